"""A question's way: search, choose passages, assemble the prompt, generate, cite."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine import BLOCK_SIZE, CacheMode, RequestStats, SamplingParams, Segment, SegmentKind
from gateway.citations import Citation, cite
from gateway.errors import ApiError
from gateway.keys import Caller
from gateway.order import PassageOrder
from gateway.prompt import DEFAULT_SYSTEM, Message, PassageText, Prompt, PromptTooLong
from gateway.retrieval_client import RetrievalDead
from gateway.schemas import Order, RagRequest
from gateway.services import Services
from gateway.turns import assemble, search_stages, stage
from gateway.usage import certified_dict, counts_dict, timings_dict, usage_dict
from retrieval import Hit, SearchRequest, SearchResult, StorageFailed, StoreUnavailable

T = TypeVar("T")
NEW_CONVERSATION = "new"
Event = tuple[str, dict[str, Any]]


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
    hits: tuple[Hit, ...]
    prompt: Prompt
    params: SamplingParams
    started: float
    timings: dict[str, float]
    conversation_id: str | None
    conversation: Conversation | None
    answer: list[str] = field(default_factory=list)


class RagPipeline:
    """Answers questions over the documents."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._conversations: dict[str, OrderedDict[str, Conversation]] = {}
        """By tenant and id."""
        self._orders = PassageOrder(0)

    async def prepare(self, request: RagRequest, caller: Caller) -> Prepared:
        """Everything before the first token. Raises `ApiError`."""
        s, started = self._services, time.perf_counter()
        s.check_model(request.model)
        s.check_cache(request.cache)
        if request.order is Order.CACHE and s.settings.engine.deterministic:
            raise ApiError("unsupported_parameter", "order cache is not possible: deterministic is on", "order")
        params = request.params(s.info.vocab_size, s.settings.gateway.default_max_tokens, temperature=0.0)
        conversation_id, conversation = self._conversation(request, caller)
        num_chars = request.num_chars()
        s.check_length(num_chars, params.max_tokens, "query")
        found = await self._search(request, caller)
        assembling = time.perf_counter()
        num_chars += sum(len(h.passage.text) for h in found.hits)
        prompt = await assemble(num_chars, lambda: self._assemble(request, found, params, conversation, caller))
        prompt = request.caching(prompt)
        prompt = self._order(request, prompt) if prompt.passage_ids else prompt
        timings = {
            "embed_ms": round(found.embed_ms, 2),
            "search_ms": round(found.search_ms, 2),
            "rerank_ms": round(found.rerank_ms, 2),
            "assemble_ms": round((time.perf_counter() - assembling) * 1e3, 2),
        }
        s.metrics.searched(found)
        answer_id = f"rag-{uuid.uuid4().hex}"
        return Prepared(
            answer_id, request.query, found.hits, prompt, params, started, timings, conversation_id, conversation
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

    async def _answer_events(self, p: Prepared) -> AsyncGenerator[Event, None]:
        yield "sources", {"id": p.id, "sources": [_source(h, p, None) for h in p.hits]}
        if not p.hits:
            reply = self._services.settings.gateway.no_context_reply
            yield "delta", {"text": reply}
            yield "final", self._final(p, reply, [], None, "stop", 0.0)
            return
        ttft_ms, stats, reason = 0.0, None, "stop"
        tokens: list[int] = []
        async with aclosing(self._services.generate(p.prompt, p.params)) as outputs:
            async for out in outputs:
                if not tokens and out.token_ids:
                    ttft_ms = (time.perf_counter() - p.started) * 1e3
                tokens += out.token_ids
                if out.text:
                    p.answer.append(out.text)
                    yield "delta", {"text": out.text}
                if out.finish_reason is not None:
                    stats, reason = out.stats, out.finish_reason.value
        answer = "".join(p.answer)
        used = [h.passage for h in p.hits if h.passage.passage_id in p.prompt.passage_ids]
        with stage("cite"):
            citations = cite(answer, p.query, used)
        for c in citations:
            yield "citation", _citation(c, p.hits)
        if p.conversation is not None:
            p.conversation.segments, p.conversation.answer_ids = p.prompt.segments, tuple(tokens)
        yield "final", self._final(p, answer, citations, stats, reason, ttft_ms)

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
        caller: Caller,
    ) -> Prompt:
        limit = self._services.info.max_model_len
        room = max(limit - params.max_tokens, limit // 2)
        passages = [PassageText(h.passage.passage_id, h.title, h.passage.text) for h in found.hits]
        assembler = self._services.assembler(caller)
        try:
            if conversation is not None and conversation.segments:
                before, ids = conversation.segments, conversation.answer_ids
                return assembler.follow_up(before, ids, r.query, passages, max_tokens=room)
            system = DEFAULT_SYSTEM if r.system is None else r.system
            history = [Message(m.role, m.content) for m in r.history or ()]
            return assembler.rag(r.query, passages, system=system, history=history, max_tokens=room)
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
        self,
        p: Prepared,
        answer: str,
        citations: list[Citation],
        stats: RequestStats | None,
        reason: str,
        ttft_ms: float,
    ) -> dict[str, Any]:
        engine_ms = timings_dict(stats) if stats else {"queue_ms": 0.0, "prefill_ms": 0.0, "decode_ms": 0.0}
        total_ms = round((time.perf_counter() - p.started) * 1e3, 2)
        return {
            "id": p.id,
            "answer": answer,
            "citations": [_citation(c, p.hits) for c in citations],
            "sources": [_source(h, p, stats) for h in p.hits],
            "usage": usage_dict([stats] if stats else []),
            "timings": {**p.timings, **engine_ms, "ttft_ms": round(ttft_ms, 2), "total_ms": total_ms},
            "finish_reason": reason,
            "no_context": not p.hits,
            "dropped": list(p.prompt.dropped),
            "conversation_id": p.conversation_id,
            **certified_dict(p.prompt.cache),
        }


def _source(hit: Hit, p: Prepared, stats: RequestStats | None) -> dict[str, Any]:
    return {
        "document_id": hit.document_id,
        "passage_id": hit.passage.passage_id,
        "title": hit.title,
        "source": hit.source,
        "page": hit.passage.page,
        "heading": hit.passage.heading,
        "text": hit.passage.text,
        "span": [hit.passage.start, hit.passage.end],
        "score": round(hit.score, 4),
        "scores": {
            "dense": round(hit.scores.dense, 4),
            "lexical": round(hit.scores.lexical, 4),
            "fused": round(hit.scores.fused, 4),
            "rerank": None if hit.scores.rerank is None else round(hit.scores.rerank, 4),
        },
        "metadata": hit.metadata,
        "also_in": [{"document_id": t.document_id, "title": t.title} for t in hit.also_in],
        "cache": _cache_of(hit, p, stats),
    }


def _cache_of(hit: Hit, p: Prepared, stats: RequestStats | None) -> dict[str, int] | None:
    """What the cache did for a passage; None before the end, and for a passage that is not in the prompt."""
    ids = p.prompt.passage_ids
    if stats is None or hit.passage.passage_id not in ids:
        return None
    # A kept conversation holds passages of earlier turns as well; this turn's are the last ones.
    own = [c for c, s in zip(stats.segments, p.prompt.segments, strict=True) if s.kind is SegmentKind.PASSAGE]
    return counts_dict(own[-len(ids) :][ids.index(hit.passage.passage_id)])


def _citation(c: Citation, hits: tuple[Hit, ...]) -> dict[str, Any]:
    number, hit = next((i + 1, h) for i, h in enumerate(hits) if h.passage.passage_id == c.passage.passage_id)
    return {
        "number": number,
        "document_id": hit.document_id,
        "passage_id": c.passage.passage_id,
        "title": hit.title,
        "page": c.passage.page,
        "span": [c.start, c.end],
        "text": c.text,
        "score": round(c.score, 4),
        "answer_span": [c.answer_start, c.answer_end],
    }


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
