"""The engine on every path: any cache, chunk, crowd and pool gives the same text, and a fault ends only its request."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fuzz import Fuzz
from tiny_model import EOS, VOCAB, make_tiny_model

from engine import LLM, EngineRequest, FinishReason, SamplingParams, Segment, SegmentKind
from engine.core import EngineCore
from engine.process import EngineServer, warm_up
from engine.sampler import NO_TOKEN, NON_FINITE
from engine.step import SchedulerOutput


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), dtype="float32", kv_cache_tokens=2048)


def tokens_of(n: int, start: int = 0) -> tuple[int, ...]:
    return tuple((start + 7 * i * i) % 256 for i in range(n))


GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PROMPTS = [
    (Segment(tokens_of(50), SegmentKind.SYSTEM), Segment(tokens_of(21, i)), Segment(tokens_of(9 + 5 * i, 99)))
    for i in (0, 0, 1, 2, 1, 3)
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads would only wait for each other at this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    """What each prompt says alone, cold and in one piece."""
    reference = LLM(str(tiny), dtype="float32", kv_cache_tokens=2048, enable_prefix_caching=False)
    return [reference.generate(p, GREEDY)[0].token_ids for p in PROMPTS]


@pytest.mark.parametrize(
    ("caching", "budget", "crowd", "pool"),
    list(itertools.product([True, False], [3, 20, 512], [1, 6], [2048, 256])),
)
def test_cache_chunks_crowd_and_preemption_change_no_token(
    tiny: Path, expected: list[list[int]], caching: bool, budget: int, crowd: int, pool: int
) -> None:
    settings: dict[str, Any] = {"enable_prefix_caching": caching, "max_num_batched_tokens": budget}
    engine = LLM(str(tiny), dtype="float32", kv_cache_tokens=pool, **settings)
    for _ in ("cold", "warm"):
        got = []
        for at in range(0, len(PROMPTS), crowd):
            got += [c.token_ids for c in engine.generate(PROMPTS[at : at + crowd], GREEDY)]
        assert got == expected
    stats = engine.core.stats()
    assert stats.free_blocks + stats.evictable_blocks == stats.num_blocks
    if caching:
        assert stats.prefix_tokens > 0
    if pool == 256 and crowd == 6 and budget > 3:
        assert stats.num_preemptions > 0
    engine.core.scheduler.check_integrity()


def test_random_work_leaks_nothing_and_says_nothing_wrong(tiny: Path) -> None:
    fuzz = Fuzz(tiny, seed=3)
    for _ in range(6):
        fuzz.world()
    assert not fuzz.outcome.wrong
    counts = fuzz.outcome.counts
    seen = ("answers", "preemptions", "cached tokens", "aborted", "hostile", "refused")
    assert min(counts[k] for k in (*seen, "linked answers", "linked tokens", "exact blocks")) > 0
    assert counts["close calls"] <= 2


def test_an_aborted_prefill_leaves_a_true_cache(tiny: Path, expected: list[list[int]]) -> None:
    engine = LLM(str(tiny), dtype="float32", kv_cache_tokens=2048, max_num_batched_tokens=16)
    core = engine.core
    for steps in range(1, 6):
        core.add(EngineRequest("cut", PROMPTS[0], GREEDY))
        for _ in range(steps):
            core.step()
        assert core.abort("cut")[0].finish_reason is FinishReason.ABORT
        (done,) = engine.generate(PROMPTS[0], GREEDY)
        assert done.token_ids == expected[0]
    assert done.stats.counts.cached > 0


def test_what_was_computed_before_an_abort_is_not_lost(tiny: Path) -> None:
    engine = LLM(str(tiny), dtype="float32", kv_cache_tokens=2048)
    engine.core.add(EngineRequest("cut", PROMPTS[0], GREEDY))
    engine.core.step()
    engine.core.abort("cut")
    (done,) = engine.generate(PROMPTS[0], GREEDY)
    assert done.stats.counts.computed <= 16


def test_second_requests_wait_for_blocks_in_flight_and_compute_only_the_rest(tiny: Path) -> None:
    engine = LLM(str(tiny), dtype="float32", kv_cache_tokens=2048, max_num_batched_tokens=32)
    together = engine.generate([PROMPTS[0]] * 4, GREEDY)
    assert [c.stats.counts.computed for c in together] == [80, 9, 9, 9]
    assert len({tuple(c.token_ids) for c in together}) == 1


def test_n_continuations_differ_are_reproducible_and_prefill_once(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=11, n=4, ignore_eos=True)
    first = llm.generate(PROMPTS[0], params)
    again = llm.generate(PROMPTS[0], params)
    (alone,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, seed=11, ignore_eos=True))
    assert [c.index for c in first] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in first}) == 4
    assert [c.token_ids for c in again] == [c.token_ids for c in first]
    assert alone.token_ids == first[0].token_ids
    assert [c.stats.counts.computed for c in first] == [80, 9, 9, 9]


def test_a_seed_holds_whatever_else_is_in_the_batch(llm: LLM) -> None:
    drawn = SamplingParams(max_tokens=16, temperature=1.0, seed=42, ignore_eos=True)
    (alone,) = llm.generate(PROMPTS[0], drawn)
    for _ in range(4):
        crowd = llm.generate([PROMPTS[1], PROMPTS[2], PROMPTS[0]], [GREEDY, SamplingParams(max_tokens=9), drawn])
        assert crowd[2].token_ids == alone.token_ids


def test_logprobs_cover_every_token_and_agree_cold_and_warm(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (cold,), (warm,) = llm.generate(PROMPTS[3], params), llm.generate(PROMPTS[3], params)
    prompt = [t for s in PROMPTS[3] for t in s.token_ids]
    for done in (cold, warm):
        assert [x.token_id for x in done.logprobs] == done.token_ids
        assert all(x.rank == 1 and x.top[0] == (x.token_id, x.logprob) and len(x.top) == 3 for x in done.logprobs)
        assert [x.token_id for x in done.prompt_logprobs] == prompt[1:]
        assert all(len(x.top) == 2 and x.rank >= 1 for x in done.prompt_logprobs)
    pairs = zip(cold.prompt_logprobs, warm.prompt_logprobs, strict=True)
    assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-4
    # A second, independent way to the same numbers: each prefix's next-token log-probabilities.
    (short,) = llm.generate([*prompt[:40]], SamplingParams(max_tokens=1, temperature=0.0, logprobs=2))
    assert [t for t, _ in short.logprobs[0].top] == [t for t, _ in cold.prompt_logprobs[39].top]
    assert short.logprobs[0].top[0][1] == pytest.approx(cold.prompt_logprobs[39].top[0][1], abs=1e-4)


@pytest.mark.parametrize(("budget", "pool"), [(8, 288), (64, 304)])
def test_prompt_logprobs_survive_preemption_and_chunks(tiny: Path, budget: int, pool: int) -> None:
    wanted = SamplingParams(max_tokens=40, temperature=0.0, prompt_logprobs=1, ignore_eos=True)
    reference = LLM(str(tiny), dtype="float32", kv_cache_tokens=2048).generate(PROMPTS[5], wanted)[0]
    engine = LLM(str(tiny), dtype="float32", kv_cache_tokens=pool, max_num_batched_tokens=budget)
    *_, done = engine.generate([PROMPTS[0], PROMPTS[2], PROMPTS[5]], [GREEDY, GREEDY, wanted])
    assert done.stats.num_preemptions > 0
    assert [x.token_id for x in done.prompt_logprobs] == [x.token_id for x in reference.prompt_logprobs]
    pairs = zip(done.prompt_logprobs, reference.prompt_logprobs, strict=True)
    assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-4


def test_min_tokens_holds_back_every_end(llm: LLM) -> None:
    free = llm.generate(PROMPTS[0], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))[0]
    stop = free.token_ids[3]
    early = llm.generate(PROMPTS[0], SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(stop,)))[0]
    assert len(early.token_ids) == free.token_ids.index(stop) + 1
    late = llm.generate(
        PROMPTS[0], SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(stop,), min_tokens=20)
    )
    assert len(late[0].token_ids) >= 20
    assert stop not in late[0].token_ids[:20]
    text = free.text[:1]
    held = llm.generate(
        PROMPTS[0], SamplingParams(max_tokens=30, temperature=0.0, stop=(text,), min_tokens=20, ignore_eos=True)
    )
    assert len(held[0].token_ids) >= 20
    assert held[0].token_ids[:20] == free.token_ids[:20]
    none = SamplingParams(max_tokens=5, temperature=0.0, stop_token_ids=tuple(range(VOCAB)), min_tokens=2)
    (stuck,) = llm.generate(PROMPTS[0], none)
    assert (stuck.finish_reason, stuck.error) == (FinishReason.ERROR, NO_TOKEN)


def test_end_of_text_is_the_union_of_all_that_name_it(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    reference = LLM(str(tiny), dtype="float32", kv_cache_tokens=2048)
    made = reference.generate(PROMPTS[0], GREEDY)[0].token_ids
    first, second = made[5], next(t for t in made[6:] if t != made[5])
    config = json.loads((tiny / "config.json").read_text())
    for in_config, in_generation in ((first, [second]), (second, [250, first]), ([first, second], None)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": in_config}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
        engine = LLM(str(tmp_path), dtype="float32", kv_cache_tokens=2048)
        assert {first, second, EOS} <= engine.core.scheduler._eos
        (done,) = engine.generate(PROMPTS[0], SamplingParams(max_tokens=40, temperature=0.0))
        assert done.finish_reason is FinishReason.STOP
        assert len(done.token_ids) == min(made.index(first), made.index(second)) + 1


def test_non_finite_logits_end_their_request_only(tiny: Path, expected: list[list[int]]) -> None:
    engine = LLM(str(tiny), dtype="float32", kv_cache_tokens=256)
    poison = 256  # a control token, which no other prompt or answer holds
    engine.core.runner._model._embed.value[poison] = float("inf")
    bad = (Segment((1, 2, poison)), Segment((poison,) * 40))
    good, ended = engine.generate([PROMPTS[1], bad], GREEDY)
    assert good.token_ids == expected[1]
    assert (ended.finish_reason, ended.error, ended.token_ids) == (FinishReason.ERROR, NON_FINITE, [])
    assert engine.core.stats().num_non_finite == 1
    # The pool is small, so these get the blocks that held NaN, and read none of it.
    for i in (0, 2, 3, 5):
        assert engine.generate(PROMPTS[i], GREEDY)[0].token_ids == expected[i]


class Failing:
    """A runner that cannot allocate for one request's tokens, as a device short of memory would."""

    def __init__(self, core: EngineCore, token: int, error: Exception) -> None:
        self.inner, self.token, self.error = core.runner.execute, token, error

    def __call__(self, output: SchedulerOutput) -> Any:
        if any(self.token in r.token_ids for r in output.requests):
            raise self.error
        return self.inner(output)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), MemoryError(), RuntimeError("shape")])
def test_a_failed_forward_ends_the_request_that_makes_it_fail(
    llm: LLM, expected: list[list[int]], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = 256  # a control token, which no answer of the others holds
    monkeypatch.setattr(llm.core.runner, "execute", Failing(llm.core, poison, error))
    bad = (*PROMPTS[0][:2], Segment((1, 2, poison)))
    before, ended, after = llm.generate([PROMPTS[0], bad, PROMPTS[3]], GREEDY)
    assert ended.finish_reason is FinishReason.ERROR
    assert type(error).__name__ in str(ended.error)
    assert [before.token_ids, after.token_ids] == [expected[0], expected[3]]
    llm.core.scheduler.check_integrity()
    assert llm.core.stats().num_failed == 1


OUT_OF_MEMORY = """
import resource, sys
from engine import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", kv_cache_tokens=65536, max_num_batched_tokens=32768)
small = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
expected = llm.generate([[1, 2, 3]], small)[0].token_ids
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
good, big = llm.generate([[1, 2, 3], [i % 256 for i in range(30000)]], small)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(good.token_ids == expected, good.finish_reason, big.finish_reason, big.error)
(again,) = llm.generate([[i % 256 for i in range(30000)]], small)
print(again.finish_reason, llm.core.stats().num_failed)
"""


def test_a_real_lack_of_memory_ends_the_big_request_only(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", max_model_len=32768)
    run = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY, str(model)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    first, second = run.stdout.splitlines()
    assert first.startswith("True length error"), run.stdout
    assert "alloc" in first or "memory" in first
    assert second == "length 1"


def test_warming_up_leaves_no_trace(tiny: Path) -> None:
    core = LLM(str(tiny), dtype="float32", kv_cache_tokens=1024, max_num_batched_tokens=64).core
    warm_up(core)
    stats = core.stats()
    assert (stats.prompt_tokens, stats.output_tokens, stats.num_finished) == (0, 0, 0)
    assert stats.free_blocks + stats.evictable_blocks == stats.num_blocks
    core.check_when_idle()
    core.check_when_idle()
    assert (core.stats().num_integrity_checks, core.stats().num_integrity_failures) == (1, 0)


@pytest.mark.parametrize("pool", [32, 64])
def test_warming_up_fits_the_smallest_pool(tiny: Path, pool: int) -> None:
    warm_up(LLM(str(tiny), dtype="float32", kv_cache_tokens=pool, max_num_batched_tokens=1).core)


def test_a_broken_invariant_is_counted_and_the_engine_goes_on(llm: LLM) -> None:
    llm.generate(PROMPTS[0], GREEDY)
    llm.core.cache._tree.num_evictable += 1
    llm.core.check_when_idle()
    assert llm.core.stats().num_integrity_failures == 1
    llm.core.cache._tree.num_evictable -= 1
    assert llm.generate(PROMPTS[0], GREEDY)[0].finish_reason is FinishReason.LENGTH


def test_a_fault_of_the_control_plane_ends_requests_not_the_process(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Socket:
        def send(self, frame: bytes) -> None:
            sent.append(frame)

    server = EngineServer(llm.core, Socket())
    llm.core.add(EngineRequest("a", PROMPTS[0], GREEDY))
    with monkeypatch.context() as patch:
        patch.setattr(llm.core.scheduler, "schedule", lambda: 1 / 0)
        (out,) = server._step()
    assert out.finish_reason is FinishReason.ERROR
    assert "ZeroDivisionError" in str(out.error)
    assert not llm.core.has_work
    assert llm.generate(PROMPTS[0], GREEDY)[0].finish_reason is FinishReason.LENGTH
    llm.core.scheduler.check_integrity()


ENDURANCE = textwrap.dedent("""
    import gc, sys
    import torch
    from engine import LLM, EngineRequest, SamplingParams, Segment

    torch.set_num_threads(1)
    core = LLM(sys.argv[1], dtype="float32", kv_cache_tokens=4096, max_num_batched_tokens=256).core
    system = Segment(tuple(range(40)))

    def memory():
        gc.collect()
        with open("/proc/self/status") as f:
            rows = dict(line.split(":", 1) for line in f)
        return sum(int(rows[k].split()[0]) for k in ("RssAnon", "VmSwap"))

    def burst(first, n, aborts):
        for i in range(first, first + n):
            tail = Segment((i % 256, i // 256 % 256, i // 65536, 7, i % 11))
            core.add(EngineRequest(str(i), (system, tail), SamplingParams(max_tokens=200 if aborts else 1 + i % 3, temperature=0.0, ignore_eos=aborts)))
            if aborts:
                if i % 2:
                    core.step()
                core.abort(str(i))
            elif i % 16 == 15:
                while core.has_work:
                    core.step()
        while core.has_work:
            core.step()

    burst(0, 4000, False)
    burst(4000, 1000, True)
    before = memory()
    burst(5000, 20000, False)
    burst(25000, 5000, True)
    core.scheduler.check_integrity()
    print(before, memory(), core.stats().num_finished, core.stats().num_aborted)
""")


@pytest.mark.slow
def test_memory_stays_flat_over_twenty_thousand_requests_and_five_thousand_aborts(tiny: Path) -> None:
    run = subprocess.run([sys.executable, "-c", ENDURANCE, str(tiny)], capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stderr[-3000:]
    before, after, finished, aborted = map(int, run.stdout.split())
    print(f"{before} KB before, {after} KB after {finished} requests and {aborted} aborts")
    assert (finished, aborted) == (24000, 6000)
    assert after - before < 2048


@pytest.mark.slow
def test_ten_minutes_of_random_work(tiny: Path) -> None:
    seconds = os.environ.get("FOREWORD_FUZZ_SECONDS", "600")
    script = Path(__file__).resolve().parents[1] / "engine_fuzz.py"
    run = subprocess.run(
        [sys.executable, str(script), "--seconds", seconds, "--seed", "7"], capture_output=True, text=True
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
