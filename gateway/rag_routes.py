"""Routes of our own: questions over documents, and the documents."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.datastructures import UploadFile
from litestar.response import Stream

from gateway import sse
from gateway.errors import ApiError, decode_body
from gateway.openai_routes import services_of
from gateway.rag import Prepared, RagPipeline, guarded
from gateway.schemas import IngestBody, RagRequest
from retrieval import DEFAULT_COLLECTION, IngestRequest, Job, JobState, SourceFile

AnyRequest = Request[Any, Any, Any]


def pipeline_of(request: AnyRequest) -> RagPipeline:
    """The app's pipeline."""
    pipeline: RagPipeline = request.app.state["pipeline"]
    return pipeline


@post("/rag/query", status_code=200)
async def rag_query(request: AnyRequest) -> Response[Any] | Stream:
    """Answer a question over a collection, with citations, sources and what the cache did."""
    body = decode_body(await request.body(), RagRequest)
    pipeline = pipeline_of(request)
    if not body.stream:
        return Response(await sse.until_disconnect(request, pipeline.answer(body)))
    prepared = await sse.until_disconnect(request, pipeline.prepare(body))
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


@post("/rag/documents", status_code=200)
async def add_documents(request: AnyRequest) -> Response[Any]:
    """Ingest files (multipart) or texts (JSON); answers when all are searchable, or at once with `?wait=false`."""
    retrieval = services_of(request).retrieval
    job = await guarded(retrieval.ingest(await _ingest_request(request)))
    if request.query_params.get("wait", "true").lower() in ("false", "0", "no"):
        return Response(job_dict(job), status_code=202)
    done = await guarded(retrieval.wait(job.job_id))
    if done.state is JobState.FAILED:
        first = done.errors[0]
        raise ApiError(first.code, "; ".join(e.message for e in done.errors)[:2000], first.name)
    return Response(job_dict(done))


@get("/rag/documents")
async def list_documents(request: AnyRequest) -> dict[str, Any]:
    """Documents in the order of ingest; `?collection=`, `?limit=` and `?offset=` choose."""
    query = request.query_params
    limit, offset = _number(query, "limit", 100), _number(query, "offset", 0)
    found = await guarded(services_of(request).retrieval.documents(query.get("collection"), limit, offset))
    return {"documents": [msgspec.to_builtins(d) for d in found]}


@get("/rag/documents/{document_id:str}")
async def get_document(request: AnyRequest, document_id: str) -> dict[str, Any]:
    """One document with its passages."""
    retrieval = services_of(request).retrieval
    found = await guarded(retrieval.document(document_id))
    if found is None:
        raise ApiError("not_found", f"there is no document {document_id[:80]!r}", "document_id")
    passages = await guarded(retrieval.passages(document_id))
    return {**msgspec.to_builtins(found), "passages": [msgspec.to_builtins(p) for p in passages]}


@delete("/rag/documents/{document_id:str}", status_code=200)
async def delete_document(request: AnyRequest, document_id: str) -> dict[str, Any]:
    """Delete a document everywhere."""
    if not await guarded(services_of(request).retrieval.delete(document_id)):
        raise ApiError("not_found", f"there is no document {document_id[:80]!r}", "document_id")
    return {"document_id": document_id, "deleted": True}


@get("/rag/jobs/{job_id:str}")
async def get_job(request: AnyRequest, job_id: str) -> dict[str, Any]:
    """An ingest job as it stands."""
    job = await guarded(services_of(request).retrieval.job(job_id))
    if job is None:
        raise ApiError("not_found", f"there is no job {job_id[:80]!r}", "job_id")
    return job_dict(job)


@post("/rag/jobs/{job_id:str}/retry", status_code=202)
async def retry_job(request: AnyRequest, job_id: str) -> dict[str, Any]:
    """Ingest again what an ended job could not, for no fault of the sources: a full disk, a fault of ours."""
    return job_dict(await guarded(services_of(request).retrieval.retry(job_id)))


@get("/rag/collections")
async def list_collections(request: AnyRequest) -> dict[str, Any]:
    """Collections, and how many documents each holds."""
    found = await guarded(services_of(request).retrieval.collections())
    return {"collections": [{"collection": name, "num_documents": n} for name, n in found.items()]}


def job_dict(job: Job) -> dict[str, Any]:
    """A job as JSON."""
    out: dict[str, Any] = msgspec.to_builtins(job)
    return out


async def _ingest_request(request: AnyRequest) -> IngestRequest:
    if request.content_type[0] == "multipart/form-data":
        return await _from_form(request)
    body = decode_body(await request.body(), IngestBody)
    if not body.documents:
        raise ApiError("invalid_request", "documents must not be empty", "documents")
    sources = [
        SourceFile(d.title or d.id or f"text-{i}", d.text.encode(), d.id, d.title, d.metadata or {}, "text/plain")
        for i, d in enumerate(body.documents)
    ]
    return IngestRequest(tuple(_with_ids(sources)), body.collection)


def _with_ids(sources: list[SourceFile]) -> list[SourceFile]:
    """Texts without an id get one made of their content, so that the same text again is no new document."""
    import hashlib

    return [
        s
        if s.document_id is not None
        else msgspec.structs.replace(s, document_id=hashlib.sha256(s.data + s.name.encode()).hexdigest()[:16])
        for s in sources
    ]


async def _from_form(request: AnyRequest) -> IngestRequest:
    form = await request.form()
    collection = str(form.get("collection") or request.query_params.get("collection") or DEFAULT_COLLECTION)
    files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
    if not files:
        raise ApiError("invalid_request", "the form holds no file", "file")
    given_id = form.get("id")
    if given_id is not None and len(files) > 1:
        raise ApiError("invalid_request", f"id names one document, but the form holds {len(files)} files", "id")
    document_id = None if given_id is None else str(given_id)
    sources = tuple([SourceFile(f.filename or "unnamed", await f.read(), document_id) for f in files])
    return IngestRequest(sources, collection)


def _number(query: Any, name: str, default: int) -> int:
    raw = query.get(name)
    if raw is None:
        return default
    if not str(raw).isdigit() or not 0 <= int(raw) <= 10_000:
        raise ApiError("invalid_request", f"{name} must be a number from 0 to 10000, got {raw!r}", name)
    return int(raw)
