"""/rag/query's way for chat completions: the last user message is the question, what stands before it the history.

Asked for by `rag: {...}` in the body, or by the model name `rag:COLLECTION`, which a client that knows nothing of
retrieval can send. Citations are annotations of OpenAI's one kind for chats, `url_citation`, since clients that check
replies know no other; all that /rag/query says of a citation stands beside it under `citation`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from engine import RequestOutput, RequestStats, SamplingParams
from gateway.errors import ApiError
from gateway.keys import Caller
from gateway.rag import Prepared, RagPipeline, guarded
from gateway.schemas import ChatRequest, HistoryMessage, RagOptions, RagRequest, message_dicts
from gateway.services import Services

MODEL_PREFIX = "rag:"


@dataclass(frozen=True, slots=True)
class ChatRag:
    """A chat whose answer is made from documents."""

    pipeline: RagPipeline
    prepared: Prepared
    base_url: str

    def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """The answer as the engine makes it, or the fixed reply where nothing was found."""
        return self.pipeline.outputs(self.prepared)

    def sources(self) -> dict[str, Any]:
        """What is known before the first token."""
        return self.pipeline.before(self.prepared)

    def report(self, stats: RequestStats) -> dict[str, Any]:
        """Fields that a reply has beside OpenAI's own."""
        return self.pipeline.report(self.prepared, stats)

    def annotations(self, answer: str) -> list[dict[str, Any]]:
        """An answer's citations."""
        urls = {h.document_id: self._url(h.document_id, h.metadata) for h in self.prepared.hits}
        citations = self.pipeline.cite(self.prepared, answer)
        return [_annotation(c, urls[c["document_id"]]) for c in citations]

    def _url(self, document_id: str, metadata: dict[str, Any]) -> str:
        """Where the document came from, if its metadata has a `url`, else where this server shows it."""
        given = metadata.get("url")
        if isinstance(given, str) and given.startswith(("http://", "https://")):
            return given
        return f"{self.base_url.rstrip('/')}/rag/documents/{quote(document_id, safe='')}"


def wants_rag(body: ChatRequest) -> bool:
    """Whether the chat is a question over documents."""
    return body.rag is not None or body.model.startswith(MODEL_PREFIX)


async def prepare_chat(
    services: Services,
    pipeline: RagPipeline,
    body: ChatRequest,
    params: SamplingParams,
    caller: Caller,
    base_url: str,
) -> ChatRag:
    """Search and assemble for a chat. Raises `ApiError` whose `param` is a field of the chat."""
    if body.documents:
        raise ApiError("invalid_request", "documents and rag exclude each other: both say what to read", "documents")
    request = _rag_request(body)
    try:
        prepared = await pipeline.prepare(request, caller, params)
    except ApiError as e:
        raise ApiError(e.code, e.message, _param(e.param)) from e
    if body.model.startswith(MODEL_PREFIX) and not prepared.hits:
        known = await guarded(services.retrieval.collections(caller.tenant))
        if request.collection not in known or not caller.may_use(request.collection):
            why = f"there is no collection {request.collection[:80]!r} for the model {body.model[:80]!r}"
            raise ApiError("model_not_found", why, "model")
    return ChatRag(pipeline, prepared, base_url)


def _rag_request(body: ChatRequest) -> RagRequest:
    options = _options(body)
    messages = message_dicts(body.messages)
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        why = "with rag the last message must be the user's question, and not empty"
        raise ApiError("invalid_request", why, f"messages[{len(messages) - 1}]")
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    history = [HistoryMessage(m["role"], m["content"]) for m in messages[:-1] if m["role"] != "system"]
    given = {name: getattr(options, name) for name in RagOptions.__struct_fields__}
    question = messages[-1]["content"]
    return RagRequest(query=question, history=history, system=system or None, cache=body.cache, **given)


def _options(body: ChatRequest) -> RagOptions:
    options = body.rag or RagOptions()
    if not body.model.startswith(MODEL_PREFIX):
        return options
    collection = body.model.removeprefix(MODEL_PREFIX)
    if body.rag is not None and options.collection not in (collection, RagOptions().collection):
        why = f"the model {body.model[:80]!r} and rag.collection {options.collection[:80]!r} name two collections"
        raise ApiError("invalid_request", why, "rag.collection")
    return msgspec.structs.replace(options, collection=collection)


def _param(name: str | None) -> str | None:
    """What a field of /rag/query is called in a chat."""
    if name == "query":
        return "messages"
    return f"rag.{name}" if name in RagOptions.__struct_fields__ else name


def _annotation(citation: dict[str, Any], url: str) -> dict[str, Any]:
    start, end = citation["answer_span"]
    at = {"start_index": start, "end_index": end, "url": url, "title": citation["title"]}
    return {"type": "url_citation", "url_citation": at, "citation": citation}
