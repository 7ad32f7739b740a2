"""HTTP over plain sockets: a client that costs little, so that it does not measure itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec


def post(path: str, body: dict[str, Any]) -> bytes:
    """A whole request with a JSON body."""
    raw = msgspec.json.encode(body)
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


class Connection:
    """One client's connection, kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._headers: dict[bytes, bytes] = {}

    def send(self, raw: bytes) -> None:
        """Send a request."""
        self._writer.write(raw)

    async def head(self) -> tuple[int, dict[bytes, bytes]]:
        """Status and headers of the next reply."""
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        pairs = (line.partition(b":") for line in lines if line)
        self._headers = {name.lower(): value.strip() for name, _, value in pairs}
        return int(first.split()[1]), self._headers

    async def body(self) -> bytes:
        """Its body, whole."""
        if b"content-length" in self._headers:
            return await self._reader.readexactly(int(self._headers[b"content-length"]))
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Its chunks as they come."""
        while size := int(await self._reader.readline(), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()


@asynccontextmanager
async def connection(port: int) -> AsyncGenerator[Connection, None]:
    """A connection to this machine's port."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
