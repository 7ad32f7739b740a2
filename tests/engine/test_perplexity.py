"""Perplexity on WikiText-2 against transformers on the same weights.

FOREWORD_PERPLEXITY_TOKENS sets how much of the split is read (0: all of it).
"""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import reference_model

from engine import LLM, SamplingParams

WINDOW = 1024
"""Tokens that are read together; each window begins afresh."""


def perplexity(windows: list[list[int]], logprobs: Callable[[list[int]], list[float]]) -> float:
    """exp of the mean negative log-probability of every token but each window's first."""
    values = [value for window in windows for value in logprobs(window)]
    return math.exp(-sum(values) / len(values))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance", "num_tokens"), [("float32", 1e-3, 16384), ("bfloat16", 5e-3, 4096)])
def test_perplexity_is_transformers(
    model_path: Path, shared_data: Path, dtype: str, tolerance: float, num_tokens: int
) -> None:
    llm = LLM(str(model_path), dtype=dtype, quantization="none", max_model_len=2048)
    with gzip.open(shared_data / "wikitext2" / "wikitext-2.valid.tokens.txt.gz", "rt", encoding="utf-8") as f:
        ids = llm.core.tokenizer.encode(f.read())
    wanted = int(os.environ.get("FOREWORD_PERPLEXITY_TOKENS", num_tokens)) or len(ids)
    windows = [ids[at : at + WINDOW] for at in range(0, min(wanted, len(ids)), WINDOW)]
    windows = [w for w in windows if len(w) > 1]
    reference = reference_model(model_path, llm.core.runner.model_config).to(getattr(torch, dtype))

    def ours(window: list[int]) -> list[float]:
        (done,) = llm.generate(window, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        return [x.logprob for x in done.prompt_logprobs]

    def theirs(window: list[int]) -> list[float]:
        with torch.inference_mode():
            rows = reference(torch.tensor([window])).logits[0, :-1].float().log_softmax(-1)
        return rows.gather(1, torch.tensor(window[1:])[:, None])[:, 0].tolist()

    mine, expected = perplexity(windows, ours), perplexity(windows, theirs)
    print(f"{dtype}: {mine:.5f}, transformers {expected:.5f} over {sum(map(len, windows))} tokens")
    assert mine == pytest.approx(expected, rel=tolerance)
