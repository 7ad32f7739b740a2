"""The parts of a running server, and their life: engine, retrieval, prompt assembly, metrics."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path

from engine import EngineInfo, EngineRequest, FinishReason, RequestOutput, SamplingParams, Tokenizer, load_tokenizer
from gateway.engine_client import EngineClient, EngineDead
from gateway.errors import ApiError
from gateway.fetch import UrlFetcher
from gateway.keys import Caller, KeyFile
from gateway.metrics import Metrics
from gateway.prompt import Prompt, PromptAssembler, PromptTooLong
from gateway.retrieval_client import RetrievalClient
from gateway.settings import Settings
from gateway.templates import PromptTemplate

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
        self.is_draining = False
        self._model_path = model_path
        self._tokenizer: Tokenizer | None = None
        self._assemblers: OrderedDict[str, PromptAssembler] = OrderedDict()

    @property
    def is_ready(self) -> bool:
        """Whether a question can be answered now."""
        parts = self.engine.is_ready and self.retrieval.is_ready and self._tokenizer is not None
        return parts and not self.is_draining

    def assembler(self, caller: Caller) -> PromptAssembler:
        """Prompt assembly for a tenant, with token ids of its own texts only: none is spared by another's.

        Raises `ApiError` while the model's tokenizer is being loaded.
        """
        if caller.scope not in self._assemblers:
            self._assemblers[caller.scope] = PromptAssembler(self.tokenizer, caller.scope)
        self._assemblers.move_to_end(caller.scope)
        while len(self._assemblers) > MAX_ASSEMBLERS:
            self._assemblers.popitem(last=False)
        return self._assemblers[caller.scope]

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `ApiError` while it is being loaded."""
        if self._tokenizer is None:
            raise ApiError("engine_unavailable", "the engine is starting")
        return self._tokenizer

    @property
    def info(self) -> EngineInfo:
        """What the engine serves. Raises `ApiError` unless it is ready."""
        if self.is_draining:
            raise ApiError("shutting_down", "the server is shutting down")
        if not self.engine.is_ready or self.engine.info is None:
            raise ApiError("engine_unavailable", "the engine is not ready; it is starting, or being started again")
        return self.engine.info

    async def start(self) -> None:
        """Start all parts at once. Raises `EngineDead`, `RetrievalDead` or `CheckpointError` if one cannot start."""
        self._tokenizer, _, _ = await asyncio.gather(
            asyncio.to_thread(load_tokenizer, self._model_path), self.engine.start(), self.retrieval.start()
        )

    async def stop(self) -> None:
        """End all parts."""
        self.is_draining = True
        await asyncio.gather(self.engine.stop(), self.retrieval.stop())

    def check_model(self, name: str) -> None:
        """Raise `ApiError` unless the name is what is served."""
        info = self.info
        if name not in ("default", info.model, self.settings.engine.model):
            raise ApiError("model_not_found", f"the model {name!r} is not served here; served: {info.model}", "model")

    def too_long(self, error: PromptTooLong, max_tokens: int, param: str) -> ApiError:
        """The answer to a prompt that does not fit."""
        limit = self.info.max_model_len
        return ApiError(
            "context_length_exceeded",
            f"the model's context is {limit} tokens, output included; the prompt has {error.num_tokens} tokens and "
            f"{max_tokens} were requested for the answer",
            param,
        )

    async def generate(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of the engine; closing the generator aborts. Raises `ApiError` where the request or engine fails."""
        request = EngineRequest(uuid.uuid4().hex, prompt.segments, params, cache=prompt.cache)
        started, first = time.perf_counter(), dict[int, float]()
        try:
            async with aclosing(self.engine.generate(request)) as outputs:
                async for out in outputs:
                    if out.finish_reason is FinishReason.ERROR:
                        # Without statistics it was refused before it began: the request's own fault.
                        code = "invalid_request" if out.stats is None else "internal_error"
                        raise ApiError(code, out.error or "the engine failed")
                    if out.token_ids:
                        first.setdefault(out.index, time.perf_counter() - started)
                    if out.stats is not None:
                        ttft = first.get(out.index, 0.0)
                        self.metrics.finished(out.stats, ttft, time.perf_counter() - started, out.index)
                    yield out
        except EngineDead as e:
            raise ApiError("engine_unavailable", str(e)) from e
