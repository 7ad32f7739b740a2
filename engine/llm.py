"""The engine in this process, for scripts, tests and benches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from engine.api import EngineRequest, FinishReason, RequestStats, SamplingParams, Segment
from engine.config import EngineConfig
from engine.core import EngineCore

Prompt = str | Sequence[int] | Sequence[Segment]


@dataclass(slots=True)
class Completion:
    """A finished request."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: RequestStats
    error: str | None = None


class LLM:
    """`LLM(model, max_model_len=..., ...)`; settings are those of `EngineConfig`; an unknown one is refused."""

    def __init__(self, model: str, **settings: Any) -> None:
        unknown = settings.keys() - set(EngineConfig.__struct_fields__)
        if unknown:
            raise TypeError(f"LLM has no setting {', '.join(sorted(unknown))}")
        self.core = EngineCore(msgspec.convert({"model": str(model), **settings}, EngineConfig))
        self._ids = count()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue prompts, all at once; each is text, token ids, or a list of segments.

        Returns completions in the prompts' order. Raises `ValueError` for one that could never run; then none ran.
        """
        batch = [prompts] if _is_one(prompts) else list(prompts)
        each = [params or SamplingParams()] * len(batch) if not isinstance(params, Sequence) else list(params)
        ids: list[str] = []
        try:
            for prompt, p in zip(batch, each, strict=True):
                request = EngineRequest(f"llm-{next(self._ids)}", self._segments(prompt), p)
                self.core.add(request)
                ids.append(request.request_id)
        except ValueError:
            for request_id in ids:
                self.core.abort(request_id)
            raise
        return self._run(ids)

    def _run(self, ids: list[str]) -> list[Completion]:
        texts: dict[str, list[str]] = {i: [] for i in ids}
        tokens: dict[str, list[int]] = {i: [] for i in ids}
        done: dict[str, Completion] = {}
        while len(done) < len(ids):
            for out in self.core.step():
                texts[out.request_id].append(out.text)
                tokens[out.request_id] += out.token_ids
                if out.finish_reason is not None and out.stats is not None:
                    text = "".join(texts[out.request_id])
                    ended = (text, tokens[out.request_id], out.finish_reason, out.stats, out.error)
                    done[out.request_id] = Completion(*ended)
        return [done[i] for i in ids]

    def _segments(self, prompt: Any) -> tuple[Segment, ...]:
        if isinstance(prompt, str):
            return (Segment(tuple(self.core.tokenizer.encode_template(prompt))),)
        if prompt and isinstance(prompt[0], Segment):
            return tuple(prompt)
        return (Segment(tuple(prompt)),)


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Segment))
