"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException

log = logging.getLogger("foreword")
T = TypeVar("T")

CODES: dict[str, tuple[int, str]] = {
    "invalid_request": (400, "a field is missing, unknown, of the wrong type or out of range"),
    "unsupported_parameter": (400, "a field of OpenAI's API that would change the answer and is not supported"),
    "context_length_exceeded": (400, "the prompt is longer than the model's context, or a text than the embedder's"),
    "not_found": (404, "no such path, document, job or conversation"),
    "model_not_found": (404, "`model` is neither `default` nor a served name"),
    "method_not_allowed": (405, "the path exists, but not for this method"),
    "conversation_busy": (409, "the conversation's last question is still being answered"),
    "request_too_large": (413, "the body is larger than `max_body_bytes`"),
    "unsupported_type": (415, "the file's type cannot be ingested"),
    "no_text": (422, "the file holds no text, as a PDF of images does"),
    "bad_encoding": (422, "the file's text encoding cannot be told"),
    "bad_document": (422, "the file is damaged or encrypted"),
    "invalid_id": (422, "a document id is empty, too long or taken in another collection"),
    "internal_error": (500, "a fault of ours; the log has the details"),
    "storage_failed": (507, "the disk is full, or the folder or the database cannot be written; nothing was changed"),
    "engine_unavailable": (503, "the engine is starting, or died and is being started again"),
    "retrieval_unavailable": (
        503,
        "the retrieval worker is starting, or died and is being started again, or its database is out of reach",
    ),
    "shutting_down": (503, "the server is ending and takes no new requests"),
}
"""Every error code: status, and when it happens."""


class ApiError(Exception):
    """An answer other than success."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param

    @property
    def status(self) -> int:
        """HTTP status."""
        return CODES[self.code][0]

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def respond(error: ApiError) -> Response[dict[str, Any]]:
    """The HTTP response of an error."""
    headers = {"Retry-After": "2"} if error.status == 503 else {}
    return Response(error.body(), status_code=error.status, headers=headers, media_type="application/json")


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
    """Handler of everything else: logged whole, told briefly."""
    log.error("unexpected error in %s %s", request.method, request.url.path, exc_info=error)
    return respond(ApiError("internal_error", "an internal error occurred"))


def decode_body(raw: bytes, kind: type[T]) -> T:
    """A request body as a struct. Raises `ApiError` that names the place of the fault."""
    if not raw.strip():
        raise ApiError("invalid_request", "the body is empty; a JSON object was expected")
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as e:
        message, _, path = str(e).partition(" - at `$.")
        raise ApiError("invalid_request", str(e), path.rstrip("`") or _unknown_field(message)) from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ApiError("invalid_request", f"the body is not valid JSON: {e}") from e
    except RecursionError as e:
        raise ApiError("invalid_request", "the body is nested too deeply") from e


def _unknown_field(message: str) -> str | None:
    """The field that a message about an unknown or missing one names."""
    parts = message.split("`")
    return parts[1] if len(parts) > 2 else None
