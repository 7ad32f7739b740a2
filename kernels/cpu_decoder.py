"""A decoder's layers in one C++ call, for steps of few rows: decode, and the rest of a prompt after a cache hit.

In eager torch such a step spends more time between operations than in them, and gathers the context's keys and values
before it reads them. Here one parallel region runs all layers, reads each weight once, and each key where it lies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch

from kernels.batch import AttentionBatch
from kernels.cpu import check, load_kernels
from kernels.weights import BLOCK, BlockWeight, DenseWeight, Weight

MAX_ROWS = 32
"""Most rows of a step; with more, torch's matrix products are faster."""
MAX_GROUP, MAX_HEAD_DIM = 8, 256
_KINDS = {torch.float32: 0, torch.bfloat16: 30}
"""GGUF's numbers of the dense types."""


class LayerWeights:
    """What the C++ code needs of one layer; its norms and bias as float32."""

    def __init__(
        self,
        input_norm: torch.Tensor,
        qkv: Weight,
        qkv_bias: torch.Tensor | None,
        o: Weight,
        post_norm: torch.Tensor,
        gate_up: Weight,
        down: Weight,
    ) -> None:
        self.norms = [input_norm.float().contiguous(), post_norm.float().contiguous()]
        self.bias = None if qkv_bias is None else qkv_bias.float().contiguous()
        self.matrices = [qkv, o, gate_up, down]


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
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
        ("k_pool", ctypes.c_void_p),
        ("v_pool", ctypes.c_void_p),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *(
            (n, ctypes.c_int64)
            for n in ("hidden", "inter", "q_heads", "kv_heads", "head_dim", "num_layers", "kv_is_bf16")
        ),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("layers", ctypes.c_void_p),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int64),
        *(
            (n, ctypes.c_void_p)
            for n in ("x", "cos", "sin", "slots", "positions", "first_block", "num_blocks", "ids", "starts", "valids")
        ),
    )


class CpuDecoder:
    """The layers of one model over one pool.

    Args: k, v, the pool [num_layers, num_blocks, 16, num_kv_heads, head_dim], float32 or bfloat16. Raises `ValueError`
    for what the C++ code cannot run, `NoKernels` without a compiler.
    """

    def __init__(
        self, layers: Items[LayerWeights], k: torch.Tensor, v: torch.Tensor, num_q_heads: int, eps: float
    ) -> None:
        *_, num_kv_heads, head_dim = k.shape
        if k.device.type != "cpu" or k.dtype not in _KINDS:
            raise ValueError(f"no C++ layers for a pool of {k.dtype} on {k.device.type}")
        if num_q_heads // num_kv_heads > MAX_GROUP or head_dim > MAX_HEAD_DIM:
            raise ValueError(f"no C++ layers for {num_q_heads} and {num_kv_heads} heads of {head_dim}")
        self._library = load_kernels()
        self._kept = (layers, k, v)
        self._layers = (_Layer * len(layers))(*(_layer(x, k[i], v[i]) for i, x in enumerate(layers)))
        _, o, gate_up, _ = layers[0].matrices
        self._model = _Model(
            o.shape[0],
            gate_up.shape[0] // 2,
            num_q_heads,
            num_kv_heads,
            head_dim,
            len(layers),
            int(k.dtype == torch.bfloat16),
            eps,
            head_dim**-0.5,
            ctypes.addressof(self._layers),
        )

    @staticmethod
    def can_run(batch: AttentionBatch) -> bool:
        """Whether a step is small enough, and its blocks are all used where they were computed."""
        num_rows = sum(s.num_new for s in batch.sequences)
        return num_rows <= MAX_ROWS and not any(s.block_deltas.any() for s in batch.sequences)

    def run(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Hidden states behind the last layer, float32 [T, hidden]; the new tokens' KV is written to the pool.

        Args: x [T, hidden] of any float type; cos, sin float32 [T, head_dim / 2]; slots int64 [T].
        Raises `MemoryError`.
        """
        out = x.float().clone()
        cos, sin = cos.contiguous(), sin.contiguous()
        new = [s.num_new for s in batch.sequences]
        sizes = [len(s.block_ids) for s in batch.sequences]
        columns = [
            np.concatenate([np.arange(s.start, s.start + s.num_new, dtype=np.int32) for s in batch.sequences]),
            np.repeat(np.cumsum([0, *sizes[:-1]], dtype=np.int64), new),
            np.repeat(np.asarray(sizes, np.int64), new),
            np.concatenate([s.block_ids for s in batch.sequences]),
            np.concatenate([s.block_starts for s in batch.sequences]),
            np.concatenate([s.block_valids for s in batch.sequences]),
        ]
        tensors = [t.data_ptr() for t in (out, cos, sin, slots)]
        step = _Step(len(out), *tensors, *(c.ctypes.data for c in columns))
        check(self._library.foreword_layers(ctypes.byref(self._model), ctypes.byref(step), torch.get_num_threads()))
        return out


def _layer(layer: LayerWeights, k: torch.Tensor, v: torch.Tensor) -> Any:
    qkv, o, gate_up, down = map(_matrix, layer.matrices)
    first, second = (n.data_ptr() for n in layer.norms)
    bias = None if layer.bias is None else layer.bias.data_ptr()
    return _Layer(first, qkv, bias, o, second, gate_up, down, k.data_ptr(), v.data_ptr())


def _matrix(weight: Weight) -> Any:
    if isinstance(weight, BlockWeight):
        return _Matrix(int(weight.kind), weight.blocks.data_ptr(), *weight.shape)
    if isinstance(weight, DenseWeight) and weight.shape[1] % BLOCK == 0:
        value = weight.value
        if value.dtype in _KINDS and value.is_contiguous():
            return _Matrix(_KINDS[value.dtype], value.data_ptr(), *weight.shape)
    raise ValueError("no C++ layers for a matrix that is joined, of another type, or not of whole blocks")
