"""The engine's loop: schedule, run, update. One instance, one thread."""

from __future__ import annotations

import logging
import time
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import torch

from engine.api import BLOCK_SIZE, CacheMode, EngineInfo, EngineRequest, EngineStats, FinishReason, RequestOutput
from engine.cache import CacheManager
from engine.config import EngineConfig
from engine.counters import SchedulerCounters
from engine.output import OutputProcessor
from engine.request import Request
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.step import SchedulerOutput, StepResult
from engine.tokenizer import Tokenizer, load_tokenizer

DEFAULT_TOKEN_BUDGET = 512

log = logging.getLogger(__name__)


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
        self.token_budget = budget
        """Most tokens of a step."""
        pinned = config.pinned_tokens
        pin_budget = self.runner.num_blocks // 4 if pinned is None else pinned // BLOCK_SIZE
        self.cache = CacheManager(self.runner.num_blocks, config.enable_prefix_caching, pin_budget)
        self.scheduler = Scheduler(
            self.cache,
            max_model_len=self.runner.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=budget,
            mixed_token_budget=config.mixed_token_budget,
            enable_chunked_prefill=config.enable_chunked_prefill,
            link_recompute_tokens=config.link_recompute_tokens,
            eos_token_ids=frozenset(eos),
            seed=config.seed,
            clock=time.monotonic,
        )
        self._outputs = OutputProcessor(self.tokenizer, self.scheduler)
        self._needs_check = False
        self._num_checks = self._num_check_failures = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `ValueError`, naming the fault, for one that could never run."""
        vocab_size = self.runner.model_config.vocab_size
        request.params.verify(vocab_size)
        if request.cache is CacheMode.LINKED and (why := self.why_no_linking()):
            raise ValueError(f"cache linked is not possible: {why}")
        if any(t < 0 or t >= vocab_size for s in request.segments for t in s.token_ids):
            raise ValueError(f"the prompt holds a token id outside the vocabulary of {vocab_size}")
        for one in self.scheduler.add(request):
            self._outputs.open(one)
        self._needs_check = True

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request at once; returns the last outputs of what was still going on."""
        return [self._end(r, FinishReason.ABORT) for r in self.scheduler.abort(request_id)]

    def step(self) -> list[RequestOutput]:
        """Compute one step and return what it added to each request.

        A fault while computing, such as a failed allocation, ends only the requests that meet it alone as well.
        """
        output = self.scheduler.schedule()
        events = self.scheduler.update(output, self._execute(output))
        return self._outputs.process(events)

    def fail_all(self, message: str) -> list[RequestOutput]:
        """End every request with an error, after a fault in the control plane; their blocks are freed."""
        outputs = []
        for request in self.scheduler.requests():
            self.scheduler.finish(request, FinishReason.ERROR, message)
            outputs.append(self._end(request, FinishReason.ERROR, message))
        return outputs

    def check_when_idle(self) -> None:
        """Check the cache's invariants once after each time there was work; a fault is counted and logged."""
        if not self._needs_check or self.has_work:
            return
        self._needs_check = False
        self._num_checks += 1
        try:
            self.scheduler.check_integrity()
        except AssertionError:
            self._num_check_failures += 1
            log.exception("the cache's invariants do not hold")

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> RequestOutput:
        self._outputs.close(request)
        return RequestOutput(
            request.request_id, index=request.index, finish_reason=reason, error=error, stats=request.stats()
        )

    def _execute(self, output: SchedulerOutput) -> dict[int, StepResult]:
        """The step's results. If it fails, each request is tried alone, and those that fail again get the fault.

        Computing a token a second time writes the same KV to the same slots, so nothing of the failed try is left.
        """
        results, fault = self._try(output)
        if fault is None:
            return results
        # A request may have several stretches of tokens in a step; they stay together.
        alone = [SchedulerOutput(tuple(group)) for _, group in groupby(output.requests, key=attrgetter("key"))]
        if len(alone) > 1:
            log.warning("a step of %d requests failed, each is tried alone: %s", len(alone), fault)
            for one in alone:
                results |= self._execute(one)
            return results
        key = output.requests[0].key
        log.error("request %d failed: %s", key, fault)
        return {key: StepResult(fault=f"the request failed in the engine: {fault}")}

    def _try(self, output: SchedulerOutput) -> tuple[dict[int, StepResult], str | None]:
        """Results, or what went wrong. The exception is let go here, and with it the memory that its frames hold."""
        try:
            return self.runner.execute(output), None
        except torch.AcceleratorError:
            raise  # the device's context is lost: only a new process has one
        except Exception as e:  # whatever a request makes the model do must not end the others
            return {}, f"{type(e).__name__}: {e}"[:500]

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
            attention=f"{self.runner.attention_note}; layers: {self.runner.decoder_note}",
            weights=self.runner.weights_note,
            why_no_linking=self.why_no_linking(),
        )

    def why_no_linking(self) -> str:
        """Why no request may have linked passages; empty if they may."""
        if not self.config.enable_prefix_caching:
            return "enable_prefix_caching is off"
        if self.config.deterministic:
            return "deterministic promises the same text whatever is cached"
        if not self.runner.model_config.has_fixed_rotary:
            return f"the rotary table of {Path(self.config.model).name} depends on the length of the text"
        return ""

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
            linked_tokens=c.linked_tokens,
            computed_tokens=c.computed_tokens,
            output_tokens=c.output_tokens,
            num_preemptions=c.preemptions,
            num_finished=c.finished,
            num_aborted=c.aborted,
            num_failed=c.failed,
            pinned_blocks=blocks.pinned,
            num_compiled_passages=c.compiled_passages,
            num_recomputed_tokens=c.recomputed_tokens,
            num_non_finite=c.non_finite,
            num_integrity_checks=self._num_checks,
            num_integrity_failures=self._num_check_failures,
        )
