"""A weight matrix and the product with it, in one object, so that a model does not know how its weights are kept.

`DenseWeight` is a plain tensor. `BlockWeight` keeps ggml's blocks of 32 weights as they are in the file, a sixth to a
quarter of float32's size. A decode step reads every weight once for a few rows, so its time is the weights' size; a
prefill step of many rows first unpacks the matrix into a buffer that all layers share, and multiplies with that.
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
MAX_KERNEL_ROWS = 32
"""Up to this many rows the block kernel is faster than unpacking and multiplying; see README.md."""


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


class Scratch:
    """Room for one unpacked matrix, shared by all of a model's, since they are used one after the other."""

    def __init__(self) -> None:
        self._room = torch.empty(0)

    def take(self, num_rows: int, num_columns: int) -> torch.Tensor:
        """A matrix [num_rows, num_columns] of float32 with any content, good until the next call."""
        size = num_rows * num_columns
        if self._room.numel() < size:
            self._room = torch.empty(size)
        return self._room[:size].view(num_rows, num_columns)


class BlockWeight:
    """Blocks of 32 weights along each row, on the CPU.

    Args: blocks uint8 [num_rows, bytes of a row]; dtype, of the results of `rows`. Raises `ValueError` where a row is
    no whole number of blocks, `NoKernels` without a compiler.
    """

    def __init__(self, kind: BlockKind, blocks: torch.Tensor, dtype: torch.dtype, scratch: Scratch) -> None:
        self.kind, self.dtype, self.scratch = kind, dtype, scratch
        self.blocks = blocks.contiguous()
        num_rows, row_bytes = blocks.shape
        if row_bytes % kind.num_bytes:
            raise ValueError(f"rows of {row_bytes} bytes are no whole number of {kind.name} blocks")
        self.shape = (num_rows, row_bytes // kind.num_bytes * BLOCK)
        self._library = load_kernels()

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.blocks.numel()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, num_columns] times the transpose."""
        if len(x) > MAX_KERNEL_ROWS:
            return F.linear(x, self._unpack(self.blocks, self.scratch.take(*self.shape)).to(x.dtype), bias)
        rows = x.float().contiguous()
        out = torch.empty(len(x), self.shape[0])
        threads = torch.get_num_threads()
        check(
            self._library.foreword_linear(
                self.kind, _at(self.blocks), _at(rows), _at(out), len(x), *self.shape, threads
            )
        )
        out = out.to(x.dtype)
        return out if bias is None else out + bias

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows."""
        picked = self.blocks[ids]
        return self._unpack(picked, torch.empty(len(ids), self.shape[1])).to(self.dtype)

    def dequantize(self) -> torch.Tensor:
        """All of it as float32."""
        return self._unpack(self.blocks, torch.empty(self.shape))

    def _unpack(self, blocks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        num_blocks = blocks.numel() // self.kind.num_bytes
        check(self._library.foreword_dequantize(self.kind, _at(blocks), _at(out), num_blocks, torch.get_num_threads()))
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
        return DenseWeight(torch.cat([w.value for w in weights if isinstance(w, DenseWeight)]))
    if isinstance(first, BlockWeight) and all(isinstance(w, BlockWeight) and w.kind == first.kind for w in weights):
        blocks = torch.cat([w.blocks for w in weights if isinstance(w, BlockWeight)])
        return BlockWeight(first.kind, blocks, first.dtype, first.scratch)
    return JoinedWeight(weights)


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
