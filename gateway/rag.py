"""A question's way: search, choose passages, assemble the prompt, generate, cite."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine import RequestStats, SamplingParams, Segment, SegmentKind
from gateway.citations import Citation, cite
from gateway.errors import ApiError
from gateway.prompt import DEFAULT_SYSTEM, Message, PassageText, Prompt, PromptTooLong
from gateway.retrieval_client import RetrievalDead
from gateway.schemas import RagRequest
from gateway.services import Services
from gateway.usage import counts_dict, timings_dict, usage_dict
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
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()

    async def prepare(self, request: RagRequest) -> Prepared:
        """Everything before the first token. Raises `ApiError`."""
        s, started = self._services, time.perf_counter()
        s.check_model(request.model)
        params = request.params(s.info.vocab_size, s.settings.gateway.default_max_tokens, temperature=0.0)
        conversation_id, conversation = self._conversation(request)
        found = await self._search(request)
        assembling = time.perf_counter()
        prompt = request.caching(self._assemble(request, found, params, conversation))
        timings = {
            "embed_ms": round(found.embed_ms, 2),
            "search_ms": round(found.search_ms, 2),
            "rerank_ms": round(found.rerank_ms, 2),
            "assemble_ms": round((time.perf_counter() - assembling) * 1e3, 2),
        }
        s.metrics.stage.labels("embed").observe(found.embed_ms / 1e3)
        s.metrics.stage.labels("search").observe(found.search_ms / 1e3)
        s.metrics.stage.labels("rerank").observe(found.rerank_ms / 1e3)
        answer_id = f"rag-{uuid.uuid4().hex}"
        return Prepared(
            answer_id, request.query, found.hits, prompt, params, started, timings, conversation_id, conversation
        )

    async def answer(self, request: RagRequest) -> dict[str, Any]:
        """The whole reply at once."""
        reply: dict[str, Any] = {}
        async with aclosing(self.events(await self.prepare(request))) as events:
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
        citations = cite(answer, p.query, used)
        for c in citations:
            yield "citation", _citation(c, p.hits)
        if p.conversation is not None:
            p.conversation.segments, p.conversation.answer_ids = p.prompt.segments, tuple(tokens)
        yield "final", self._final(p, answer, citations, stats, reason, ttft_ms)

    def _conversation(self, request: RagRequest) -> tuple[str | None, Conversation | None]:
        """The conversation a request goes on with. The server makes the ids."""
        wanted = request.conversation_id
        if wanted is None:
            return None, None
        if wanted == NEW_CONVERSATION:
            new_id = f"conv-{uuid.uuid4().hex}"
            self._conversations[new_id] = Conversation()
            while len(self._conversations) > self._services.settings.gateway.max_conversations:
                self._conversations.popitem(last=False)
            return new_id, self._conversations[new_id]
        if wanted not in self._conversations:
            raise ApiError("not_found", f"there is no conversation {wanted[:80]!r}", "conversation_id")
        if request.history or request.system is not None:
            raise ApiError("invalid_request", "a kept conversation takes no history and no system text", "history")
        if self._conversations[wanted].is_busy:
            raise ApiError("conversation_busy", "the last question of this conversation is still being answered")
        self._conversations.move_to_end(wanted)
        return wanted, self._conversations[wanted]

    async def _search(self, r: RagRequest) -> SearchResult:
        filters = r.filters or None
        request = SearchRequest(
            r.query, r.collection, r.top_k, filters, r.mode, r.min_score, r.diversity, rerank=r.rerank
        )
        return await guarded(self._services.retrieval.search(request))

    def _assemble(
        self, r: RagRequest, found: SearchResult, params: SamplingParams, conversation: Conversation | None
    ) -> Prompt:
        limit = self._services.info.max_model_len
        room = max(limit - params.max_tokens, limit // 2)
        passages = [PassageText(h.passage.passage_id, h.title, h.passage.text) for h in found.hits]
        assembler = self._services.assembler
        try:
            if conversation is not None and conversation.segments:
                before, ids = conversation.segments, conversation.answer_ids
                return assembler.follow_up(before, ids, r.query, passages, max_tokens=room)
            system = DEFAULT_SYSTEM if r.system is None else r.system
            history = [Message(m.role, m.content) for m in r.history or ()]
            return assembler.rag(r.query, passages, system=system, history=history, max_tokens=room)
        except PromptTooLong as e:
            raise self._services.too_long(e, params.max_tokens, "query") from e

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
