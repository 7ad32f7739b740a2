"""The indexes of a data folder as one file, so that opening it does not build them again.

SQLite is the truth: a snapshot that is damaged, of another store, or of another history is left aside, and what changed
since it was taken is made up for by key. Layout: magic, SHA-256 of the rest, MessagePack.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path

import msgspec

log = logging.getLogger("foreword")

_MAGIC = b"foreword-index-1\n"


class IndexSnapshot(msgspec.Struct, frozen=True):
    """Both indexes of one collection."""

    tenant: str
    collection: str
    dense: bytes
    lexical: dict[str, bytes]


class Snapshot(msgspec.Struct, frozen=True):
    """The indexes of a data folder at one time."""

    store_id: str
    indexes: list[IndexSnapshot]
    keys: bytes
    """int64 keys of all passages."""
    serials: bytes
    """int64, the documents they belong to."""
    text_sums: bytes
    """16 bytes each."""


def write_snapshot(file: Path, snapshot: Snapshot) -> None:
    """Put a snapshot in place of the last, whole or not at all. A folder without room is a warning: nothing is lost."""
    new = file.with_suffix(".new")
    try:
        body = msgspec.msgpack.encode(snapshot)
        with new.open("wb") as f:
            f.write(_MAGIC + hashlib.sha256(body).digest())
            f.write(body)
            f.flush()
            os.fsync(f.fileno())
        new.replace(file)
    except (OSError, ValueError) as e:  # MessagePack refuses an index of 4 GiB and more
        log.warning("the index snapshot could not be written, the next start takes longer: %s", e)
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def read_snapshot(file: Path, store_id: str) -> Snapshot | None:
    """The snapshot of this store; None, with a warning where there is something wrong, if it cannot be used."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as e:
        log.warning("%s cannot be read, the index is built again: %s", file, e)
        return None
    head, body = len(_MAGIC) + 32, memoryview(data)[len(_MAGIC) + 32 :]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != data[len(_MAGIC) : head]:
        log.warning("%s is damaged, the index is built again", file)
        return None
    snapshot = msgspec.msgpack.decode(body, type=Snapshot)
    if snapshot.store_id != store_id:
        log.warning("%s belongs to another store, the index is built again", file)
        return None
    return snapshot
