"""Where a request's tokens lie in blocks.

Every segment starts on a fresh block, so a block holds 1 to 16 tokens and begins at any logical position. A block is
*sealed* once no token can join it: it is full, or its segment has ended. Only sealed blocks are shared. The last
segment is open: generated tokens go on in it, so its last, partly filled block is never sealed; a sequence that is only
computed, not continued, has none that is open.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.api import BLOCK_SIZE, Segment, SegmentKind


class IntColumn:
    """An int32 array that grows at its end without being made anew each time."""

    __slots__ = ("_data", "_n")

    def __init__(self, values: Sequence[int]) -> None:
        self._n = len(values)
        self._data = np.zeros(max(2 * self._n, 16), np.int32)
        self._data[: self._n] = values

    def __len__(self) -> int:
        return self._n

    def extend(self, values: Sequence[int]) -> None:
        """Add values."""
        end = self._n + len(values)
        if end > len(self._data):
            self._data = np.concatenate([self._data, np.zeros(max(end, len(self._data)), np.int32)])
        self._data[self._n : end] = values
        self._n = end

    def replace(self, first: int, values: Sequence[int]) -> None:
        """Overwrite from index `first` on. Arrays that `first(n)` gave before may change."""
        self._data[first : first + len(values)] = values

    def tolist(self) -> list[int]:
        """The values."""
        out: list[int] = self._data[: self._n].tolist()
        return out

    def first(self, n: int) -> npt.NDArray[np.int32]:
        """The first n values, as a view."""
        return self._data[:n]


class Passage(NamedTuple):
    """A passage that also could be had from behind the system segments."""

    segment: int
    """Which of the prompt's segments."""
    first_block: int
    last_block: int
    """One past its last block."""


class BlockLayout:
    """Block boundaries of one token sequence that grows at its end, and the keys of its sealed blocks.

    `starts[i]` is the logical position of block i's first token; `ends[i]` is one past the last position that block i
    may ever hold.
    """

    __slots__ = ("_sizes", "_starts", "ends", "keys", "num_system_blocks", "passages", "paths", "scopes", "starts")

    def __init__(self, segments: Sequence[Segment], is_open: bool = True) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.scopes: list[str] = []
        """Scope of each block."""
        self.keys: list[bytes] = []
        """Keys of the leading sealed blocks, as far as they were needed."""
        self.paths: list[int] = []
        """For each key a number made of it and all keys before it; equal prefixes have equal numbers."""
        self.num_system_blocks = 0
        """Leading blocks of system segments."""
        self.passages: list[Passage] = []
        """Passages that neither stand right behind the system segments nor last."""
        position, is_leading = 0, True
        for i, segment in enumerate(segments):
            first, end = len(self.starts), position + len(segment.token_ids)
            self.starts.extend(range(position, end, BLOCK_SIZE))
            self.ends.extend(min(start + BLOCK_SIZE, end) for start in range(position, end, BLOCK_SIZE))
            self.scopes.extend([segment.scope] * (len(self.starts) - len(self.scopes)))
            position = end
            is_leading = is_leading and segment.kind is SegmentKind.SYSTEM
            self.num_system_blocks = len(self.starts) if is_leading else self.num_system_blocks
            if segment.kind is SegmentKind.PASSAGE and 0 < self.num_system_blocks < first and i < len(segments) - 1:
                self.passages.append(Passage(i, first, len(self.starts)))
        if is_open:
            self.ends[-1] = self.starts[-1] + BLOCK_SIZE
        self._starts = IntColumn(self.starts)
        self._sizes = IntColumn([b - a for a, b in zip(self.starts, self.ends, strict=True)])

    @property
    def num_system_tokens(self) -> int:
        """Tokens of the leading system segments."""
        return self.ends[self.num_system_blocks - 1] if self.num_system_blocks else 0

    def extend_to(self, num_tokens: int) -> None:
        """Add blocks until positions below `num_tokens` have one."""
        while self.ends[-1] < num_tokens:
            self.starts.append(self.ends[-1])
            self.ends.append(self.ends[-1] + BLOCK_SIZE)
            self.scopes.append(self.scopes[-1])
            self._starts.extend((self.starts[-1],))
            self._sizes.extend((BLOCK_SIZE,))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that the first `num_tokens` tokens need, whether or not the layout has grown that far."""
        if num_tokens > self.ends[-1]:
            return len(self.starts) + -(-(num_tokens - self.ends[-1]) // BLOCK_SIZE)
        return bisect_left(self.starts, num_tokens)

    def num_sealed(self, num_tokens: int) -> int:
        """Leading blocks that are sealed once `num_tokens` tokens are computed."""
        return bisect_right(self.ends, num_tokens)

    def columns(self, num_tokens: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(start position, valid tokens) of each block that holds any of the first `num_tokens` tokens."""
        n = bisect_left(self.starts, num_tokens)
        valids = self._sizes.first(n).copy()
        valids[-1] = num_tokens - self.starts[n - 1]
        return self._starts.first(n), valids

    def slots(self, block_ids: npt.NDArray[np.int32], first: int, last: int) -> npt.NDArray[np.int64]:
        """Pool slots (block id * 16 + offset) of the positions first..last-1."""
        if last - first == 1:
            block = bisect_right(self.starts, first) - 1
            return np.array([int(block_ids[block]) * BLOCK_SIZE + first - self.starts[block]], np.int64)
        positions = np.arange(first, last)
        starts = self._starts.first(len(block_ids))
        blocks = np.searchsorted(starts, positions, side="right") - 1
        slots: npt.NDArray[np.int64] = block_ids[blocks].astype(np.int64) * BLOCK_SIZE + positions - starts[blocks]
        return slots

    def make_keys(self, token_ids: Sequence[int], last: int, scope_ids: dict[str, int]) -> list[bytes]:
        """Keys of the sealed blocks 0..last-1: scope and token ids, whole, as bytes; made once and kept.

        Two keys are equal only if scope and tokens are: identity is the content itself, a hash only finds the place.
        Args: `scope_ids` numbers the scopes seen so far and is extended.
        """
        first = len(self.keys)
        if last > first:
            base = self.starts[first]
            tokens = np.asarray(token_ids[base : self.ends[last - 1]], np.int32).tobytes()
            path = self.paths[-1] if self.paths else 0
            for i in range(first, last):
                scope = scope_ids.setdefault(self.scopes[i], len(scope_ids))
                key = scope.to_bytes(4, "little") + tokens[4 * (self.starts[i] - base) : 4 * (self.ends[i] - base)]
                path = hash((path, key))
                self.keys.append(key)
                self.paths.append(path)
        return self.keys if last == len(self.keys) else self.keys[:last]


def segment_spans(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """(start, end) positions of each segment."""
    ends = list(accumulate(len(s.token_ids) for s in segments))
    return list(zip([0, *ends[:-1]], ends, strict=True))
