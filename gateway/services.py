"""The parts of a running server, and their life: engine, retrieval, prompt assembly, metrics."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path

from engine import (
    CacheMode,
    EngineInfo,
    EngineRequest,
    FinishReason,
    RequestOutput,
    RequestStats,
    SamplingParams,
    Tokenizer,
    load_tokenizer,
)
from gateway.admission import ANYONE, Admission, Refused, Stage, Ticket, Turn
from gateway.engine_client import EngineClient, EngineDead
from gateway.errors import ApiError
from gateway.fetch import UrlFetcher
from gateway.keys import Caller, KeyFile
from gateway.metrics import Metrics
from gateway.output_clock import OutputClock
from gateway.prompt import Prompt, PromptAssembler, PromptTooLong
from gateway.retrieval_client import RetrievalClient
from gateway.settings import Settings
from gateway.templates import PromptTemplate
from gateway.tracing import make_tracing
from gateway.turns import TICKET, before_deadline, turn_of

SHUTDOWN_RETRY_S = 10

MAX_ASSEMBLERS = 32
"""Tenants whose texts' token ids are kept; the longest unused ones are made again when needed."""


class Services:
    """Everything that handlers use. `start` returns when an answer can be given."""

    def __init__(
        self,
        settings: Settings,
        engine: EngineClient,
        retrieval: RetrievalClient,
        model_path: Path,
        templates: Mapping[str, PromptTemplate] | None = None,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.retrieval = retrieval
        self.metrics = Metrics()
        self.templates = templates or {}
        """Prompt templates by collection."""
        self.keys = KeyFile(settings.data_dir)
        self.urls = UrlFetcher()
        self.tracing = make_tracing(settings.gateway.traces, settings.gateway.otlp_endpoint)
        self.admission = Admission(settings.limits(), time.monotonic)
        self.is_draining = False
        self.idle = asyncio.Event()
        """Set while no request is being answered, those of watchers aside."""
        self.idle.set()
        self._num_active = 0
        self._has_stopped = False
        self._model_path = model_path
        self._tokenizer: Tokenizer | None = None
        self._assemblers: OrderedDict[str, PromptAssembler] = OrderedDict()
        self._assemblers_lock = threading.Lock()
        """Long prompts are made in threads."""

    @property
    def is_ready(self) -> bool:
        """Whether a question can be answered now."""
        parts = self.engine.is_ready and self.retrieval.is_ready and self._tokenizer is not None
        return parts and not self.is_draining

    def assembler(self, caller: Caller) -> PromptAssembler:
        """Prompt assembly for a tenant, with token ids of its own texts only: none is spared by another's.

        Raises `ApiError` while the model's tokenizer is being loaded.
        """
        with self._assemblers_lock:
            found = self._assemblers.pop(caller.scope, None) or PromptAssembler(self.tokenizer, caller.scope)
            self._assemblers[caller.scope] = found
            while len(self._assemblers) > MAX_ASSEMBLERS:
                self._assemblers.popitem(last=False)
        return found

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `ApiError` while it is being loaded."""
        if self._tokenizer is None:
            raise ApiError("engine_unavailable", "the engine is starting")
        return self._tokenizer

    @property
    def info(self) -> EngineInfo:
        """What the engine serves. Raises `ApiError` unless it is ready."""
        if not self.engine.is_ready or self.engine.info is None:
            raise ApiError("engine_unavailable", "the engine is not ready; it is starting, or being started again")
        return self.engine.info

    async def start(self) -> None:
        """Start all parts at once. Raises `EngineDead`, `RetrievalDead` or `CheckpointError` if one cannot start."""
        self._tokenizer, _, _ = await asyncio.gather(
            asyncio.to_thread(load_tokenizer, self._model_path), self.engine.start(), self.retrieval.start()
        )

    def begin_request(self) -> None:
        """A request is being answered."""
        self._num_active += 1
        self.idle.clear()

    def end_request(self) -> None:
        """It has ended."""
        self._num_active -= 1
        if not self._num_active:
            self.idle.set()

    async def stop(self) -> None:
        """End all parts; what still runs or waits fails with `shutting_down`. May be called again."""
        if self._has_stopped:
            return
        self.is_draining = self._has_stopped = True
        self.admission.refuse_all(shutting_down())
        await asyncio.gather(self.engine.stop(), self.retrieval.stop())
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def check_model(self, name: str) -> None:
        """Raise `ApiError` unless the name is what is served."""
        info = self.info
        if name not in ("default", info.model, self.settings.engine.model):
            raise ApiError("model_not_found", f"the model {name!r} is not served here; served: {info.model}", "model")

    def check_cache(self, cache: CacheMode | None) -> None:
        """Raise `ApiError` where linked passages are asked for and forbidden, or not to be had."""
        if cache is not CacheMode.LINKED:
            return
        if not self.settings.gateway.allow_linked:
            raise ApiError("linked_forbidden", "cache linked is forbidden here: allow_linked is off", "cache")
        if why := self.info.why_no_linking:
            raise ApiError("unsupported_parameter", f"cache linked is not possible: {why}", "cache")

    def too_long(self, error: PromptTooLong, max_tokens: int, param: str) -> ApiError:
        """The answer to a prompt that does not fit."""
        limit = self.info.max_model_len
        return ApiError(
            "context_length_exceeded",
            f"the model's context is {limit} tokens, output included; the prompt has {error.num_tokens} tokens and "
            f"{max_tokens} were requested for the answer",
            param,
        )

    def check_length(self, num_chars: int, max_tokens: int, param: str) -> None:
        """Raise `ApiError` for text that cannot fit whatever its tokens are, before any work is done for it."""
        longest, limit = self.tokenizer.max_token_len, self.info.max_model_len
        if longest is not None and num_chars > limit * longest:
            raise ApiError(
                "context_length_exceeded",
                f"the model's context is {limit} tokens, output included; the prompt has at least "
                f"{num_chars // longest} tokens and {max_tokens} were requested for the answer",
                param,
            )

    async def generate(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of the engine, once it is this prompt's turn; closing the generator aborts.

        Raises `ApiError` where the request or the engine fails, or its time in the queue is over.
        """
        ticket, own = TICKET.get(), None
        if ticket is None:  # not from a generating route: still in line with all others
            ticket = own = self.admission.admit(ANYONE, "", 0)
        ending = "disconnect"
        try:
            async with (
                turn_of(self.admission, ticket, prompt.num_tokens, params.max_tokens, params.n) as turn,
                aclosing(self._run(prompt, params, ticket, turn)) as outputs,
            ):
                async for out in outputs:
                    yield out
            ending = ""
        except EngineDead as e:
            ending = "shutting_down" if self._has_stopped else "engine_died"
            raise (shutting_down() if self._has_stopped else ApiError("engine_unavailable", str(e))) from e
        except Refused as e:
            self.metrics.refusals.labels(e.reason).inc()
            ticket.fault, ending = e.code, ""
            raise
        except ApiError as e:
            ending = e.code
            raise
        finally:
            self._count_end(ticket, ending)
            if own is not None:
                self.admission.close(own)

    async def _run(
        self, prompt: Prompt, params: SamplingParams, ticket: Ticket, turn: Turn
    ) -> AsyncGenerator[RequestOutput, None]:
        request = EngineRequest(uuid.uuid4().hex, prompt.segments, params, cache=prompt.cache)
        ticket.engine_ids.append(request.request_id)
        clock = OutputClock(self.metrics, partial(self.admission.elapsed_s, ticket), turn.waited_s)
        async with aclosing(self.engine.generate(request)) as outputs:
            # The engine says when it begins, so the time limit holds in its queue as well.
            out: RequestOutput | None = await before_deadline(self.admission, ticket, anext(outputs))
            while out is not None:
                if out.finish_reason is FinishReason.ERROR:
                    # Without statistics it was refused before it began: the request's own fault.
                    code = "invalid_request" if out.stats is None else "internal_error"
                    raise ApiError(code, out.error or "the engine failed")
                turn.num_output_tokens += len(out.token_ids)
                out = clock.take(out)
                if out.stats is not None:
                    _note(ticket, turn, out.stats, out.index)
                if out.token_ids or out.text or out.finish_reason is not None or out.prompt_logprobs:
                    yield out
                out = await anext(outputs, None)

    def _count_end(self, ticket: Ticket, ending: str) -> None:
        """Count a prompt that did not end by itself, by what ended it."""
        if not ending:
            return
        if ending == "disconnect" and ticket.fault is not None:
            ending = "sibling_failed"
        ticket.fault = ticket.fault or ending
        self.metrics.aborted.labels(ending).inc()


def _note(ticket: Ticket, turn: Turn, stats: RequestStats, index: int) -> None:
    """Tokens for the access line and stages for the trace; further continuations share the first one's prompt."""
    ticket.num_output_tokens += stats.num_output_tokens
    if index == 0:
        at = turn.asked_s
        for name, time_s in (("queue", stats.queue_s), ("prefill", stats.prefill_s), ("decode", stats.decode_s)):
            ticket.stages.append(Stage(name, at, at + time_s))
            at += time_s
        ticket.num_prompt_tokens += stats.num_prompt_tokens
        ticket.num_cached_tokens += stats.counts.cached


def shutting_down() -> Refused:
    """The answer to what a server that is ending does not do."""
    return Refused("shutting_down", "shutting_down", "the server is shutting down", SHUTDOWN_RETRY_S)
