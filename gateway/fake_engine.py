"""An engine that computes nothing, at the protocol's place of a real one: for measuring the gateway alone.

Each request says by its `seed` how many milliseconds pass before its first token; the others follow at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from engine import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    EngineView,
    FinishReason,
    PoolView,
    RequestOutput,
    RequestStats,
    TokenCounts,
)
from gateway.retrieval_client import RetrievalClient
from retrieval import RetrievalStats


class FakeEngine:
    """Answers every prompt with the word "token", as often as it may."""

    def __init__(self, model_path: Path, vocab_size: int, max_model_len: int = 8192) -> None:
        self.info: EngineInfo | None = EngineInfo(
            model=model_path.stem,
            model_path=str(model_path),
            max_model_len=max_model_len,
            num_blocks=1,
            vocab_size=vocab_size,
            dtype="none",
            device="none",
            attention="none",
            weights="none",
        )
        self.num_going = 0
        """Requests under way."""

    @property
    def is_ready(self) -> bool:
        """Always."""
        return True

    @property
    def num_restarts(self) -> int:
        """Never."""
        return 0

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to stop."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """First an empty output, as the request begins at once; then the tokens."""
        self.num_going += 1
        try:
            yield RequestOutput(request.request_id)
            if request.params.seed:
                await asyncio.sleep(request.params.seed / 1e3)
            n, last = request.num_prompt_tokens, request.params.max_tokens - 1
            for i in range(last):
                yield RequestOutput(request.request_id, " token", (i,))
            counts = TokenCounts(computed=n)
            stats = RequestStats(n, last + 1, counts, (TokenCounts(),) * len(request.segments), 0, 0.0, 0.0, 0.0)
            yield RequestOutput(request.request_id, " token", (last,), finish_reason=FinishReason.LENGTH, stats=stats)
        finally:
            self.num_going -= 1

    async def stats(self) -> EngineStats:
        """Running requests, and zeros."""
        return EngineStats(self.num_going, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0)

    async def view(self) -> EngineView:
        """Nothing."""
        return EngineView(PoolView(1, 0, 0, 0, 1, 0), (), 0, ())


class NoRetrieval(RetrievalClient):
    """A retrieval client without a worker."""

    def __init__(self) -> None:
        self.is_ready = True

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to stop."""

    async def stats(self) -> RetrievalStats:
        """An empty corpus."""
        return RetrievalStats(0, 0, "none", {})
