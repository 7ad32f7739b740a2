"""Dense search with FAISS: inner product over normalised vectors, which is the cosine.

Exact up to `EXACT_LIMIT` vectors; beyond, an inverted file (Sivic and Zisserman 2003) whose lists are read in part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
Keys = Sequence[int] | npt.NDArray[np.int64]
EXACT_LIMIT = 300_000
"""Vectors up to which every one is compared."""
TRAIN_PER_LIST = 50
"""Vectors that the centre of each list is learnt from."""
PROBE_SHARE = 0.08
"""Share of the lists that an approximate search reads: recall@10 and time by share are in README.md."""


class VectorIndex(Protocol):
    """Finds the nearest vectors by cosine. Keys are the caller's own non-negative integers."""

    def add(self, keys: Keys, vectors: Vectors) -> None:
        """Add normalised vectors [n, dim]."""

    def remove(self, keys: Keys) -> None:
        """Forget vectors for good."""

    def search(self, vector: Vectors, limit: int, allowed: Keys | None = None) -> list[tuple[int, float]]:
        """Keys and cosines of the nearest to `vector` [dim], best first; fewer than `limit` if there are fewer."""

    def vectors(self, keys: Keys) -> Vectors:
        """The vectors themselves [n, dim]."""


class DenseIndex:
    """`VectorIndex` on FAISS. Not thread-safe: its owner holds a lock."""

    def __init__(self, dim: int, exact_limit: int | None = None, snapshot: bytes | None = None) -> None:
        import faiss

        self._faiss: Any = faiss
        self._exact_limit = EXACT_LIMIT if exact_limit is None else exact_limit
        if snapshot is None:
            self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
        else:
            self._index = faiss.deserialize_index(np.frombuffer(snapshot, np.uint8))
        self._trained_at = len(self) if self.is_approximate else 0

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def is_approximate(self) -> bool:
        """Whether searches without a filter read a part of the lists only."""
        return not isinstance(self._index, self._faiss.IndexIDMap2)

    def snapshot(self) -> npt.NDArray[np.uint8]:
        """The index as bytes, for `snapshot`."""
        out: npt.NDArray[np.uint8] = self._faiss.serialize_index(self._index)
        return out

    def add(self, keys: Keys, vectors: Vectors) -> None:
        """Add normalised vectors [n, dim]."""
        self._index.add_with_ids(np.ascontiguousarray(vectors, np.float32), np.asarray(keys, np.int64))
        if len(self) > self._exact_limit and len(self) > 4 * self._trained_at:
            self._train()

    def remove(self, keys: Keys) -> None:
        """Forget vectors for good."""
        self._index.remove_ids(np.asarray(keys, np.int64))

    def search(self, vector: Vectors, limit: int, allowed: Keys | None = None) -> list[tuple[int, float]]:
        """Nearest vectors; exact wherever `allowed` is given. FAISS pads a short answer with -1, which never leaves."""
        limit = min(limit, len(self))
        if limit == 0 or (allowed is not None and not len(allowed)) or not np.isfinite(vector).all():
            return []
        found = self._index.search(vector[None].astype(np.float32), limit, params=self._parameters(allowed))
        return [(int(k), float(s)) for s, k in zip(found[0][0], found[1][0], strict=True) if k >= 0]

    def vectors(self, keys: Keys) -> Vectors:
        """The vectors themselves [n, dim]."""
        found = [self._index.reconstruct(int(k)) for k in keys]
        return np.stack(found) if found else np.zeros((0, self._index.d), np.float32)

    def _parameters(self, allowed: Keys | None) -> Any:
        selector = None if allowed is None else self._faiss.IDSelectorBatch(np.asarray(allowed, np.int64))
        if not self.is_approximate:
            return None if selector is None else self._faiss.SearchParameters(sel=selector)
        lists = self._index.nlist
        probes = lists if selector is not None else max(8, math.ceil(PROBE_SHARE * lists))
        return self._faiss.SearchParametersIVF(sel=selector, nprobe=probes)

    def _train(self) -> None:
        """Move everything into lists around centres that are learnt from a sample."""
        faiss, dim, n = self._faiss, self._index.d, len(self)
        lists = round(math.sqrt(n))
        keys = self._keys()
        sample = np.random.default_rng(0).choice(n, min(n, TRAIN_PER_LIST * lists), replace=False)
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.set_direct_map_type(faiss.DirectMap.Hashtable)
        index.train(self.vectors(keys[sample]))
        for at in range(0, n, 10_000):
            part = keys[at : at + 10_000]
            index.add_with_ids(self.vectors(part), part)
        self._index, self._trained_at = index, n

    def _keys(self) -> npt.NDArray[np.int64]:
        if not self.is_approximate:
            out: npt.NDArray[np.int64] = self._faiss.vector_to_array(self._index.id_map)
            return out
        lists = self._index.invlists
        parts = [
            self._faiss.rev_swig_ptr(lists.get_ids(i), lists.list_size(i)).copy()
            for i in range(self._index.nlist)
            if lists.list_size(i)
        ]
        return np.concatenate(parts)
