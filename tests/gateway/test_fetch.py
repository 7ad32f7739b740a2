"""URLs to ingest: fetched where they lead to the public internet, and refused wherever else they try to lead."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from keyed_server import Keyed

from gateway import fetch
from gateway.errors import ApiError
from gateway.fetch import Address, UrlFetcher, check_url, is_public, media_type_of
from gateway.schemas import IngestDocument
from gateway.settings import GatewaySettings
from gateway.uploads import _check_urls, _fetch

LOOPBACK = ipaddress.ip_address("127.0.0.1")
Handler = Callable[[str, dict[str, str]], Any]


def reply(body: bytes = b"", status: int = 200, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", "Connection: close", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


@asynccontextmanager
async def site(handler: Handler) -> AsyncIterator[tuple[int, list[dict[str, str]]]]:
    """A server on loopback that answers with bytes, or with pieces for as long as they are read; and its requests."""
    seen: list[dict[str, str]] = []
    ended = asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:])}
        seen.append({"path": head[0].split()[1], **headers})
        answer = handler(head[0].split()[1], headers)
        try:
            for piece in [answer] if isinstance(answer, bytes) else answer:
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass  # whoever asked has heard enough
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            ended.release()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], seen
    finally:
        server.close()
        for _ in seen:
            await ended.acquire()


def on_loopback(hosts: dict[str, list[str]] | None = None) -> UrlFetcher:
    """A fetcher that may reach 127.0.0.1 and nothing else."""

    async def resolve(host: str, port: int) -> list[Address]:
        if hosts is not None:
            return [ipaddress.ip_address(a) for a in hosts[host]]
        return await fetch.resolve_host(host, port)

    return UrlFetcher(lambda a: a == LOOPBACK, resolve)


def refused(work: Awaitable[Any]) -> tuple[str, str]:
    with pytest.raises(ApiError) as e:
        asyncio.run(work)  # type: ignore[arg-type]
    return e.value.code, e.value.message


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1"),
        *("::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "2002:7f00:1::1", "64:ff9b::7f00:1"),
    ],
)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


def test_public_addresses_are_allowed() -> None:
    for address in ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"):
        assert is_public(ipaddress.ip_address(address)), address


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "ftp://example.com/x", "gopher://example.com", "javascript:1", "//example.com", ""),
        *("http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/", "http://127.1/", "http://1.2.3.4.5/"),
        *("http://0x7f.0.0.0x1/", "http://user:pw@example.com/", "http://", "http:///x", "http://[::1", "http://a:99999/"),
        *("http://example.com/" + "x" * 2000, "http://exa mple.com\r\nX: y/", "http://\0/"),
    ],
)  # fmt: skip
def test_malformed_urls_and_addresses_in_disguise_are_refused(url: str) -> None:
    with pytest.raises(ApiError) as e:
        check_url(url)
    assert e.value.code == "url_refused"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "169.254.169.254", "127.0.0.1."]
)
def test_the_real_policy_never_connects_to_this_machine(host: str) -> None:
    async def run() -> None:
        async with site(lambda *_: reply(b"inner")) as (port, seen):
            try:
                await UrlFetcher().fetch(f"http://{host}:{port}/", 99)
            finally:
                assert seen == []

    code, message = refused(run())
    assert code == "url_refused"
    assert "inner" not in message


def test_a_document_is_fetched_with_its_host_and_type() -> None:
    async def run() -> None:
        async with site(lambda *_: reply(b"# Words", content_type="text/markdown; charset=utf-8")) as (port, seen):
            hosts = {"docs.example": ["127.0.0.1"]}
            got = await on_loopback(hosts).fetch(f"http://docs.example:{port}/a/b.bin?q=1#part", 99)
            assert (got.data, got.media_type, got.name) == (b"# Words", "text/markdown", "b.bin")
            (request,) = seen
            assert request["host"] == f"docs.example:{port}"
            assert request["path"] == "/a/b.bin?q=1"
            assert not {"cookie", "authorization"} & set(request)

    asyncio.run(run())


def test_an_environment_with_a_proxy_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    test_a_document_is_fetched_with_its_host_and_type()


def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """Rebinding: the name is public when it is looked at, and this machine's ever after."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[Address]:
        asked.append(host)
        return [ipaddress.ip_address("127.0.0.1" if len(asked) == 1 else "127.0.0.2")]

    async def run() -> None:
        async with site(lambda *_: reply(b"x", content_type="text/plain")) as (port, seen):
            await UrlFetcher(lambda a: a == LOOPBACK, resolve).fetch(f"http://localhost:{port}/", 99)
            assert (asked, len(seen)) == (["localhost"], 1)

    asyncio.run(run())


def test_a_host_with_one_inner_address_is_refused_whole() -> None:
    hosts = {"two.example": ["127.0.0.1", "10.0.0.1"], "none.example": []}
    for host in hosts:
        code, message = refused(on_loopback(hosts).fetch(f"http://{host}/", 99))
        assert code == "url_refused"
        assert "10.0.0.1" not in message


@pytest.mark.parametrize(
    ("to", "code"),
    [
        ("http://169.254.169.254/latest", "url_refused"),
        ("http://127.0.0.2:{port}/", "url_refused"),
        ("http://2130706433:{port}/", "url_refused"),
        ("file:///etc/passwd", "url_refused"),
        ("//[::1]:{port}/", "url_refused"),
        ("/again", "fetch_failed"),
        ("", "fetch_failed"),
    ],
)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_each_redirect_is_checked_like_the_first_and_their_number_is_bounded(to: str, code: str, status: int) -> None:
    async def run() -> None:
        async with site(lambda *_: reply(status=status, location=to.format(port=port))) as (port, seen):
            try:
                await on_loopback().fetch(f"http://127.0.0.1:{port}/", 99)
            finally:
                assert len(seen) == (1 if code == "url_refused" else fetch.MAX_REDIRECTS + 1)

    assert refused(run())[0] == code


def test_a_redirect_is_followed_without_the_cookie_it_set() -> None:
    async def run() -> None:
        def answer(path: str, _: dict[str, str]) -> bytes:
            if path == "/":
                return reply(status=302, location="/end.html", set_cookie="a=b")
            return reply(b"<!DOCTYPE html><p>Words", content_type="application/octet-stream")

        async with site(answer) as (port, seen):
            got = await on_loopback().fetch(f"http://127.0.0.1:{port}/", 99)
            assert (got.name, got.media_type) == ("end.html", "text/html")
            assert "cookie" not in seen[1]

    asyncio.run(run())


def test_size_is_bounded_while_it_comes() -> None:
    sent = 0

    def endless(*_: Any) -> Any:
        nonlocal sent
        yield reply(content_type="text/plain")
        while True:
            sent += 1000
            yield b"x" * 1000

    async def run() -> None:
        async with site(endless) as (port, _):
            await on_loopback().fetch(f"http://127.0.0.1:{port}/", 5000)

    assert refused(run())[0] == "request_too_large"
    assert sent < 50_000_000


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "TOTAL_S", 0.2)

    async def run() -> None:
        held = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()  # until the other side gives up
            writer.close()
            held.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            await on_loopback().fetch(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", 99)
        finally:
            await held.wait()
            server.close()

    assert refused(run())[0] == "fetch_failed"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (reply(b"x", status=404), "fetch_failed"),
        (reply(b"x", status=204), "fetch_failed"),
        (reply(b"x", content_type="text/plain", content_encoding="gzip"), "fetch_failed"),
        (reply(b"x", content_type="image/png"), "unsupported_type"),
        (b"no http at all", "fetch_failed"),
        (b"", "fetch_failed"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_it(answer: bytes, code: str) -> None:
    async def run() -> None:
        async with site(lambda *_: answer) as (port, _):
            await on_loopback().fetch(f"http://127.0.0.1:{port}/paper", 99)

    got, message = refused(run())
    assert got == code
    assert "/paper" in message


def test_a_type_is_told_by_content_and_header_not_by_name() -> None:
    for header, head, expected in (
        ("text/html", b"%PDF-1.7", "application/pdf"),
        ("", b"\xef\xbb\xbf \n<html lang=en>", "text/html"),
        ("application/xhtml+xml", b"<?xml", "text/html"),
        ("text/x-unknown", b"words", "text/plain"),
        ("application/json; charset=utf-8", b"{}", "application/json"),
    ):
        assert media_type_of("http://x/a.exe", header, head) == expected
    with pytest.raises(ApiError, match="cannot be ingested"):
        media_type_of("http://x/a.pdf", "application/octet-stream", b"MZ")


def test_a_fetched_document_is_named_by_its_url_and_keeps_it() -> None:
    async def run() -> None:
        async with site(lambda *_: reply(b"Some words.", content_type="text/plain")) as (port, _):
            url = f"http://127.0.0.1:{port}/notes"
            services: Any = SimpleNamespace(urls=on_loopback())
            source = await _fetch(services, IngestDocument(url=url, metadata={"a": 1}), "documents[0].url", 99)
            assert (source.name, source.data, source.media_type) == ("notes", b"Some words.", "text/plain")
            assert source.metadata == {"url": url, "a": 1}
            again = await _fetch(services, IngestDocument(url=url), "documents[0].url", 99)
            assert again.document_id == source.document_id
            given = await _fetch(services, IngestDocument(url=url, id="mine", title="T"), "documents[0].url", 99)
            assert (given.document_id, given.title) == ("mine", "T")

    asyncio.run(run())


def test_nothing_is_fetched_unless_the_server_was_told_to() -> None:
    assert not GatewaySettings().allow_url_ingest
    with pytest.raises(ApiError, match="allow_url_ingest"):
        _check_urls(GatewaySettings(), [IngestDocument(text="x"), IngestDocument(url="http://example.com/")])


def test_a_server_that_fetches_refuses_inner_addresses_before_it_ingests_anything(keyed: Keyed) -> None:
    before = keyed.ask("ann", "GET", "/rag/documents").json()
    inner = ["http://169.254.169.254/", "http://[::1]/", "http://2130706433/", "file:///etc/passwd", keyed.server.url]
    for url in inner:
        reply = keyed.post("ann", "/rag/documents", documents=[{"id": "first", "text": "x"}, {"url": url}])
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (422, "url_refused", "documents[1].url")
    for document in ({}, {"url": "http://example.com/", "text": "x"}):
        reply = keyed.post("ann", "/rag/documents", documents=[document])
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "documents[0]")
    many = keyed.post("ann", "/rag/documents", documents=[{"url": "http://127.0.0.1/"}] * 21)
    assert many.status_code == 413
    assert keyed.ask("ann", "GET", "/rag/documents").json() == before
