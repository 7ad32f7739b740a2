"""`foreword keys create|list|revoke`, and the key that other commands use: `FOREWORD_API_KEY`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping

from gateway.keys import ApiKey, Caller, KeyFile, KeysError, Role
from gateway.settings import Settings, SettingsError, add_flags, load_settings

VARIABLE = "FOREWORD_API_KEY"


def add_keys_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Give the command line `foreword keys`."""
    parser = commands.add_parser("keys", help="make, list and revoke API keys")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    create = actions.add_parser("create", help="make a key and print it, this once")
    create.add_argument("--tenant", default="", help="Whose documents. Default: those of a server without keys.")
    create.add_argument("--role", choices=[r.value for r in Role], default=Role.QUERY.value, help="Default: query.")
    create.add_argument("--collections", metavar="A,B", help="The only collections it may use. Default: all.")
    create.add_argument("--name", default="", help="What it is for; shown in the list.")
    listing = actions.add_parser("list", help="every key ever made, without its secret")
    revoke = actions.add_parser("revoke", help="make a key worthless at once")
    revoke.add_argument("id", metavar="ID", help="as `foreword keys list` shows it")
    for sub, run in ((create, _create), (listing, _list), (revoke, _revoke)):
        add_flags(sub, frozenset({"data_dir"}))
        sub.set_defaults(run=run)


def key_headers(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Headers for a server that asks for a key."""
    key = (os.environ if environ is None else environ).get(VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def local_caller(settings: Settings, needed: Role) -> Caller:
    """Who runs a command without a server: the tenant of `FOREWORD_API_KEY`, by the rules that a server has.

    Raises `SettingsError`.
    """
    keys = KeyFile(settings.data_dir)
    try:
        keys.read()
    except KeysError as e:
        raise SettingsError(str(e)) from e
    caller = keys.caller_of(os.environ.get(VARIABLE))
    if caller is None:
        raise SettingsError(f"{settings.data_dir} has API keys; set {VARIABLE} to a valid one, which names the tenant")
    if not caller.role.includes(needed):
        raise SettingsError(f"this needs a key of the role {needed}; the role of yours is {caller.role}")
    return caller


def _create(args: argparse.Namespace) -> int:
    collections = None if args.collections is None else [c for c in args.collections.split(",") if c]
    try:
        key = _keys(args).create(args.tenant, Role(args.role), collections, args.name)
    except KeysError as e:
        return _failed(e)
    print("This key is shown only now:", file=sys.stderr)
    print(key)
    return 0


def _list(args: argparse.Namespace) -> int:
    try:
        keys = _keys(args).all()
    except KeysError as e:
        return _failed(e)
    print(f"{'ID':14}{'TENANT':18}{'ROLE':8}{'MADE':18}{'STATE':10}{'COLLECTIONS':18}NAME")
    for k in keys:
        print(_row(k))
    return 0


def _row(k: ApiKey) -> str:
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(k.created_s))
    state = "valid" if k.revoked_s is None else "revoked"
    collections = "all" if k.collections is None else ",".join(k.collections)
    return f"{k.id:14}{k.tenant or '(none)':18}{k.role:8}{made:18}{state:10}{collections:18}{k.name}"


def _revoke(args: argparse.Namespace) -> int:
    try:
        _keys(args).revoke(args.id)
    except KeysError as e:
        return _failed(e)
    print(f"{args.id} is revoked")
    return 0


def _keys(args: argparse.Namespace) -> KeyFile:
    return KeyFile(load_settings(vars(args)).data_dir)


def _failed(error: KeysError) -> int:
    print(f"foreword: {error}", file=sys.stderr)
    return 1
