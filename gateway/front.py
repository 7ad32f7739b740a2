"""What stands before every route: request ids, metrics and access lines; refusals while draining; admission.

Two layers, so that authentication can stand between them. A refusal is written here, before the body is read.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admission import Refused, Stage, Ticket, caller_in
from gateway.errors import ApiError, headers_of
from gateway.logs import ACCESS
from gateway.services import Services, shutting_down
from gateway.turns import TICKET

WATCHING = ("/health/", "/metrics", "/debug/")
"""Paths that answer to the end."""

Middleware = Callable[[ASGIApp], ASGIApp]


def observe(services: Services) -> Middleware:
    """Middleware that echoes the request id, counts by route and status, and writes a line for each request."""

    def factory(app: ASGIApp) -> ASGIApp:
        async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != ScopeType.HTTP:
                await app(scope, receive, send)
                return
            scope.setdefault("state", {})  # a server without a lifespan brings none
            started, status = time.perf_counter(), 0
            request_id = _request_id(scope)

            async def observed(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                    status = int(message["status"])
                    services.metrics.requests.labels(_route(scope), str(status)).inc()
                await send(message)

            is_watching = scope["path"].startswith(WATCHING)
            if not is_watching:
                services.begin_request()
            try:
                await app(scope, receive, observed)
            finally:
                if not is_watching:
                    services.end_request()
                _report(services, scope, request_id.decode(), status, time.perf_counter() - started)

        return middleware

    return factory


def admit(services: Services) -> Middleware:
    """Middleware that refuses new work while draining, and lets generating requests in or not."""

    def factory(app: ASGIApp) -> ASGIApp:
        async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != ScopeType.HTTP or scope["path"].startswith(WATCHING):
                await app(scope, receive, send)
                return
            ticket: Ticket | None = None
            started = services.admission.now()
            try:
                if services.is_draining:
                    raise shutting_down()
                if scope["route_handler"].opt.get("generates"):  # the engine works for this route
                    ticket = services.admission.admit(caller_in(scope), _route(scope), _body_bytes(scope))
            except Refused as e:
                services.metrics.refusals.labels(e.reason).inc()
                await _respond(e, send)
                return
            if ticket is None:
                await app(scope, receive, send)
                return
            ticket.stages.append(Stage("admit", started, services.admission.now()))
            scope["state"]["ticket"] = ticket
            token = TICKET.set(ticket)
            try:
                await app(scope, receive, send)
            finally:
                TICKET.reset(token)
                services.admission.close(ticket)

        return middleware

    return factory


async def _respond(error: ApiError, send: Send) -> None:
    body = msgspec.json.encode(error.body())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in headers_of(error).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _route(scope: Scope) -> str:
    """The route's template, never what the client wrote."""
    return str(scope.get("path_template") or "unknown")


def _body_bytes(scope: Scope) -> int:
    """Length of the body as the headers say it; 0 where they do not, as the estimate then learns from the prompts."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


def _request_id(scope: Scope) -> bytes:
    """The client's id if it is harmless, else a new one. Only echoed and logged, never used as a key."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and re.fullmatch(rb"[\x21-\x7e]{1,128}", value):
            return bytes(value)
    return uuid.uuid4().hex.encode()


def _report(services: Services, scope: Scope, request_id: str, status: int, total_s: float) -> None:
    """An access line and a trace, where they are wanted, without a word of what was asked or answered."""
    ticket: Ticket | None = scope.get("state", {}).get("ticket")
    is_logged = ACCESS.isEnabledFor(logging.INFO)
    if not is_logged and services.tracing is None:
        return
    fields: dict[str, Any] = {
        "request_id": request_id,
        "method": scope.get("method"),
        "route": _route(scope),
        "status": status or 499,
        "ms": round(total_s * 1e3, 2),
        "tenant": caller_in(scope).tenant,
    }
    if ticket is not None:
        fields |= {
            "prompt_tokens": ticket.num_prompt_tokens,
            "cached_tokens": ticket.num_cached_tokens,
            "output_tokens": ticket.num_output_tokens,
            "engine_ids": ticket.engine_ids,
            "fault": ticket.fault,
        }
    if is_logged:
        ACCESS.info("request", extra={"fields": fields})
    if services.tracing is not None and ticket is not None:
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        attributes = {k: v for k, v in fields.items() if v is not None}
        services.tracing.emit(f"{fields['method']} {fields['route']}", ticket, headers, attributes)
