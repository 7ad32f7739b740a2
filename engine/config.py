"""Engine settings, one frozen struct; the names are those people know from vLLM."""

from __future__ import annotations

import msgspec

from engine.api import BLOCK_SIZE

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "int8")
QUANTIZATIONS = ("auto", "none", "int8", "int4")


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an engine is started with. `verify` refuses values it cannot honour, by name."""

    model: str = "SmolLM2-135M-Instruct"
    """Model to serve: a GGUF file, a Hugging Face folder, or a name from `foreword models list`."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together. Default: what the model was trained for."""
    enable_prefix_caching: bool = True
    """Reuse KV of prompts seen before."""
    enable_chunked_prefill: bool = True
    """Split long prompts over steps, so that running answers go on meanwhile."""
    max_num_seqs: int = 64
    """Most requests that run at once; never more than half of max_num_batched_tokens."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step. Default: 512, or max_model_len where chunked prefill is off."""
    mixed_token_budget: int | None = None
    """Token budget of a step beside running answers, which bounds the time between their tokens. Default: no other."""
    kv_cache_tokens: int | None = None
    """Tokens the KV pool holds, in blocks of 16. Default: what fits 1 GiB, or one full-length request if more."""
    pinned_tokens: int | None = None
    """Tokens of system texts used more than once that are evicted last. Default: a quarter of the KV pool; 0: none."""
    link_recompute_tokens: int = 16
    """Tokens at the beginning of each linked passage that are computed in their new place: a multiple of 16."""
    dtype: str = "auto"
    """Weights and KV: float32, bfloat16, float16, or auto: bfloat16 where the device is fast at it, else float32."""
    quantization: str = "auto"
    """Weights: auto (a GGUF file's Q8_0, Q4_0 and Q4_1 blocks stay as they are), none (dense), int8, int4."""
    kv_cache_dtype: str = "auto"
    """Keys and values: auto (the type of dtype), or int8 with a scale for each token and head, on a CPU."""
    deterministic: bool = False
    """Same greedy text to the last bit whatever is cached, in the batch, or preempted; on a CPU, by the C++ layers."""
    seed: int = 0
    """Seed of the engine's own random numbers, for requests that bring none."""
    num_threads: int | None = None
    """CPU threads of the engine process. Default: all cores."""

    def verify(self) -> None:
        """Raise `ValueError`, whose message begins with the field's name, if a value cannot be honoured."""
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "mixed_token_budget"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < 32:
            raise ValueError(f"kv_cache_tokens must be at least 32, got {self.kv_cache_tokens}")
        if self.mixed_token_budget is not None and not self.enable_chunked_prefill:
            raise ValueError("mixed_token_budget needs enable_chunked_prefill, since it makes chunks smaller")
        if self.pinned_tokens is not None and self.pinned_tokens < 0:
            raise ValueError(f"pinned_tokens must be 0 or more, got {self.pinned_tokens}")
        if self.link_recompute_tokens < 0 or self.link_recompute_tokens % BLOCK_SIZE:
            raise ValueError(
                f"link_recompute_tokens must be 0 or a multiple of {BLOCK_SIZE}, got {self.link_recompute_tokens}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {self.quantization!r}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}")
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {self.num_threads}")
