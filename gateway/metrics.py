"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine import EngineStats, FinishReason, RequestStats
from gateway.admission import Admission
from retrieval import RetrievalStats, SearchResult

_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters and histograms that handlers feed, and gauges set when they are read."""

    def __init__(self) -> None:
        r = self._registry = CollectorRegistry()
        self.requests = Counter("foreword_requests", "Requests by route and status", ["route", "status"], registry=r)
        self.ttft = Histogram(
            "foreword_time_to_first_token_seconds",
            "Arrival to first token, queue included",
            registry=r,
            buckets=_SECONDS,
        )
        self.tpot = Histogram(
            "foreword_time_per_output_token_seconds",
            "Time per output token after the first",
            registry=r,
            buckets=_TOKEN_SECONDS,
        )
        self.itl = Histogram(
            "foreword_inter_token_latency_seconds",
            "Time between two outputs of an answer",
            registry=r,
            buckets=_TOKEN_SECONDS,
        )
        self.e2e = Histogram("foreword_e2e_request_latency_seconds", "Arrival to end", registry=r, buckets=_SECONDS)
        self.queue = Histogram(
            "foreword_queue_time_seconds", "Wait in the gateway's and the engine's queue", registry=r, buckets=_SECONDS
        )
        self.prefill = Histogram(
            "foreword_prefill_time_seconds", "From the queue to the first token", registry=r, buckets=_SECONDS
        )
        self.prompt_tokens = Counter(
            "foreword_prompt_tokens", "Prompt tokens by how they were had", ["kind"], registry=r
        )
        self.output_tokens = Counter("foreword_output_tokens", "Tokens generated", registry=r)
        self.finish_reasons = Counter(
            "foreword_finished_requests", "Continuations that ended, by reason", ["reason"], registry=r
        )
        self.refusals = Counter(
            "foreword_refused_requests",
            "Requests that were not let in or did not get their turn",
            ["reason"],
            registry=r,
        )
        self.aborted = Counter(
            "foreword_aborted_requests", "Prompts that ended before their answer did", ["reason"], registry=r
        )
        self._queued = Gauge("foreword_requests_queued", "Requests in the gateway's queue", registry=r)
        self._queued_tokens = Gauge("foreword_queued_prompt_tokens", "Prompt tokens in the gateway's queue", registry=r)
        self._usage = Gauge("foreword_kv_usage_ratio", "Share of the KV pool that running requests use", registry=r)
        self.stage = Histogram(
            "foreword_retrieval_stage_seconds",
            "Retrieval time by stage; search holds lexical, dense and fuse",
            ["stage"],
            registry=r,
            buckets=_SECONDS,
        )
        self._running = Gauge("foreword_requests_running", "Requests that have KV blocks", registry=r)
        self._waiting = Gauge("foreword_requests_waiting", "Requests in the engine's queue", registry=r)
        self._blocks = Gauge("foreword_kv_blocks", "KV blocks by state", ["state"], registry=r)
        self._preemptions = Gauge("foreword_preemptions", "Preemptions since the engine started", registry=r)
        self._recomputed = Gauge(
            "foreword_recomputed_tokens", "Tokens computed again because of preemption", registry=r
        )
        self._pinned = Gauge("foreword_kv_blocks_pinned", "KV blocks of system texts that are evicted last", registry=r)
        self._compiled = Gauge(
            "foreword_compiled_passages", "Passages computed so that prompts can link them", registry=r
        )
        self._non_finite = Gauge(
            "foreword_non_finite_logits", "Requests ended because the model gave NaN or infinite logits", registry=r
        )
        self._checks = Gauge("foreword_integrity_checks", "Idle checks of the cache's invariants", registry=r)
        self._check_failures = Gauge("foreword_integrity_failures", "Checks that found one broken", registry=r)
        self._failed = Gauge("foreword_failed_requests", "Requests that ended with an error in the engine", registry=r)
        self._aborts = Gauge("foreword_aborts", "Aborted requests since the engine started", registry=r)
        self._restarts = Gauge("foreword_engine_restarts", "Times the engine was started again", registry=r)
        self._documents = Gauge("foreword_documents", "Documents in all collections", registry=r)
        self._passages = Gauge("foreword_passages", "Passages in all collections", registry=r)
        for kind in ("prefix", "linked", "computed"):
            self.prompt_tokens.labels(kind)

    def finished(self, stats: RequestStats, total_s: float, index: int, reason: FinishReason) -> None:
        """Count a continuation that ended; the prompt counts once, with the first."""
        if index == 0:
            self.prompt_tokens.labels("prefix").inc(stats.counts.prefix)
            self.prompt_tokens.labels("linked").inc(stats.counts.linked)
            self.prompt_tokens.labels("computed").inc(stats.counts.computed)
        self.output_tokens.inc(stats.num_output_tokens)
        self.queue.observe(stats.queue_s)
        self.prefill.observe(stats.prefill_s)
        self.finish_reasons.labels(reason.value).inc()
        self.e2e.observe(total_s)
        if stats.num_output_tokens > 1:
            self.tpot.observe(stats.decode_s / (stats.num_output_tokens - 1))

    def searched(self, found: SearchResult) -> None:
        """Observe a search's stages."""
        times = {"embed": found.embed_ms, "search": found.search_ms, **found.stages_ms}
        if found.rerank_ms:
            times["rerank"] = found.rerank_ms
        for stage, ms in times.items():
            self.stage.labels(stage).observe(ms / 1e3)

    def render(
        self, engine: EngineStats | None, retrieval: RetrievalStats | None, num_restarts: int, admission: Admission
    ) -> bytes:
        """The text that Prometheus reads."""
        self._queued.set(admission.num_queued)
        self._queued_tokens.set(admission.num_queued_tokens)
        self._restarts.set(num_restarts)
        if engine is not None:
            self._running.set(engine.num_running)
            self._waiting.set(engine.num_waiting)
            for state in ("free", "evictable", "protected", "held"):
                self._blocks.labels(state).set(getattr(engine, f"{state}_blocks"))
            self._usage.set((engine.protected_blocks + engine.held_blocks) / engine.num_blocks)
            self._preemptions.set(engine.num_preemptions)
            self._recomputed.set(engine.num_recomputed_tokens)
            self._pinned.set(engine.pinned_blocks)
            self._compiled.set(engine.num_compiled_passages)
            self._non_finite.set(engine.num_non_finite)
            self._checks.set(engine.num_integrity_checks)
            self._check_failures.set(engine.num_integrity_failures)
            self._failed.set(engine.num_failed)
            self._aborts.set(engine.num_aborted)
        if retrieval is not None:
            self._documents.set(retrieval.num_documents)
            self._passages.set(retrieval.num_passages)
        return generate_latest(self._registry)
