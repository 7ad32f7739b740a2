"""Model files: what architecture they hold, and their weights under Hugging Face's Llama names.

A path is a GGUF file or a folder with `config.json` and safetensors. Both give the same `ModelConfig` and the same
weights in the same layout (half-split rotary), so nothing behind this module knows the source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


FIXED_ROTARY = ("linear", "llama3")
"""Changes of the rotary table that are the same for every length."""


class CheckpointError(Exception):
    """A model file is missing, damaged, or of a kind that is not supported; the message names file and fault."""


class RopeScaling(msgspec.Struct, frozen=True):
    """A fixed change of the rotary table. Tables that depend on the length at hand are refused at load."""

    kind: str
    """`linear` or `llama3`."""
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder of the Llama family."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    eos_token_ids: tuple[int, ...]
    """Union of what the checkpoint's own files name."""

    @property
    def has_fixed_rotary(self) -> bool:
        """Whether a key can be turned from one place to another: the table is the same for every length."""
        return self.rope_scaling is None or self.rope_scaling.kind in FIXED_ROTARY

    def inv_freq(self) -> npt.NDArray[np.float64]:
        """Rotary frequencies [head_dim / 2], radians a position, with the checkpoint's scaling applied."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        base = 1.0 / self.rope_theta**exponents
        if self.rope_scaling is None:
            return base
        if self.rope_scaling.kind == "linear":
            return base / self.rope_scaling.factor
        return _llama3(base, self.rope_scaling)


def _llama3(base: npt.NDArray[np.float64], s: RopeScaling) -> npt.NDArray[np.float64]:
    """Llama 3.1's table: long waves divided by the factor, short ones kept, a linear blend between."""
    turns = s.original_max_position * base / (2 * math.pi)
    blend = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    scaled: npt.NDArray[np.float64] = blend * base + (1 - blend) * base / s.factor
    return scaled


def load_config(path: Path) -> ModelConfig:
    """Architecture of the checkpoint at `path`. Raises `CheckpointError`."""
    if path.is_dir():
        from engine.hf import read_config

        return read_config(path)
    from engine.gguf import GGUFFile

    with GGUFFile(path) as file:
        return file.model_config()


class Blocks(NamedTuple):
    """A matrix in ggml's blocks of 32 weights along each row."""

    kind: int
    """GGUF's number of the format."""
    data: torch.Tensor
    """uint8 [rows, bytes of a row]"""


KEPT_KINDS = frozenset({2, 3, 8})
"""GGUF's numbers of the formats that can be kept as they are: Q4_0, Q4_1, Q8_0."""


def iter_weights(path: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each weight. GGUF blocks come dequantised to float32. Raises `CheckpointError`."""
    for name, value in iter_kept_weights(path, config, keep=frozenset()):
        assert not isinstance(value, Blocks)
        yield name, value


def iter_kept_weights(
    path: Path, config: ModelConfig, keep: frozenset[int]
) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
    """The same, with matrices in the block formats of `keep` as they are in the file."""
    if path.is_dir():
        from engine.hf import read_weights

        yield from read_weights(path)
        return
    from engine.gguf import GGUFFile

    with GGUFFile(path) as file:
        yield from file.weights(config, keep)
