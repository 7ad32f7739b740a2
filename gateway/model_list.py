"""GET /v1/models: what is served, by the names that requests may use."""

from __future__ import annotations

from typing import Any

from litestar import Request, get

from gateway.access import caller_of
from gateway.chat_rag import MODEL_PREFIX
from gateway.embeddings import embedder_name
from gateway.errors import ApiError
from gateway.keys import Caller, Role
from gateway.openai_routes import services_of
from gateway.rag import guarded
from gateway.services import Services

AnyRequest = Request[Any, Any, Any]


@get("/v1/models", role=Role.QUERY)
async def list_models(request: AnyRequest) -> dict[str, Any]:
    """The model, which `default` means too, the same over each collection, and the embedder."""
    return {"object": "list", "data": await _models(services_of(request), caller_of(request))}


@get("/v1/models/{model:str}", role=Role.QUERY)
async def get_model(request: AnyRequest, model: str) -> dict[str, Any]:
    """One of them."""
    rows = await _models(services_of(request), caller_of(request))
    found = next((row for row in rows if row["id"] == model), None)
    if found is None:
        served = ", ".join(row["id"] for row in rows)[:500]
        raise ApiError("model_not_found", f"the model {model[:80]!r} is not served here; served: {served}", "model")
    return found


async def _models(services: Services, caller: Caller) -> list[dict[str, Any]]:
    info = services.info
    found = await guarded(services.retrieval.collections(caller.tenant))
    collections = [c for c in found if caller.may_use(c)]
    chat = [_model(name, "generation", max_model_len=info.max_model_len) for name in (info.model, "default")]
    rag = [_model(f"{MODEL_PREFIX}{c}", "rag", max_model_len=info.max_model_len) for c in collections]
    return [*chat, *rag, _model(embedder_name(services.settings.gateway.embedder), "embedding")]


def _model(name: str, task: str, **extra: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "foreword", "task": task, **extra}
