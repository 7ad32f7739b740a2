"""Log-probabilities in the shapes of OpenAI's API, and of prompt tokens in vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine import Tokenizer, TokenLogprobs


def chat_logprobs(tokenizer: Tokenizer, items: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion: one entry for each token made, the one that ends the text included."""
    content = []
    for item in items:
        tops = [_entry(tokenizer, token, value) for token, value in item.top]
        content.append({**_entry(tokenizer, item.token_id, item.logprob), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, items: Sequence[TokenLogprobs], offset: int = 0) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. Args: offset, characters of the text before the first token."""
    tokens = [_text(tokenizer, item.token_id) for item in items]
    offsets = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
    tops = [{_text(tokenizer, t): value for t, value in reversed(item.top)} for item in items]
    return {
        "tokens": tokens,
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def prompt_logprobs(tokenizer: Tokenizer, items: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """One entry for each prompt token, by token id; the first token has none."""
    out: list[dict[str, Any] | None] = [None]
    for item in items:
        ranked = [(token, value, rank + 1) for rank, (token, value) in enumerate(item.top)]
        rows = [*ranked, (item.token_id, item.logprob, item.rank)]
        out.append({str(t): {"logprob": v, "rank": r, "decoded_token": _text(tokenizer, t)} for t, v, r in rows})
    return out


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(raw)}
