"""Where a request's tokens lie in blocks.

Every segment starts on a fresh block, so a block holds 1 to 16 tokens and begins at any logical position. A block is
*sealed* once no token can join it: it is full, or its segment has ended. Only sealed blocks are shared. The last
segment is open: generated tokens go on in it, so its last, partly filled block is never sealed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from engine.api import BLOCK_SIZE, Segment


class BlockLayout:
    """Block boundaries of one token sequence that grows at its end.

    `starts[i]` is the logical position of block i's first token; `ends[i]` is one past the last position that block i
    may ever hold.
    """

    __slots__ = ("ends", "scopes", "starts")

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.scopes: list[str] = []
        """Scope of each block."""
        position = 0
        for segment in segments:
            end = position + len(segment.token_ids)
            self.starts.extend(range(position, end, BLOCK_SIZE))
            self.ends.extend(min(start + BLOCK_SIZE, end) for start in range(position, end, BLOCK_SIZE))
            self.scopes.extend([segment.scope] * (len(self.starts) - len(self.scopes)))
            position = end
        self.ends[-1] = self.starts[-1] + BLOCK_SIZE

    def extend_to(self, num_tokens: int) -> None:
        """Add blocks until positions below `num_tokens` have one."""
        while self.ends[-1] < num_tokens:
            self.starts.append(self.ends[-1])
            self.ends.append(self.ends[-1] + BLOCK_SIZE)
            self.scopes.append(self.scopes[-1])

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that the first `num_tokens` tokens need, whether or not the layout has grown that far."""
        if num_tokens > self.ends[-1]:
            return len(self.starts) + -(-(num_tokens - self.ends[-1]) // BLOCK_SIZE)
        return int(np.searchsorted(np.asarray(self.starts), num_tokens, side="left"))

    def num_sealed(self, num_tokens: int) -> int:
        """Leading blocks that are sealed once `num_tokens` tokens are computed."""
        return int(np.searchsorted(np.asarray(self.ends), num_tokens, side="right"))

    def slots(self, block_ids: Sequence[int], first: int, last: int) -> npt.NDArray[np.int64]:
        """Pool slots (block id * 16 + offset) of the positions first..last-1."""
        positions = np.arange(first, last)
        starts = np.asarray(self.starts[: len(block_ids)])
        blocks = np.searchsorted(starts, positions, side="right") - 1
        slots: npt.NDArray[np.int64] = np.asarray(block_ids, np.int64)[blocks] * BLOCK_SIZE + (
            positions - starts[blocks]
        )
        return slots


def block_keys(
    layout: BlockLayout, token_ids: Sequence[int], first: int, last: int, scope_ids: dict[str, int]
) -> list[bytes]:
    """Keys of the sealed blocks first..last-1: scope and token ids, whole, as bytes.

    Two keys are equal only if scope and tokens are: identity is the content itself, a hash only finds the place.
    Args: `scope_ids` numbers the scopes seen so far and is extended.
    """
    keys: list[bytes] = []
    tokens = np.asarray(token_ids[layout.starts[first] : layout.ends[last - 1]] if last > first else (), np.int32)
    base = layout.starts[first] if last > first else 0
    for i in range(first, last):
        scope = scope_ids.setdefault(layout.scopes[i], len(scope_ids))
        piece = tokens[layout.starts[i] - base : layout.ends[i] - base]
        keys.append(scope.to_bytes(4, "little") + piece.tobytes())
    return keys


def segment_spans(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """(start, end) positions of each segment."""
    ends = list(accumulate(len(s.token_ids) for s in segments))
    return list(zip([0, *ends[:-1]], ends, strict=True))
