"""The engine against transformers on the same weights, and against itself cold, warm, chunked and in company."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import reference_model

from engine import LLM, SamplingParams, Segment
from engine.api import EngineRequest
from engine.cache import CacheManager
from engine.checkpoint import CheckpointError, load_config
from engine.config import EngineConfig
from engine.gguf import _FAST, GGUFFile
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.step import StepResult

SERIAL = count()
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def llm(model_path: Path) -> LLM:
    return LLM(str(model_path), dtype="float32", quantization="none", kv_cache_tokens=16384)


def prompts(tokenizer: Any, long: bool) -> list[list[int]]:
    from pydoc_data.topics import topics

    text = "\n".join(topics[k] for k in sorted(topics))
    ids = tokenizer.encode(text[:60000])
    short = [ids[i * 37 : i * 37 + 20 + 9 * i] for i in range(15 if long else 5)]
    return short + [ids[i * 1600 : i * 1600 + 1550 + 16 * i] for i in range(5 if long else 0)]


def compare(llm: LLM, model_path: Path, long: bool) -> tuple[float, int]:
    reference = reference_model(model_path, llm.core.runner.model_config)
    worst_kl, checked = 0.0, 0
    for ids in prompts(llm.core.tokenizer, long):
        # A greedy continuation of ours is part of what is compared.
        (done,) = llm.generate(ids, SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))
        tokens = [*ids, *done.token_ids]
        ours = engine_cold(llm, tokens)
        with torch.inference_mode():
            theirs = reference(torch.tensor([tokens])).logits[0]
        top2 = theirs.topk(2).values
        clear = (top2[:, 0] - top2[:, 1]) > 1e-3
        assert (ours.argmax(-1) == theirs.argmax(-1))[clear].all()
        p = theirs.log_softmax(-1)
        kl = (p.exp() * (p - ours.log_softmax(-1))).sum(-1)
        worst_kl = max(worst_kl, float(kl.mean()))
        checked += int(clear.sum())
        assert [int(t) for t in theirs.argmax(-1)[-17:-1]] == done.token_ids or not clear[-17:-1].all()
    return worst_kl, checked


def engine_cold(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """Logits of all positions without any cached token: a scope of its own keeps the cache out of it."""
    core, scope = llm.core, f"cold-{next(SERIAL)}"
    core.add(EngineRequest(scope, (Segment(tuple(tokens), scope=scope),), SamplingParams(max_tokens=1)))
    rows = []
    while core.has_work:
        out = core.scheduler.schedule()
        (r,) = out.requests
        assert r.start == sum(map(len, rows))
        rows.append(core.runner.logits(out, [(r, i) for i in range(len(r.token_ids))]))
        core.scheduler.update(out, {r.key: StepResult(0)} if r.needs_token else {})
    core._outputs._streams.clear()
    return torch.cat(rows)


def test_logits_equal_transformers_on_short_prompts(llm: LLM, model_path: Path) -> None:
    kl, checked = compare(llm, model_path, long=False)
    assert kl < 1e-5
    assert checked > 100


@pytest.mark.slow
def test_logits_equal_transformers_on_twenty_prompts(llm: LLM, model_path: Path) -> None:
    kl, checked = compare(llm, model_path, long=True)
    print(f"worst mean KL {kl:.2e} over {checked} positions")
    assert kl < 1e-5
    assert checked > 8000


def chat(llm: LLM, question: str) -> str:
    return llm.core.tokenizer.render_chat([{"role": "user", "content": question}])


def test_it_answers(llm: LLM) -> None:
    (done,) = llm.generate(chat(llm, "What is the capital of France?"), GREEDY)
    assert "Paris" in done.text
    assert done.finish_reason == "stop"


def test_cold_equals_warm_and_the_second_time_is_cached(llm: LLM) -> None:
    tokens = llm.core.tokenizer.encode("Once upon a time there was a compiler that " * 12)[:100]
    segments = [Segment(tuple(tokens[:37])), Segment(tuple(tokens[37:80])), Segment(tuple(tokens[80:]))]
    (cold,), (warm,) = llm.generate(segments, GREEDY), llm.generate(segments, GREEDY)
    assert cold.stats.counts.cached == 0
    assert warm.stats.counts.prefix == 80 + 16
    assert [s.prefix for s in warm.stats.segments] == [37, 43, 16]
    assert (cold.text, cold.token_ids) == (warm.text, warm.token_ids)


def test_eight_at_once_say_what_each_says_alone(llm: LLM) -> None:
    questions = [chat(llm, f"Say something about the number {i}.") for i in range(8)]
    together = [c.text for c in llm.generate(questions, GREEDY)]
    alone = [llm.generate(q, GREEDY)[0].text for q in questions]
    assert together == alone
    stats = llm.core.stats()
    assert stats.free_blocks + stats.evictable_blocks == stats.num_blocks
    llm.core.scheduler.check_integrity()


def test_chunks_cache_and_preemption_change_nothing(llm: LLM, model_path: Path) -> None:
    questions = [chat(llm, f"Write one line about {w}.") for w in ("rain", "iron", "maps")]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    expected = [c.text for c in llm.generate(questions, params)]
    settings = {"kv_cache_tokens": 144, "max_num_batched_tokens": 7, "enable_prefix_caching": False}
    small = LLM(str(model_path), dtype="float32", quantization="none", **settings)
    assert [c.text for c in small.generate(questions, params)] == expected
    assert small.core.stats().num_preemptions > 0


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    (whole,) = llm.generate(chat(llm, "Count from one to ten."), GREEDY)
    stop = whole.text[6:9]
    (cut,) = llm.generate(
        chat(llm, "Count from one to ten."), SamplingParams(max_tokens=24, temperature=0, stop=(stop,))
    )
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"


def test_unknown_settings_are_refused_by_name(model_path: Path) -> None:
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        LLM(str(model_path), tensor_parallel_size=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return folder, model


def test_a_hugging_face_folder_gives_transformers_logits(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    runner = ModelRunner(EngineConfig(model=str(folder), dtype="float32", kv_cache_tokens=512))
    scheduler = Scheduler(
        CacheManager(32), max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64, clock=lambda: 0.0
    )
    tokens = [(7 * i) % 128 for i in range(150)]
    scheduler.add(EngineRequest("x", (Segment(tuple(tokens)),)))
    rows = []
    while scheduler.requests():
        out = scheduler.schedule()
        (r,) = out.requests
        rows.append(runner.logits(out, [(r, i) for i in range(len(r.token_ids))]))
        scheduler.update(out, {r.key: StepResult(1)} if r.needs_token else {})
        if r.needs_token:
            break
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0]
    assert torch.allclose(torch.cat(rows), theirs, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": None}, "config.json"),
    ],
)
def test_unsupported_folders_are_refused_by_name(
    tiny: tuple[Path, Any], tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    config = json.loads((tiny[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=why):
        load_config(tmp_path)


def test_damaged_gguf_files_are_refused_by_name(model_path: Path, tmp_path: Path) -> None:
    raw = model_path.read_bytes()[: 1 << 20]
    for i, (data, why) in enumerate(
        [
            (b"", "cannot read"),
            (b"PK\3\4" + raw[4:], "not a GGUF"),
            (raw[:5000], "damaged"),
            (raw[:4] + b"\x63" + raw[5:], "version"),
        ]
    ):
        file = tmp_path / f"{i}.gguf"
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=why):
            load_config(file)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model_path.read_bytes()[: 60 << 20])
    with GGUFFile(cut) as f, pytest.raises(CheckpointError, match="cut short"):
        f.tensor(list(f.tensors)[-1])


def test_fast_dequantisation_equals_the_reference(model_path: Path) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    raw = np.random.default_rng(0).integers(0, 256, 20 * 34 * 8, dtype=np.uint8)
    raw.reshape(-1, 2).view(np.float16)[~np.isfinite(raw.reshape(-1, 2).view(np.float16))] = 1
    for name, fast in _FAST.items():
        expected = dequantize(raw, GGMLQuantizationType[name])
        assert np.array_equal(fast(raw).ravel(), expected.ravel(), equal_nan=True)
