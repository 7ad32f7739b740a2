"""Routes of our own: questions over documents, and the documents."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.response import Stream

from gateway import sse
from gateway.access import caller_of
from gateway.errors import ApiError, decode_body
from gateway.keys import Role
from gateway.openai_routes import services_of
from gateway.rag import Prepared, RagPipeline, guarded
from gateway.schemas import RagRequest
from gateway.uploads import read_sources
from retrieval import Document, Job, JobState

AnyRequest = Request[Any, Any, Any]


def pipeline_of(request: AnyRequest) -> RagPipeline:
    """The app's pipeline."""
    pipeline: RagPipeline = request.app.state["pipeline"]
    return pipeline


@post("/rag/query", status_code=200, role=Role.QUERY)
async def rag_query(request: AnyRequest) -> Response[Any] | Stream:
    """Answer a question over a collection, with citations, sources and what the cache did."""
    body = decode_body(await request.body(), RagRequest)
    pipeline, caller = pipeline_of(request), caller_of(request)
    if not body.stream:
        return Response(await sse.until_disconnect(request, pipeline.answer(body, caller)))
    prepared = await sse.until_disconnect(request, pipeline.prepare(body, caller))
    return sse.stream(_events(pipeline, prepared), services_of(request).settings.gateway.keep_alive_s)


async def _events(pipeline: RagPipeline, prepared: Prepared) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(pipeline.events(prepared)) as events:
            async for name, data in events:
                yield sse.event(data, name)
    except ApiError as e:
        yield sse.event(e.body(), "error")
        return
    yield sse.DONE


@post("/rag/documents", status_code=200, role=Role.INGEST)
async def add_documents(request: AnyRequest) -> Response[Any]:
    """Ingest files (multipart) or texts (JSON); answers when all are searchable, or at once with `?wait=false`."""
    retrieval = services_of(request).retrieval
    job = await guarded(retrieval.ingest(await read_sources(request)))
    if request.query_params.get("wait", "true").lower() in ("false", "0", "no"):
        return Response(job_dict(job), status_code=202)
    done = await guarded(retrieval.wait(job.job_id, job.tenant))
    if done.state is JobState.FAILED:
        first = done.errors[0]
        raise ApiError(first.code, "; ".join(e.message for e in done.errors)[:2000], first.name)
    return Response(job_dict(done))


@get("/rag/documents", role=Role.QUERY)
async def list_documents(request: AnyRequest) -> dict[str, Any]:
    """Documents in the order of ingest; `?collection=`, `?limit=` and `?offset=` choose."""
    query, caller = request.query_params, caller_of(request)
    limit, offset = _number(query, "limit", 100), _number(query, "offset", 0)
    wanted = query.get("collection")
    names = caller.collections if wanted is None else frozenset({wanted} if caller.may_use(wanted) else ())
    found = await guarded(services_of(request).retrieval.documents(names, limit, offset, caller.tenant))
    return {"documents": [document_dict(d) for d in found]}


@get("/rag/documents/{document_id:str}", role=Role.QUERY)
async def get_document(request: AnyRequest, document_id: str) -> dict[str, Any]:
    """One document with its passages."""
    retrieval, caller = services_of(request).retrieval, caller_of(request)
    found = await _document(request, document_id)
    passages = await guarded(retrieval.passages(document_id, caller.tenant))
    return {**document_dict(found), "passages": [msgspec.to_builtins(p) for p in passages]}


@delete("/rag/documents/{document_id:str}", status_code=200, role=Role.INGEST)
async def delete_document(request: AnyRequest, document_id: str) -> dict[str, Any]:
    """Delete a document everywhere."""
    await _document(request, document_id)
    if not await guarded(services_of(request).retrieval.delete(document_id, caller_of(request).tenant)):
        raise _no_document(document_id)
    return {"document_id": document_id, "deleted": True}


@get("/rag/jobs/{job_id:str}", role=Role.INGEST)
async def get_job(request: AnyRequest, job_id: str) -> dict[str, Any]:
    """An ingest job as it stands."""
    return job_dict(await _job(request, job_id))


@post("/rag/jobs/{job_id:str}/retry", status_code=202, role=Role.INGEST)
async def retry_job(request: AnyRequest, job_id: str) -> dict[str, Any]:
    """Ingest again what an ended job could not, for no fault of the sources: a full disk, a fault of ours."""
    await _job(request, job_id)
    return job_dict(await guarded(services_of(request).retrieval.retry(job_id, caller_of(request).tenant)))


@get("/rag/collections", role=Role.QUERY)
async def list_collections(request: AnyRequest) -> dict[str, Any]:
    """Collections, and how many documents each holds."""
    caller = caller_of(request)
    found = await guarded(services_of(request).retrieval.collections(caller.tenant))
    rows = [{"collection": name, "num_documents": n} for name, n in found.items() if caller.may_use(name)]
    return {"collections": rows}


def job_dict(job: Job) -> dict[str, Any]:
    """A job as JSON."""
    out: dict[str, Any] = msgspec.to_builtins(job)
    return out


def document_dict(document: Document) -> dict[str, Any]:
    """A document as JSON."""
    out: dict[str, Any] = msgspec.to_builtins(document)
    return out


async def _document(request: AnyRequest, document_id: str) -> Document:
    """A document that the caller may see. Raises `ApiError`, for another's as for one that is not there."""
    caller = caller_of(request)
    found = await guarded(services_of(request).retrieval.document(document_id, caller.tenant))
    if found is None or not caller.may_use(found.collection):
        raise _no_document(document_id)
    return found


def _no_document(document_id: str) -> ApiError:
    return ApiError("not_found", f"there is no document {document_id[:80]!r}", "document_id")


async def _job(request: AnyRequest, job_id: str) -> Job:
    """A job that the caller may see. Raises `ApiError`, for another's as for one that is not there."""
    caller = caller_of(request)
    job = await guarded(services_of(request).retrieval.job(job_id, caller.tenant))
    if job is None or not caller.may_use(job.collection):
        raise ApiError("not_found", f"there is no job {job_id[:80]!r}", "job_id")
    return job


def _number(query: Any, name: str, default: int) -> int:
    raw = query.get(name)
    if raw is None:
        return default
    if not re.fullmatch(r"[0-9]{1,5}", str(raw)) or int(raw) > 10_000:
        raise ApiError("invalid_request", f"{name} must be a number from 0 to 10000, got {raw[:80]!r}", name)
    return int(raw)
