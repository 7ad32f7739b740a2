"""The engine in this process, for scripts, tests and benches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from engine.api import (
    CacheMode,
    EngineRequest,
    FinishReason,
    RequestOutput,
    RequestStats,
    SamplingParams,
    Segment,
    TokenLogprobs,
)
from engine.config import EngineConfig
from engine.core import EngineCore

Prompt = str | Sequence[int] | Sequence[Segment]


@dataclass(slots=True)
class Completion:
    """A finished continuation."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: RequestStats
    error: str | None = None
    index: int = 0
    """Which of the prompt's n continuations it is."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class LLM:
    """`LLM(model, max_model_len=..., ...)`; settings are those of `EngineConfig`; an unknown one is refused."""

    def __init__(self, model: str, **settings: Any) -> None:
        unknown = settings.keys() - set(EngineConfig.__struct_fields__)
        if unknown:
            raise TypeError(f"LLM has no setting {', '.join(sorted(unknown))}")
        self.core = EngineCore(msgspec.convert({"model": str(model), **settings}, EngineConfig))
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        cache: CacheMode = CacheMode.AUTO,
    ) -> list[Completion]:
        """Continue prompts, all at once; each is text, token ids, or a list of segments.

        Returns completions in the prompts' order, n for each prompt. Raises `ValueError` for one that could never run;
        then none ran.
        """
        batch: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        each = [params or SamplingParams()] * len(batch) if not isinstance(params, Sequence) else list(params)
        wanted: dict[tuple[str, int], list[RequestOutput]] = {}
        try:
            for prompt, p in zip(batch, each, strict=True):
                request = self.request(prompt, p, cache)
                self.core.add(request)
                wanted |= {(request.request_id, i): [] for i in range(p.n)}
        except ValueError:
            for request_id, _ in wanted:
                self.core.abort(request_id)
            raise
        return self._run(wanted)

    def request(self, prompt: Prompt, params: SamplingParams, cache: CacheMode = CacheMode.AUTO) -> EngineRequest:
        """A prompt as `EngineCore.add` takes it, with an id of its own."""
        return EngineRequest(f"llm-{next(self._ids)}", self._segments(prompt), params, cache=cache)

    def _run(self, wanted: dict[tuple[str, int], list[RequestOutput]]) -> list[Completion]:
        running = len(wanted)
        while running:
            for out in self.core.step():
                wanted[out.request_id, out.index].append(out)
                running -= out.finish_reason is not None
        return [_completion(outputs) for outputs in wanted.values()]

    def _segments(self, prompt: Any) -> tuple[Segment, ...]:
        if isinstance(prompt, str):
            return (Segment(tuple(self.core.tokenizer.encode_template(prompt))),)
        if prompt and isinstance(prompt[0], Segment):
            return tuple(prompt)
        return (Segment(tuple(prompt)),)


def _completion(outputs: Sequence[RequestOutput]) -> Completion:
    """One continuation of all its outputs."""
    last = outputs[-1]
    assert last.finish_reason is not None
    assert last.stats is not None
    return Completion(
        "".join(o.text for o in outputs),
        [t for o in outputs for t in o.token_ids],
        last.finish_reason,
        last.stats,
        last.error,
        last.index,
        [x for o in outputs for x in o.logprobs],
        [x for o in outputs for x in o.prompt_logprobs],
    )


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Segment))
