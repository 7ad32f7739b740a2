"""Chooses the next token from logits: greedy, or temperature, top-k and top-p (nucleus sampling, Holtzman et al. 2020).

A draw depends on the request's seed and on how many tokens it has made, and on nothing else: not on the batch, not on
preemption. Each draw takes one number from a counter-based generator (Philox, Salmon et al. 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.scheduler import ScheduledRequest

NON_FINITE = "the model gave non-finite logits"


def sample(logits: torch.Tensor, requests: Sequence[ScheduledRequest]) -> dict[str, int | str]:
    """Next token for each row.

    Args: logits [B, vocab_size], any float type; requests, one for each row.
    Returns token ids by request id; a row with a NaN or infinite logit gets a message instead.
    """
    logits = logits.float()
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    greedy = logits.argmax(dim=-1).tolist()
    return {
        r.request_id: NON_FINITE if not ok else token if r.params.temperature == 0 else _draw(logits[i], r)
        for i, (r, ok, token) in enumerate(zip(requests, finite, greedy, strict=True))
    }


def _draw(row: torch.Tensor, request: ScheduledRequest) -> int:
    """One token from a row [vocab_size] by inverting the cumulative distribution of what is kept."""
    params = request.params
    probabilities = torch.softmax(row / params.temperature, dim=-1)
    k = min(params.top_k, row.numel()) if params.top_k else row.numel()
    if k < row.numel():
        values, ids = torch.topk(probabilities, k)
    else:
        values, ids = torch.sort(probabilities, descending=True)
    cumulative = values.double().cumsum(0)
    total = float(cumulative[-1])
    if params.top_p < 1.0:
        # Smallest set that reaches p of what top-k left: up to and with the first token whose sum reaches it.
        kept = int(torch.searchsorted(cumulative, params.top_p * total)) + 1
        total = float(cumulative[min(kept, k) - 1])
    at = int(torch.searchsorted(cumulative, uniform(request.seed, request.output_index) * total, right=True))
    return int(ids[min(at, k - 1)])


def uniform(seed: int, index: int) -> float:
    """The index-th number in [0, 1) of a seed's stream."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=index)
    return float(np.random.Generator(bits).random())
