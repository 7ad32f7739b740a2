"""Free list of KV block ids. Owner: `CacheManager` alone allocates and frees."""

from __future__ import annotations

from collections.abc import Iterable


class BlockAllocator:
    """Hands out block ids 0..num_blocks-1; each id is either free or handed out, never both."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Hand out n ids, lowest first on a fresh pool. Raises `MemoryError` if fewer are free; then none is taken."""
        if n > len(self._free):
            raise MemoryError(f"{n} KV blocks asked for, {len(self._free)} free")
        if n == 0:
            return []
        ids = self._free[-n:][::-1]
        del self._free[-n:]
        for i in ids:
            self._is_free[i] = 0
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Take ids back. Raises `ValueError` on one that is free already."""
        for i in ids:
            if self._is_free[i]:
                raise ValueError(f"KV block {i} is freed twice")
            self._is_free[i] = 1
            self._free.append(i)

    def free_ids(self) -> frozenset[int]:
        """The free ids, for integrity checks."""
        return frozenset(self._free)
