"""Plain-torch operations of a Llama-family decoder: normalisation, rotary embedding, gate, write into the pool."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square normalisation (Zhang and Sennrich 2019) over the last dimension of x [T, hidden], in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def rotary_tables(inv_freq: torch.Tensor, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [max_len, head_dim / 2] in float32, computed in float64 from inv_freq [head_dim / 2]."""
    angles = torch.arange(max_len, dtype=torch.float64, device=inv_freq.device)[:, None] * inv_freq.double()
    return angles.cos().float(), angles.sin().float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding with split halves (Su et al. 2021, section 3.4.2).

    Args: x [T, heads, head_dim]; cos, sin [T, head_dim / 2], float32, of each token's position.
    """
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x [T, 2 * intermediate], gate first (SwiGLU, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def write_kv(
    k_new: torch.Tensor, v_new: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Put new keys and values [T, num_kv_heads, head_dim] into the pool's slots (int64 [T], block id * 16 + offset)."""
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k_new)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v_new)
