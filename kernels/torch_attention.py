"""Paged attention in plain torch, for the CPU and as a fallback anywhere.

A step's slot lists are made once (`plan`) and serve every layer. A sequence with several new tokens attends in two
parts whose results are merged by their log-sum-exp (FlashAttention, Dao et al. 2022, section 3.1): the cached prefix,
where no mask is needed and the query heads of a group are packed as rows, and its own new tokens, causal, read where
they lie instead of through the block table. Sequences with one new token are taken together, those of similar length
in one call: their keys are gathered into one padded tensor, since eight small calls cost more than one larger.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.batch import AttentionBatch, Sequence, flat_slots
from kernels.ops import rotate

MAX_PADDING = 1.25
"""In a group of one-token sequences the longest has at most so many times the keys of the shortest."""
MAX_GROUP_KEYS = 1 << 15
"""Keys of such a group, padding included, so that what is gathered for it stays small."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where keys lie in the pool: one slot for each, and by what they are to be turned unless none is."""

    slots: torch.Tensor | slice
    """int64 [S], or a slice where the slots follow each other: then the pool is read in place."""
    turn: tuple[torch.Tensor, torch.Tensor] | None
    """Cosines and sines [S, head_dim / 2], float32."""


@dataclass(frozen=True, slots=True)
class _Many:
    """Queries [first, last) of one sequence, and its cached keys if it has any."""

    first: int
    last: int
    cached: _Keys | None


@dataclass(frozen=True, slots=True)
class _Ones:
    """Sequences with one query each: the queries' rows [B], keys [B * S] and the mask of the padding."""

    rows: torch.Tensor
    keys: _Keys
    mask: torch.Tensor | None
    """float32 [B, 1, 1, S]: 0 for a key, -inf for padding; None where there is no padding."""


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Slot lists of one step, the same for every layer."""

    many: tuple[_Many, ...]
    ones: tuple[_Ones, ...]


class TorchAttention:
    """Attention over the paged pool in plain torch. Float32 softmax for every input type."""

    def __init__(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        sm_scale: float,
        inv_freq: torch.Tensor | None,
        device: torch.device | None = None,
    ) -> None:
        if num_q_heads % num_kv_heads:
            raise ValueError(f"num_q_heads ({num_q_heads}) is no multiple of num_kv_heads ({num_kv_heads})")
        self.name = "torch"
        self._group = num_q_heads // num_kv_heads
        self._scale = sm_scale
        self._device = device or torch.device("cpu")
        self._inv_freq = inv_freq.to(self._device) if inv_freq is not None else None

    def plan(self, batch: AttentionBatch) -> TorchPlan:
        """Prepare a step. Raises `ValueError` for a rotary delta where there is no `inv_freq`."""
        many: list[_Many] = []
        ones: list[tuple[int, Sequence]] = []
        at = 0
        for s in batch.sequences:
            if s.num_new == 1:
                ones.append((at, s))
            elif s.num_new:
                cached = self._keys(*flat_slots(s, s.start)) if s.start else None
                many.append(_Many(at, at + s.num_new, cached))
            at += s.num_new
        return TorchPlan(tuple(many), tuple(self._ones(group) for group in _similar(ones)))

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
        for m in plan.many:
            rows = slice(m.first, m.last)
            cached = self._read(k_flat, v_flat, m.cached) if m.cached is not None else None
            out[rows] = self._many_queries(q[rows], k_new[rows], v_new[rows], cached)
        for o in plan.ones:
            out[o.rows] = self._one_query_each(q[o.rows], *self._read(k_flat, v_flat, o.keys), o.mask)
        return out

    def _keys(self, slots: np.ndarray, deltas: np.ndarray) -> _Keys:
        where: torch.Tensor | slice = torch.from_numpy(slots).to(self._device)
        if slots[-1] - slots[0] == len(slots) - 1 and (slots[1:] > slots[:-1]).all():
            where = slice(int(slots[0]), int(slots[-1]) + 1)
        if not deltas.any():
            return _Keys(where, None)
        if self._inv_freq is None:
            raise ValueError("a rotary delta needs inv_freq")
        different, rows = np.unique(deltas, return_inverse=True)
        angles = torch.outer(torch.from_numpy(different).double().to(self._device), self._inv_freq.double())
        at = torch.from_numpy(rows).to(self._device)
        return _Keys(where, (angles.cos().float()[at], angles.sin().float()[at]))

    def _ones(self, group: list[tuple[int, Sequence]]) -> _Ones:
        longest = group[-1][1].start + 1
        slots = np.empty((len(group), longest), np.int64)
        deltas = np.zeros((len(group), longest), np.int32)
        mask = np.zeros((len(group), 1, 1, longest), np.float32)
        for i, (_, s) in enumerate(group):
            n = s.start + 1
            slots[i, :n], deltas[i, :n] = flat_slots(s, n)
            # Padding reads a slot that holds a token: a weight of 0 does not undo a NaN.
            slots[i, n:] = slots[i, 0]
            mask[i, :, :, n:] = -np.inf
        rows = torch.tensor([row for row, _ in group], device=self._device)
        padded = torch.from_numpy(mask).to(self._device) if mask.any() else None
        return _Ones(rows, self._keys(slots.reshape(-1), deltas.reshape(-1)), padded)

    def _read(self, k_flat: torch.Tensor, v_flat: torch.Tensor, keys: _Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [S, num_kv_heads, head_dim], the keys turned to where they stand now."""
        if isinstance(keys.slots, slice):
            k, v = k_flat[keys.slots], v_flat[keys.slots]
        else:
            k, v = k_flat.index_select(0, keys.slots), v_flat.index_select(0, keys.slots)
        return (rotate(k, *keys.turn) if keys.turn is not None else k), v

    def _one_query_each(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """q [B, num_q_heads, head_dim] over k, v [B * S, num_kv_heads, head_dim]."""
        num, heads = q.shape[0], k.shape[1]
        k, v = (x.view(num, -1, *x.shape[1:]).transpose(1, 2) for x in (k, v))
        bias = mask.to(q.dtype) if mask is not None else None
        out, _ = _flash(q.view(num, heads, self._group, -1), k, v, False, self._scale, bias)
        return out.reshape(q.shape)

    def _many_queries(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        cached: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """q [T, num_q_heads, head_dim] over new keys [T, num_kv_heads, head_dim] and cached ones [S, ...]."""
        heads = q.transpose(0, 1)[None]
        k_own = k_new.transpose(0, 1).repeat_interleave(self._group, 0)[None]
        v_own = v_new.transpose(0, 1).repeat_interleave(self._group, 0)[None]
        own, own_lse = _flash(heads, k_own, v_own, True, self._scale)
        if cached is None:
            return own[0].transpose(0, 1)
        k, v = (x.transpose(0, 1)[None] for x in cached)
        packed = heads.reshape(1, k.shape[1], -1, q.shape[2])
        prefix, prefix_lse = _flash(packed, k, v, False, self._scale)
        return _merge(own, own_lse, prefix.reshape(own.shape), prefix_lse.reshape(own_lse.shape))


def _similar(ones: list[tuple[int, Sequence]]) -> list[list[tuple[int, Sequence]]]:
    """Sequences by rising length, cut into groups that waste little on padding."""
    groups: list[list[tuple[int, Sequence]]] = []
    for item in sorted(ones, key=lambda one: one[1].start):
        length = item[1].start + 1
        if groups:
            shortest = groups[-1][0][1].start + 1
            if length <= MAX_PADDING * shortest and length * (len(groups[-1]) + 1) <= MAX_GROUP_KEYS:
                groups[-1].append(item)
                continue
        groups.append([item])
    return groups


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [B, H, T, D] with log-sum-exp [B, H, T]; the mask is added to the scaled scores."""
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return out, lse
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores = scores + mask
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, -torch.inf)
    return torch.matmul(scores.softmax(-1).to(v.dtype), v), scores.logsumexp(-1)


def _merge(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> torch.Tensor:
    """Attention over two disjoint sets of keys from the attention over each: [1, H, T, D] -> [T, H, D]."""
    share = torch.sigmoid(a_lse - b_lse)[..., None]
    merged = torch.lerp(b.float(), a.float(), share.float()).to(a.dtype)
    return merged[0].transpose(0, 1)
