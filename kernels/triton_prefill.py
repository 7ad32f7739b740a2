"""Triton kernel: causal attention of many new tokens over a paged cache (FlashAttention-2, Dao 2023, section 3).

One program computes a tile of one sequence's queries for one key-value head. The query heads of that head's group are
packed into the tile's rows, so grouped-query attention reads each key once for the whole group, and a short block of
new queries still fills the tile. Keys and values come through the block table, whose entries are (id, start, valid,
delta); the mask compares logical positions. A key with a delta is rotated as it is loaded: with its two halves (a, b)
that takes the dot product apart into two products of half the width, which the tensor cores do not mind. The cosines
come from a table with a row for each different delta of the step, made in float64: in the kernel they would need the
slow path for large angles, which goes through local memory.

Softmax runs in base 2 (log2(e) is folded into the scale) and accumulates in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.batch import BLOCK_SIZE, AttentionBatch


@triton.jit  # type: ignore[untyped-decorator]
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    ids_ptr,
    starts_ptr,
    valids_ptr,
    turns_ptr,
    cos_ptr,
    sin_ptr,
    scale,
    stride_q,
    stride_kv,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles, num_kv_heads). A row of tiles_ptr: first token, tokens, position, first table entry, entries."""
    HALF: tl.constexpr = HEAD_DIM // 2
    HALF_PAD: tl.constexpr = D_PAD // 2
    tile = tiles_ptr + tl.program_id(0) * 5
    head = tl.program_id(1)
    first, num, position = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    entry, num_entries = tl.load(tile + 3), tl.load(tile + 4)

    rows = tl.arange(0, BLOCK_M)
    token = rows // GROUP
    is_row = token < num
    q_head = head * GROUP + rows % GROUP
    q_pos = position + token
    half = tl.arange(0, HALF_PAD)
    is_half = half < HALF
    q_at = q_ptr + (first + token).to(tl.int64)[:, None] * stride_q + q_head[:, None] * HEAD_DIM
    q_mask = is_row[:, None] & is_half[None, :]
    q_a = tl.load(q_at + half[None, :], mask=q_mask, other=0.0)
    q_b = tl.load(q_at + HALF + half[None, :], mask=q_mask, other=0.0)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    cols = tl.arange(0, D_PAD)
    slot = tl.arange(0, BLOCK_N) % PAGE
    for base in range(0, num_entries, BLOCK_N // PAGE):
        page = base + tl.arange(0, BLOCK_N) // PAGE
        is_page = page < num_entries
        valid = tl.load(valids_ptr + entry + page, mask=is_page, other=0)
        is_key = slot < valid
        block = tl.load(ids_ptr + entry + page, mask=is_page, other=0).to(tl.int64)
        k_pos = tl.load(starts_ptr + entry + page, mask=is_page, other=0) + slot
        at = (block * PAGE + slot) * stride_kv + head * HEAD_DIM
        k_mask = is_key[:, None] & is_half[None, :]
        k_a = tl.load(k_ptr + at[:, None] + half[None, :], mask=k_mask, other=0.0)
        k_b = tl.load(k_ptr + at[:, None] + HALF + half[None, :], mask=k_mask, other=0.0)
        if HAS_DELTA:
            turn = tl.load(turns_ptr + entry + page, mask=is_page, other=0) * HALF
            cos = tl.load(cos_ptr + turn[:, None] + half[None, :], mask=k_mask, other=1.0)
            sin = tl.load(sin_ptr + turn[:, None] + half[None, :], mask=k_mask, other=0.0)
            a, b = k_a.to(tl.float32), k_b.to(tl.float32)
            k_a = (a * cos - b * sin).to(q_a.dtype)
            k_b = (b * cos + a * sin).to(q_a.dtype)
        s = tl.dot(q_a, tl.trans(k_a), input_precision=PRECISION)
        s = tl.dot(q_b, tl.trans(k_b), acc=s, input_precision=PRECISION) * scale
        s = tl.where(is_key[None, :] & (k_pos[None, :] <= q_pos[:, None]), s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        # A row whose keys so far are all masked keeps the maximum -inf; 0 in its place avoids inf - inf.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[:, None])
        shrink = tl.exp2(m_i - m_safe)
        l_i = l_i * shrink + tl.sum(p, 1)
        v_mask = is_key[:, None] & (cols < HEAD_DIM)[None, :]
        v = tl.load(v_ptr + at[:, None] + cols[None, :], mask=v_mask, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc=acc * shrink[:, None], input_precision=PRECISION)
        m_i = m_new
    out_at = out_ptr + (first + token).to(tl.int64)[:, None] * stride_q + q_head[:, None] * HEAD_DIM
    out = acc / l_i[:, None]
    out_mask = is_row[:, None] & (cols < HEAD_DIM)[None, :]
    tl.store(out_at + cols[None, :], out.to(out_ptr.dtype.element_ty), mask=out_mask)
    num_q_heads = stride_q // HEAD_DIM
    lse_at = lse_ptr + (first + token).to(tl.int64) * num_q_heads + q_head
    tl.store(lse_at, (m_i + tl.log2(l_i)) * 0.6931471805599453, mask=is_row)


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Tiles and block tables of one step on the device."""

    tiles: torch.Tensor
    """int32 [num_tiles, 5]: first token, tokens, position of the first, first table entry, entries to read."""
    ids: torch.Tensor
    starts: torch.Tensor
    valids: torch.Tensor
    turns: torch.Tensor
    """Row of each table entry's delta in `cos` and `sin`."""
    cos: torch.Tensor
    """float32 [different deltas, head_dim / 2]"""
    sin: torch.Tensor
    has_delta: bool


class TritonPrefillAttention:
    """Attention over the paged pool by `prefill_kernel`; a sequence with one new token is a tile of one token."""

    def __init__(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        sm_scale: float,
        inv_freq: torch.Tensor | None,
        *,
        device: torch.device | None = None,
        block_m: int = 64,
        block_n: int = 64,
    ) -> None:
        if num_q_heads % num_kv_heads:
            raise ValueError(f"num_q_heads ({num_q_heads}) is no multiple of num_kv_heads ({num_kv_heads})")
        self.name = "triton_prefill"
        self._heads, self._group, self._head_dim = num_kv_heads, num_q_heads // num_kv_heads, head_dim
        if block_m < self._group:
            raise ValueError(f"a group of {self._group} query heads does not fit a tile of {block_m} rows")
        self._scale = sm_scale
        self._device = device or torch.device("cpu")
        self._inv_freq = inv_freq.double().to(self._device) if inv_freq is not None else None
        self._block_m, self._block_n = block_m, block_n

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        """Cut the queries into tiles and put the tables on the device."""
        per_tile = self._block_m // self._group
        tiles, entry, token = [], 0, 0
        for s in batch.sequences:
            for at in range(0, s.num_new, per_tile):
                num = min(per_tile, s.num_new - at)
                # Blocks that begin behind the tile's last query hold no key for it.
                reach = int(np.searchsorted(s.block_starts, s.start + at + num))
                tiles.append((token + at, num, s.start + at, entry, reach))
            token += s.num_new
            entry += len(s.block_ids)

        def join(name: str) -> torch.Tensor:
            parts = [getattr(s, name) for s in batch.sequences]
            return torch.from_numpy(np.concatenate([*parts, np.zeros(1, np.int32)])).to(self._device)

        table = torch.tensor(tiles, dtype=torch.int32).reshape(-1, 5).to(self._device)
        different, turns = join("block_deltas").unique(return_inverse=True)
        cos, sin, has_delta = self._turn_tables(different)
        rows = turns.to(torch.int32)
        return TritonPlan(
            table, join("block_ids"), join("block_starts"), join("block_valids"), rows, cos, sin, has_delta
        )

    def _turn_tables(self, deltas: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """cos and sin of each delta's rotation, and whether any is not 0."""
        if not bool(deltas.any()):
            empty = torch.zeros(1, dtype=torch.float32, device=deltas.device)
            return empty, empty, False
        if self._inv_freq is None:
            raise ValueError("a rotary delta needs inv_freq")
        angles = deltas.double()[:, None] * self._inv_freq
        return angles.cos().float(), angles.sin().float(), True

    def forward(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: TritonPlan,
    ) -> torch.Tensor:
        """Attention of one layer; see `TorchAttention.forward`. New keys are read from the cache."""
        return self.forward_with_lse(q, k_cache, v_cache, plan)[0]

    def forward_with_lse(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: TritonPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, num_q_heads, head_dim] and log-sum-exp of the scaled scores, float32 [T, num_q_heads]."""
        q = q.contiguous()
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self.launch(q, k_cache, v_cache, out, lse, plan)
        return out, lse

    def launch(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        plan: TritonPlan,
    ) -> None:
        """Run the kernel into `out` and `lse`, which need no initial value."""
        if not len(plan.tiles):
            return
        kernel: Any = prefill_kernel
        kernel[(len(plan.tiles), self._heads)](
            *(q, k_cache, v_cache, out, lse, plan.tiles, plan.ids, plan.starts, plan.valids, plan.turns),
            *(plan.cos, plan.sin),
            self._scale * 1.4426950408889634,
            q.stride(0),
            k_cache.stride(1),
            **self.constants(q.dtype, plan.has_delta),
            num_warps=4,
            num_stages=2,
        )

    def constants(self, dtype: torch.dtype, has_delta: bool) -> dict[str, Any]:
        """The kernel's compile-time arguments."""
        return {
            "HEAD_DIM": self._head_dim,
            "D_PAD": triton.next_power_of_2(self._head_dim),
            "GROUP": self._group,
            "BLOCK_M": self._block_m,
            "BLOCK_N": self._block_n,
            "PAGE": BLOCK_SIZE,
            "HAS_DELTA": has_delta,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        }
