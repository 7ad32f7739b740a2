"""The ASGI application: routes, error handlers, and the life of the services behind them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from litestar import Litestar, Request, Response, get
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp

from gateway.access import Gate, check_role
from gateway.debug_routes import debug_cache, debug_scheduler
from gateway.embeddings import embeddings
from gateway.engine_client import EngineDead
from gateway.errors import ApiError, on_api_error, on_http_error, on_unexpected
from gateway.front import admit, observe
from gateway.keys import Role
from gateway.model_list import get_model, list_models
from gateway.openai_routes import chat_completions, completions, services_of
from gateway.openapi import openapi_document
from gateway.rag import RagPipeline
from gateway.rag_routes import (
    add_documents,
    delete_document,
    get_document,
    get_job,
    list_collections,
    list_documents,
    rag_query,
    retry_job,
)
from gateway.retrieval_client import RetrievalDead
from gateway.services import Services
from gateway.sse import ClientGone

log = logging.getLogger("foreword")
FORM_FIELDS = 100
"""Parts of a form beside its files; more than that, and it is refused while it is read."""
AnyRequest = Request[Any, Any, Any]


@get("/health/live")
async def health_live() -> dict[str, str]:
    """The process answers."""
    return {"status": "live"}


@get("/health/ready")
async def health_ready(request: AnyRequest) -> Response[dict[str, Any]]:
    """A question can be answered now: 200, else 503 with what is missing."""
    s = services_of(request)
    parts = {"engine": s.engine.is_ready, "retrieval": s.retrieval.is_ready, "draining": s.is_draining}
    status = 200 if s.is_ready else 503
    return Response({"status": "ready" if s.is_ready else "not ready", **parts}, status_code=status)


@get("/metrics", role=Role.ADMIN)
async def metrics(request: AnyRequest) -> Response[bytes]:
    """Prometheus metrics."""
    s = services_of(request)
    engine = retrieval = None
    try:
        engine = await s.engine.stats()
        retrieval = await s.retrieval.stats()
    except (EngineDead, RetrievalDead) as e:
        log.info("metrics without live gauges: %s", e)
    text = s.metrics.render(engine, retrieval, s.engine.num_restarts, s.admission)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@get("/docs/openapi.json")
async def openapi_json() -> dict[str, Any]:
    """The API's description in OpenAPI 3.1."""
    return openapi_document()


@get("/docs")
async def docs_page() -> Response[str]:
    """The API's description as a page, with nothing from another host."""
    return _page("docs.html")


@get("/")
async def home_page() -> Response[str]:
    """Ask questions in a browser."""
    return _page("index.html")


def _page(name: str) -> Response[str]:
    return Response(files("gateway").joinpath("static", name).read_text(encoding="utf-8"), media_type="text/html")


def on_client_gone(_: AnyRequest, __: ClientGone) -> Response[None]:
    """Nobody reads this; 499 is what proxies log for it."""
    return Response(None, status_code=499)


def make_app(services: Services, on_fatal: Callable[[str], None] | None = None) -> ASGIApp:
    """The application behind its gate: observed, then authenticated, then routed.

    Its services start with it and end with it; `on_fatal` hears why they could not start.
    """
    return observe(services)(Gate(_routes(services, on_fatal), services.keys))


def _routes(services: Services, on_fatal: Callable[[str], None] | None) -> Litestar:
    starting: list[asyncio.Task[None]] = []

    async def startup() -> None:
        starting.append(asyncio.create_task(_start(services, on_fatal)))

    async def shutdown() -> None:
        for task in starting:
            task.cancel()
        await services.stop()

    return Litestar(
        route_handlers=[
            *(health_live, health_ready, metrics, openapi_json, docs_page, home_page),
            *(rag_query, add_documents, list_documents, get_document, delete_document, get_job),
            *(retry_job, list_collections),
            *(debug_scheduler, debug_cache),
            *(chat_completions, completions, embeddings, list_models, get_model),
        ],
        on_startup=[startup],
        on_shutdown=[shutdown],
        guards=[check_role],
        middleware=[admit(services)],
        exception_handlers={
            ApiError: on_api_error,
            ClientGone: on_client_gone,
            HTTPException: on_http_error,
            Exception: on_unexpected,
        },
        openapi_config=None,
        multipart_form_part_limit=services.settings.gateway.max_files + FORM_FIELDS,
        state=State({"services": services, "pipeline": RagPipeline(services)}),
        request_max_body_size=services.settings.gateway.max_body_bytes,
        logging_config=None,
    )


async def _start(services: Services, on_fatal: Callable[[str], None] | None) -> None:
    try:
        await services.start()
    except Exception as e:  # whatever it is, the server cannot serve: say so and end
        log.error("cannot start: %s", e)
        if on_fatal is not None:
            on_fatal(str(e))
