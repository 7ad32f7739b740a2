"""What a request's head may be: bounded in the parser, so that it costs no memory, and said in an error."""

from __future__ import annotations

from collections.abc import Collection

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import ApiError

MAX_HEADERS = 100
MAX_HEAD_BYTES = 32 * 1024
"""Names and values of all headers together."""
MAX_UNREAD_HEAD_BYTES = 64 * 1024
"""A head that is not complete by then ends the connection; with it the path is bounded too."""


def check_head(headers: Collection[tuple[bytes, bytes]]) -> None:
    """Raise `ApiError` (headers_too_large) for too many headers or too long ones."""
    if len(headers) > MAX_HEADERS:
        raise ApiError("headers_too_large", f"the request has {len(headers)} headers; {MAX_HEADERS} are allowed")
    if sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
        raise ApiError("headers_too_large", f"the request's headers are longer than {MAX_HEAD_BYTES} bytes")


class BoundedHeadProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which by itself would keep a head of any length."""

    _is_in_head = False
    _num_unread = 0

    def on_message_begin(self) -> None:
        """A head begins."""
        self._is_in_head, self._num_unread = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """It is whole."""
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Parse, then end the connection if the head goes on for too long."""
        super().data_received(data)
        if not self._is_in_head or self.transport.is_closing():
            return
        self._num_unread += len(data)
        if self._num_unread > MAX_UNREAD_HEAD_BYTES:
            text = f"the request's head is longer than {MAX_UNREAD_HEAD_BYTES} bytes".encode()
            head = (
                f"HTTP/1.1 431 \r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + text)
            self.transport.close()
