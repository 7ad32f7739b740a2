"""What a request brings to be ingested: texts in JSON, or files in a form.

A client's names are labels: no path is made of them anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request
from litestar.datastructures import FormMultiDict, UploadFile
from litestar.exceptions import ClientException

from gateway.access import caller_of
from gateway.errors import ApiError, decode_body
from gateway.openai_routes import services_of
from gateway.schemas import IngestBody, IngestDocument
from gateway.services import Services
from gateway.settings import GatewaySettings
from retrieval import DEFAULT_COLLECTION, IngestRequest, SourceFile

AnyRequest = Request[Any, Any, Any]
MAX_URLS = 20


async def read_sources(request: AnyRequest) -> IngestRequest:
    """A body's sources, for the caller's tenant. Raises `ApiError`."""
    is_form = request.content_type[0] == "multipart/form-data"
    sources, collection = await (_from_form(request) if is_form else _from_json(request))
    caller = caller_of(request)
    if not caller.may_use(collection):
        raise ApiError("forbidden", f"this key may not use the collection {collection[:80]!r}", "collection")
    return IngestRequest(tuple(sources), collection, caller.tenant)


async def _from_json(request: AnyRequest) -> tuple[Sequence[SourceFile], str]:
    body = decode_body(await request.body(), IngestBody)
    if not body.documents:
        raise ApiError("invalid_request", "documents must not be empty", "documents")
    services = services_of(request)
    limits = services.settings.gateway
    _check_number(limits, len(body.documents), "documents")
    _check_urls(limits, body.documents)
    sources: list[SourceFile] = []
    for i, d in enumerate(body.documents):
        room = limits.max_body_bytes - sum(len(s.data) for s in sources)
        if d.url is not None:
            sources.append(await _fetch(services, d, f"documents[{i}].url", min(limits.max_file_bytes, room)))
            continue
        data, name = (d.text or "").encode(), d.title or d.id or f"text-{i}"
        _check_size(limits, len(data), f"documents[{i}]")
        source = SourceFile(name, data, d.id, d.title, d.metadata or {}, "text/plain")
        sources.append(source if d.id is not None else _with_id(source))
    return sources, body.collection


def _check_urls(limits: GatewaySettings, documents: Sequence[IngestDocument]) -> None:
    """Refuse a bad document before anything is fetched."""
    for i, d in enumerate(documents):
        if (d.text is None) == (d.url is None):
            raise ApiError("invalid_request", f"documents[{i}] must have either text or url", f"documents[{i}]")
        if d.url is not None and not limits.allow_url_ingest:
            why = "this server fetches no URLs: its setting allow_url_ingest is off"
            raise ApiError("invalid_request", f"documents[{i}].url: {why}", f"documents[{i}].url")
    num_urls = sum(d.url is not None for d in documents)
    if num_urls > MAX_URLS:
        raise ApiError("request_too_large", f"{num_urls} URLs were sent; {MAX_URLS} are allowed", "documents")


async def _fetch(services: Services, d: IngestDocument, at: str, max_bytes: int) -> SourceFile:
    """A fetched document; the same URL is the same document. Raises `ApiError`."""
    url = str(d.url)
    try:
        fetched = await services.urls.fetch(url, max_bytes)
    except ApiError as e:
        raise ApiError(e.code, f"{at}: {e.message}", at) from e
    document_id = hashlib.sha256(url.encode()).hexdigest()[:16] if d.id is None else d.id
    metadata = {"url": url, **(d.metadata or {})}
    return SourceFile(fetched.name, fetched.data, document_id, d.title, metadata, fetched.media_type)


def _with_id(source: SourceFile) -> SourceFile:
    """A text without an id gets one made of its content, so that the same text again is no new document."""
    digest = hashlib.sha256(source.data + source.name.encode()).hexdigest()
    return msgspec.structs.replace(source, document_id=digest[:16])


async def _from_form(request: AnyRequest) -> tuple[Sequence[SourceFile], str]:
    form = await _form(request)
    collection = _text(form, "collection") or request.query_params.get("collection") or DEFAULT_COLLECTION
    files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
    if not files:
        raise ApiError("invalid_request", "the form holds no file", "file")
    document_id = _text(form, "id") or None
    if document_id is not None and len(files) > 1:
        raise ApiError("invalid_request", f"id names one document, but the form holds {len(files)} files", "id")
    limits = services_of(request).settings.gateway
    _check_number(limits, len(files), "file")
    sources = []
    for i, file in enumerate(files):
        data = await file.read()
        _check_size(limits, len(data), f"file {i + 1}")
        sources.append(SourceFile(file.filename or "unnamed", data, document_id))
    return sources, collection


async def _form(request: AnyRequest) -> FormMultiDict:
    try:
        return await request.form()
    except ClientException as e:
        if e.status_code == 400 and "Too Large" in e.detail:  # what the framework says of its limits
            limit = services_of(request).settings.gateway.max_files
            what = f"the form has more than {limit} files, too many fields, or a part whose head is too long"
            raise ApiError("request_too_large", what) from e
        raise
    except (ValueError, LookupError) as e:  # a field in an encoding that is unknown, or is not the one it says
        raise ApiError("invalid_request", "the form holds a field whose text cannot be decoded") from e


def _text(form: FormMultiDict, name: str) -> str | None:
    value = form.get(name)
    if value is not None and not isinstance(value, str):
        raise ApiError("invalid_request", f"{name} must be a text field of the form", name)
    return value


def _check_number(limits: GatewaySettings, number: int, what: str) -> None:
    if number > limits.max_files:
        raise ApiError("request_too_large", f"{number} sources were sent; {limits.max_files} are allowed", what)


def _check_size(limits: GatewaySettings, size: int, what: str) -> None:
    if size > limits.max_file_bytes:
        raise ApiError("request_too_large", f"{what} has {size} bytes; {limits.max_file_bytes} are allowed", what)
