"""A decoder of the Llama family over a paged KV pool, in torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.checkpoint import CheckpointError, ModelConfig
from kernels.dispatch import AttentionBackend
from kernels.ops import rms_norm, rotary_tables, rotate, silu_gate, write_kv


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; q, k, v and gate, up are stacked, so that each stack is one matrix product."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    """[(num_q_heads + 2 * num_kv_heads) * head_dim, hidden]"""
    qkv_bias: torch.Tensor | None
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    """[2 * intermediate, hidden], gate first"""
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class KVPool:
    """Keys and values of all layers, each [num_layers, num_blocks, 16, num_kv_heads, head_dim]. Owner: the runner."""

    k: torch.Tensor
    v: torch.Tensor


class LlamaModel:
    """Last hidden states of the tokens asked for, writing the KV of all new tokens into the pool; and their logits."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        attention: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._attention = attention
        store = {name: value.to(device=device, dtype=dtype) for name, value in weights}
        self._embed = _take(store, "model.embed_tokens.weight")
        self._norm = _take(store, "model.norm.weight")
        tied = config.tie_word_embeddings or "lm_head.weight" not in store
        self._head = self._embed if tied else _take(store, "lm_head.weight")
        self._layers = [_layer(store, i, config) for i in range(config.num_layers)]
        inv_freq = torch.from_numpy(config.inv_freq()).to(device)
        self._cos, self._sin = rotary_tables(inv_freq, config.max_position_embeddings)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        plan: Any,
        pool: KVPool,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """One step.

        Args: token_ids, positions, slots int64 [T]; plan, the attention's plan of this step; rows int64 [B], the tokens
        whose logits are wanted. Returns their hidden states [B, hidden_size], for `logits`.
        """
        x = self._embed[token_ids]
        cos, sin = self._cos[positions], self._sin[positions]
        for i, layer in enumerate(self._layers):
            h = rms_norm(x, layer.input_norm, self._config.rms_norm_eps)
            x = x + self._attend(h, layer, cos, sin, slots, plan, pool.k[i], pool.v[i])
            if i == len(self._layers) - 1:
                x = x[rows]
            h = rms_norm(x, layer.post_norm, self._config.rms_norm_eps)
            x = x + F.linear(silu_gate(F.linear(h, layer.gate_up)), layer.down)
        return rms_norm(x, self._norm, self._config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocab_size] of hidden states [B, hidden_size]."""
        return F.linear(hidden, self._head)

    def _attend(
        self,
        h: torch.Tensor,
        layer: Layer,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        plan: Any,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        c = self._config
        qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(len(h), -1, c.head_dim)
        turned = rotate(qkv[:, : c.num_q_heads + c.num_kv_heads], cos, sin)
        q, k, v = turned[:, : c.num_q_heads], turned[:, c.num_q_heads :], qkv[:, c.num_q_heads + c.num_kv_heads :]
        write_kv(k, v, k_cache, v_cache, slots)
        out = self._attention.forward(q, k, v, k_cache, v_cache, plan)
        return F.linear(out.reshape(len(h), -1), layer.o)


def _take(store: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in store:
        raise CheckpointError(f"the checkpoint lacks the weight {name}")
    return store.pop(name)


def _layer(store: dict[str, torch.Tensor], i: int, config: ModelConfig) -> Layer:
    at = f"model.layers.{i}."
    projections = [f"{at}self_attn.{p}_proj" for p in "qkv"]
    has_bias = f"{projections[0]}.bias" in store
    layer = Layer(
        input_norm=_take(store, f"{at}input_layernorm.weight"),
        qkv=torch.cat([_take(store, f"{p}.weight") for p in projections]),
        qkv_bias=torch.cat([_take(store, f"{p}.bias") for p in projections]) if has_bias else None,
        o=_take(store, f"{at}self_attn.o_proj.weight"),
        post_norm=_take(store, f"{at}post_attention_layernorm.weight"),
        gate_up=torch.cat([_take(store, f"{at}mlp.{p}_proj.weight") for p in ("gate", "up")]),
        down=_take(store, f"{at}mlp.down_proj.weight"),
    )
    want = ((config.num_q_heads + 2 * config.num_kv_heads) * config.head_dim, config.hidden_size)
    if tuple(layer.qkv.shape) != want:
        raise CheckpointError(f"layer {i}: q, k and v together have the shape {tuple(layer.qkv.shape)}, not {want}")
    return layer
