"""Paged attention in plain torch, for the CPU and as a fallback anywhere.

A step's slot lists are made once (`plan`) and serve every layer. A sequence with several new tokens attends in two
parts whose results are merged by their log-sum-exp (FlashAttention, Dao et al. 2022, section 3.1): the cached prefix,
where no mask is needed and the query heads of a group are packed as rows, and its own new tokens, causal, read where
they lie instead of through the block table. A sequence with one new token is one grouped matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.batch import AttentionBatch, Sequence, flat_slots
from kernels.reference import rotate_by


@dataclass(frozen=True, slots=True)
class _Part:
    """One sequence's queries [first, last) and the slots of its cached tokens (of all its tokens, if one is new)."""

    first: int
    last: int
    slots: torch.Tensor | slice
    num_keys: int
    deltas: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Slot lists of one step, the same for every layer."""

    parts: tuple[_Part, ...]


class TorchAttention:
    """Attention over the paged pool in plain torch. Float32 softmax for every input type."""

    def __init__(self, num_q_heads: int, num_kv_heads: int, sm_scale: float, inv_freq: torch.Tensor | None) -> None:
        if num_q_heads % num_kv_heads:
            raise ValueError(f"num_q_heads ({num_q_heads}) is no multiple of num_kv_heads ({num_kv_heads})")
        self.name = "torch"
        self._group = num_q_heads // num_kv_heads
        self._scale = sm_scale
        self._inv_freq = inv_freq

    def plan(self, batch: AttentionBatch) -> TorchPlan:
        """Prepare a step."""
        parts, at = [], 0
        for s in batch.sequences:
            if s.num_new:
                parts.append(self._part(s, at))
            at += s.num_new
        return TorchPlan(tuple(parts))

    def forward(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: TorchPlan,
    ) -> torch.Tensor:
        """Attention of one layer.

        Args: q [T, num_q_heads, head_dim]; k_new, v_new [T, num_kv_heads, head_dim], rotated, and already written into
        k_cache, v_cache [num_blocks, 16, num_kv_heads, head_dim]. Returns [T, num_q_heads, head_dim].
        """
        out = torch.empty_like(q)
        k_flat, v_flat = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        for p in plan.parts:
            rows = slice(p.first, p.last)
            k, v = self._cached(k_flat, v_flat, p)
            if p.last - p.first == 1:
                out[rows] = self._one_query(q[p.first], k, v)
            else:
                out[rows] = self._many_queries(q[rows], k_new[rows], v_new[rows], k, v)
        return out

    def _part(self, s: Sequence, at: int) -> _Part:
        num_keys = s.start + 1 if s.num_new == 1 else s.start
        slots, deltas = flat_slots(s, num_keys)
        where: torch.Tensor | slice = torch.from_numpy(slots)
        if num_keys and slots[-1] - slots[0] == num_keys - 1 and (slots[1:] > slots[:-1]).all():
            where = slice(int(slots[0]), int(slots[-1]) + 1)
        needs_turn = torch.from_numpy(deltas) if deltas.any() else None
        if needs_turn is not None and self._inv_freq is None:
            raise ValueError("a rotary delta needs inv_freq")
        return _Part(at, at + s.num_new, where, num_keys, needs_turn)

    def _cached(self, k_flat: torch.Tensor, v_flat: torch.Tensor, p: _Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Cached keys and values [S, num_kv_heads, head_dim], turned to where they stand now."""
        k, v = k_flat[p.slots], v_flat[p.slots]
        if p.deltas is not None and self._inv_freq is not None:
            k = rotate_by(k.float(), p.deltas, self._inv_freq.float()).to(k.dtype)
        return k, v

    def _one_query(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [num_q_heads, head_dim] over k, v [S, num_kv_heads, head_dim]."""
        grouped = q.view(k.shape[1], self._group, -1)
        scores = torch.bmm(grouped, k.permute(1, 2, 0)).float().mul_(self._scale)
        weights = scores.softmax(-1).to(v.dtype)
        return torch.bmm(weights, v.transpose(0, 1)).view(1, q.shape[0], -1)

    def _many_queries(
        self, q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        heads = q.transpose(0, 1)[None]
        k_own = k_new.transpose(0, 1).repeat_interleave(self._group, 0)[None]
        v_own = v_new.transpose(0, 1).repeat_interleave(self._group, 0)[None]
        own, own_lse = _flash(heads, k_own, v_own, True, self._scale)
        if not k.shape[0]:
            return own[0].transpose(0, 1)
        packed = heads.reshape(1, k.shape[1], -1, q.shape[2])
        prefix, prefix_lse = _flash(packed, k.transpose(0, 1)[None], v.transpose(0, 1)[None], False, self._scale)
        return _merge(own, own_lse, prefix.reshape(own.shape), prefix_lse.reshape(own_lse.shape))


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [1, H, T, D] with log-sum-exp [1, H, T]."""
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, -torch.inf)
    return torch.matmul(scores.softmax(-1).to(v.dtype), v), scores.logsumexp(-1)


def _merge(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> torch.Tensor:
    """Attention over two disjoint sets of keys from the attention over each: [1, H, T, D] -> [T, H, D]."""
    share = torch.sigmoid(a_lse - b_lse)[..., None]
    merged = torch.lerp(b.float(), a.float(), share.float()).to(a.dtype)
    return merged[0].transpose(0, 1)
