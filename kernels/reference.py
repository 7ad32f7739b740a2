"""The oracle: paged attention written for reading, in float64. Every fast path is checked against it."""

from __future__ import annotations

import torch

from kernels.batch import AttentionBatch, Sequence, flat_slots


def oracle_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    sm_scale: float,
    inv_freq: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of new tokens over cached and new ones, all read through the block tables.

    Args: q [T, num_q_heads, head_dim]; k_cache, v_cache [num_blocks, 16, num_kv_heads, head_dim], new tokens already
    written; inv_freq [head_dim / 2], needed where a delta is not 0.
    Returns out [T, num_q_heads, head_dim] and the log-sum-exp of the scaled scores [T, num_q_heads], both float64.
    """
    batch.validate()
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    at = 0
    for s in batch.sequences:
        rows = slice(at, at + s.num_new)
        if s.num_new:
            out[rows], lse[rows] = _one(q[rows].double(), k_cache, v_cache, s, sm_scale, inv_freq)
        at += s.num_new
    return out, lse


def _one(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    s: Sequence,
    sm_scale: float,
    inv_freq: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_keys = s.start + s.num_new
    slots, deltas = flat_slots(s, num_keys)
    k = k_cache.flatten(0, 1)[torch.from_numpy(slots)].double()
    v = v_cache.flatten(0, 1)[torch.from_numpy(slots)].double()
    if deltas.any():
        if inv_freq is None:
            raise ValueError("a rotary delta needs inv_freq")
        k = rotate_by(k, torch.from_numpy(deltas), inv_freq.double())
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * sm_scale
    positions_q = s.start + torch.arange(s.num_new)
    scores = scores.masked_fill(torch.arange(num_keys)[None, :] > positions_q[:, None], -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1).T


def rotate_by(k: torch.Tensor, deltas: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotate keys [S, heads, head_dim] by a further `deltas` [S] positions. Rotations add up, so this is exact."""
    angles = deltas.to(inv_freq.dtype)[:, None] * inv_freq
    cos, sin = angles.cos()[:, None].to(k.dtype), angles.sin()[:, None].to(k.dtype)
    a, b = k.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
