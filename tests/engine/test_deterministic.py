"""Deterministic mode: the same text and the same log-probabilities to the last bit, in every type, on every path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import make_tiny_model

from engine import LLM, SamplingParams, Segment, SegmentKind
from engine.config import EngineConfig
from engine.llm import Completion
from engine.runner import ModelRunner
from kernels import cpu

pytestmark = pytest.mark.skipif(cpu.find_compiler() is None, reason="no C++ compiler")


def tokens_of(n: int, start: int = 0) -> tuple[int, ...]:
    return tuple((start + 7 * i * i) % 256 for i in range(n))


GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
PROMPTS = [
    (Segment(tokens_of(50), SegmentKind.SYSTEM), Segment(tokens_of(21, i)), Segment(tokens_of(9 + 25 * i, 99)))
    for i in (0, 0, 1, 2, 1, 3)
]
WAYS: list[dict[str, Any]] = [
    {"dtype": "float32", "quantization": "none"},
    {"dtype": "bfloat16", "quantization": "none"},
    {"dtype": "float32", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4"},
    {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8"},
    {"dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": "int8"},
]


def make(path: Path, way: dict[str, Any], **settings: Any) -> LLM:
    return LLM(str(path), deterministic=True, **way, **{"kv_cache_tokens": 2048, **settings})


def said(done: Completion) -> tuple[Any, ...]:
    return (done.token_ids, [(x.logprob, x.top) for x in done.logprobs])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.mark.parametrize("way", WAYS, ids=lambda w: " ".join(w.values()))
def test_nothing_around_a_request_changes_a_bit(tiny: Path, way: dict[str, Any]) -> None:
    alone = make(tiny, way, enable_prefix_caching=False)
    expected = [said(alone.generate(p, GREEDY)[0]) for p in PROMPTS]
    for caching, budget, crowd, pool in (
        (True, 512, 1, 2048),
        (True, 512, 6, 256),
        (True, 20, 6, 2048),
        (False, 20, 6, 256),
        (False, 3, 1, 2048),
        (True, 37, 2, 256),
    ):
        llm = make(
            tiny, way, enable_prefix_caching=caching, max_num_batched_tokens=budget, kv_cache_tokens=pool, num_threads=2
        )
        for _ in ("cold", "warm"):
            got = []
            for at in range(0, len(PROMPTS), crowd):
                got += [said(d) for d in llm.generate(PROMPTS[at : at + crowd], GREEDY)]
            assert got == expected, (caching, budget, crowd, pool)
        stats = llm.core.stats()
        if caching:
            assert stats.prefix_tokens > 0
        if (budget, crowd, pool) == (512, 6, 256):
            assert stats.num_preemptions > 0


def test_the_number_of_threads_changes_no_bit(tiny: Path) -> None:
    before = torch.get_num_threads()
    try:
        one, two = ([said(d) for d in make(tiny, WAYS[1], num_threads=n).generate(PROMPTS, GREEDY)] for n in (1, 2))
    finally:
        torch.set_num_threads(before)
    assert one == two


def test_where_it_cannot_be_had_it_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no ordered products for a matrix of torch\\.float16"):
        make(tiny, {"dtype": "float16", "quantization": "none"})

    def none() -> None:
        raise cpu.NoKernels("no C++ compiler (g++) was found")

    monkeypatch.setattr("kernels.cpu_decoder.load_kernels", none)
    for setting in (
        {"deterministic": True, "quantization": "none"},
        {"kv_cache_dtype": "int8", "quantization": "none"},
    ):
        name = "deterministic" if "deterministic" in setting else "kv_cache_dtype int8"
        with pytest.raises(ValueError, match=f"{name} is not possible: no C\\+\\+ compiler"):
            ModelRunner(EngineConfig(model=str(tiny), dtype="float32", kv_cache_tokens=256, **setting))
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, int8, got 'fp8'"):
        EngineConfig(kv_cache_dtype="fp8").verify()
