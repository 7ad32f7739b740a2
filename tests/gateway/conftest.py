"""One server with API keys, over a tiny model, for all tests of access."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from keyed_server import KEYS, Keyed
from server_process import Server
from tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory, embedder_path: Path) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    model = make_tiny_model(folder / "tiny", max_model_len=4096)
    server = Server(folder, "--model", str(model), "--max-body-bytes", "3000000", "--max-file-bytes", "1000000",
                    "--allow-url-ingest", "--max-files", "20", "--dtype", "float32")  # fmt: skip
    try:
        server.wait_ready()
        k = Keyed(server, {})
        k.before = {path: k.ask(None, "GET", path).status_code for path in ("/rag/documents", "/metrics", "/nowhere")}
        for site in ("cross-site", "same-site", "same-origin", "none"):
            status = k.ask(None, "GET", "/rag/documents", headers={"Sec-Fetch-Site": site}).status_code
            k.before[f"from {site}"] = status
        for name, (tenant, role, collections) in KEYS.items():
            only = [] if collections is None else ["--collections", collections]
            k.keys[name] = k.command("create", "--tenant", tenant, "--role", role, "--name", name, *only)
        yield k
    finally:
        server.stop()
