"""A weight matrix and the product with it, in one object, so that a model does not know how its weights are kept.

`DenseWeight` is a plain tensor. `BlockWeight` keeps ggml's blocks of 32 weights, the same numbers as in the file, in a
sixth to a quarter of float32's size. A decode step reads every weight once for a few rows, so its time is the weights'
size; a prefill step of many rows is bound by arithmetic, which is in whole numbers here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.cpu import check, load_kernels

BLOCK = 32
"""Weights in a block."""
DENSE_KINDS = {torch.float32: 0, torch.bfloat16: 30}
"""GGUF's numbers of the dense types that the C++ code knows."""
PANEL = 16
"""Rows that are kept together, as in cpu_linear.h."""


class BlockKind(IntEnum):
    """Block formats, numbered as in GGUF files."""

    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 8

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return {BlockKind.Q4_0: 18, BlockKind.Q4_1: 20, BlockKind.Q8_0: 34}[self]


class Weight(Protocol):
    """[num_rows, num_columns]"""

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)"""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, num_columns] times the transpose: [M, num_rows], of x's type."""


class Table(Weight, Protocol):
    """A matrix whose rows are looked up too, as token embeddings are."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows [len(ids), num_columns], for an embedding table. Args: ids int64 [T]."""


class DenseWeight:
    """A plain tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)"""
        return (self.value.shape[0], self.value.shape[1])

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.value.numel() * self.value.itemsize

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, num_columns] times the transpose."""
        return F.linear(x, self.value, bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows."""
        return self.value[ids]


class OrderedDenseWeight(DenseWeight):
    """A plain tensor on the CPU whose products have one order of additions: a row's result does not depend on the rows
    beside it. Slower than torch's for many rows.

    Raises `ValueError` for a type or width that the C++ code does not know.
    """

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__(value.contiguous())
        if value.dtype not in DENSE_KINDS or value.shape[1] % BLOCK:
            raise ValueError(f"no ordered products for a matrix of {value.dtype} with {value.shape[1]} columns")
        self._library = load_kernels()
        self._by_torch = False

    def use_torch(self) -> None:
        """For comparison: multiply by torch from now on."""
        self._by_torch = True

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, num_columns] times the transpose."""
        if self._by_torch:
            return super().linear(x, bias)
        return _linear(self._library, DENSE_KINDS[self.value.dtype], self.value, self.shape, x, bias)


class BlockWeight:
    """Blocks of 32 weights along each row, on the CPU, in panels of 16 rows (cpu_linear.h). Make it by `pack`.

    Its products round each row of x to eight bits with a scale for every 32 numbers, to sixteen where it is fine, for
    twice the work; a row's result does not depend on the rows beside it.
    """

    def __init__(
        self, kind: BlockKind, panels: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, is_fine: bool = False
    ) -> None:
        self.kind, self.panels, self.shape, self.dtype, self.is_fine = kind, panels, shape, dtype, is_fine
        self._library = load_kernels()

    @classmethod
    def pack(cls, kind: BlockKind, blocks: torch.Tensor, dtype: torch.dtype, is_fine: bool = False) -> BlockWeight:
        """Blocks in a file's order.

        Args: blocks uint8 [num_rows, bytes of a row]; dtype, of the results of `rows`. Raises `ValueError` where a row
        is no whole number of blocks, `NoKernels` without a compiler.
        """
        num_rows, row_bytes = blocks.shape
        if row_bytes % kind.num_bytes:
            raise ValueError(f"rows of {row_bytes} bytes are no whole number of {kind.name} blocks")
        blocks, num_columns = blocks.contiguous(), row_bytes // kind.num_bytes * BLOCK
        panels = torch.empty(-(-num_rows // PANEL) * PANEL * row_bytes, dtype=torch.uint8)
        threads = torch.get_num_threads()
        check(load_kernels().foreword_pack(kind, _at(blocks), _at(panels), num_rows, num_columns, threads))
        return cls(kind, panels, (num_rows, num_columns), dtype, is_fine)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.panels.numel()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, num_columns] times the transpose."""
        return _linear(self._library, self.kind, self.panels, self.shape, x, bias, self.is_fine)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows."""
        return self._look_up(ids).to(self.dtype)

    def dequantize(self) -> torch.Tensor:
        """All of it as float32."""
        return self._look_up(torch.arange(self.shape[0]))

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        ids, out = ids.contiguous(), torch.empty(len(ids), self.shape[1])
        sizes, threads = (len(ids), self.shape[1]), torch.get_num_threads()
        check(self._library.foreword_rows(self.kind, _at(self.panels), _at(ids), _at(out), *sizes, threads))
        return out


class JoinedWeight:
    """Several matrices with the same columns, one below the other, each kept in its own way."""

    def __init__(self, parts: Sequence[Weight]) -> None:
        self._parts = tuple(parts)
        self.shape = (sum(p.shape[0] for p in parts), parts[0].shape[1])

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return sum(p.num_bytes for p in self._parts)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, num_columns] times the transpose."""
        out = torch.cat([p.linear(x) for p in self._parts], dim=-1)
        return out if bias is None else out + bias


def stack(weights: Sequence[Weight]) -> Weight:
    """One matrix of several with the same columns, one below the other: one product instead of several."""
    first = weights[0]
    if isinstance(first, DenseWeight) and all(isinstance(w, DenseWeight) for w in weights):
        return type(first)(torch.cat([w.value for w in weights if isinstance(w, DenseWeight)]))
    if isinstance(first, BlockWeight) and all(_is_like(first, w) for w in weights):
        panels = torch.cat([w.panels for w in weights if isinstance(w, BlockWeight)])
        shape = (sum(w.shape[0] for w in weights), first.shape[1])
        return BlockWeight(first.kind, panels, shape, first.dtype, first.is_fine)
    return JoinedWeight(weights)


def _linear(
    library: ctypes.CDLL,
    kind: int,
    weight: torch.Tensor,
    shape: tuple[int, int],
    x: torch.Tensor,
    bias: torch.Tensor | None,
    is_fine: bool = False,
) -> torch.Tensor:
    rows = x.float().contiguous()
    out = torch.empty(len(x), shape[0])
    threads = torch.get_num_threads()
    check(library.foreword_linear(kind, _at(weight), _at(rows), _at(out), len(x), *shape, is_fine, threads))
    out = out.to(x.dtype)
    return out if bias is None else out + bias


def _is_like(first: BlockWeight, weight: Weight) -> bool:
    return isinstance(weight, BlockWeight) and (weight.kind, weight.is_fine, weight.shape[0] % PANEL) == (
        first.kind,
        first.is_fine,
        0,
    )


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def quantize(value: torch.Tensor, kind: BlockKind) -> torch.Tensor:
    """Blocks uint8 [N, bytes of a row] of a matrix [N, K]. Raises `ValueError` where K is no multiple of 32.

    Round to nearest: Q8_0 over the block's largest magnitude, Q4_1 between its least and greatest value.
    """
    num_rows, num_columns = value.shape
    if num_columns % BLOCK:
        raise ValueError(f"{num_columns} columns are no multiple of {BLOCK}")
    groups = value.float().view(num_rows, -1, BLOCK)
    if kind is BlockKind.Q8_0:
        scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
        q = (groups / _or_one(scale)).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
        parts = [scale.view(torch.uint8), q]
    elif kind is BlockKind.Q4_1:
        low = groups.amin(-1, keepdim=True).half()
        scale = ((groups.amax(-1, keepdim=True) - low.float()) / 15).half()
        q = ((groups - low.float()) / _or_one(scale)).round().clamp(0, 15).to(torch.uint8)
        parts = [scale.view(torch.uint8), low.view(torch.uint8), q[..., :16] | (q[..., 16:] << 4)]
    else:
        raise ValueError(f"cannot quantize to {kind.name}")
    return torch.cat(parts, dim=-1).reshape(num_rows, -1)


def _or_one(scale: torch.Tensor) -> torch.Tensor:
    """The scale, with 1 for 0, so that a block of equal weights divides by something."""
    scale = scale.float()
    return torch.where(scale == 0, torch.ones_like(scale), scale)
