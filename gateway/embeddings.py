"""POST /v1/embeddings: OpenAI's route over the embedder that retrieval uses.

The one rule for long texts: a text longer than the embedder reads is refused by its number in `input`; none is cut.
Texts go to the retrieval worker a few at a time, so a search between them waits for one slice only, and a client that
leaves ends the work after the slice at hand.
"""

from __future__ import annotations

import base64
import sys
from array import array
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec
from litestar import Request, Response, post

from gateway import sse
from gateway.errors import ApiError
from gateway.keys import Role
from gateway.openai_routes import read_openai, services_of
from gateway.rag import guarded
from gateway.services import Services
from retrieval import Embeddings, EmbedRequest

AnyRequest = Request[Any, Any, Any]
MAX_INPUTS = 2048
"""Texts of one request, as OpenAI has it."""
SLICE = 16
"""Texts that go to the worker together."""


class EmbeddingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings."""

    model: str
    input: str | list[str | int | list[int]]
    """A text, or up to 2048. Token ids are refused: they would be another tokenizer's."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    """The embedder's own, or absent."""
    input_type: Literal["query", "passage"] | None = None
    """Which of the embedder's two prefixes goes before each text, where it has any; passage if absent."""

    def texts(self) -> list[str]:
        """The texts. Raises `ApiError` naming the first that cannot be embedded."""
        given = [self.input] if isinstance(self.input, str) else self.input
        if not 1 <= len(given) <= MAX_INPUTS:
            raise ApiError("invalid_request", f"input takes 1 to {MAX_INPUTS} texts, got {len(given)}", "input")
        texts = [t for t in given if isinstance(t, str)]
        if len(texts) < len(given):
            why = "input holds token ids, which belong to another tokenizer than the embedder's; send texts"
            raise ApiError("invalid_request", why, "input")
        empty = next((i for i, t in enumerate(texts) if not t.strip()), None)
        if empty is not None:
            raise _empty(empty)
        return texts


@post("/v1/embeddings", status_code=200, role=Role.QUERY)
async def embeddings(request: AnyRequest) -> Response[Any]:
    """Vectors of texts, normalised, by the embedder that retrieval uses."""
    services = services_of(request)
    body: EmbeddingRequest = read_openai(await request.body(), EmbeddingRequest)
    name = embedder_name(services.settings.gateway.embedder)
    if body.model not in ("default", name, services.settings.gateway.embedder):
        raise ApiError("model_not_found", f"{body.model!r} is no embedder served here; served: {name}", "model")
    if services.is_draining:
        raise ApiError("shutting_down", "the server is shutting down")
    parts = await sse.until_disconnect(request, _embed(services, body))
    rows = [row for part in parts for row in _rows(part, body.encoding_format)]
    used = sum(n for part in parts for n in part.num_tokens)
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    usage = {"prompt_tokens": used, "total_tokens": used}
    return Response({"object": "list", "data": data, "model": name, "usage": usage})


def embedder_name(setting: str) -> str:
    """What clients call the embedder: a folder's name, or an endpoint's model."""
    model, at, url = setting.partition("@")
    return model if at and url.startswith(("http://", "https://")) else Path(setting).name


async def _embed(services: Services, body: EmbeddingRequest) -> list[Embeddings]:
    """The vectors, slice by slice. Raises `ApiError` for a text that the embedder does not read whole."""
    texts, parts = body.texts(), []
    for at in range(0, len(texts), SLICE):
        request = EmbedRequest(tuple(texts[at : at + SLICE]), body.input_type == "query")
        part = await guarded(services.retrieval.embed(request))
        if body.dimensions not in (None, part.dim):
            why = f"dimensions must be {part.dim}, the embedder's own, got {body.dimensions}"
            raise ApiError("unsupported_parameter", why, "dimensions")
        _check_lengths(part, at)
        parts.append(part)
    return parts


def _check_lengths(part: Embeddings, first: int) -> None:
    for i, n in zip(count(first), part.num_tokens, strict=False):
        if n == 0:
            raise _empty(i)
        if n > part.max_tokens:
            why = f"input[{i}] has {n} tokens; the embedder reads at most {part.max_tokens}, and nothing is cut"
            raise ApiError("context_length_exceeded", why, f"input[{i}]")


def _empty(i: int) -> ApiError:
    return ApiError("invalid_request", f"input[{i}] holds nothing to embed", f"input[{i}]")


def _rows(part: Embeddings, encoding: str | None) -> list[Any]:
    """Each vector as numbers, or as base64 of little-endian float32."""
    size = 4 * part.dim
    raw = [part.vectors[at : at + size] for at in range(0, len(part.vectors), size)]
    if encoding == "base64":
        return [base64.b64encode(r).decode() for r in raw]
    return [_floats(r).tolist() for r in raw]


def _floats(raw: bytes) -> array[float]:
    values = array("f", raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values
