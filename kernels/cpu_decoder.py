"""A decoder's layers in one C++ call.

In eager torch a decode step spends more time between operations than in them, and gathers the context's keys and values
before it reads them. Here one parallel region runs all layers, reads each weight once, and each key where it lies. A
token's result depends on its own sequence alone, to the last bit: neither on the tokens computed beside it, nor on how
its prompt was cut into steps.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.batch import AttentionBatch
from kernels.cpu import check, load_kernels
from kernels.weights import BLOCK, DENSE_KINDS, PANEL, BlockWeight, DenseWeight, Weight

FEW_ROWS = 32
"""Up to this many rows the C++ product with a dense matrix is faster than torch's."""
MAX_GROUP, MAX_HEAD_DIM = 8, 256
_POOL_KINDS = {**DENSE_KINDS, torch.int8: 24}
"""GGUF's numbers of the types that a pool may have."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; q, k, v and gate, up are stacked, so that each stack is one matrix product."""

    input_norm: torch.Tensor
    qkv: Weight
    """[(num_q_heads + 2 * num_kv_heads) * head_dim, hidden]"""
    qkv_bias: torch.Tensor | None
    o: Weight
    post_norm: torch.Tensor
    gate_up: Weight
    """[2 * intermediate, hidden], gate first"""
    down: Weight


@dataclass(frozen=True, slots=True)
class PoolTensors:
    """A pool [num_layers, num_blocks, 16, num_kv_heads, head_dim] of float32, bfloat16 or int8, the last with scales
    float32 [num_layers, num_blocks, 16, num_kv_heads]."""

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("is_fine", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("qkv", _Matrix),
        ("qkv_bias", ctypes.c_void_p),
        ("o", _Matrix),
        ("post_norm", ctypes.c_void_p),
        ("gate_up", _Matrix),
        ("down", _Matrix),
        *((name, ctypes.c_void_p) for name in ("k", "v", "k_scales", "v_scales")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_int64) for n in ("hidden", "inter", "num_layers", "q_heads", "kv_heads", "head_dim", "kv_kind")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("final_norm", ctypes.c_void_p),
        ("layers", ctypes.c_void_p),
    )


_COLUMNS = (
    "first_row",
    "num_new",
    "start",
    "first_block",
    "num_blocks",
    "ids",
    "starts",
    "valids",
    "turns",
    "cos",
    "sin",
)


class _Step(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_int64) for n in ("num_rows", "num_seqs", "num_picks")),
        *((n, ctypes.c_void_p) for n in ("x", "row_cos", "row_sin", "slots", "picks", "out", *_COLUMNS)),
    )


class CpuDecoder:
    """The layers of one model over one pool, and its final norm.

    Args: inv_freq float64 [head_dim / 2], radians per position. Raises `ValueError` for what the C++ code cannot run,
    `NoKernels` without a compiler.
    """

    def __init__(
        self,
        layers: Items[LayerWeights],
        pool: PoolTensors,
        final_norm: torch.Tensor,
        inv_freq: torch.Tensor,
        num_q_heads: int,
        eps: float,
    ) -> None:
        num_layers, _, _, num_kv_heads, head_dim = pool.k.shape
        if pool.k.device.type != "cpu" or pool.k.dtype not in _POOL_KINDS:
            raise ValueError(f"no C++ layers for a pool of {pool.k.dtype} on {pool.k.device.type}")
        if num_q_heads // num_kv_heads > MAX_GROUP or head_dim > MAX_HEAD_DIM or head_dim % 8:
            raise ValueError(f"no C++ layers for {num_q_heads} and {num_kv_heads} heads of {head_dim}")
        self._library = load_kernels()
        self._inv_freq = inv_freq
        self._vectors = [_float32(v) for x in layers for v in (x.input_norm, x.qkv_bias, x.post_norm)]
        self._kept = (layers, pool, _float32(final_norm))
        self._layers = (_Layer * num_layers)(
            *(_layer(x, self._vectors[3 * i : 3 * i + 3], pool, i) for i, x in enumerate(layers))
        )
        hidden, inter = layers[0].o.shape[0], layers[0].gate_up.shape[0] // 2
        if inter % PANEL:
            raise ValueError(f"no C++ layers for an intermediate size of {inter}")
        kind, scale = _POOL_KINDS[pool.k.dtype], head_dim**-0.5
        sizes = (hidden, inter, num_layers, num_q_heads, num_kv_heads, head_dim, kind)
        self._model = _Model(*sizes, eps, scale, _address(self._kept[2]), ctypes.addressof(self._layers))
        self._hidden = hidden
        self._space = self._library.foreword_workspace()
        if not self._space:
            raise MemoryError("no memory for the C++ layers")
        weakref.finalize(self, self._library.foreword_free_workspace, self._space)
        self.is_dense = any(isinstance(w, DenseWeight) for x in layers for w in (x.qkv, x.o, x.gate_up, x.down))
        """Whether some matrix is dense, so that torch's products are faster for many rows."""

    def run(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        batch: AttentionBatch,
        picks: torch.Tensor,
    ) -> torch.Tensor:
        """Normed hidden states of the rows picked, float32 [P, hidden]; the new tokens' KV is written to the pool.

        Args: x [T, hidden] of any float type; cos, sin float32 [T, head_dim / 2]; slots int64 [T]; picks int64 [P].
        Raises `MemoryError`.
        """
        picked, where = torch.unique(picks, return_inverse=True)
        x = x.to(torch.float32, copy=True).contiguous()
        out = torch.empty(max(len(picked), 1), self._hidden)
        tensors = [x, cos.contiguous(), sin.contiguous(), slots.contiguous(), picked, out]
        columns = [*_columns(batch), *self._turns(batch)]
        step = _Step(
            len(x),
            len(batch.sequences),
            len(picked),
            *(t.data_ptr() for t in tensors),
            *(c.ctypes.data for c in columns),
        )
        threads = torch.get_num_threads()
        check(self._library.foreword_layers(ctypes.byref(self._model), ctypes.byref(step), self._space, threads))
        return out[where]

    def _turns(self, batch: AttentionBatch) -> tuple[Any, Any, Any]:
        """For each block the row of the tables that turns its keys, -1 where it was not moved; the tables."""
        deltas = np.concatenate([s.block_deltas for s in batch.sequences])
        different, turns = np.unique(deltas, return_inverse=True)
        angles = np.outer(different.astype(np.float64), self._inv_freq.double().numpy())
        turns = np.where(deltas == 0, -1, turns).astype(np.int32)
        return turns, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _columns(batch: AttentionBatch) -> list[Any]:
    sequences = batch.sequences
    new = np.array([s.num_new for s in sequences], np.int64)
    sizes = np.array([len(s.block_ids) for s in sequences], np.int64)
    return [
        np.cumsum(new) - new,
        new,
        np.array([s.start for s in sequences], np.int64),
        np.cumsum(sizes) - sizes,
        sizes,
        *(np.concatenate([getattr(s, n) for s in sequences]) for n in ("block_ids", "block_starts", "block_valids")),
    ]


def _layer(layer: LayerWeights, vectors: Items[torch.Tensor | None], pool: PoolTensors, i: int) -> Any:
    qkv, o, gate_up, down = (_matrix(w) for w in (layer.qkv, layer.o, layer.gate_up, layer.down))
    input_norm, bias, post_norm = map(_address, vectors)
    tensors = [None if t is None else t[i] for t in (pool.k, pool.v, pool.k_scales, pool.v_scales)]
    return _Layer(input_norm, qkv, bias, o, post_norm, gate_up, down, *map(_address, tensors))


def _float32(vector: torch.Tensor | None) -> torch.Tensor | None:
    return None if vector is None else vector.float().contiguous()


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _matrix(weight: Weight) -> Any:
    if isinstance(weight, BlockWeight):
        return _Matrix(int(weight.kind), weight.panels.data_ptr(), *weight.shape, int(weight.is_fine))
    if isinstance(weight, DenseWeight) and weight.shape[1] % BLOCK == 0:
        value = weight.value
        if value.dtype in DENSE_KINDS and value.is_contiguous():
            return _Matrix(DENSE_KINDS[value.dtype], value.data_ptr(), *weight.shape, 0)
    raise ValueError("no C++ layers for a matrix that is joined, of another type, or not of whole blocks")
