"""A question's way: search, choose passages, assemble the prompt, generate, cite."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine import (
    BLOCK_SIZE,
    CacheMode,
    FinishReason,
    RequestOutput,
    RequestStats,
    SamplingParams,
    Segment,
    TokenCounts,
)
from gateway.citations import cite
from gateway.errors import ApiError
from gateway.keys import Caller
from gateway.languages import language_name
from gateway.order import PassageOrder
from gateway.prompt import BUILT_IN, Message, PassageText, Prompt, PromptTooLong
from gateway.rag_reply import citation_dict, dropped_dicts, source_dict, tokens_by_kind
from gateway.retrieval_client import RetrievalDead
from gateway.schemas import Order, RagRequest
from gateway.services import Services
from gateway.turns import assemble, search_stages, stage
from gateway.usage import certified_dict, timings_dict, usage_dict
from retrieval import Hit, SearchRequest, SearchResult, StorageFailed, StoreUnavailable

T = TypeVar("T")
NEW_CONVERSATION = "new"
Event = tuple[str, dict[str, Any]]
TIMINGS = (
    *("embed_ms", "search_ms", "rerank_ms", "assemble_ms", "queue_ms", "prefill_ms", "decode_ms", "cite_ms"),
    *("ttft_ms", "total_ms"),
)
"""Stages of a reply in their order, then arrival to first token and to end."""
_NO_STATS = RequestStats(0, 0, TokenCounts(), (), 0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class Conversation:
    """A conversation the server keeps: append-only, so each turn finds the earlier ones in the cache."""

    segments: tuple[Segment, ...] = ()
    answer_ids: tuple[int, ...] = ()
    is_busy: bool = False
    collections: set[str] = field(default_factory=set)
    """Where its passages come from: who may not use one of them may not go on with it."""

    def add_source(self, collection: str, caller: Caller) -> None:
        """Note where the next passages come from; there are none where the caller may not look."""
        if caller.may_use(collection):
            self.collections.add(collection)


@dataclass(slots=True)
class Prepared:
    """A question up to the point where the engine takes over."""

    id: str
    query: str
    language: str | None
    hits: tuple[Hit, ...]
    prompt: Prompt
    params: SamplingParams
    started: float
    timings: dict[str, float]
    conversation_id: str | None
    conversation: Conversation | None


class RagPipeline:
    """Answers questions over the documents."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._conversations: dict[str, OrderedDict[str, Conversation]] = {}
        """By tenant and id."""
        self._orders = PassageOrder(0)

    async def prepare(self, request: RagRequest, caller: Caller, params: SamplingParams | None = None) -> Prepared:
        """Everything before the first token; `params` in place of the request's own. Raises `ApiError`."""
        s, started = self._services, time.perf_counter()
        s.check_model(request.model)
        s.check_cache(request.cache)
        if request.order is Order.CACHE and s.settings.engine.deterministic:
            raise ApiError("unsupported_parameter", "order cache is not possible: deterministic is on", "order")
        if params is None:
            params = request.params(s.info.vocab_size, s.settings.gateway.default_max_tokens, temperature=0.0)
        language = None if request.language is None else language_name(request.language)
        conversation_id, conversation = self._conversation(request, caller)
        num_chars = request.num_chars()
        s.check_length(num_chars, params.max_tokens, "query")
        found = await self._search(request, caller)
        assembling = time.perf_counter()
        num_chars += sum(len(h.passage.text) for h in found.hits)
        prompt = await assemble(
            num_chars, lambda: self._assemble(request, found, params, conversation, language, caller)
        )
        prompt = request.caching(prompt)
        prompt = self._order(request, prompt) if prompt.passage_ids else prompt
        timings = {
            "embed_ms": found.embed_ms,
            "search_ms": found.search_ms,
            "rerank_ms": found.rerank_ms,
            "assemble_ms": _since(assembling),
        }
        s.metrics.searched(found)
        answer_id = f"rag-{uuid.uuid4().hex}"
        return Prepared(
            *(answer_id, request.query, language, found.hits, prompt, params, started, timings),
            conversation_id=conversation_id,
            conversation=conversation,
        )

    async def answer(self, request: RagRequest, caller: Caller) -> dict[str, Any]:
        """The whole reply at once."""
        reply: dict[str, Any] = {}
        async with aclosing(self.events(await self.prepare(request, caller))) as events:
            async for name, data in events:
                if name == "final":
                    reply = data
        return reply

    async def events(self, p: Prepared) -> AsyncGenerator[Event, None]:
        """sources, delta..., citation..., final. Raises `ApiError`."""
        if p.conversation is not None:
            p.conversation.is_busy = True
        try:
            async with aclosing(self._answer_events(p)) as events:
                async for event in events:
                    yield event
        finally:
            if p.conversation is not None:
                p.conversation.is_busy = False

    async def outputs(self, p: Prepared) -> AsyncGenerator[RequestOutput, None]:
        """What the engine makes of the prompt; where nothing was found, the fixed reply, and no engine is asked."""
        if not p.hits:
            reply = self._services.settings.gateway.no_context_reply
            for i in range(p.params.n):
                yield RequestOutput(p.id, reply, index=i, finish_reason=FinishReason.STOP, stats=_NO_STATS)
            return
        async with aclosing(self._services.generate(p.prompt, p.params)) as outputs:
            async for out in outputs:
                if out.token_ids and "ttft_ms" not in p.timings:
                    p.timings["ttft_ms"] = _since(p.started)
                yield out

    def cite(self, p: Prepared, answer: str) -> list[dict[str, Any]]:
        """Citations of an answer, from the passages that are in the prompt."""
        started = time.perf_counter()
        used = [h.passage for h in p.hits if h.passage.passage_id in p.prompt.passage_ids]
        with stage("cite"):
            citations = [citation_dict(c, p.hits) for c in cite(answer, p.query, used)]
        p.timings["cite_ms"] = p.timings.get("cite_ms", 0.0) + _since(started)
        return citations

    def before(self, p: Prepared) -> dict[str, Any]:
        """What is known of a reply before its first token."""
        return {"sources": [source_dict(h, p.prompt, None) for h in p.hits]}

    def report(self, p: Prepared, stats: RequestStats) -> dict[str, Any]:
        """What every reply over documents says beside the answer, at its end."""
        timings = {**p.timings, **timings_dict(stats), "total_ms": _since(p.started)}
        return {
            "sources": [source_dict(h, p.prompt, stats) for h in p.hits],
            "no_context": not p.hits,
            "dropped": dropped_dicts(p.prompt),
            "language": p.language,
            "timings": {name: round(timings.get(name, 0.0), 2) for name in TIMINGS},
        }

    async def _answer_events(self, p: Prepared) -> AsyncGenerator[Event, None]:
        yield "sources", {"id": p.id, **self.before(p)}
        stats, reason = _NO_STATS, "stop"
        answer, tokens = "", list[int]()
        async with aclosing(self.outputs(p)) as outputs:
            async for out in outputs:
                tokens += out.token_ids
                if out.text:
                    answer += out.text
                    yield "delta", {"text": out.text}
                if out.finish_reason is not None:
                    stats, reason = out.stats or _NO_STATS, out.finish_reason.value
        citations = self.cite(p, answer)
        for c in citations:
            yield "citation", c
        if p.conversation is not None and p.hits:
            p.conversation.segments, p.conversation.answer_ids = p.prompt.segments, tuple(tokens)
        yield "final", self._final(p, answer, citations, stats, reason)

    def _conversation(self, request: RagRequest, caller: Caller) -> tuple[str | None, Conversation | None]:
        """The conversation a request goes on with. The server makes the ids."""
        wanted = request.conversation_id
        if wanted is None:
            return None, None
        own = self._conversations.setdefault(caller.tenant, OrderedDict())
        if wanted == NEW_CONVERSATION:
            new_id = f"conv-{uuid.uuid4().hex}"
            own[new_id] = Conversation()
            own[new_id].add_source(request.collection, caller)
            while len(own) > self._services.settings.gateway.max_conversations:
                own.popitem(last=False)
            return new_id, own[new_id]
        if wanted not in own or not all(map(caller.may_use, own[wanted].collections)):
            raise ApiError("not_found", f"there is no conversation {wanted[:80]!r}", "conversation_id")
        if request.history or request.system is not None:
            raise ApiError("invalid_request", "a kept conversation takes no history and no system text", "history")
        if own[wanted].is_busy:
            raise ApiError("conversation_busy", "the last question of this conversation is still being answered")
        own.move_to_end(wanted)
        own[wanted].add_source(request.collection, caller)
        return wanted, own[wanted]

    async def _search(self, r: RagRequest, caller: Caller) -> SearchResult:
        filters, tenant = r.filters or None, caller.tenant_in(r.collection)
        request = SearchRequest(
            r.query, r.collection, r.top_k, filters, r.mode, r.min_score, r.diversity, r.rerank, tenant
        )
        started_s = time.monotonic()
        found = await guarded(self._services.retrieval.search(request))
        search_stages(started_s, found)
        return found

    def _assemble(
        self,
        r: RagRequest,
        found: SearchResult,
        params: SamplingParams,
        conversation: Conversation | None,
        language: str | None,
        caller: Caller,
    ) -> Prompt:
        limit = self._services.info.max_model_len
        room = max(limit - params.max_tokens, limit // 2)
        passages = [PassageText(h.passage.passage_id, h.title, h.passage.text) for h in found.hits]
        assembler = self._services.assembler(caller)
        template = self._services.templates.get(r.collection, BUILT_IN)
        # In the tail, where it changes nothing of what others can reuse.
        question = r.query if language is None else f"{r.query}\n\nAnswer in {language}."
        try:
            if conversation is not None and conversation.segments:
                before, ids = conversation.segments, conversation.answer_ids
                return assembler.follow_up(before, ids, question, passages, template=template, max_tokens=room)
            system = template.system if r.system is None else r.system
            history = [Message(m.role, m.content) for m in r.history or ()]
            given: dict[str, Any] = {"system": system, "history": history, "template": template}
            return assembler.rag(question, passages, **given, max_tokens=room)
        except PromptTooLong as e:
            raise self._services.too_long(e, params.max_tokens, "query") from e

    def _order(self, r: RagRequest, prompt: Prompt) -> Prompt:
        """The prompt with its passages along earlier orders, if that is asked for; the order is remembered."""
        s, num = self._services, len(prompt.passage_ids)
        head, passages = prompt.segments[: -1 - num], prompt.segments[-1 - num : -1]
        if r.order is Order.CACHE:
            prompt = prompt.reordered(self._orders.propose(head, passages, s.settings.gateway.max_passage_shift))
        if prompt.cache is not CacheMode.OFF:
            # What the engine's cache cannot hold is not worth following.
            self._orders.max_tokens = s.info.num_blocks * BLOCK_SIZE
            sent = prompt.segments[-1 - num : -1]
            self._orders.record(head, sent, [len(p.token_ids) for p in sent])
        return prompt

    def _final(
        self, p: Prepared, answer: str, citations: list[dict[str, Any]], stats: RequestStats, reason: str
    ) -> dict[str, Any]:
        usage = {**usage_dict([stats]), "prompt_tokens_by_kind": tokens_by_kind(p.prompt, stats)}
        return {
            "id": p.id,
            "answer": answer,
            "citations": citations,
            "usage": usage,
            "finish_reason": reason,
            "conversation_id": p.conversation_id,
            **self.report(p, stats),
            **certified_dict(p.prompt.cache),
        }


def _since(started: float) -> float:
    """Milliseconds."""
    return (time.perf_counter() - started) * 1e3


async def guarded(work: Awaitable[T]) -> T:
    """A retrieval call, its faults as `ApiError`."""
    try:
        return await work
    except ValueError as e:
        raise ApiError("invalid_request", str(e), str(e).split(" ", 1)[0].rstrip(":")) from e
    except (StoreUnavailable, RetrievalDead) as e:
        raise ApiError("retrieval_unavailable", str(e)) from e
    except StorageFailed as e:
        raise ApiError("storage_failed", str(e)) from e
