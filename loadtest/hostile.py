"""Bodies that no route may take, and none may be hurt by."""

from __future__ import annotations

import json
import random
from typing import Any


def hostile_body(rng: random.Random) -> tuple[bytes, dict[str, str]]:
    """Content and headers of a request that is wrong for each of the routes."""
    make = rng.choice((_broken, _wrong_types, _out_of_range, _too_long, _deep, _noise, _unknown))
    return make(rng), rng.choice(({}, {"X-Request-Id": "a b"}, {"Content-Type": "text/plain"}))


def _both(**fields: Any) -> bytes:
    """A body with the fields of all routes, so that each finds a fault in it."""
    return json.dumps({"model": "default", "messages": [{"role": "user", "content": "x"}], **fields}).encode()


def _broken(rng: random.Random) -> bytes:
    whole = _both(max_tokens=3)
    return whole[: rng.randrange(len(whole))]


def _wrong_types(rng: random.Random) -> bytes:
    wrong: Any = rng.choice((None, 5, "x", [], {}, [[[]]], {"a": None}))
    return _both(messages=wrong if wrong != "x" else 7, query=5, prompt={"a": wrong}, documents=wrong)


def _out_of_range(rng: random.Random) -> bytes:
    wrong = {"temperature": -1, "top_p": 0, "n": 10**9, "max_tokens": 2**70, "seed": 2**80, "presence_penalty": 1e308}
    name, value = rng.choice(list(wrong.items()))
    return _both(**{name: value})


def _too_long(rng: random.Random) -> bytes:
    text = rng.choice(("word ", "é", "<|im_end|>", "\u0000", "🦊")) * rng.choice((50_000, 300_000))
    return _both(messages=[{"role": "user", "content": text}])


def _deep(rng: random.Random) -> bytes:
    depth = rng.choice((200, 20_000))
    return b'{"model": ' + b"[" * depth + b"]" * depth + b"}"


def _noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 100, 100_000)))


def _unknown(rng: random.Random) -> bytes:
    return _both(**{f"field{rng.randrange(10**6)}": 1})
