"""Connections to PostgreSQL: transactions over a few that are kept open, and one that holds locks for its process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, LiteralString

import psycopg
from psycopg.conninfo import conninfo_to_dict

from retrieval.api import StorageFailed, StoreUnavailable

POOL = 8
"""Connections kept open."""

Connection = psycopg.Connection[tuple[Any, ...]]


class Database:
    """Thread-safe.

    Raises `ValueError` if the URL is none, and in a block whose database fails `StorageFailed` or `StoreUnavailable`.
    """

    def __init__(self, url: str) -> None:
        try:
            conninfo_to_dict(url)
        except psycopg.ProgrammingError as e:
            # What it says may quote the password.
            raise ValueError("store: this is no URL such as postgresql://user:password@host:5432/database") from e
        self._url = url
        self._idle: queue.LifoQueue[Connection] = queue.LifoQueue()
        self._session: Connection | None = None
        self._session_lock = threading.Lock()

    def close(self) -> None:
        """Close all connections and let go of the locks."""
        with self._session_lock, suppress(psycopg.OperationalError):
            if self._session is not None and not self._session.closed:
                self._session.execute("SELECT pg_advisory_unlock_all()")  # the server sees the end a moment later
                self._session.close()
        while not self._idle.empty():
            self._idle.get_nowait().close()

    @contextmanager
    def transaction(self, begin: LiteralString = "BEGIN") -> Iterator[Connection]:
        """Committed at the end of the block, rolled back if it raises."""
        with _failures():
            db = self._begin(begin)
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if not db.broken:
                    db.execute("ROLLBACK")
                raise
            finally:
                if db.broken or self._idle.qsize() >= POOL:
                    db.close()
                else:
                    self._idle.put(db)

    def holds(self, name: str) -> bool:
        """Whether this process has a lock."""
        return self._ask(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
            " AND ((classid::bigint << 32) | objid::bigint) = hashtextextended(%s, 1))",
            name,
        )

    def take(self, name: str) -> bool:
        """Take a lock, until it is released or the process ends; False if somebody has it."""
        return not self.holds(name) and self._ask("SELECT pg_try_advisory_lock(hashtextextended(%s, 1))", name)

    def release(self, name: str) -> None:
        """Let go of a lock if this process has it."""
        if self.holds(name):
            self._ask("SELECT pg_advisory_unlock(hashtextextended(%s, 1))", name)

    def _ask(self, sql: LiteralString, name: str) -> bool:
        with self._session_lock, _failures():
            if self._session is not None and not self._session.closed:
                try:
                    row = self._session.execute(sql, (name,)).fetchone()
                    return bool(row and row[0])
                except psycopg.OperationalError:  # it died while it was idle, and its locks with it
                    self._session.close()
            self._session = self._connect()
            row = self._session.execute(sql, (name,)).fetchone()
            return bool(row and row[0])

    def _begin(self, begin: LiteralString) -> Connection:
        """A connection with a transaction begun; one that died while it was idle is left behind."""
        while True:
            try:
                db = self._idle.get_nowait()
            except queue.Empty:
                db = self._connect()
                db.execute(begin)
                return db
            try:
                db.execute(begin)
                return db
            except psycopg.OperationalError:
                db.close()

    def _connect(self) -> Connection:
        # Planned anew each time: a plan for any collection could not use the graph of one.
        return psycopg.connect(
            self._url, autocommit=True, prepare_threshold=None, connect_timeout=10, application_name="foreword"
        )


@contextmanager
def _failures() -> Iterator[None]:
    """What is the server's fault, its administrator's or the network's; our own errors pass as they are."""
    try:
        yield
    except psycopg.errors.FeatureNotSupported as e:
        raise StorageFailed(f"the database lacks the extension pgvector: {str(e).strip()}") from e
    except (psycopg.errors.DiskFull, psycopg.InternalError, psycopg.errors.InsufficientPrivilege) as e:
        raise StorageFailed(f"the database cannot be written: {str(e).strip()}") from e
    except psycopg.OperationalError as e:
        raise StoreUnavailable(f"the database failed: {str(e).strip()}") from e
