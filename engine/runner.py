"""Runs steps on the device: owns the weights and the KV pool, knows token ids and slots, not requests' lives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from engine.api import BLOCK_SIZE, TokenLogprobs
from engine.checkpoint import KEPT_KINDS, ModelConfig, iter_kept_weights, load_config
from engine.config import EngineConfig
from engine.model import KVPool, LlamaModel, WeightMaker
from engine.sampler import sample, token_logprobs
from engine.step import ScheduledRequest, SchedulerOutput, StepResult
from kernels.batch import AttentionBatch
from kernels.batch import Sequence as Rows
from kernels.cpu import NoKernels, load_kernels
from kernels.cpu_decoder import FEW_ROWS, CpuDecoder
from kernels.dispatch import make_attention
from kernels.weights import BlockKind

DEFAULT_POOL_BYTES = 1 << 30
SPARE_BLOCKS = 64
"""Blocks beyond a full-length request's own, for its segments' partly filled last blocks."""

LOGPROB_ROWS = 64


class ModelRunner:
    """Model, pool and sampler behind one call, `execute`."""

    def __init__(self, config: EngineConfig) -> None:
        config.verify()
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        path = Path(config.model)
        self.model_config = load_config(path)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = resolve_dtype(config.dtype, self.device)
        self.max_model_len = _max_model_len(config, self.model_config)
        self.kv_dtype = torch.int8 if _is_int8(config) else self.dtype
        self.num_blocks = _num_blocks(config, self.model_config, self.max_model_len, self.kv_dtype)
        c = self.model_config
        inv_freq = torch.from_numpy(c.inv_freq()).to(self.device)
        self._attention, self.attention_note = make_attention(
            self.device, c.num_q_heads, c.num_kv_heads, c.head_dim, inv_freq
        )
        keep, kind, how = weight_plan(config.quantization, self.device)
        is_ordered = config.deterministic or ours_is_faster(self.dtype, self.device)
        maker = WeightMaker(self.dtype, self.device, kind, is_ordered, not config.deterministic)
        self._model = LlamaModel(c, iter_kept_weights(path, c, keep), self._attention, maker)
        self.weights_note = f"{how}, {self._model.num_weight_bytes / 1e6:.0f} MB"
        self._pool = _make_pool(c, self.num_blocks, self.kv_dtype, self.device)
        self._decoder, self.decoder_note = self._make_decoder(config)
        is_partial = self._decoder is not None and self._decoder.is_dense and not is_ordered
        self._decoder_rows = FEW_ROWS if is_partial and self.kv_dtype != torch.int8 else None
        """Most rows of a step that the C++ layers run; None: any."""
        if self._decoder_rows is not None:
            self.decoder_note += f" up to {self._decoder_rows} rows"

    def _make_decoder(self, config: EngineConfig) -> tuple[CpuDecoder | None, str]:
        """The C++ layers where they can be had, in words why not. Raises `ValueError` where a setting needs them."""
        why = "the device is no CPU"
        if self.device.type == "cpu":
            try:
                return self._model.make_decoder(self._pool), "C++"
            except (NoKernels, ValueError) as e:
                why = str(e)
        for name, is_set in (("deterministic", config.deterministic), ("kv_cache_dtype int8", _is_int8(config))):
            if is_set:
                raise ValueError(f"{name} is not possible: {why}")
        return None, f"none ({why})"

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> dict[int, StepResult]:
        """Compute a step; by key, what it gave each request that needs a token or prompt log-probabilities."""
        requests = output.requests
        if not requests:
            return {}
        wanting = [r for r in requests if r.needs_token]
        hidden = self.hidden(
            output,
            [(r, len(r.token_ids) - 1) for r in wanting]
            + [(r, row) for r in requests for row in range(len(r.prompt_targets))],
        )
        results = sample(self._model.logits(hidden[: len(wanting)]), wanting) if wanting else {}
        at = len(wanting)
        for r in requests:
            if r.prompt_targets:
                rows = hidden[at : at + len(r.prompt_targets)]
                result = results.get(r.key, StepResult())
                results[r.key] = msgspec.structs.replace(result, prompt_logprobs=self._prompt_logprobs(rows, r))
                at += len(rows)
        return results

    def _prompt_logprobs(self, hidden: torch.Tensor, r: ScheduledRequest) -> tuple[TokenLogprobs, ...]:
        """In pieces, so that never more than LOGPROB_ROWS rows of the vocabulary's size are in memory."""
        out: list[TokenLogprobs] = []
        for at in range(0, len(hidden), LOGPROB_ROWS):
            logits = self._model.logits(hidden[at : at + LOGPROB_ROWS]).float()
            out += token_logprobs(logits, r.prompt_targets[at : at + LOGPROB_ROWS], r.params.prompt_logprobs or 0)
        return tuple(out)

    @torch.inference_mode()
    def logits(self, output: SchedulerOutput, rows: Sequence[tuple[ScheduledRequest, int]]) -> torch.Tensor:
        """Logits [len(rows), vocab_size] of some of the step's new tokens, given as (request, which of its tokens)."""
        return self._model.logits(self.hidden(output, rows))

    @torch.inference_mode()
    def hidden(self, output: SchedulerOutput, rows: Sequence[tuple[ScheduledRequest, int]]) -> torch.Tensor:
        """The same tokens' last hidden states [len(rows), hidden_size]; the KV of all new tokens is written."""
        requests = output.requests
        offsets = np.cumsum([0, *(len(r.token_ids) for r in requests)])
        first = {id(r): int(at) for r, at in zip(requests, offsets, strict=False)}
        batch = AttentionBatch(
            tuple(
                Rows(len(r.token_ids), r.start, r.block_ids, r.block_starts, r.block_valids, r.block_deltas)
                for r in requests
            )
        )
        token_ids = self._ids([t for r in requests for t in r.token_ids])
        positions = self._ids(np.concatenate([np.arange(r.start, r.start + len(r.token_ids)) for r in requests]))
        slots = self._ids(np.concatenate([r.slots for r in requests]))
        picks = self._ids([first[id(r)] + row for r, row in rows])
        if self._decoder is not None and (self._decoder_rows is None or len(slots) <= self._decoder_rows):
            return self._model.forward_with(self._decoder, token_ids, positions, slots, batch, picks)
        return self._model.forward(token_ids, positions, slots, self._attention.plan(batch), self._pool, picks)

    def _ids(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self.device)


def weight_plan(quantization: str, device: torch.device) -> tuple[frozenset[int], BlockKind | None, str]:
    """How weights are kept: formats that stay as they are in the file, the format to quantize to, and both in words.

    Raises `ValueError` for a setting that cannot be honoured here.
    """
    if quantization == "none":
        return frozenset(), None, "dense"
    why = "the device is no CPU" if device.type != "cpu" else ""
    try:
        if not why:
            load_kernels()
    except NoKernels as e:
        why = str(e)
    if quantization == "auto":
        return (frozenset(), None, f"dense ({why})") if why else (KEPT_KINDS, None, "as in the file")
    if why:
        raise ValueError(f"quantization {quantization} is not possible: {why}")
    return frozenset(), BlockKind.Q8_0 if quantization == "int8" else BlockKind.Q4_1, quantization


def ours_is_faster(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether our products with dense matrices are faster than torch's: in float32 without AVX-512, as measured.

    With AVX-512 torch uses vectors twice as wide, and bfloat16 arithmetic where there is any.
    """
    try:
        load_kernels()
    except NoKernels:
        return False
    return device.type == "cpu" and dtype == torch.float32 and "avx512f" not in _cpu_flags()


def _cpu_flags() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="ascii", errors="ignore") if path.exists() else ""


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch type a setting names; `auto` is bfloat16 where the device multiplies it in hardware, else float32."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    flags = _cpu_flags()
    has_bf16 = "avx512_bf16" in flags or "amx_bf16" in flags
    return torch.bfloat16 if has_bf16 else torch.float32


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_position_embeddings
    if config.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len ({config.max_model_len}) is above what the model was trained for "
            f"({model.max_position_embeddings})"
        )
    return config.max_model_len


def _is_int8(config: EngineConfig) -> bool:
    return config.kv_cache_dtype == "int8"


def _make_pool(model: ModelConfig, num_blocks: int, dtype: torch.dtype, device: torch.device) -> KVPool:
    """Written, not only reserved: no page of it is touched for the first time on a user's request."""
    shape = (model.num_layers, num_blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    k, v = (torch.empty(shape, dtype=dtype, device=device).fill_(0) for _ in range(2))
    if dtype != torch.int8:
        return KVPool(k, v)
    return KVPool(k, v, *(torch.empty(shape[:-1], device=device).fill_(0) for _ in range(2)))


def _num_blocks(config: EngineConfig, model: ModelConfig, max_model_len: int, dtype: torch.dtype) -> int:
    if config.kv_cache_tokens is not None:
        return config.kv_cache_tokens // BLOCK_SIZE
    head_bytes = model.head_dim * dtype.itemsize + (4 if dtype == torch.int8 else 0)
    bytes_per_block = 2 * model.num_layers * BLOCK_SIZE * model.num_kv_heads * head_bytes
    return max(DEFAULT_POOL_BYTES // bytes_per_block, -(-max_model_len // BLOCK_SIZE) + SPARE_BLOCKS)
