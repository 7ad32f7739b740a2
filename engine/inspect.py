"""What an engine is doing, for whoever operates it: requests, where the blocks are, the largest cached prefixes.

No text and no token ids: a view says how much is cached, not what. Reading a view changes nothing.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator

import msgspec

from engine.cache import CacheManager
from engine.radix import RadixNode
from engine.request import Request
from engine.scheduler import Scheduler

MAX_PREFIXES = 20
"""Prefixes that a view lists."""
KEY_HEAD = 4
"""Bytes of a block's key before its tokens, which take 4 bytes each."""


class RequestView(msgspec.Struct, frozen=True):
    """A request in the engine: one for each continuation."""

    request_id: str
    index: int
    state: str
    """`running` has blocks, `waiting` has none."""
    priority: int
    age_s: float
    """Seconds since it came to the engine."""
    num_prompt_tokens: int
    num_prefix_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_blocks: int
    num_own_blocks: int
    """Of those, the ones that no other request can use."""
    num_preemptions: int
    num_recomputed_tokens: int


class PrefixView(msgspec.Struct, frozen=True):
    """A cached prefix, from the root to a leaf of the tree."""

    num_tokens: int
    num_blocks: int
    scope: str
    """`shared`, or the tenant that alone may reuse its end."""
    idle_s: float
    """Seconds since it was last used."""
    is_protected: bool
    """Whether a running request uses it."""
    is_pinned: bool


class PoolView(msgspec.Struct, frozen=True):
    """Where the pool's blocks are: the first four add up to `total`."""

    free: int
    evictable: int
    protected: int
    held: int
    total: int
    pinned: int


class EngineView(msgspec.Struct, frozen=True):
    """All of it, between two steps."""

    pool: PoolView
    requests: tuple[RequestView, ...]
    """Running ones first, each by rank."""
    num_prefixes: int
    prefixes: tuple[PrefixView, ...]
    """The largest, at most `MAX_PREFIXES`."""


def view_of(scheduler: Scheduler, cache: CacheManager) -> EngineView:
    """A view of now."""
    c, now = cache.counts(), scheduler.now()
    prefixes = list(_prefixes(cache, time.monotonic_ns()))
    return EngineView(
        PoolView(c.free, c.evictable, c.protected, c.held, c.total, c.pinned),
        tuple(_request_view(r, now) for r in sorted(scheduler.requests(), key=_order)),
        len(prefixes),
        tuple(heapq.nlargest(MAX_PREFIXES, prefixes, key=lambda p: p.num_tokens)),
    )


def _order(request: Request) -> tuple[bool, tuple[float, float]]:
    return request.allocation is None, request.rank


def _request_view(r: Request, now: float) -> RequestView:
    a = r.allocation
    return RequestView(
        request_id=r.request_id,
        index=r.index,
        state="waiting" if a is None else "running",
        priority=r.source.priority,
        age_s=round(now - r.arrival_s, 3),
        num_prompt_tokens=r.num_prompt_tokens,
        num_prefix_tokens=r.num_prefix_tokens,
        num_computed_tokens=r.num_computed_tokens,
        num_output_tokens=r.num_output_tokens,
        max_tokens=r.max_tokens,
        num_blocks=0 if a is None else a.num_blocks,
        num_own_blocks=0 if a is None else len(a.held),
        num_preemptions=r.num_preemptions,
        num_recomputed_tokens=r.num_recomputed_tokens,
    )


def _prefixes(cache: CacheManager, now_ns: int) -> Iterator[PrefixView]:
    """One for each leaf."""
    sizes: dict[RadixNode, tuple[int, int]] = {}
    for node in cache.nodes():  # parents first
        tokens, blocks = sizes.get(node.parent, (0, 0)) if node.parent is not None else (0, 0)
        tokens += sum(len(key) - KEY_HEAD for key in node.keys) // 4
        blocks += len(node.blocks)
        sizes[node] = tokens, blocks
        if not node.children:
            scope = cache.scope_of(node)
            idle_s = round((now_ns - node.last_use) / 1e9, 3)
            yield PrefixView(tokens, blocks, scope, idle_s, bool(node.locks), node.is_pinned)
