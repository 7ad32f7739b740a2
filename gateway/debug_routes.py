"""What the server is doing, for its operator: numbers, ids and tenants, never text."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, get

from engine import EngineView
from gateway.admission import Admission, Turn
from gateway.engine_client import EngineDead
from gateway.errors import ApiError
from gateway.openai_routes import services_of
from gateway.services import Services

AnyRequest = Request[Any, Any, Any]


@get("/debug/scheduler")
async def debug_scheduler(request: AnyRequest) -> dict[str, Any]:
    """Requests that wait in the gateway, and that wait and run in the engine; the pool's accounting."""
    services = services_of(request)
    view = await _view(services)
    return {
        "queue": _queue(services.admission),
        "engine": [msgspec.to_builtins(r) for r in view.requests],
        "pool": msgspec.to_builtins(view.pool),
    }


@get("/debug/cache")
async def debug_cache(request: AnyRequest) -> dict[str, Any]:
    """The pool's accounting, and the largest cached prefixes."""
    view = await _view(services_of(request))
    prefixes = [msgspec.to_builtins(p) for p in view.prefixes]
    return {"pool": msgspec.to_builtins(view.pool), "num_prefixes": view.num_prefixes, "prefixes": prefixes}


async def _view(services: Services) -> EngineView:
    try:
        return await services.engine.view()
    except EngineDead as e:
        raise ApiError("engine_unavailable", str(e)) from e


def _queue(admission: Admission) -> dict[str, Any]:
    limits = admission.limits
    return {
        "num_queued": admission.num_queued,
        "max_queued_requests": limits.max_queued_requests,
        "num_queued_tokens": admission.num_queued_tokens,
        "max_queued_tokens": limits.max_queued_tokens,
        "num_with_engine": admission.num_running,
        "max_active": limits.max_active,
        "waiting": [_turn(admission, t) for t in admission.waiting()],
    }


def _turn(admission: Admission, turn: Turn) -> dict[str, Any]:
    ticket = turn.ticket
    return {
        "tenant": ticket.caller.tenant,
        "route": ticket.route,
        "num_prompt_tokens": turn.num_tokens,
        "seats": turn.seats,
        "age_s": round(admission.elapsed_s(ticket), 3),
    }
