"""OpenTelemetry traces: one for each generating request that was let in, one span for each stage. Off by default.

Stages are noted while a request runs, as plain times (`gateway.turns.stage`), and become spans when it has ended: so
no library is imported, and next to nothing is spent, where traces are off. A client's `traceparent` is followed. Spans
hold numbers, ids and the tenant, never text.

  request            from arrival to the last byte
    admit            bounds, quotas
    retrieve         the search, with embed, lexical, dense, fuse and rerank inside, as the worker timed them
    assemble         text to tokens
    queue            the gateway's queue and the engine's
    prefill, decode  in the engine, for each prompt
    cite
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gateway.admission import Ticket
from gateway.settings import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

MISSING = "traces needs OpenTelemetry: pip install 'foreword[otel]'"


class Tracing:
    """Turns the stages of ended requests into spans for an exporter."""

    def __init__(self, exporter: SpanExporter, *, batched: bool = True) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": "foreword"}))
        processor = BatchSpanProcessor if batched else SimpleSpanProcessor
        self._provider.add_span_processor(processor(exporter))
        self._tracer = self._provider.get_tracer("foreword")
        self._propagator = TraceContextTextMapPropagator()
        # Stages are noted by a clock that never jumps; spans want the time of day.
        self._offset_s = time.time() - time.monotonic()

    def emit(self, name: str, ticket: Ticket, headers: Mapping[str, str], attributes: dict[str, Any]) -> None:
        """One ended request, whose root span is called `name`."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        parent = self._propagator.extract(headers)
        arrived_s = min([ticket.arrived_s, *(s.start_s for s in ticket.stages)])
        root = self._tracer.start_span(name, parent, start_time=self._ns(arrived_s), attributes=attributes)
        contexts = {"": set_span_in_context(root)}
        for stage in ticket.stages:
            context = contexts.get(stage.parent, contexts[""])
            span = self._tracer.start_span(stage.name, context, start_time=self._ns(stage.start_s))
            span.end(self._ns(stage.end_s))
            contexts[stage.name] = set_span_in_context(span)
        if ticket.fault is not None:
            root.set_status(Status(StatusCode.ERROR, ticket.fault))
        root.end(self._ns(time.monotonic()))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _ns(self, at_s: float) -> int:
        return int((at_s + self._offset_s) * 1e9)


def make_tracing(kind: str, endpoint: str) -> Tracing | None:
    """What the setting `traces` asks for. Raises `SettingsError` where the library is not installed."""
    if kind == "off":
        return None
    try:
        if kind == "console":
            import sys

            from opentelemetry.sdk.trace.export import ConsoleSpanExporter

            return Tracing(ConsoleSpanExporter(out=sys.stderr), batched=False)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return Tracing(OTLPSpanExporter(endpoint=endpoint))
    except ImportError as e:
        raise SettingsError(MISSING) from e
