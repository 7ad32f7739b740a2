"""API keys: who may call, as whose tenant, in what role.

A key is `fw-ID-SECRET`: the id is public (it is listed, and a key is revoked by it), the secret has 256 random bits.
Only the SHA-256 of the whole key is kept. One plain hash is right here: slow, salted hashes protect secrets that can
be guessed, and 2^256 random values cannot. Keys live in `keys.json` of the data folder, so they are a gateway's own,
also where several share one store.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import msgspec

log = logging.getLogger("foreword")

NOBODY = "/nobody"
"""A tenant that no key can have, so it owns nothing: who may not see a collection looks as this one."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NO_KEY_SUM = hashlib.sha256(b"").hexdigest()
"""What an unknown id is compared with, so that it takes the same way as a known one."""


class KeysError(Exception):
    """A key cannot be made or revoked, or the file cannot be used; the message says why."""


class Role(StrEnum):
    """What a key may do. Each includes the ones before it."""

    QUERY = "query"
    """Ask, and read documents."""
    INGEST = "ingest"
    """Add and delete documents too."""
    ADMIN = "admin"
    """The operator's: metrics too, which count over all tenants."""

    def includes(self, other: Role) -> bool:
        """Whether this role may do what `other` may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


class Caller(msgspec.Struct, frozen=True):
    """Who sent a request, as the server alone decides. Without keys everybody is the tenant `""`, in every role."""

    tenant: str = ""
    role: Role = Role.ADMIN
    collections: frozenset[str] | None = None
    """The only collections it may use; None: all of its tenant's."""
    key_id: str = ""

    @property
    def scope(self) -> str:
        """Scope of its prompts in the engine's cache: never `shared`, whatever the tenant is called."""
        return f"tenant/{self.tenant}"

    def may_use(self, collection: str) -> bool:
        """Whether it may use a collection."""
        return self.collections is None or collection in self.collections

    def tenant_in(self, collection: str) -> str:
        """The tenant to search a collection as: one that owns nothing where this caller may not use it."""
        return self.tenant if self.may_use(collection) else NOBODY


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key as it is kept."""

    id: str
    sha256: str
    """Of the whole key, in hex."""
    tenant: str
    role: Role
    collections: tuple[str, ...] | None
    name: str
    created_s: float
    revoked_s: float | None = None

    @property
    def caller(self) -> Caller:
        """Who comes with it."""
        collections = None if self.collections is None else frozenset(self.collections)
        return Caller(self.tenant, self.role, collections, self.id)


class _Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the file."""

    keys: tuple[ApiKey, ...]


class KeyFile:
    """The keys of a data folder, for commands that change them and for a server that follows the changes.

    The server is open as long as no key was ever made. From the first key on it is closed, also when all are revoked,
    and also while the file is missing or cannot be read.
    """

    def __init__(self, data_dir: Path) -> None:
        self._file = data_dir / "keys.json"
        self._keys: dict[str, ApiKey] | None = None
        self._seen: tuple[int, int, int] | None = None
        self._reading = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """Whether no key was made so far; as of the last `read`."""
        return self._keys is None

    def read(self) -> None:
        """Take the file as it is. Raises `KeysError` if it cannot be used."""
        try:
            self._seen = self._signature()
            raw = None if self._seen is None else self._file.read_bytes()
            keys = () if raw is None else msgspec.json.decode(raw, type=_Keys).keys
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as e:
            self._keys = {}
            raise KeysError(f"the API keys in {self._file} cannot be read: {e}") from e
        if self._seen is not None or self._keys is not None:
            self._keys = {k.id: k for k in keys if k.revoked_s is None}

    async def follow(self) -> None:
        """Read the file again if it has changed: one look at its date for each request, which costs microseconds."""
        if not self._has_changed():
            return
        async with self._reading:
            try:
                if self._has_changed():
                    await asyncio.to_thread(self.read)
            except KeysError as e:
                log.error("no key is accepted: %s", e)

    def caller_of(self, key: str | None) -> Caller | None:
        """Who a key stands for, compared in constant time; None if it is not known. Without any key: everybody."""
        if self._keys is None:
            return Caller()
        _, _, rest = (key or "").partition("-")
        known = self._keys.get(rest.partition("-")[0])
        given = hashlib.sha256((key or "").encode(errors="surrogateescape")).hexdigest()
        is_right = hmac.compare_digest(given, known.sha256 if known is not None else _NO_KEY_SUM)
        return known.caller if is_right and known is not None else None

    def all(self) -> tuple[ApiKey, ...]:
        """Every key ever made, revoked ones too. Raises `KeysError`."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=_Keys).keys
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as e:
            raise KeysError(f"the API keys in {self._file} cannot be read: {e}") from e

    def create(self, tenant: str, role: Role, collections: Sequence[str] | None = None, name: str = "") -> str:
        """Make a key and return it; it is kept nowhere. Raises `KeysError`."""
        for what, value in (*(("tenant", t) for t in [tenant] if t), *(("collection", c) for c in collections or ())):
            if not _NAME.fullmatch(value):
                raise KeysError(f"{what} must have 1 to 64 characters of A-Z a-z 0-9 . _ -, got {value[:80]!r}")
        if collections is not None and not collections:
            raise KeysError("collections must name one at least")
        with self._changing() as keys:
            key_id = secrets.token_hex(6)
            key = f"fw-{key_id}-{secrets.token_urlsafe(32)}"
            digest = hashlib.sha256(key.encode()).hexdigest()
            kept = None if collections is None else tuple(sorted(set(collections)))
            keys.append(ApiKey(key_id, digest, tenant, role, kept, name, time.time()))
        return key

    def revoke(self, key_id: str) -> None:
        """Make a key worthless. Raises `KeysError` if there is none of that id that is valid."""
        with self._changing() as keys:
            at = next((i for i, k in enumerate(keys) if k.id == key_id and k.revoked_s is None), None)
            if at is None:
                raise KeysError(f"there is no valid key with the id {key_id!r}")
            keys[at] = msgspec.structs.replace(keys[at], revoked_s=time.time())

    def _has_changed(self) -> bool:
        try:
            return self._signature() != self._seen
        except OSError:
            return True

    def _signature(self) -> tuple[int, int, int] | None:
        """What differs after each change: a file is replaced, never written in place. None: there is no file."""
        try:
            s = self._file.stat()
        except FileNotFoundError:
            return None
        return s.st_mtime_ns, s.st_ino, s.st_size

    @contextmanager
    def _changing(self) -> Iterator[list[ApiKey]]:
        """All keys, to be changed; then written whole, or not at all. One process at a time."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with (self._file.parent / "keys.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                keys = list(self.all())
                yield keys
                self._write(keys)
        except OSError as e:
            raise KeysError(f"cannot write {self._file}: {e.strerror}") from e

    def _write(self, keys: list[ApiKey]) -> None:
        descriptor, name = tempfile.mkstemp(dir=self._file.parent, prefix=".keys-")  # readable by its owner alone
        try:
            with os.fdopen(descriptor, "wb") as f:
                f.write(msgspec.json.format(msgspec.json.encode(_Keys(tuple(keys)))))
                f.flush()
                os.fsync(f.fileno())
            Path(name).replace(self._file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
