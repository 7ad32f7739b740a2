"""The API's description in OpenAPI 3.1, made from the request structs and one table of endpoints."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec

from gateway.access import OPEN_PATHS
from gateway.embeddings import EmbeddingRequest
from gateway.errors import CODES
from gateway.schemas import ChatRequest, CompletionRequest, IngestBody, RagRequest

ENDPOINTS: tuple[tuple[str, str, str, type[msgspec.Struct] | None], ...] = (
    ("post", "/rag/query", "Answer a question over a collection, with citations; streams events if asked", RagRequest),
    ("post", "/rag/documents", "Ingest texts (JSON) or files (multipart); `?wait=false` gives a job", IngestBody),
    ("get", "/rag/documents", "List documents; `?collection=`, `?limit=`, `?offset=`", None),
    ("get", "/rag/documents/{document_id}", "One document with its passages", None),
    ("delete", "/rag/documents/{document_id}", "Delete a document everywhere", None),
    ("get", "/rag/jobs/{job_id}", "An ingest job as it stands", None),
    ("post", "/rag/jobs/{job_id}/retry", "Ingest again what failed for no fault of the source", None),
    ("get", "/rag/collections", "Collections, and how many documents each holds", None),
    ("post", "/v1/chat/completions", "OpenAI chat, with `documents` as an extension", ChatRequest),
    ("post", "/v1/completions", "OpenAI completions", CompletionRequest),
    ("post", "/v1/embeddings", "OpenAI embeddings, by the embedder that retrieval uses", EmbeddingRequest),
    ("get", "/v1/models", "What is served; `default` means the model", None),
    ("get", "/v1/models/{model}", "One of them", None),
    ("get", "/health/live", "The process answers", None),
    ("get", "/health/ready", "A question can be answered now, else 503", None),
    ("get", "/metrics", "Prometheus metrics", None),
    ("get", "/debug/scheduler", "Requests that wait and run, without their text", None),
    ("get", "/debug/cache", "Where the KV blocks are, and the largest cached prefixes, without their text", None),
    ("get", "/docs", "This description as a page", None),
    ("get", "/docs/openapi.json", "This description", None),
    ("get", "/", "Ask questions in a browser", None),
)
"""Method, path, what it does, JSON body."""


def openapi_document() -> dict[str, Any]:
    """The whole description."""
    bodies = [body for *_, body in ENDPOINTS if body is not None]
    refs, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schema = dict(zip(bodies, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, body in ENDPOINTS:
        paths.setdefault(path, {})[method] = _operation(path, summary, schema[body] if body else None)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Foreword", "version": version("foreword")},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}, "securitySchemes": _KEYS},
        "security": [{name: []} for name in _KEYS],
    }


def _operation(path: str, summary: str, body: dict[str, Any] | None) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "Success"},
            "default": {
                "description": "Error",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    if path in OPEN_PATHS:
        operation["security"] = []
    if names:
        operation["parameters"] = [
            {"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names
        ]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


_KEYS: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
"""Either one, once the server has keys."""

_ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string", "enum": sorted(CODES)},
            },
        }
    },
}
