"""The plain-torch backend against the float64 oracle, over odd shapes and poisoned memory."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest
import torch

import kernels
from kernels.batch import AttentionBatch, Sequence, flat_slots
from kernels.dispatch import choose, make_attention
from kernels.reference import oracle_attention

NUM_BLOCKS = 160


def make_sequence(rng: np.random.Generator, ids: list[int], num_new: int, start: int, turned: bool) -> Sequence:
    """A table with partly filled blocks among the cached ones; if `turned`, deltas on those, and empty blocks first."""
    num_empty = 5 if turned and start else 0
    starts, valids, at = [0] * num_empty, [0] * num_empty, 0
    while at < start + num_new:
        n = min(16, start + num_new - at)
        if at < start and rng.random() < 0.3:
            n = min(n, int(rng.integers(0, 17)))
        starts.append(at)
        valids.append(n)
        at += n
    deltas = [
        int(rng.integers(-40, 40)) if turned and s + v <= start else 0 for s, v in zip(starts, valids, strict=True)
    ]
    blocks = [ids.pop() for _ in starts]
    return Sequence(num_new, start, *(np.array(x, np.int32) for x in (blocks, starts, valids, deltas)))


def make_case(
    shapes: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype, turned: bool, seed: int = 0
) -> tuple[AttentionBatch, dict[str, torch.Tensor]]:
    """A batch with (new, cached) tokens per sequence; every slot that holds no token is NaN."""
    hq, hkv, d = heads
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    ids = list(rng.permutation(NUM_BLOCKS))
    batch = AttentionBatch(tuple(make_sequence(rng, ids, n, s, turned) for n, s in shapes))
    total = sum(n for n, _ in shapes)
    caches = [torch.full((NUM_BLOCKS, 16, hkv, d), float("nan"), dtype=dtype) for _ in range(2)]
    new = [torch.randn(total, hkv, d).to(dtype) for _ in range(2)]
    at = 0
    for s in batch.sequences:
        slots = torch.from_numpy(flat_slots(s, s.start + s.num_new)[0])
        for cache, values in zip(caches, new, strict=True):
            flat = cache.view(-1, hkv, d)
            flat[slots[: s.start]] = torch.randn(s.start, hkv, d).to(dtype)
            flat[slots[s.start :]] = values[at : at + s.num_new]
        at += s.num_new
    q = torch.randn(total, hq, d).to(dtype)
    return batch, {"q": q, "k_new": new[0], "v_new": new[1], "k_cache": caches[0], "v_cache": caches[1]}


SHAPES = [
    [(1, 0)],
    [(1, 1), (1, 15), (1, 16), (1, 17)],
    [(15, 0), (16, 0), (17, 0)],
    [(0, 0), (5, 1), (0, 20), (3, 33)],
    [(40, 100), (1, 200), (16, 16)],
    [(1, 300), (1, 3), (7, 0), (1, 270), (1, 64), (2, 30), (1, 299), (1, 299)],
]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 80), (6, 1, 128)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)])
def test_backend_equals_oracle(
    shapes: list[tuple[int, int]], heads: tuple[int, int, int], turned: bool, dtype: torch.dtype, atol: float
) -> None:
    batch, t = make_case(shapes, heads, dtype, turned)
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, heads[2], 2, dtype=torch.float64) / heads[2])
    expected, _ = oracle_attention(t["q"], t["k_cache"], t["v_cache"], batch, heads[2] ** -0.5, inv_freq)
    backend, note = make_attention(torch.device("cpu"), *heads, inv_freq)
    assert note == "torch: device is cpu"
    got = backend.forward(**t, plan=backend.plan(batch))
    assert torch.isfinite(got).all()
    assert (got.double() - expected).abs().max() <= atol


def test_a_delta_is_a_rotation_by_so_many_positions() -> None:
    """Keys stored for position p with delta d act as keys rotated for p + d."""
    from kernels.ops import rotary_tables, rotate
    from kernels.reference import rotate_by

    inv_freq = 1.0 / 1e4 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    cos, sin = rotary_tables(inv_freq, 100)
    k = torch.randn(10, 3, 64)
    at = rotate(k, cos[20:30], sin[20:30])
    moved = rotate_by(at.double(), torch.full((10,), 45), inv_freq)
    assert torch.allclose(moved.float(), rotate(k, cos[65:75], sin[65:75]), atol=1e-5)


def test_a_delta_without_frequencies_is_refused() -> None:
    batch, t = make_case([(2, 40)], (2, 1, 64), torch.float32, turned=True)
    backend, _ = make_attention(torch.device("cpu"), 2, 1, 64)
    with pytest.raises(ValueError, match="inv_freq"):
        backend.plan(batch)
    with pytest.raises(ValueError, match="inv_freq"):
        oracle_attention(t["q"], t["k_cache"], t["v_cache"], batch, 0.1)


def test_one_token_sequences_of_similar_length_are_taken_together() -> None:
    batch, _ = make_case([(1, 300), (1, 3), (5, 9), (1, 200), (1, 270), (1, 299)], (2, 1, 64), torch.float32, False)
    backend, _ = make_attention(torch.device("cpu"), 2, 1, 64)
    plan = backend.plan(batch)
    assert [o.rows.tolist() for o in plan.ones] == [[1], [7], [8, 9, 0]]
    assert [(m.first, m.last) for m in plan.many] == [(2, 7)]


def test_blocks_that_follow_each_other_are_read_in_place() -> None:
    blocks = np.array([[3, 4, 5], [0, 16, 32], [16, 16, 9], [0, 0, 0]], np.int32)
    backend, _ = make_attention(torch.device("cpu"), 2, 1, 64)
    plan = backend.plan(AttentionBatch((Sequence(1, 40, *blocks),)))
    assert plan.ones[0].keys.slots == slice(48, 89)
    assert plan.ones[0].mask is None


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (("cpu", None, True, 3, 64), ("torch", "device is cpu")),
        (("cuda", (9, 0), True, 3, 64), ("triton_prefill", "cuda 9.0")),
        (("cuda", (9, 0), False, 3, 64), ("torch", "cuda 9.0, but triton is not installed")),
        (("cuda", (7, 5), True, 3, 64), ("torch", "cuda 7.5, but the kernel needs 8.0")),
        (("cuda", (9, 0), True, 3, 16), ("torch", "cuda 9.0, but the kernel has no head size 16")),
        (("cuda", (9, 0), True, 71, 64), ("torch", "cuda 9.0, but a group of 71 query heads does not fit a tile")),
    ],
)
def test_the_choice_and_its_reason(case: tuple, expected: tuple[str, str]) -> None:
    assert choose(*case) == expected


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"start": 5}, "does not end"),
        ({"block_valids": np.array([17, 3], np.int32)}, "more than 16"),
        ({"block_valids": np.array([16, -1], np.int32)}, "fewer than 0"),
        ({"block_starts": np.array([0, 17], np.int32)}, "gap"),
        ({"block_deltas": np.zeros(1, np.int32)}, "length"),
    ],
)
def test_tables_that_are_no_sequence_are_refused(change: dict[str, object], why: str) -> None:
    arrays = {"block_ids": [0, 1], "block_starts": [0, 16], "block_valids": [16, 3], "block_deltas": [0, 0]}
    fields = {"num_new": 1, "start": 18, **{k: np.array(v, np.int32) for k, v in arrays.items()}}
    AttentionBatch((Sequence(**fields),)).validate()
    with pytest.raises(ValueError, match=why):
        AttentionBatch((Sequence(**{**fields, **change}),)).validate()


def test_importing_kernels_is_light_and_never_mistaken_for_another_package() -> None:
    """transformers takes a distribution or module `kernels` of version 0.18.2 to 0.19 for a package of that name."""
    assert kernels.__version__ == "0"
    assert version("foreword").startswith("0.1.")
    code = "import sys, kernels; assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import kernels.dispatch, sys; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
