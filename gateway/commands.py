"""`foreword ingest` and `foreword ask`: through a running server if there is one, else with parts of their own."""

from __future__ import annotations

import asyncio
import glob
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.progress import Progress

from gateway.engine_client import EngineDead
from gateway.errors import ApiError
from gateway.key_commands import key_headers, local_caller
from gateway.keys import Role
from gateway.rag import RagPipeline
from gateway.retrieval_client import RetrievalClient, RetrievalDead
from gateway.schemas import RagRequest
from gateway.settings import Settings, SettingsError
from retrieval import SUPPORTED, IngestRequest, JobState, SourceFile

SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "venv"})
"""Never looked into, as is every folder whose name begins with a dot, unless it is named itself."""
STDIN = Path("/dev/stdin")
TIMEOUT = httpx.Timeout(5.0, read=600.0)
NamedFile = tuple[str, Path]
Send = Callable[[str, bytes], list[str]]
"""Ingests one file; returns its errors."""


def ingest(settings: Settings, paths: Sequence[str], collection: str) -> int:
    """Ingest files; returns the exit code: 1 if a file failed or nothing was found."""
    named = list(find_files(paths))
    if not named:
        print("foreword: no file to ingest was found", file=sys.stderr)
        return 1
    url = running_server(settings)
    if url is not None:
        errors = ingest_url(url, named, collection)
    else:
        errors = asyncio.run(_ingest_here(settings, named, collection))
    for error in errors:
        print(f"foreword: {error}", file=sys.stderr)
    print(f"{len(named) - len(errors)} of {len(named)} files ingested into {collection!r}")
    return 1 if errors else 0


def ingest_url(url: str, named: Sequence[NamedFile], collection: str) -> list[str]:
    """Send files to a server, one by one; returns errors. Raises `ConnectionError`."""
    errors: list[str] = []
    with httpx.Client(timeout=TIMEOUT, headers=key_headers()) as client, _progress() as progress:
        for name, path in progress.track(named, description="Ingesting"):
            try:
                form = {"collection": collection, "id": document_id(collection, path)}
                reply = client.post(f"{url}/rag/documents", data=form, files={"file": (name, path.read_bytes())})
            except httpx.HTTPError as e:
                raise ConnectionError(f"the server at {url} does not answer: {e}") from e
            except OSError as e:
                errors.append(f"{path}: {e.strerror}")
                continue
            if reply.is_error:
                errors.append(reply.json()["error"]["message"])
    return errors


def document_id(collection: str, path: Path) -> str:
    """The id of a file's document: files of the same name in two folders are two documents, the same file is one."""
    place = "stdin" if path == STDIN else str(path.resolve())
    return hashlib.sha256(f"{collection}\0{place}".encode()).hexdigest()[:16]


def find_files(paths: Sequence[str]) -> Iterator[NamedFile]:
    """Files that the given paths mean, with the names they are ingested under; `-` is standard input, as text.

    A folder is searched for the types that can be read; a file named by itself is always tried. Raises `SettingsError`.
    """
    for given in paths:
        if given == "-":
            yield "stdin.txt", STDIN
            continue
        matches = sorted(glob.glob(given)) if glob.has_magic(given) and not Path(given).exists() else [given]
        if not matches:
            raise SettingsError(f"nothing matches {given!r}")
        for match in matches:
            path = Path(match)
            if path.is_dir():
                yield from ((str(p.relative_to(path)).replace("/", "-"), p) for p in _readable(path))
            elif path.exists():
                yield path.name, path
            else:
                raise SettingsError(f"{given}: no such file or folder")


def _readable(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder).parts
        is_skipped = any(part.startswith(".") for part in inner) or SKIPPED_FOLDERS & set(inner)
        if not is_skipped and path.is_file() and path.suffix.lower() in SUPPORTED:
            yield path


def ask(settings: Settings, body: dict[str, Any], as_json: bool) -> int:
    """Ask a question and print the answer; returns the exit code."""
    url = running_server(settings)
    try:
        if url is not None:
            ask_url(url, body, as_json)
        else:
            asyncio.run(_ask_here(settings, body, as_json))
    except (ConnectionError, ApiError, EngineDead, RetrievalDead) as e:
        print(f"foreword: {e}", file=sys.stderr)
        return 1
    return 0


def ask_url(url: str, body: dict[str, Any], as_json: bool) -> None:
    """Ask a server and print the answer as it comes. Raises `ConnectionError`."""
    try:
        whole = {**body, "stream": True}
        with httpx.stream("POST", f"{url}/rag/query", json=whole, timeout=TIMEOUT, headers=key_headers()) as reply:
            if reply.is_error:
                reply.read()
                raise ConnectionError(reply.json()["error"]["message"])
            name = ""
            for line in reply.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: {"):
                    show_event(name, json.loads(line.removeprefix("data: ")), as_json)
    except httpx.HTTPError as e:
        raise ConnectionError(f"the server at {url} does not answer: {e}") from e


def show_event(name: str, data: dict[str, Any], as_json: bool) -> None:
    """Print what an event of an answer brings. Raises `ConnectionError` for an error event."""
    if name == "error":
        raise ConnectionError(data["error"]["message"])
    if as_json:
        if name == "final":
            print(json.dumps(data, ensure_ascii=False, indent=2))
    elif name == "delta":
        print(data["text"], end="", flush=True)
    elif name == "final":
        print("\n" + summary(data), flush=True)


def summary(final: dict[str, Any]) -> str:
    """Sources, citations, and what the cache did."""
    cited = {c["passage_id"] for c in final["citations"]}
    lines = [""]
    for i, s in enumerate(final["sources"], 1):
        page = f", page {s['page']}" if s["page"] else ""
        mark = "cited" if s["passage_id"] in cited else "     "
        lines.append(f"  [{i}] {mark}  {s['title']}{page}  (score {s['score']:.2f}, {s['passage_id']})")
    lines += [f'  "{" ".join(c["text"].split())[:160]}" [{c["number"]}]' for c in final["citations"]]
    u, t = final["usage"], final["timings"]
    d = u["prompt_tokens_details"]
    lines.append(
        f"  {u['prompt_tokens']} prompt tokens: {d['prefix_tokens']} from the prefix cache, "
        f"{d['linked_tokens']} linked, {d['computed_tokens']} computed"
    )
    lines.append(f"  first token after {t['ttft_ms']:.0f} ms, all after {t['total_ms']:.0f} ms")
    return "\n".join(lines)


def running_server(settings: Settings) -> str | None:
    """Address of the server that owns the data folder, if one answers."""
    note = settings.data_dir / "server.json"
    try:
        url = str(json.loads(note.read_text(encoding="utf-8"))["url"])
        httpx.get(f"{url}/health/live", timeout=2.0).raise_for_status()
    except (OSError, ValueError, KeyError, httpx.HTTPError):
        return None
    return url


async def _ingest_here(settings: Settings, named: Sequence[NamedFile], collection: str) -> list[str]:
    from gateway.models import resolve_embedder

    caller, g = local_caller(settings, Role.INGEST), settings.gateway
    if not caller.may_use(collection):
        raise SettingsError(f"this key may not use the collection {collection!r}")
    embedder = resolve_embedder(g.embedder, offline=g.offline, say=print, verbose=True)
    client = RetrievalClient(settings.data_dir, embedder, max(g.embed_threads, 2), g.store, overlap=g.passage_overlap)
    errors: list[str] = []
    try:
        await client.start()
        with _progress() as progress:
            for name, path in progress.track(named, description="Ingesting"):
                source = SourceFile(name, path.read_bytes(), document_id(collection, path))
                request = IngestRequest((source,), collection, caller.tenant)
                job = await client.wait((await client.ingest(request)).job_id, caller.tenant)
                errors += [e.message for e in job.errors] if job.state is JobState.FAILED else []
    except (RetrievalDead, ValueError, OSError) as e:
        raise SettingsError(str(e)) from e
    finally:
        await client.stop()
    return errors


async def _ask_here(settings: Settings, body: dict[str, Any], as_json: bool) -> None:
    from gateway.serve import make_services

    caller, services = local_caller(settings, Role.QUERY), make_services(settings)
    try:
        await services.start()
        pipeline = RagPipeline(services)
        async for name, data in pipeline.events(await pipeline.prepare(RagRequest(**body), caller)):
            show_event(name, data, as_json)
    finally:
        await services.stop()


def _progress() -> Progress:
    from rich.console import Console

    return Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
