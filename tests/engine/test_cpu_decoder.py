"""The C++ layers against the torch layers: same hidden states, same KV, for odd shapes, types and block tables."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.checkpoint import ModelConfig
from engine.model import KVPool, LlamaModel, WeightMaker
from kernels import cpu
from kernels.batch import AttentionBatch, Sequence
from kernels.cpu_decoder import CpuDecoder
from kernels.torch_attention import TorchAttention
from kernels.weights import BlockKind

pytestmark = pytest.mark.skipif(cpu.find_compiler() is None, reason="no C++ compiler")
CPU = torch.device("cpu")


def make_model(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    kind: BlockKind | None,
    dtype: torch.dtype,
    has_bias: bool = False,
    is_int8: bool = False,
) -> tuple[LlamaModel, KVPool, CpuDecoder]:
    hidden, inter, layers, blocks = 96, 64, 2, 40
    config = ModelConfig(
        architecture="llama", hidden_size=hidden, num_layers=layers, num_q_heads=q_heads, num_kv_heads=kv_heads,
        head_dim=head_dim, intermediate_size=inter, vocab_size=64, rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None,
        max_position_embeddings=512, tie_word_embeddings=True, attention_bias=has_bias, eos_token_ids=(),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.embed_tokens.weight", random(64, hidden) * 8
        yield "model.norm.weight", 1 + random(hidden)
        for i in range(layers):
            at = f"model.layers.{i}."
            yield f"{at}input_layernorm.weight", 1 + random(hidden)
            yield f"{at}post_attention_layernorm.weight", 1 + random(hidden)
            for p, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads)):
                yield f"{at}self_attn.{p}_proj.weight", random(heads * head_dim, hidden)
                if has_bias:
                    yield f"{at}self_attn.{p}_proj.bias", random(heads * head_dim)
            yield f"{at}self_attn.o_proj.weight", random(hidden, q_heads * head_dim)
            yield f"{at}mlp.gate_proj.weight", random(inter, hidden)
            yield f"{at}mlp.up_proj.weight", random(inter, hidden)
            yield f"{at}mlp.down_proj.weight", random(hidden, inter)

    inv_freq = torch.from_numpy(config.inv_freq())
    attention = TorchAttention(q_heads, kv_heads, head_dim**-0.5, inv_freq, CPU)
    model = LlamaModel(config, weights(), attention, WeightMaker(dtype, CPU, kind))
    shape = (layers, blocks, 16, kv_heads, head_dim)
    kv = [torch.full(shape, 77 if is_int8 else float("nan"), dtype=torch.int8 if is_int8 else dtype) for _ in range(2)]
    scales = [torch.full(shape[:-1], float("nan")) for _ in range(2)] if is_int8 else []
    pool = KVPool(*kv, *scales)
    return model, pool, model.make_decoder(pool)


def table(first_id: int, sizes: list[int], num_new: int) -> Sequence:
    """A sequence whose blocks hold `sizes` tokens each, the last `num_new` of them new."""
    starts = np.cumsum([0, *sizes[:-1]]).astype(np.int32)
    ids = (first_id + (np.arange(len(sizes)) ^ 1)).astype(np.int32)  # not in order, and the same as the table grows
    total = sum(sizes)
    zeros = np.zeros(len(sizes), np.int32)
    return Sequence(num_new, total - num_new, ids, starts, np.asarray(sizes, np.int32), zeros)


def slots_of(s: Sequence) -> list[int]:
    where = [int(i) * 16 + j for i, n in zip(s.block_ids, s.block_valids, strict=True) for j in range(n)]
    return where[s.start :]


def run(model: LlamaModel, decoder: CpuDecoder | None, pool: KVPool, sequences: list[Sequence]) -> torch.Tensor:
    batch = AttentionBatch(tuple(sequences))
    positions = torch.cat([torch.arange(s.start, s.start + s.num_new) for s in sequences])
    ids, slots = positions * 7 % 64, torch.tensor([x for s in sequences for x in slots_of(s)])
    rows = torch.arange(len(ids))
    if decoder is not None:
        return model.forward_with(decoder, ids, positions, slots, batch, rows)
    return model.forward(ids, positions, slots, model._attention.plan(batch), pool, rows)


SHAPES = pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "kind", "dtype", "has_bias"),
    [
        (9, 3, 64, BlockKind.Q4_1, torch.float32, False),
        (6, 3, 32, None, torch.float32, True),
        (4, 4, 80, BlockKind.Q8_0, torch.float32, False),
        (8, 1, 128, None, torch.float32, False),
        (6, 2, 64, BlockKind.Q4_1, torch.bfloat16, True),
        (4, 2, 64, None, torch.bfloat16, False),
    ],
)
LONG = [16] * 18 + [5]
BEFORE = [table(0, [16, 3, 16, 1], 36), table(8, LONG, sum(LONG))]
STEPS = [
    [table(0, [16, 3, 16, 2], 1)],
    [table(0, [16, 3, 16, 9], 8), table(8, [*LONG[:-1], 6], 1), table(30, [16, 4], 20)],
    [table(0, [16, 3, 16, 16, 14], 29), table(30, [16, 16, 9], 41), table(8, [*LONG[:-1], 7], 2)],
]


@SHAPES
def test_cpp_layers_are_the_torch_layers(
    q_heads: int, kv_heads: int, head_dim: int, kind: BlockKind | None, dtype: torch.dtype, has_bias: bool
) -> None:
    model, pool, decoder = make_model(q_heads, kv_heads, head_dim, kind, dtype, has_bias)
    for s in BEFORE:
        run(model, None, pool, [s])
    k, v = pool.k.clone(), pool.v.clone()
    # Where a sum differs in its last bits, eight bits of it may round to the other side.
    exact = {"rtol": 1e-4, "atol": 2e-5} if kind is None else {"rtol": 2e-2, "atol": 3e-2}
    tolerance = exact if dtype == torch.float32 else {"rtol": 5e-2, "atol": 1e-1}
    for step in STEPS:
        pool.k.copy_(k)
        pool.v.copy_(v)
        expected = run(model, None, pool, step)
        expected_k, expected_v = pool.k.clone(), pool.v.clone()
        pool.k.copy_(k)
        pool.v.copy_(v)
        got = run(model, decoder, pool, step)
        assert got.isfinite().all()
        torch.testing.assert_close(got, expected, **tolerance)
        torch.testing.assert_close(pool.k, expected_k, equal_nan=True, **tolerance)
        torch.testing.assert_close(pool.v, expected_v, equal_nan=True, **tolerance)


@SHAPES
@pytest.mark.parametrize("is_int8", [False, True])
def test_a_token_depends_on_its_own_sequence_alone(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    kind: BlockKind | None,
    dtype: torch.dtype,
    has_bias: bool,
    is_int8: bool,
) -> None:
    """The same hidden states to the last bit: a prompt whole, cut anywhere, or in company; partly filled blocks too."""
    model, pool, decoder = make_model(q_heads, kv_heads, head_dim, kind, dtype, has_bias, is_int8)
    sizes = [16, 16, 7, 16, 16, 16, 16, 16, 16, 16, 9]
    whole = run(model, decoder, pool, [table(0, sizes, sum(sizes))])
    for cuts in ([1] * 5 + [150], [30, 1, 1, 100], [39, 17, 16, 15, 14]):
        pool.k.fill_(0)
        done, parts = 0, []
        for i, n in enumerate([*cuts, sum(sizes) - sum(cuts)]):
            part = sizes_of(sizes, done + n)
            company = [table(20, [16, 16, 3], 35)] if i % 2 else []
            parts.append(run(model, decoder, pool, [*company, table(0, part, n)])[35 * len(company) :])
            done += n
        assert torch.equal(torch.cat(parts), whole)


def sizes_of(sizes: list[int], num: int) -> list[int]:
    """The blocks that hold a table's first `num` tokens."""
    out: list[int] = []
    for size in sizes:
        if num > 0:
            out.append(min(size, num))
        num -= size
    return out


def test_blocks_that_were_moved_are_turned() -> None:
    model, pool, decoder = make_model(6, 2, 64, None, torch.float32)
    run(model, None, pool, [table(0, [16, 16, 4], 36)])
    for num_new in (1, 20):
        moved = table(0, [16, 16, 4 + num_new], num_new)
        moved.block_deltas[:2] = (5, -3)
        k = pool.k.clone()
        expected = run(model, None, pool, [moved])
        pool.k.copy_(k)
        torch.testing.assert_close(run(model, decoder, pool, [moved]), expected, rtol=1e-4, atol=2e-5)
        still = table(0, [16, 16, 4 + num_new], num_new)
        assert (run(model, decoder, pool, [still]) - expected).abs().max() > 1e-3, "the deltas changed nothing"


def test_stretches_of_one_sequence_may_stand_in_one_step() -> None:
    """New tokens in the middle and at the end of a sequence, the later ones attending to the earlier, between turned blocks."""
    model, pool, decoder = make_model(6, 2, 64, None, torch.float32)
    run(model, None, pool, [table(0, [16, 16, 4], 36)])
    middle, end = table(0, [16, 16, 4, 16], 16), table(0, [16, 16, 4, 16, 16, 7, 13], 13)
    run(model, None, pool, [middle])
    run(model, None, pool, [table(0, [16, 16, 4, 16, 16, 7], 23)])
    for s in (middle, end):
        s.block_deltas[:2] = (5, -3)
    end.block_deltas[4:6] = (40, 40)
    k, v = pool.k.clone(), pool.v.clone()
    apart = torch.cat([run(model, None, pool, [s]) for s in (middle, end)])
    for layers in (None, decoder):
        pool.k.copy_(k)
        pool.v.copy_(v)
        for changed in (pool.k, pool.v):
            changed.view(2, -1, 2, 64)[:, slots_of(middle)] = float("nan")
        together = run(model, layers, pool, [middle, end])
        torch.testing.assert_close(together, apart, rtol=1e-4, atol=2e-5)


def test_an_int8_pool_changes_little() -> None:
    steps = [[table(0, [16, 16, 4], 36)], [table(0, [16, 16, 5], 1)]]
    exact, rounded = (
        torch.cat([run(model, decoder, pool, s) for s in steps])
        for model, pool, decoder in (make_model(6, 2, 64, None, torch.float32, is_int8=x) for x in (False, True))
    )
    assert not torch.equal(exact, rounded)
    assert float((exact - rounded).norm() / exact.norm()) < 0.01


def test_rows_may_be_picked_twice_or_not_at_all() -> None:
    model, pool, decoder = make_model(4, 2, 32, None, torch.float32)
    s = table(0, [16, 16, 16], 48)
    batch, ids = AttentionBatch((s,)), torch.arange(48) % 64
    every = run(model, decoder, pool, [s])
    picks = torch.tensor([47, 3, 47, 0])
    args = (ids * 0 + torch.arange(48) * 7 % 64, torch.arange(48), torch.tensor(slots_of(s)), batch)
    assert torch.equal(model.forward_with(decoder, *args, picks), every[picks])
    assert model.forward_with(decoder, *args, torch.tensor([], dtype=torch.int64)).shape == (0, 96)


def test_what_it_cannot_run_is_refused() -> None:
    model, pool, _ = make_model(4, 2, 32, None, torch.float32)
    with pytest.raises(ValueError, match="float16"):
        model.make_decoder(KVPool(pool.k.half(), pool.v.half()))
    with pytest.raises(ValueError, match="18 and 2 heads"):
        make_model(18, 2, 32, None, torch.float32)


def test_nan_in_a_prompt_stays_with_it() -> None:
    model, pool, decoder = make_model(4, 2, 64, None, torch.float32)
    for s in (table(0, [16, 4], 20), table(4, [16, 4], 20)):
        run(model, None, pool, [s])
    pool.v[0, 4] = float("nan")
    good, bad = run(model, decoder, pool, [table(0, [16, 5], 1), table(4, [16, 5], 1)])
    assert good.isfinite().all()
    assert bad.isnan().any()
