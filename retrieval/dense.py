"""Exact dense search: FAISS inner product over normalised vectors, which is the cosine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]


class VectorIndex(Protocol):
    """Finds the nearest vectors by cosine. Keys are the caller's own non-negative integers."""

    def add(self, keys: Sequence[int], vectors: Vectors) -> None:
        """Add normalised vectors [n, dim]."""

    def remove(self, keys: Sequence[int]) -> None:
        """Forget vectors for good."""

    def search(self, vector: Vectors, limit: int, allowed: Sequence[int] | None = None) -> list[tuple[int, float]]:
        """Keys and cosines of the nearest to `vector` [dim], best first; fewer than `limit` if there are fewer."""

    def cosines(self, vector: Vectors, keys: Sequence[int]) -> list[float]:
        """Cosine of `vector` with each of these."""

    def vectors(self, keys: Sequence[int]) -> Vectors:
        """The vectors themselves [n, dim]."""


class FlatIndex:
    """`VectorIndex` on FAISS's exact index. Not thread-safe: its owner holds a lock."""

    def __init__(self, dim: int) -> None:
        import faiss

        self._faiss: Any = faiss
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def add(self, keys: Sequence[int], vectors: Vectors) -> None:
        """Add normalised vectors [n, dim]."""
        self._index.add_with_ids(np.ascontiguousarray(vectors, np.float32), np.asarray(keys, np.int64))

    def remove(self, keys: Sequence[int]) -> None:
        """Forget vectors for good."""
        self._index.remove_ids(np.asarray(keys, np.int64))

    def search(self, vector: Vectors, limit: int, allowed: Sequence[int] | None = None) -> list[tuple[int, float]]:
        """Nearest vectors. FAISS pads a short answer with id -1, which never leaves this function."""
        limit = min(limit, len(self))
        if limit == 0 or (allowed is not None and not allowed) or not np.isfinite(vector).all():
            return []
        params = None
        if allowed is not None:
            selector = self._faiss.IDSelectorBatch(np.asarray(allowed, np.int64))
            params = self._faiss.SearchParameters(sel=selector)
        scores, keys = self._index.search(vector[None].astype(np.float32), limit, params=params)
        return [(int(k), float(s)) for k, s in zip(keys[0], scores[0], strict=True) if k >= 0]

    def cosines(self, vector: Vectors, keys: Sequence[int]) -> list[float]:
        """Cosine of `vector` with each of these."""
        return [float(x) for x in self.vectors(keys) @ vector]

    def vectors(self, keys: Sequence[int]) -> Vectors:
        """The vectors themselves [n, dim]."""
        found = [self._index.reconstruct(int(k)) for k in keys]
        return np.stack(found) if found else np.zeros((0, self._index.d), np.float32)
