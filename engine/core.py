"""The engine's loop: schedule, run, update. One instance, one thread."""

from __future__ import annotations

import time
from pathlib import Path

from engine.api import EngineInfo, EngineRequest, EngineStats, FinishReason, RequestOutput
from engine.cache import CacheManager
from engine.config import EngineConfig
from engine.output import OutputProcessor
from engine.runner import ModelRunner
from engine.scheduler import Scheduler, SchedulerCounters
from engine.tokenizer import Tokenizer, load_tokenizer

DEFAULT_TOKEN_BUDGET = 512


class EngineCore:
    """Scheduler, runner and text behind `add`, `abort` and `step`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.runner = ModelRunner(config)
        self.tokenizer: Tokenizer = load_tokenizer(Path(config.model))
        eos = self.tokenizer.eos_token_ids | set(self.runner.model_config.eos_token_ids)
        budget = config.max_num_batched_tokens
        if budget is None:
            budget = DEFAULT_TOKEN_BUDGET if config.enable_chunked_prefill else self.runner.max_model_len
        self.cache = CacheManager(self.runner.num_blocks, config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.cache,
            max_model_len=self.runner.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=config.enable_chunked_prefill,
            eos_token_ids=frozenset(eos),
            seed=config.seed,
            clock=time.monotonic,
        )
        self._outputs = OutputProcessor(self.tokenizer, self.scheduler)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `ValueError`, naming the fault, for one that could never run."""
        vocab_size = self.runner.model_config.vocab_size
        request.params.verify(vocab_size)
        if any(t < 0 or t >= vocab_size for s in request.segments for t in s.token_ids):
            raise ValueError(f"the prompt holds a token id outside the vocabulary of {vocab_size}")
        self._outputs.open(self.scheduler.add(request))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once; returns its last output, or None if it had ended."""
        request = self.scheduler.abort(request_id)
        if request is None:
            return None
        self._outputs.close(request_id)
        return RequestOutput(request_id, finish_reason=FinishReason.ABORT, stats=request.stats())

    def step(self) -> list[RequestOutput]:
        """Compute one step and return what it added to each request."""
        output = self.scheduler.schedule()
        events = self.scheduler.update(output, self.runner.execute(output))
        return self._outputs.process(events)

    def fail_all(self, message: str) -> list[RequestOutput]:
        """End every request with an error, after a step that failed; their blocks are freed."""
        outputs = []
        for request in self.scheduler.requests():
            self.scheduler.finish(request, FinishReason.ERROR, message)
            self._outputs.close(request.request_id)
            out = RequestOutput(
                request.request_id, finish_reason=FinishReason.ERROR, error=message, stats=request.stats()
            )
            outputs.append(out)
        return outputs

    def reset_counters(self) -> None:
        """Forget what was counted so far, after warming up."""
        self.scheduler.counters = SchedulerCounters()

    def info(self) -> EngineInfo:
        """What this engine serves."""
        path = Path(self.config.model)
        return EngineInfo(
            model=path.stem if path.is_file() else path.name,
            model_path=str(path),
            max_model_len=self.runner.max_model_len,
            num_blocks=self.runner.num_blocks,
            vocab_size=self.runner.model_config.vocab_size,
            dtype=str(self.runner.dtype).removeprefix("torch."),
            device=self.runner.device.type,
            attention=self.runner.attention_note,
        )

    def stats(self) -> EngineStats:
        """Counters and gauges of now."""
        blocks, c = self.cache.counts(), self.scheduler.counters
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            free_blocks=blocks.free,
            evictable_blocks=blocks.evictable,
            protected_blocks=blocks.protected,
            held_blocks=blocks.held,
            num_blocks=blocks.total,
            prompt_tokens=c.prompt_tokens,
            prefix_tokens=c.prefix_tokens,
            linked_tokens=0,
            computed_tokens=c.computed_tokens,
            output_tokens=c.output_tokens,
            num_preemptions=c.preemptions,
            num_finished=c.finished,
            num_aborted=c.aborted,
            num_failed=c.failed,
        )
