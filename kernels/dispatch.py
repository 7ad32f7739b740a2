"""Chooses the attention implementation, once, at start."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

import torch

from kernels.batch import AttentionBatch
from kernels.torch_attention import TorchAttention

MIN_CAPABILITY = (8, 0)
"""Oldest GPU with bfloat16 in its tensor cores."""
MIN_HEAD_DIM, MAX_HEAD_DIM = 32, 256
MAX_GROUP = 64
"""Query heads of a key-value head that fit the rows of one tile."""


class AttentionBackend(Protocol):
    """Attention over the paged pool. `plan` once a step, `forward` once a layer."""

    name: str

    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare a step; the result goes to each `forward` of that step."""

    def forward(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
    ) -> torch.Tensor:
        """[T, num_q_heads, head_dim] for q of that shape; see `TorchAttention.forward`."""


def make_attention(
    device: torch.device,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    inv_freq: torch.Tensor | None = None,
) -> tuple[AttentionBackend, str]:
    """The implementation for a device, and one line that says which it is and why.

    `inv_freq` [head_dim / 2] is needed as soon as a block has a rotary delta. Triton is imported only where it is used.
    """
    scale = head_dim**-0.5
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    has_triton = importlib.util.find_spec("triton") is not None
    name, why = choose(device.type, capability, has_triton, num_q_heads // num_kv_heads, head_dim)
    backend: AttentionBackend
    if name == "triton_prefill":
        from kernels.triton_prefill import TritonPrefillAttention

        backend = TritonPrefillAttention(num_q_heads, num_kv_heads, head_dim, scale, inv_freq, device=device)
    else:
        backend = TorchAttention(num_q_heads, num_kv_heads, scale, inv_freq, device)
    return backend, f"{backend.name}: {why}"


def choose(
    device_type: str, capability: tuple[int, int] | None, has_triton: bool, group: int, head_dim: int
) -> tuple[str, str]:
    """Name of the implementation, and why."""
    if device_type != "cuda" or capability is None:
        return "torch", f"device is {device_type}"
    gpu = f"cuda {capability[0]}.{capability[1]}"
    if not has_triton:
        return "torch", f"{gpu}, but triton is not installed"
    if capability < MIN_CAPABILITY:
        return "torch", f"{gpu}, but the kernel needs {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or head_dim % 2:
        return "torch", f"{gpu}, but the kernel has no head size {head_dim}"
    if group > MAX_GROUP:
        return "torch", f"{gpu}, but a group of {group} query heads does not fit a tile"
    return "triton_prefill", gpu
