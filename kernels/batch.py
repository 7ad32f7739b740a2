"""What one step asks of attention, as numbers: new tokens and block tables, without any notion of requests.

KV pool of a layer: k_cache and v_cache, each [num_blocks, 16, num_kv_heads, head_dim]. A sequence's block table is a
list of entries (block id, start, valid, delta): the block's first token stands at logical position `start`, its first
`valid` slots hold tokens, and its keys, which are stored rotated for the place where they were computed, must act as if
rotated by `delta` positions more. Blocks may be partly filled, or empty, anywhere in a table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK_SIZE = 16

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence's part of a step. Its block table covers cached and new tokens; the new ones stand at its end."""

    num_new: int
    """New tokens, that is, queries; they stand at positions start .. start + num_new - 1."""
    start: int
    """Logical position of the first new token."""
    block_ids: Ints
    block_starts: Ints
    block_valids: Ints
    block_deltas: Ints


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """All sequences of a step; their new tokens lie one after the other in the token dimension."""

    sequences: tuple[Sequence, ...]

    @property
    def cu_seqlens_q(self) -> npt.NDArray[np.int64]:
        """[B + 1] first token of each sequence, and the total."""
        return np.cumsum([0, *(s.num_new for s in self.sequences)])

    def validate(self) -> None:
        """Raise `ValueError` if a table is not a whole sequence of contiguous positions ending with the new tokens."""
        for i, s in enumerate(self.sequences):
            ends = s.block_starts + s.block_valids
            if len({len(s.block_ids), len(s.block_starts), len(s.block_valids), len(s.block_deltas)}) != 1:
                raise ValueError(f"sequence {i}: the block arrays differ in length")
            if ((s.block_valids < 0) | (s.block_valids > BLOCK_SIZE)).any():
                raise ValueError(f"sequence {i}: a block holds fewer than 0 tokens, or more than {BLOCK_SIZE}")
            if len(ends) and (s.block_starts[0] != 0 or (s.block_starts[1:] != ends[:-1]).any()):
                raise ValueError(f"sequence {i}: the blocks' positions have a gap or overlap")
            if (int(ends[-1]) if len(ends) else 0) != s.start + s.num_new:
                raise ValueError(f"sequence {i}: the block table does not end with the new tokens")


def flat_slots(s: Sequence, num_tokens: int) -> tuple[npt.NDArray[np.int64], Ints]:
    """Pool slots (block id * 16 + offset) of the first `num_tokens` tokens, and the rotary delta of each."""
    offsets = np.arange(BLOCK_SIZE)
    is_valid = offsets < s.block_valids[:, None]
    slots = (s.block_ids.astype(np.int64)[:, None] * BLOCK_SIZE + offsets)[is_valid]
    deltas = np.repeat(s.block_deltas, s.block_valids)
    return slots[:num_tokens], deltas[:num_tokens]
