"""Passages that are being computed behind their system text so that prompts can borrow them, and who waits for them."""

from __future__ import annotations

from engine.request import Request

Path = tuple[bytes, ...]
"""Keys of [system][passage]: which passage it is, by content and scope."""


class Compiles:
    """One request for each such passage, however many wait for it. Owner: `Scheduler`."""

    def __init__(self) -> None:
        self._by_path: dict[Path, Request] = {}
        self._entries: dict[Request, tuple[Path, set[Request]]] = {}

    def find(self, path: Path) -> Request | None:
        """The request that computes a passage, if one does."""
        return self._by_path.get(path)

    def join(self, path: Path, compile_: Request, waiter: Request) -> None:
        """A request waits for a passage from now on."""
        self._by_path[path] = compile_
        self._entries.setdefault(compile_, (path, set()))[1].add(waiter)
        waiter.compiles.add(compile_)

    def begin(self, request: Request) -> None:
        """A request got its blocks. If it computes a passage, work on the requests that wait for it has begun."""
        for waiter in self._entries[request][1] if request.is_compile else ():
            waiter.began_s = request.first_run_s if waiter.began_s is None else waiter.began_s

    def end(self, compile_: Request) -> None:
        """A passage is computed, or will not be: nobody waits for it any more."""
        path, waiters = self._entries.pop(compile_)
        del self._by_path[path]
        for waiter in waiters:
            waiter.compiles.discard(compile_)

    def leave(self, waiter: Request) -> list[Request]:
        """A request waits no more; returns what only it waited for."""
        mine, waiter.compiles = waiter.compiles, set()
        for compile_ in mine:
            self._entries[compile_][1].discard(waiter)
        return [c for c in mine if not self._entries[c][1]]

    def check_integrity(self) -> None:
        """Raise `AssertionError` if a passage is computed for nobody, or somebody waits for none."""
        assert set(self._by_path.values()) == set(self._entries), "a passage's path is lost"
        for compile_, (_, waiters) in self._entries.items():
            assert compile_.finish_reason is None, "a passage that has ended is waited for"
            assert waiters, "a passage is computed for nobody"
            assert all(compile_ in w.compiles and w.finish_reason is None for w in waiters), "a waiter has left"
