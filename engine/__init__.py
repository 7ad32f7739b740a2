"""Tokens in, tokens out: paged KV cache, radix prefix cache, chunked prefill, continuous batching.

Importing this package brings only records and the control plane; torch is imported when `LLM` is first touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.api import (
    BLOCK_SIZE,
    SHARED_SCOPE,
    CacheMode,
    EngineInfo,
    EngineRequest,
    EngineStats,
    FinishReason,
    RequestOutput,
    RequestStats,
    SamplingParams,
    Segment,
    SegmentKind,
    TokenCounts,
    TokenLogprobs,
)
from engine.config import EngineConfig
from engine.wire import Abort, Add, AskStats, Failed, FromEngine, Outputs, Ready, Stats

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.tokenizer import Tokenizer, load_tokenizer

_LAZY = {
    "LLM": "engine.llm",
    "Tokenizer": "engine.tokenizer",
    "load_tokenizer": "engine.tokenizer",
}

__all__ = [
    "BLOCK_SIZE",
    "LLM",
    "SHARED_SCOPE",
    "Abort",
    "Add",
    "AskStats",
    "CacheMode",
    "EngineConfig",
    "EngineInfo",
    "EngineRequest",
    "EngineStats",
    "Failed",
    "FinishReason",
    "FromEngine",
    "Outputs",
    "Ready",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "Segment",
    "SegmentKind",
    "Stats",
    "TokenCounts",
    "TokenLogprobs",
    "Tokenizer",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
