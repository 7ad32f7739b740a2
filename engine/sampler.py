"""Chooses the next token from logits: greedy, or temperature, min-p, top-k and top-p (nucleus, Holtzman et al. 2020).

A draw depends on the request's seed and on how many tokens it has made, and on nothing else: not on the batch, not on
preemption. Each draw takes one number from a counter-based generator (Philox, Salmon et al. 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.api import TokenLogprobs
from engine.step import ScheduledRequest, StepResult

NON_FINITE = "the model gave non-finite logits"
NO_TOKEN = "min_tokens and stop_token_ids leave no token to choose"


def sample(logits: torch.Tensor, requests: Sequence[ScheduledRequest]) -> dict[int, StepResult]:
    """Next token for each row, by the request's key.

    Args: logits [B, vocab_size], any float type; requests, one for each row. A row with a NaN or infinite logit gets a
    fault instead, and so does one of which nothing is left to choose.
    """
    logits = logits.float()
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    greedy = logits.argmax(dim=-1).tolist()
    out: dict[int, StepResult] = {}
    for i, request in enumerate(requests):
        if not finite[i]:
            out[request.key] = StepResult(fault=NON_FINITE, is_non_finite=True)
            continue
        row, token = logits[i], greedy[i]
        if _changes_logits(request):
            row = _changed(row, request)
            token = int(row.argmax())
            if row[token] == -torch.inf:
                out[request.key] = StepResult(fault=NO_TOKEN)
                continue
        if not request.params.is_greedy:
            token = _draw(row, request)
        k = request.params.logprobs
        logprobs = None if k is None else token_logprobs(logits[i : i + 1], [token], k)[0]
        out[request.key] = StepResult(token, logprobs)
    return out


def token_logprobs(logits: torch.Tensor, targets: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Log-probability and rank of each row's target, and the k best of the row.

    Args: logits float32 [N, vocab_size]; targets, N token ids.
    """
    logprobs = logits.log_softmax(dim=-1)
    ids = torch.as_tensor(targets, device=logits.device)[:, None]
    own = logprobs.gather(1, ids)
    ranks = ((logprobs > own).sum(dim=-1) + 1).tolist()
    values, best = torch.topk(logprobs, k, dim=-1)
    tops = zip(best.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(token, value, rank, tuple(zip(*top, strict=True)))
        for token, value, rank, top in zip(targets, own[:, 0].tolist(), ranks, tops, strict=True)
    ]


def _changes_logits(r: ScheduledRequest) -> bool:
    return bool(r.params.has_penalties or r.params.logit_bias or r.banned_ids)


def _changed(row: torch.Tensor, request: ScheduledRequest) -> torch.Tensor:
    """A copy of a row with bias, penalties and bans applied.

    Repetition: Keskar et al. 2019 (CTRL), section 4.1, over prompt and output. Frequency and presence: OpenAI's API
    reference, over the output.
    """
    row, params = row.clone(), request.params
    if params.logit_bias:
        row[list(params.logit_bias)] += torch.as_tensor(
            list(params.logit_bias.values()), dtype=row.dtype, device=row.device
        )
    made = request.output_ids
    if params.repetition_penalty != 1.0:
        both = [ids for ids in (request.prompt_ids, made) if ids is not None]
        seen = torch.from_numpy(np.unique(np.concatenate(both))).to(row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if made is not None and len(made) and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(made, return_counts=True)
        taken = params.frequency_penalty * counts + params.presence_penalty
        row[torch.from_numpy(ids).to(row.device)] -= torch.from_numpy(taken).to(row)
    if request.banned_ids:
        row[list(request.banned_ids)] = -torch.inf
    return row


def _draw(row: torch.Tensor, request: ScheduledRequest) -> int:
    """One token from a row [vocab_size] by inverting the cumulative distribution of what is kept."""
    params, k = request.params, len(row)
    # The best logit is taken off first: the exponentials stay finite at any temperature.
    probabilities = torch.softmax((row - row.max()) / params.temperature, dim=-1)
    if params.top_k:
        k = min(params.top_k, k)
    if k < len(row):
        values, ids = torch.topk(probabilities, k)
    else:
        values, ids = torch.sort(probabilities, descending=True, stable=True)
    if params.min_p > 0.0:
        k = max(1, int((values >= params.min_p * values[0]).sum()))
    cumulative = values[:k].double().cumsum(0)
    if params.top_p < 1.0:
        # Smallest set that reaches p of what is left: up to and with the first token whose sum reaches it.
        k = min(int(torch.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1, k)
    at = uniform(request.seed, request.output_index, request.stream) * float(cumulative[k - 1])
    return int(ids[min(int(torch.searchsorted(cumulative, at, right=True)), k - 1)])


def uniform(seed: int, index: int, stream: int = 0) -> float:
    """The index-th number in [0, 1) of one of a seed's streams."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=[index, stream, 0, 0])
    return float(np.random.Generator(bits).random())
