"""The gate in front of the application: no request without a key gets as far as routing, once there are keys.

So whoever has no valid key learns nothing, not even whether a path or an id exists. Behind the gate each route names
the role that it needs (`role=`, an option of its handler); a route that names none is for the operator.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from litestar import Request
from litestar.connection import ASGIConnection
from litestar.enums import ScopeType
from litestar.handlers.base import BaseRouteHandler
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import ApiError, headers_of, log_fault
from gateway.keys import Caller, KeyFile, Role
from gateway.limits import check_head

OPEN_PATHS = frozenset({"/", "/docs", "/docs/openapi.json", "/health/live", "/health/ready"})
"""Always answered: they say nothing about documents, tenants or use. The pages are the program's own text."""


class Gate:
    """ASGI: refuses what has too large a head or no valid key, and tells the routes who is calling."""

    def __init__(self, app: ASGIApp, keys: KeyFile) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on with its caller."""
        if scope["type"] == ScopeType.WEBSOCKET:
            await send({"type": "websocket.close", "code": 1008, "reason": None})
            return
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        try:
            check_head(list(scope["headers"]))
            if scope["path"] not in OPEN_PATHS:
                scope["state"]["caller"] = await self._authenticate(scope)
        except ApiError as e:
            await _answer(e, send)
            return
        await self._guarded(scope, receive, send)

    async def _authenticate(self, scope: Scope) -> Caller:
        """Who is calling. Raises `ApiError` (unauthorized), which is the same for every path."""
        await self._keys.follow()
        if self._keys.is_open:
            _refuse_other_sites(scope)
            return Caller()
        given = _given_keys(scope)
        if len(given) != 1:
            what = "an API key is needed" if not given else "one API key is needed, but several were sent"
            raise ApiError("unauthorized", f"{what}: Authorization: Bearer KEY, or X-API-Key: KEY")
        caller = self._keys.caller_of(given.pop())
        if caller is None:
            raise ApiError("unauthorized", "the API key is not known, or was revoked")
        return caller

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; a fault after the head was sent is logged here, without what it says of contents."""
        has_started = False

        async def watched(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as e:  # the server below would log the exception's own words
            log_fault(f"unexpected error in {scope.get('path_template') or 'an unknown path'}", e)
            if not has_started:
                await _answer(ApiError("internal_error", "an internal error occurred"), send)


def caller_of(request: Request[Any, Any, Any]) -> Caller:
    """Who sent a request."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


def check_role(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Guard of every route. Raises `ApiError` (forbidden)."""
    if connection.scope["path"] in OPEN_PATHS:
        return
    caller: Caller = connection.scope["state"]["caller"]
    needed: Role = handler.opt.get("role", Role.ADMIN)
    if not caller.role.includes(needed):
        raise ApiError("forbidden", f"this needs a key of the role {needed.value}; the role of yours is {caller.role}")


def _refuse_other_sites(scope: Scope) -> None:
    """Without keys, a page of another site must not make its visitor's browser ask for it. Raises `ApiError`.

    Browsers say so themselves, in a header that no page can set. With keys there is no need: a page would lack one.
    """
    if dict(scope["headers"]).get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
        raise ApiError("forbidden", "a page of another site may not use a server that asks for no key")


def _given_keys(scope: Scope) -> set[str]:
    values = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
    bearer = [re.fullmatch(r"bearer +(\S+) *", v, re.IGNORECASE) for name, v in values if name == b"authorization"]
    return {m.group(1) for m in bearer if m} | {v.strip() for name, v in values if name == b"x-api-key" and v.strip()}


async def _answer(error: ApiError, send: Send) -> None:
    body = msgspec.json.encode(error.body())
    head = {"content-type": "application/json", "content-length": str(len(body)), **headers_of(error)}
    headers = [(k.lower().encode(), v.encode()) for k, v in head.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
