"""`foreword serve` and `foreword demo`: a server in this process until it is told to end."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import uvicorn

from gateway.app import make_app
from gateway.commands import ask_url, ingest_url
from gateway.engine_client import LocalEngineClient
from gateway.keys import KeyFile, KeysError
from gateway.limits import BoundedHeadProtocol
from gateway.logs import set_up_logs
from gateway.models import resolve_embedder, resolve_model
from gateway.retrieval_client import RetrievalClient
from gateway.services import Services
from gateway.settings import Settings, SettingsError
from gateway.templates import load_templates

log = logging.getLogger("foreword")

REPO = Path(__file__).resolve().parents[1]
DEMO_COLLECTION = "foreword"
DEMO_QUESTION = "What does quantization auto keep?"
READY_POLL_S = 0.1
OPEN_WARNING = """foreword: WARNING: listening on {host} without an API key: whoever reaches this port can
read and delete all documents, and use the model. Once `foreword keys create` has made a key, every caller needs one.
"""
FLUSH_S = 2
"""Seconds for the last bytes of answers that have ended."""


def make_services(settings: Settings) -> Services:
    """The parts of a server, not started. Fetches missing default models. Raises `ModelError`, `SettingsError`."""
    g = settings.gateway
    offline = g.offline

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    templates = load_templates(g.prompt_templates)
    model = resolve_model(settings.engine.model, offline=offline, say=say, verbose=True)
    embedder = resolve_embedder(g.embedder, offline=offline, say=say, verbose=True)
    engine = LocalEngineClient(msgspec.structs.replace(settings.engine, model=str(model)))
    retrieval = RetrievalClient(settings.data_dir, embedder, g.embed_threads, g.store, g.reranker, g.passage_overlap)
    return Services(settings, engine, retrieval, model, templates)


class _Uvicorn(uvicorn.Server):
    """uvicorn that leaves signals to us: its own way raises them again at the end, so the exit code would not be 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured."""
        yield


class Server:
    """uvicorn with our app, plus what the command line says about it."""

    def __init__(self, settings: Settings) -> None:
        g = settings.gateway
        self._settings = settings
        self._services = make_services(settings)
        try:
            self._services.keys.read()
        except KeysError as e:
            raise SettingsError(str(e)) from e
        self._fatal: str | None = None
        self._draining: asyncio.Task[None] | None = None
        app = make_app(self._services, self._on_fatal)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                host=g.host,
                port=g.port,
                log_config=None,
                log_level=g.log_level,
                timeout_graceful_shutdown=FLUSH_S,
                access_log=g.log_level == "debug",
                server_header=False,
                http=BoundedHeadProtocol,
            )
        )
        self.url = f"http://{'127.0.0.1' if g.host == '0.0.0.0' else g.host}:{g.port}"
        self._note = settings.data_dir / "server.json"

    async def run(self) -> int:
        """Serve until told to end; returns the exit code."""
        g = self._settings.gateway
        if not _is_free(g.host, g.port):
            print(f"foreword: port {g.port} on {g.host} is in use", file=sys.stderr)
            return 1
        if (warning := exposure(g.host, self._services.keys)) is not None:
            print(warning, file=sys.stderr)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.end)
        announce = asyncio.create_task(self._announce())
        try:
            await self._uvicorn.serve()
        finally:
            announce.cancel()
            self._note.unlink(missing_ok=True)
        if self._fatal is not None:
            print(f"foreword: {self._fatal}", file=sys.stderr)
            return 1
        return 0

    async def ready(self) -> bool:
        """Wait until a question can be answered; False if that will never be."""
        while not self._services.is_ready:
            if self._fatal is not None or self._uvicorn.should_exit:
                return False
            await asyncio.sleep(READY_POLL_S)
        return True

    def end(self) -> None:
        """Take no new requests, let running ones finish, then end; a second call ends at once."""
        if self._services.is_draining:
            self._note.unlink(missing_ok=True)
            os._exit(1)  # the children end by themselves when our pipes close
        self._services.is_draining = True
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Go on listening, so that new requests hear why they are refused, until the last answer or the time is out."""
        self._note.unlink(missing_ok=True)
        idle = self._services.idle
        try:
            await asyncio.wait_for(idle.wait(), self._settings.gateway.shutdown_grace_s)
        except TimeoutError:
            log.warning("not all requests ended within shutdown_grace_s; the rest is given up")
            await self._services.stop()  # running streams get an error event, not a bare end
            with suppress(TimeoutError):
                await asyncio.wait_for(idle.wait(), FLUSH_S)
        self._uvicorn.should_exit = True

    async def _announce(self) -> None:
        """Say what is served, and leave the address where other commands find it."""
        if not await self.ready():
            return
        info = self._services.info
        self._note.write_text(json.dumps({"url": self.url}), encoding="utf-8")
        print(
            f"Serving {info.model} ({info.dtype}, {info.attention}; weights {info.weights}; "
            f"context {info.max_model_len}, "
            f"KV pool {info.num_blocks} blocks of 16) on {self.url}",
            file=sys.stderr,
        )

    def _on_fatal(self, why: str) -> None:
        self._fatal = why
        self._uvicorn.should_exit = True


def exposure(host: str, keys: KeyFile) -> str | None:
    """What to warn of: a server that others can reach and that asks for no key."""
    return None if _is_loopback(host) or not keys.is_open else OPEN_WARNING.format(host=host)


def serve(settings: Settings) -> int:
    """Run a server; returns the exit code."""
    set_up_logs(settings.gateway.log_level, settings.gateway.log_format)
    return asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> int:
    return await Server(settings).run()


def demo(settings: Settings) -> int:
    """Serve, ingest the project's own documentation, ask one question twice, go on serving."""
    set_up_logs(settings.gateway.log_level, settings.gateway.log_format)
    return asyncio.run(_demo(settings))


async def _demo(settings: Settings) -> int:
    server = Server(settings)
    serving = asyncio.create_task(server.run())
    if await server.ready():
        documents = [*sorted(REPO.glob("*.md")), *sorted(REPO.glob("[a-z]*/README.md"))]
        named = [(str(p.relative_to(REPO)).replace("/", "-"), p) for p in documents]
        try:
            await asyncio.to_thread(ingest_url, server.url, named, DEMO_COLLECTION)
            body = {"query": DEMO_QUESTION, "collection": DEMO_COLLECTION, "max_tokens": 96}
            for title in ("First time", "Again"):
                print(f"\n{title}: {DEMO_QUESTION}")
                await asyncio.to_thread(ask_url, server.url, body, False)
            print(f"\nOpen {server.url} in a browser, or ask: foreword ask --collection {DEMO_COLLECTION} 'QUESTION'")
            print("Ctrl-C ends the server.", flush=True)
        except ConnectionError as e:
            print(f"foreword: {e}", file=sys.stderr)
            server.end()
    return await serving


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
