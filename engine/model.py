"""A decoder of the Llama family over a paged KV pool, in torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from engine.checkpoint import Blocks, CheckpointError, ModelConfig
from kernels.batch import AttentionBatch
from kernels.cpu_decoder import CpuDecoder, LayerWeights, PoolTensors
from kernels.dispatch import AttentionBackend
from kernels.ops import rms_norm, rotary_tables, rotate, silu_gate, write_kv
from kernels.weights import (
    BLOCK,
    BlockKind,
    BlockWeight,
    DenseWeight,
    OrderedDenseWeight,
    Table,
    quantize,
    stack,
)

T = TypeVar("T")


KVPool = PoolTensors
"""Keys and values of all layers. Owner: the runner."""


class LlamaModel:
    """Last hidden states of the tokens asked for, writing the KV of all new tokens into the pool; and their logits."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor | Blocks]],
        attention: AttentionBackend,
        maker: WeightMaker,
    ) -> None:
        self._config = config
        self._attention = attention
        device = maker.device
        store = _Store(weights, maker)
        self._embed = store.matrix("model.embed_tokens.weight")
        self._norm = store.vector("model.norm.weight")
        is_tied = config.tie_word_embeddings or "lm_head.weight" not in store
        self._head = self._embed if is_tied else store.matrix("lm_head.weight")
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
        x = self._embed.rows(token_ids)
        cos, sin = self._cos[positions], self._sin[positions]
        for i, layer in enumerate(self._layers):
            h = rms_norm(x, layer.input_norm, self._config.rms_norm_eps)
            x = x + self._attend(h, layer, cos, sin, slots, plan, pool.k[i], pool.v[i])
            if i == len(self._layers) - 1:
                x = x[rows]
            h = rms_norm(x, layer.post_norm, self._config.rms_norm_eps)
            x = x + layer.down.linear(silu_gate(layer.gate_up.linear(h)))
        return rms_norm(x, self._norm, self._config.rms_norm_eps)

    def make_decoder(self, pool: KVPool) -> CpuDecoder:
        """The layers over a pool in C++. Raises `ValueError` or `NoKernels`."""
        c = self._config
        inv_freq = torch.from_numpy(c.inv_freq())
        return CpuDecoder(self._layers, pool, self._norm, inv_freq, c.num_q_heads, c.rms_norm_eps)

    def forward_with(
        self,
        decoder: CpuDecoder,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        batch: AttentionBatch,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """The same as `forward`, its layers run by `decoder`."""
        embedded = self._embed.rows(token_ids)
        hidden = decoder.run(embedded, self._cos[positions], self._sin[positions], slots, batch, rows)
        return hidden.to(embedded.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocab_size] of hidden states [B, hidden_size]."""
        return self._head.linear(hidden)

    def use_torch_products(self) -> None:
        """For comparison: dense matrices are multiplied by torch from now on."""
        for layer in self._layers:
            for weight in (layer.qkv, layer.o, layer.gate_up, layer.down):
                if isinstance(weight, OrderedDenseWeight):
                    weight.use_torch()
        for table in (self._embed, self._head):
            if isinstance(table, OrderedDenseWeight):
                table.use_torch()

    @property
    def num_weight_bytes(self) -> int:
        """Memory of the matrices."""
        layers = (w.num_bytes for x in self._layers for w in (x.qkv, x.o, x.gate_up, x.down))
        tables = {id(w): w.num_bytes for w in (self._embed, self._head)}
        return sum(layers) + sum(tables.values())

    def _attend(
        self,
        h: torch.Tensor,
        layer: LayerWeights,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        plan: Any,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        c = self._config
        qkv = layer.qkv.linear(h, layer.qkv_bias).view(len(h), -1, c.head_dim)
        turned = rotate(qkv[:, : c.num_q_heads + c.num_kv_heads], cos, sin)
        q, k, v = turned[:, : c.num_q_heads], turned[:, c.num_q_heads :], qkv[:, c.num_q_heads + c.num_kv_heads :]
        write_kv(k, v, k_cache, v_cache, slots)
        out = self._attention.forward(q, k, v, k_cache, v_cache, plan)
        return layer.o.linear(out.reshape(len(h), -1))


class WeightMaker:
    """Turns a checkpoint's tensors into weights: dense, or in blocks.

    Args: kind, the block format that matrices are quantized to, or None to leave them as they come; is_ordered, whether
    products of dense ones have one order of additions; may_fall_back, whether odd sizes may go without it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        kind: BlockKind | None = None,
        is_ordered: bool = False,
        may_fall_back: bool = False,
    ) -> None:
        self.dtype, self.device, self._kind, self._may_fall_back = dtype, device, kind, may_fall_back
        self._dense = OrderedDenseWeight if is_ordered else DenseWeight

    def matrix(self, name: str, value: torch.Tensor | Blocks) -> Table:
        """A matrix. Tables of token embeddings are never kept in fewer than eight bits."""
        if isinstance(value, Blocks):
            return BlockWeight.pack(BlockKind(value.kind), value.data, self.dtype, _is_fine(name))
        if self._kind is not None and value.shape[1] % BLOCK == 0:
            is_table = "embed" in name or "lm_head" in name
            kind = BlockKind.Q8_0 if is_table else self._kind
            return BlockWeight.pack(kind, quantize(value, kind), self.dtype, _is_fine(name))
        dense = value.to(device=self.device, dtype=self.dtype)
        return self._dense(dense) if value.shape[1] % BLOCK == 0 or not self._may_fall_back else DenseWeight(dense)

    def vector(self, value: torch.Tensor) -> torch.Tensor:
        """A vector, as for norms and biases."""
        return value.to(device=self.device, dtype=self.dtype)


def _is_fine(name: str) -> bool:
    """Whether eight bits of a matrix's input lose too much: those of queries, keys and values, and of the logits do."""
    return any(part in name for part in ("q_proj", "k_proj", "v_proj", "embed", "lm_head"))


class _Store:
    """A checkpoint's weights by name, made as they are read, so that no more than one is in memory twice."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor | Blocks]], maker: WeightMaker) -> None:
        self._matrices: dict[str, Table] = {}
        self._vectors: dict[str, torch.Tensor] = {}
        for name, value in weights:
            if isinstance(value, Blocks) or value.dim() == 2:
                self._matrices[name] = maker.matrix(name, value)
            else:
                self._vectors[name] = maker.vector(value)

    def __contains__(self, name: str) -> bool:
        return name in self._matrices or name in self._vectors

    def matrix(self, name: str) -> Table:
        """Take a matrix out."""
        return _take(self._matrices, name)

    def vector(self, name: str) -> torch.Tensor:
        """Take a vector out."""
        return _take(self._vectors, name)


def _take(store: dict[str, T], name: str) -> T:
    if name not in store:
        raise CheckpointError(f"the checkpoint lacks the weight {name}")
    return store.pop(name)


def _layer(store: _Store, i: int, config: ModelConfig) -> LayerWeights:
    at = f"model.layers.{i}."
    projections = [f"{at}self_attn.{p}_proj" for p in "qkv"]
    has_bias = f"{projections[0]}.bias" in store
    layer = LayerWeights(
        input_norm=store.vector(f"{at}input_layernorm.weight"),
        qkv=stack([store.matrix(f"{p}.weight") for p in projections]),
        qkv_bias=torch.cat([store.vector(f"{p}.bias") for p in projections]) if has_bias else None,
        o=store.matrix(f"{at}self_attn.o_proj.weight"),
        post_norm=store.vector(f"{at}post_attention_layernorm.weight"),
        gate_up=stack([store.matrix(f"{at}mlp.{p}_proj.weight") for p in ("gate", "up")]),
        down=store.matrix(f"{at}mlp.down_proj.weight"),
    )
    want = ((config.num_q_heads + 2 * config.num_kv_heads) * config.head_dim, config.hidden_size)
    if tuple(layer.qkv.shape) != want:
        raise CheckpointError(f"layer {i}: q, k and v together have the shape {tuple(layer.qkv.shape)}, not {want}")
    return layer
