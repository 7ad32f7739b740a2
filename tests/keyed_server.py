"""A server with API keys: two tenants, every role."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import httpx
from server_process import REPO, Server


@dataclass
class Keyed:
    """A server, its keys by name, and what it said before it had any."""

    server: Server
    keys: dict[str, str]
    before: dict[str, int] = field(default_factory=dict)

    def ask(self, who: str | None, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """A request with somebody's key."""
        headers = {**kwargs.pop("headers", {})}
        if who is not None:
            headers["Authorization"] = f"Bearer {self.keys[who]}"
        return self.server.client.request(method, path, headers=headers, **kwargs)

    def post(self, who: str | None, path: str, **body: Any) -> httpx.Response:
        """A JSON body with somebody's key."""
        return self.ask(who, "POST", path, json=body)

    def command(self, *args: str) -> str:
        """Run `foreword keys ...` on the server's folder."""
        where = ["--data-dir", str(self.server.data_dir)]
        command = [sys.executable, "-m", "gateway.cli", "keys", *args, *where]
        return subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=True).stdout.strip()


KEYS: dict[str, tuple[str, str, str | None]] = {
    "ann": ("acme", "ingest", None),
    "ann_reads": ("acme", "query", None),
    "ann_limited": ("acme", "ingest", "open"),
    "bob": ("bolt", "ingest", None),
    "root": ("", "admin", None),
}
"""Name -> tenant, role, collections."""
