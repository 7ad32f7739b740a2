"""Linked passages: what is borrowed, what is computed, what is shared, and that nothing approximate passes for exact."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from linked_oracle import Borrowed, Oracle, assert_tree_is_exact
from tiny_model import make_tiny_model

from engine import LLM, CacheMode, EngineRequest, RequestOutput, SamplingParams, Segment, SegmentKind, TokenCounts
from engine.cache import CacheManager
from engine.checkpoint import RopeScaling
from engine.layout import BlockLayout, Passage

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def text(seed: int, n: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(256) for _ in range(n))


def prompt(*passages: tuple[int, ...], system: int = 1, tail: int = 99, scope: str = "shared") -> list[Segment]:
    return [
        Segment(text(system, 21), SegmentKind.SYSTEM),
        *(Segment(p, SegmentKind.PASSAGE, scope) for p in passages),
        Segment(text(tail, 9), SegmentKind.TAIL, scope),
    ]


A, B, C = text(11, 40), text(12, 53), text(13, 33)


def flat(segments: list[Segment]) -> list[int]:
    return [t for s in segments for t in s.token_ids]


def linked(llm: LLM, segments: list[Segment], params: SamplingParams = GREEDY) -> Any:
    (completion,) = llm.generate([segments], params, cache=CacheMode.LINKED)
    return completion


def spans(segments: list[Segment], k: int, which: tuple[int, ...]) -> list[Borrowed]:
    """What the passages `which`, by their index among the segments, borrow if k of their tokens are computed."""
    ends = [0]
    for s in segments:
        ends.append(ends[-1] + len(s.token_ids))
    return [Borrowed(ends[i] + k, ends[i + 1], ends[i], ends[1]) for i in which]


def assert_follows(oracle: Oracle, segments: list[Segment], token_ids: list[int], borrowed: list[Borrowed]) -> None:
    """Each token is the oracle's best, or as good as the best."""
    n = sum(len(s.token_ids) for s in segments)
    logits = oracle.logits([*flat(segments), *token_ids], borrowed)[n - 1 : -1]
    lost = logits.max(-1).values - logits[torch.arange(len(token_ids)), torch.tensor(token_ids)]
    assert lost.max() < 1e-3


@pytest.mark.parametrize("k", [0, 16, 32])
@pytest.mark.parametrize("budget", [4, 37, 512])
def test_a_linked_answer_is_the_oracles(model: Path, oracle: Oracle, k: int, budget: int) -> None:
    llm = LLM(str(model), dtype="float32", link_recompute_tokens=k, max_num_batched_tokens=budget)
    segments = prompt(A, B, C)
    for _ in range(2):
        answer = linked(llm, segments)
        borrowed = spans(segments, k, (2, 3))
        assert_follows(oracle, segments, answer.token_ids, borrowed)
        logits = oracle.logits([*flat(segments), *answer.token_ids])[len(flat(segments)) - 1 : -1]
        exact = logits.argmax(-1).tolist()
        assert k or exact != answer.token_ids, "linking changed nothing, so the comparison proves nothing"
    assert_tree_is_exact(llm.core, oracle)


@pytest.mark.parametrize("layers", ["C++", "torch"])
def test_the_log_probabilities_of_a_linked_answer_are_the_oracles(model: Path, oracle: Oracle, layers: str) -> None:
    llm = LLM(str(model), dtype="float32")
    if layers == "torch":
        llm.core.runner._decoder = None
    segments = prompt(A, B, C)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
    for _ in range(2):
        answer = linked(llm, segments, params)
        tokens = [*flat(segments), *answer.token_ids]
        logits = oracle.logits(tokens, spans(segments, 16, (2, 3)))[len(flat(segments)) - 1 : -1]
        for row, x in zip(logits.log_softmax(-1), answer.logprobs, strict=True):
            assert abs(float(row[x.token_id]) - x.logprob) < 1e-4


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}])
def test_borrowing_changes_nothing_of_what_is_borrowed(model: Path, oracle: Oracle, settings: dict[str, Any]) -> None:
    llm = LLM(str(model), **settings)
    pool = llm.core.runner._pool
    llm.generate([prompt(B), prompt(C)], SamplingParams(max_tokens=1))
    blocks = [b for node in llm.core.cache._tree.nodes() for b in node.blocks]
    before = [None if t is None else t[:, blocks].clone() for t in (pool.k, pool.v, pool.k_scales, pool.v_scales)]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    answer = linked(llm, prompt(A, B, C), params)
    assert answer.stats.counts.linked == 54
    for old, new in zip(before, (pool.k, pool.v, pool.k_scales, pool.v_scales), strict=True):
        assert old is None or new is None or torch.equal(old, new[:, blocks])
    segments = prompt(A, B, C)
    logits = oracle.logits(flat(segments), spans(segments, 16, (2, 3)))[-1].log_softmax(-1)
    got = answer.logprobs[0]
    assert abs(float(logits[got.token_id]) - got.logprob) < (1e-4 if settings == {"dtype": "float32"} else 0.3)


def test_recomputing_whole_passages_is_full_prefill(model: Path) -> None:
    llm = LLM(str(model), dtype="float32", link_recompute_tokens=512)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
    (exact,) = LLM(str(model), dtype="float32", enable_prefix_caching=False).generate([prompt(A, B, C)], params)
    for segments in (prompt(C, B, A), prompt(B, A), prompt(A, B, C)):
        answer = linked(llm, segments, params)
    assert answer.token_ids == exact.token_ids
    assert max(abs(a.logprob - b.logprob) for a, b in zip(answer.logprobs, exact.logprobs, strict=True)) < 1e-4
    assert answer.stats.counts.linked == 0


def test_every_prompt_token_is_counted_once_by_how_it_was_had(model: Path) -> None:
    llm = LLM(str(model), dtype="float32")
    first = linked(llm, prompt(A, B, C)).stats
    assert first.counts == TokenCounts(0, 0, 21 + 40 + 53 + 33 + 9), "what was compiled for it was computed for it"
    second = linked(llm, prompt(A, B, C, tail=98)).stats
    assert second.segments == (
        TokenCounts(prefix=21),
        TokenCounts(prefix=40),
        TokenCounts(prefix=16, linked=37),
        TokenCounts(linked=17, computed=16),
        TokenCounts(computed=9),
    )
    moved = linked(llm, prompt(C, A)).stats
    assert moved.segments[:2] == (TokenCounts(prefix=21), TokenCounts(prefix=33)), "compiled is exact in first place"
    assert moved.segments[2] == TokenCounts(linked=24, computed=16)
    stats = llm.core.stats()
    assert (stats.linked_tokens, stats.num_compiled_passages) == (37 + 17 + 24, 2)
    assert stats.prefix_tokens + stats.linked_tokens + stats.computed_tokens == stats.prompt_tokens


def test_computing_what_a_request_waits_for_is_prefill_and_no_queue(model: Path) -> None:
    llm = LLM(str(model), dtype="float32", max_num_batched_tokens=16)
    now = [0.0]
    llm.core.scheduler._clock = lambda: now[0]
    start(llm, prompt(A, B), "one")
    now[0] = 5.0
    for _ in range(4):
        llm.core.step()
    now[0] = 9.0
    (last,) = (o for o in run(llm)["one"] if o.stats is not None)
    assert last.stats is not None
    assert (last.stats.queue_s, last.stats.prefill_s) == (5.0, 4.0)


def test_exact_requests_after_linked_ones_are_those_of_a_fresh_engine(model: Path, oracle: Oracle) -> None:
    llm = LLM(str(model), dtype="float32", kv_cache_tokens=4096)
    fresh = LLM(str(model), dtype="float32", enable_prefix_caching=False)
    passages = [text(50 + i, 20 + 7 * i) for i in range(6)]
    rng = random.Random(3)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    chosen = [prompt(*rng.sample(passages, 4), tail=rng.randrange(3)) for _ in range(12)]
    for segments in chosen:
        linked(llm, segments)
    assert assert_tree_is_exact(llm.core, oracle) > 20
    for segments in chosen:
        (got,), (want,) = llm.generate([segments], params), fresh.generate([segments], params)
        assert got.stats.counts.linked == 0
        assert got.token_ids == want.token_ids
        assert max(abs(a.logprob - b.logprob) for a, b in zip(got.logprobs, want.logprobs, strict=True)) < 1e-4
    llm.core.scheduler.check_integrity()


def test_a_passage_that_several_wait_for_is_computed_once(model: Path, oracle: Oracle) -> None:
    llm = LLM(str(model), dtype="float32", max_num_batched_tokens=64)
    prompts = [prompt(A, B, C, tail=i) for i in range(5)]
    answers = llm.generate(prompts, GREEDY, cache=CacheMode.LINKED)
    assert llm.core.stats().num_compiled_passages == 2
    for segments, answer in zip(prompts, answers, strict=True):
        assert_follows(oracle, segments, answer.token_ids, spans(segments, 16, (2, 3)))
    assert [a.stats.counts.linked for a in answers] == [0, 54, 54, 54, 54]


def test_another_tenants_passage_is_never_borrowed(model: Path) -> None:
    llm = LLM(str(model), dtype="float32")
    mine, theirs = prompt(A, B, C, scope="a"), prompt(A, B, C, scope="b")
    linked(llm, mine)
    other = linked(llm, theirs).stats
    assert (other.counts.prefix, other.counts.linked) == (21, 0)
    assert linked(llm, theirs).stats.counts.linked == 54
    shared = linked(llm, prompt(A, B, C)).stats
    assert (shared.counts.prefix, shared.counts.linked) == (21, 0)


def test_a_passage_computed_behind_another_system_text_is_not_borrowed(model: Path) -> None:
    llm = LLM(str(model), dtype="float32")
    linked(llm, prompt(A, B, C))
    assert linked(llm, prompt(A, B, C, system=2)).stats.counts == TokenCounts(0, 0, 156)


def test_log_probabilities_of_the_prompt_are_computed_whole(model: Path) -> None:
    llm = LLM(str(model), dtype="float32")
    linked(llm, prompt(A, B, C))
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    answer = linked(llm, prompt(A, B, C), params)
    assert answer.stats.counts == TokenCounts(0, 0, 156)
    assert len(answer.prompt_logprobs) == 155


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"enable_prefix_caching": False}, "enable_prefix_caching"), ({"deterministic": True}, "deterministic")],
)
def test_linking_is_refused_where_it_cannot_be_had(model: Path, settings: dict[str, Any], why: str) -> None:
    llm = LLM(str(model), dtype="float32", **settings)
    assert not llm.core.info().supports_linking
    with pytest.raises(ValueError, match=f"cache linked is not possible: .*{why}"):
        linked(llm, prompt(A, B))
    assert llm.generate([prompt(A, B)], GREEDY)[0].token_ids


def test_a_length_dependent_rotary_table_is_refused(model: Path) -> None:
    llm = LLM(str(model), dtype="float32")
    assert llm.core.info().supports_linking
    config = llm.core.runner.model_config
    for kind, is_fixed in (("llama3", True), ("dynamic", False)):
        llm.core.runner.model_config = msgspec.structs.replace(config, rope_scaling=RopeScaling(kind, 2.0))
        assert llm.core.info().supports_linking is is_fixed
    with pytest.raises(ValueError, match=f"rotary table of {model.name} depends on the length"):
        linked(llm, prompt(A, B))


def test_a_setting_that_is_no_multiple_of_a_block_is_refused(model: Path) -> None:
    for bad in (-16, 8):
        with pytest.raises(ValueError, match=f"link_recompute_tokens must be 0 or a multiple of 16, got {bad}"):
            LLM(str(model), link_recompute_tokens=bad)


def start(llm: LLM, segments: list[Segment], name: str, priority: int = 0, **params: Any) -> None:
    wanted = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **params})
    llm.core.add(EngineRequest(name, tuple(segments), wanted, priority, CacheMode.LINKED))


def run(llm: LLM) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while llm.core.has_work:
        for out in llm.core.step():
            outputs.setdefault(out.request_id, []).append(out)
        llm.core.scheduler.check_integrity()
    counts = llm.core.cache.counts()
    assert counts.free + counts.evictable == counts.total, "blocks leaked"
    return outputs


def ids(outputs: list[RequestOutput]) -> list[int]:
    return [t for o in outputs for t in o.token_ids]


def test_an_abort_while_a_passage_is_computed_ends_only_what_nobody_else_wants(model: Path, oracle: Oracle) -> None:
    llm = LLM(str(model), dtype="float32", max_num_batched_tokens=8)
    core = llm.core
    start(llm, prompt(A, B, C), "one")
    for _ in range(2):
        core.step()
    start(llm, prompt(C, B), "two", priority=-5)
    for _ in range(3):
        core.step()
        core.scheduler.check_integrity()
    assert {r.request_id for r in core.scheduler.requests()} == {"one", "two"}
    assert (core.scheduler.num_running, core.scheduler.num_waiting) == (1, 3), "a passage each, and who waits for them"
    (out,) = core.abort("one")
    assert out.stats is not None
    core.scheduler.check_integrity()
    assert (core.scheduler.num_running, core.scheduler.num_waiting) == (1, 1), "C, which only it wanted, is given up"
    outputs = run(llm)
    assert_follows(oracle, prompt(C, B), ids(outputs["two"]), spans(prompt(C, B), 16, (2,)))
    assert_tree_is_exact(core, oracle)
    start(llm, prompt(A, B), "three")
    core.abort("three")
    assert not core.has_work
    core.scheduler.check_integrity()


def test_a_request_of_higher_priority_hastens_the_passage_it_waits_for(model: Path) -> None:
    llm = LLM(str(model), dtype="float32", max_num_batched_tokens=8)
    start(llm, prompt(A, B), "late", priority=5)
    llm.core.step()
    start(llm, prompt(C), "between")
    start(llm, prompt(C, B), "first", priority=-5)
    llm.core.step()
    (work,) = llm.core.scheduler._compiles._by_path.values()
    assert work.rank < min(r.rank for r in llm.core.scheduler.requests())
    run(llm)


def test_preemption_while_a_passage_is_computed_loses_nothing(model: Path, oracle: Oracle) -> None:
    llm = LLM(str(model), dtype="float32", max_num_batched_tokens=8, kv_cache_tokens=16 * 24)
    long = prompt(C, text(20, 200))
    start(llm, prompt(A, B), "grows", max_tokens=90)
    while not any(r.num_output_tokens for r in llm.core.scheduler.requests()):
        llm.core.step()
    start(llm, long, "waits")
    preempted: list[bool] = []
    log = llm.core.scheduler._preempt
    llm.core.scheduler._preempt = lambda r: (preempted.append(r.is_compile), log(r))  # type: ignore[method-assign]
    outputs = run(llm)
    assert True in preempted, "nothing was preempted while it was computed"
    assert len(ids(outputs["grows"])) == 89
    assert_follows(oracle, long, ids(outputs["waits"]), spans(long, 16, (2,)))
    assert_tree_is_exact(llm.core, oracle)


def test_a_pool_too_small_to_keep_what_was_computed_ends_every_request(model: Path, oracle: Oracle) -> None:
    """Passages are evicted before they can be borrowed, and the request needs nearly every block itself."""
    segments = prompt(A, B, C, text(14, 60))
    need = BlockLayout(segments).num_blocks_for(len(flat(segments)) + 6)
    for spare in range(6):
        llm = LLM(str(model), dtype="float32", kv_cache_tokens=16 * (need + spare), pinned_tokens=0)
        for i in range(3):
            start(llm, segments, f"r{i}")
        outputs = run(llm)
        assert all(len(ids(outputs[f"r{i}"])) == 6 for i in range(3))
        assert_tree_is_exact(llm.core, oracle)


def test_an_answer_that_follows_its_own_borrowed_blocks_is_not_shared(model: Path, oracle: Oracle) -> None:
    llm = LLM(str(model), dtype="float32")
    segments = prompt(A, B)
    answer = linked(llm, segments, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    follow = [*segments[:-1], Segment((*segments[-1].token_ids, *answer.token_ids)), Segment(text(5, 20))]
    (exact,) = llm.generate([follow], GREEDY)
    assert exact.stats.counts.prefix == 21 + 40 + 16, "the first tokens of B stood behind exact ones"
    assert_tree_is_exact(llm.core, oracle)


def test_a_fault_while_a_passage_is_computed_lets_its_request_compute_it(
    model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(model), dtype="float32")
    real = llm.core.runner.execute

    def execute(output: Any) -> Any:
        if any(len(r.token_ids) + r.start == 21 + 53 for r in output.requests):
            raise RuntimeError("no memory")
        return real(output)

    monkeypatch.setattr(llm.core.runner, "execute", execute)
    segments = prompt(A, B, C)
    answer = linked(llm, segments)
    assert answer.error is None
    assert answer.stats.counts == TokenCounts(0, 0, 156)
    assert_follows(oracle, segments, answer.token_ids, spans(segments, 16, (3,)))
    assert_tree_is_exact(llm.core, oracle)


def test_borrowed_blocks_are_locked_turned_and_given_back() -> None:
    cache = CacheManager(32)
    segments = prompt(A, B, C)
    layout, tokens = BlockLayout(segments), flat(segments)
    assert layout.passages == [Passage(2, 5, 9), Passage(3, 9, 12)]
    for passage in (B, C):
        source = BlockLayout([segments[0], Segment(passage, SegmentKind.PASSAGE)], is_open=False)
        n = 21 + len(passage)
        work, _ = cache.open(source, [*segments[0].token_ids, *passage])
        assert cache.reserve(work, n)
        cache.commit(work, [*segments[0].token_ids, *passage], n)
        cache.close(work)
    assert cache.counts().evictable == 2 + 4 + 3
    mine, cached = cache.open(layout, tokens)
    assert cached == 21
    assert cache.link(mine, 16) == []
    assert cache.reserve(mine, len(tokens) + 30)
    assert mine.deltas.tolist() == [0] * 6 + [40] * 3 + [0] + [93] * 2 + [0] * 3
    counts = cache.counts()
    assert (counts.protected, counts.held) == (9, 3 + 1 + 1 + 3)
    assert counts.evictable == 0
    cache.commit(mine, tokens, len(tokens))
    assert mine.num_shared == 6, "nothing behind the first borrowed block is shared"
    cache.check_integrity()
    cache.close(mine)
    cache.check_integrity()
    assert cache.counts().held == 0
