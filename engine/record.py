"""What the runner sees of a request in a step. Made for each request in each step, so it is kept short."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.request import Request
from engine.step import ScheduledRequest


def make_records(request: Request, n: int) -> Iterator[ScheduledRequest]:
    """The next n tokens of a request, one record for each stretch of them between borrowed blocks."""
    allocation, layout = request.allocation, request.layout
    assert allocation is not None
    for first, last in request.runs(n):
        starts, valids = layout.columns(last)
        ids = allocation.block_ids.first(len(starts)).copy()
        yield ScheduledRequest(
            request.key,
            tuple(request.token_ids[first:last]),
            first,
            layout.slots(ids, first, last),
            ids,
            starts,
            valids,
            allocation.deltas.first(len(starts)) if allocation.links else _zeros(len(starts)),
            last == len(request.token_ids) and not request.is_compile,
            request.source.params,
            request.seed,
            len(request.token_ids) - request.num_prompt_tokens,
            request.index,
            **(_extras(request, first, last) if request.needs_extras else {}),
        )


def _extras(request: Request, first: int, last: int) -> dict[str, Any]:
    """What only some sampling parameters need."""
    params, made = request.source.params, request.token_ids[request.num_prompt_tokens :]
    extras: dict[str, Any] = {"prompt_ids": request.prompt_ids}
    if len(made) < params.min_tokens:
        extras["banned_ids"] = request.banned_ids
    if params.has_penalties:
        extras["output_ids"] = np.asarray(made, np.int64)
    if request.wants_prompt_logprobs:
        extras["prompt_targets"] = tuple(request.token_ids[first + 1 : min(last + 1, request.num_prompt_tokens)])
    return extras


@lru_cache(maxsize=4096)
def _zeros(n: int) -> npt.NDArray[np.int32]:
    out = np.zeros(n, np.int32)
    out.flags.writeable = False
    return out
