"""The file of API keys: what is kept, who is recognised, and what happens when the file changes or breaks."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.key_commands import key_headers, local_caller
from gateway.keys import NOBODY, Caller, KeyFile, KeysError, Role
from gateway.serve import exposure
from gateway.settings import GatewaySettings, SettingsError, load_settings


def reader(folder: Path) -> KeyFile:
    keys = KeyFile(folder)
    keys.read()
    return keys


def test_only_a_hash_is_kept_and_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    key = KeyFile(tmp_path).create("acme", Role.INGEST, ["b", "a", "a"], "robot")
    file = tmp_path / "keys.json"
    assert key not in file.read_text()
    assert key.split("-", 2)[2] not in file.read_text()
    (kept,) = KeyFile(tmp_path).all()
    assert kept.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert (kept.id, kept.tenant, kept.role, kept.collections, kept.name) == (
        *(key.split("-")[1], "acme", Role.INGEST),
        *(("a", "b"), "robot"),
    )
    assert file.stat().st_mode & 0o077 == 0
    assert len(key.split("-", 2)[2]) >= 43, "256 bits in base64"


def test_a_key_is_its_tenant_role_and_collections_and_nothing_else_is(tmp_path: Path) -> None:
    one = KeyFile(tmp_path).create("acme", Role.ADMIN)
    two = KeyFile(tmp_path).create("other", Role.QUERY, ["c"])
    keys = reader(tmp_path)
    first, second = keys.caller_of(one), keys.caller_of(two)
    assert first == Caller("acme", Role.ADMIN, None, one.split("-")[1])
    assert second == Caller("other", Role.QUERY, frozenset({"c"}), two.split("-")[1])
    assert first.scope != second.scope
    assert (second.tenant_in("c"), second.tenant_in("d")) == ("other", NOBODY)
    wrong = f"fw-{one.split('-')[1]}-{two.split('-', 2)[2]}"
    for given in (None, "", "fw", "fw-", "fw--", one[:-1], one + "x", one.upper(), wrong, one.split("-")[1]):
        assert keys.caller_of(given) is None, given


def test_no_tenants_scope_is_the_shared_one_and_roles_include_the_lesser() -> None:
    assert Caller("shared").scope != "shared"
    assert Caller("").scope != Caller("tenant/").scope
    assert [[a.includes(b) for b in Role] for a in Role] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


def test_no_key_is_open_and_after_the_first_it_stays_closed(tmp_path: Path) -> None:
    keys = reader(tmp_path)
    assert keys.is_open
    assert keys.caller_of(None) == keys.caller_of("anything") == Caller()
    key = KeyFile(tmp_path).create("t", Role.QUERY)
    asyncio.run(keys.follow())
    assert not keys.is_open
    assert keys.caller_of(key) is not None
    KeyFile(tmp_path).revoke(key.split("-")[1])
    asyncio.run(keys.follow())
    assert not keys.is_open
    assert keys.caller_of(key) is None
    (tmp_path / "keys.json").unlink()
    asyncio.run(keys.follow())
    assert not keys.is_open
    assert keys.caller_of(None) is None


def test_a_broken_file_accepts_no_key_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = KeyFile(tmp_path).create("t", Role.QUERY)
    keys = reader(tmp_path)
    whole = (tmp_path / "keys.json").read_bytes()
    for broken in (whole[:-5], b"", b'{"keys": [{"id": 1}]}', b"\xff"):
        (tmp_path / "keys.json").write_bytes(broken)
        asyncio.run(keys.follow())
        assert keys.caller_of(key) is None
        assert "no key is accepted" in caplog.text
        caplog.clear()
        with pytest.raises(KeysError, match="cannot be read"):
            reader(tmp_path)
        with pytest.raises(KeysError, match="cannot be read"):
            KeyFile(tmp_path).create("t", Role.QUERY)
    (tmp_path / "keys.json").write_bytes(whole)
    asyncio.run(keys.follow())
    assert keys.caller_of(key) is not None


def test_a_reachable_server_without_keys_warns_and_the_default_is_not_reachable(tmp_path: Path) -> None:
    assert GatewaySettings().host == "127.0.0.1"
    keys = reader(tmp_path)
    for host in ("0.0.0.0", "::", "192.168.1.5", "my-host"):
        assert f"WARNING: listening on {host} without an API key" in (exposure(host, keys) or "")
    for host in ("127.0.0.1", "::1", "localhost"):
        assert exposure(host, keys) is None
    KeyFile(tmp_path).create("t", Role.QUERY)
    assert exposure("0.0.0.0", reader(tmp_path)) is None


def test_keys_made_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    made: list[str] = []
    threads = [
        threading.Thread(target=lambda: made.append(KeyFile(tmp_path).create("t", Role.QUERY))) for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    keys = reader(tmp_path)
    assert len(set(made)) == 8
    assert all(keys.caller_of(k) for k in made)
    assert {p.name for p in tmp_path.iterdir()} == {"keys.json", "keys.lock"}


@pytest.mark.parametrize(
    ("tenant", "collections", "what"),
    [("a/b", None, "tenant"), ("a" * 65, None, "tenant"), ("t", ["../x"], "collection"), ("t", [], "collections")],
)
def test_names_that_cannot_be_are_refused(tmp_path: Path, tenant: str, collections: list[str], what: str) -> None:
    with pytest.raises(KeysError, match=what):
        KeyFile(tmp_path).create(tenant, Role.QUERY, collections)
    assert not (tmp_path / "keys.json").exists()


def test_the_command_line_shows_a_key_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--data-dir", str(tmp_path)]
    create = ["keys", "create", "--tenant", "acme", "--role", "ingest", "--collections", "a,b", "--name", "ci"]
    assert main([*create, *where]) == 0
    key = capsys.readouterr().out.strip()
    key_id = key.split("-")[1]
    assert main(["keys", "list", *where]) == 0
    listed = capsys.readouterr().out
    assert key not in listed
    row = next(line for line in listed.splitlines() if line.startswith(key_id))
    assert row.split()[1:3] == ["acme", "ingest"]
    assert row.split()[-3:] == ["valid", "a,b", "ci"]
    assert main(["keys", "revoke", key_id, *where]) == 0
    assert main(["keys", "revoke", key_id, *where]) == 1
    assert key_id in capsys.readouterr().err
    assert main(["keys", "list", *where]) == 0
    assert "revoked" in capsys.readouterr().out


def test_commands_without_a_server_keep_the_same_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings({"data_dir": str(tmp_path)}, {})
    monkeypatch.delenv("FOREWORD_API_KEY", raising=False)
    assert local_caller(settings, Role.INGEST) == Caller()
    key = KeyFile(tmp_path).create("acme", Role.QUERY)
    with pytest.raises(SettingsError, match="FOREWORD_API_KEY"):
        local_caller(settings, Role.QUERY)
    monkeypatch.setenv("FOREWORD_API_KEY", key)
    assert local_caller(settings, Role.QUERY).tenant == "acme"
    with pytest.raises(SettingsError, match="role ingest"):
        local_caller(settings, Role.INGEST)
    assert key_headers() == {"Authorization": f"Bearer {key}"}
    assert load_settings({}, {"FOREWORD_API_KEY": key, "FOREWORD_EMBEDDER_KEY": "x"}).gateway.port == 8000
