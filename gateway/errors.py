"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException

log = logging.getLogger("foreword")
T = TypeVar("T")
MAX_DEPTH = 64
"""Objects and lists inside each other in a body."""
TOO_DEEP = f"the body is nested too deeply; {MAX_DEPTH} levels are allowed"

RETRY_AFTER_S = 2
"""Where nothing better is known."""

CODES: dict[str, tuple[int, str]] = {
    "invalid_request": (400, "a field is missing, unknown, of the wrong type or out of range"),
    "unsupported_parameter": (400, "a field of OpenAI's API that would change the answer and is not supported"),
    "context_length_exceeded": (400, "the prompt is longer than the model's context, or a text than the embedder's"),
    "unauthorized": (401, "no API key was sent, or one that is not known or was revoked"),
    "forbidden": (403, "the key's role or collections do not allow this"),
    "linked_forbidden": (403, "`cache` is `linked`, and this server's `allow_linked` is off"),
    "not_found": (404, "no such path, document, job or conversation"),
    "model_not_found": (404, "`model` is neither `default` nor a served name"),
    "method_not_allowed": (405, "the path exists, but not for this method"),
    "conversation_busy": (409, "the conversation's last question is still being answered"),
    "request_too_large": (413, "the body, a file, or the number of files is over its limit in the settings"),
    "headers_too_large": (431, "the request has too many headers, or too long ones"),
    "unsupported_type": (415, "the file's type cannot be ingested"),
    "no_text": (422, "the file holds no text, as a PDF of images does"),
    "bad_encoding": (422, "the file's text encoding cannot be told"),
    "url_refused": (422, "the URL to ingest is malformed, or leads to a host that is not public"),
    "fetch_failed": (422, "the URL to ingest cannot be fetched, takes too long, or redirects too often"),
    "bad_document": (422, "the file is damaged or encrypted"),
    "invalid_id": (422, "a document id is empty, too long or taken in another collection"),
    "queue_full": (429, "too many requests, or prompt tokens, are queued"),
    "rate_limit_exceeded": (
        429,
        "the key's limit of requests at once, or of requests or tokens per minute, is used up",
    ),
    "internal_error": (500, "a fault of ours; the log has the details"),
    "storage_failed": (507, "the disk is full, or the folder or the database cannot be written; nothing was changed"),
    "engine_unavailable": (503, "the engine is starting, or died and is being started again"),
    "retrieval_unavailable": (
        503,
        "the retrieval worker is starting, or died and is being started again, or its database is out of reach",
    ),
    "queue_timeout": (503, "the request was queued for `queue_timeout_s` seconds and did not get its turn"),
    "shutting_down": (503, "the server is ending and takes no new requests"),
}
"""Every error code: status, and when it happens."""


class ApiError(Exception):
    """An answer other than success."""

    def __init__(self, code: str, message: str, param: str | None = None, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.code, self.message, self.param, self.retry_after_s = code, message, param, retry_after_s

    @property
    def status(self) -> int:
        """HTTP status."""
        return CODES[self.code][0]

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def headers_of(error: ApiError) -> dict[str, str]:
    """What the status asks for."""
    retry = {"Retry-After": str(error.retry_after_s)}
    return {429: retry, 503: retry, 401: {"WWW-Authenticate": 'Bearer realm="foreword"'}}.get(error.status, {})


def respond(error: ApiError) -> Response[dict[str, Any]]:
    """The HTTP response of an error."""
    headers = headers_of(error)
    return Response(error.body(), status_code=error.status, headers=headers, media_type="application/json")


def log_fault(what: str, error: BaseException) -> None:
    """Log an exception's type and place, not its words: they may hold a prompt or a document."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s: %s\n%s", what, type(error).__name__, frames)


def on_api_error(_: Request[Any, Any, Any], error: ApiError) -> Response[dict[str, Any]]:
    """Handler of our own errors."""
    return respond(error)


_BY_STATUS = {
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_type",
}


def on_http_error(_: Request[Any, Any, Any], error: HTTPException) -> Response[dict[str, Any]]:
    """Handler of the framework's errors."""
    code = _BY_STATUS.get(error.status_code, "invalid_request" if error.status_code < 500 else "internal_error")
    if isinstance(error, ValidationException) and isinstance(error.extra, list) and error.extra:
        first = error.extra[0]
        return respond(ApiError(code, str(first.get("message", error.detail)), first.get("key")))
    return respond(ApiError(code, error.detail))


def on_unexpected(request: Request[Any, Any, Any], error: Exception) -> Response[dict[str, Any]]:
    """Handler of everything else: logged, told briefly."""
    log_fault(f"unexpected error in {request.method} {request.scope.get('path_template')}", error)
    return respond(ApiError("internal_error", "an internal error occurred"))


def decode_body(raw: bytes, kind: type[T]) -> T:
    """A request body as a struct. Raises `ApiError` that names the place of the fault."""
    if not raw.strip():
        raise ApiError("invalid_request", "the body is empty; a JSON object was expected")
    try:
        body = msgspec.json.decode(raw, type=kind)
        _check_depth(raw, body)
        return body
    except msgspec.ValidationError as e:
        message, _, path = str(e).partition(" - at `$.")
        raise ApiError("invalid_request", str(e), path.rstrip("`") or _unknown_field(message)) from e
    except RecursionError as e:
        raise ApiError("invalid_request", TOO_DEEP) from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ApiError("invalid_request", f"the body is not valid JSON: {e}") from e


def _check_depth(raw: bytes, body: object) -> None:
    """Refuse what is nested so deeply that it could be read but not written, or not read from the store again."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [inner for value in level for inner in _parts(value) if isinstance(inner, dict | list | msgspec.Struct)]
    if level:
        raise ApiError("invalid_request", TOO_DEEP)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        return value.values()
    return [getattr(value, name) for name in value.__struct_fields__]


def _unknown_field(message: str) -> str | None:
    """The field that a message about an unknown or missing one names."""
    parts = message.split("`")
    return parts[1] if len(parts) > 2 else None
