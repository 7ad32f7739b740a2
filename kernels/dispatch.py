"""Chooses the attention implementation, once, at start."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kernels.batch import AttentionBatch
from kernels.torch_attention import TorchAttention


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
    """The implementation for a device, and one line that says which it is and why."""
    if device.type == "cuda":
        from kernels.triton_prefill import TritonPrefillAttention

        major, minor = torch.cuda.get_device_capability(device)
        chosen = TritonPrefillAttention(num_q_heads, num_kv_heads, head_dim, head_dim**-0.5, inv_freq)
        return chosen, f"{chosen.name}: cuda {major}.{minor}"
    backend = TorchAttention(num_q_heads, num_kv_heads, head_dim**-0.5, inv_freq)
    return backend, f"{backend.name}: device is {device.type}"
