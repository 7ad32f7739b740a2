"""URLs to ingest, fetched without becoming a way into the server's own network.

A host is resolved here, every address it has is checked, and the connection goes to the address that was checked, so
an answer of the name server that changes in between (rebinding) changes nothing. Redirects are followed here, each as
checked as the first. No proxy, cookie or credential is used. Size, time and number of redirects are bounded.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import PurePosixPath

import httpx
import msgspec

from gateway.errors import ApiError
from retrieval import SUPPORTED

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Policy = Callable[[Address], bool]
Resolve = Callable[[str, int], Awaitable[list[Address]]]

MAX_REDIRECTS = 5
MAX_URL = 2000
CONNECT_S, READ_S, TOTAL_S = 5.0, 10.0, 60.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class Fetched(msgspec.Struct, frozen=True):
    """What a URL led to."""

    url: str
    """The last one, after redirects."""
    name: str
    """A label: the last part of its path, or its host."""
    media_type: str
    data: bytes


def is_public(address: Address) -> bool:
    """Whether an address may be connected to: of the public internet, and no other one wrapped into it."""
    inner = None
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address.is_site_local:
            return False
    if inner is not None:
        return is_public(inner)
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


async def resolve_host(host: str, port: int) -> list[Address]:
    """All addresses of a host. Raises `OSError`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in found]


class UrlFetcher:
    """Fetches URLs. The policy and the resolver are for tests to replace; no setting and no client can."""

    def __init__(self, policy: Policy = is_public, resolve: Resolve = resolve_host) -> None:
        self._policy, self._resolve = policy, resolve

    async def fetch(self, url: str, max_bytes: int) -> Fetched:
        """What a URL leads to, at most `max_bytes` long. Raises `ApiError`."""
        try:
            async with asyncio.timeout(TOTAL_S):
                return await self._follow(url, max_bytes)
        except (TimeoutError, httpx.TimeoutException) as e:
            raise ApiError("fetch_failed", f"{_shown(url)} took too long") from e
        except (httpx.HTTPError, OSError) as e:
            raise ApiError("fetch_failed", f"{_shown(url)} cannot be fetched") from e

    async def _follow(self, first: str, max_bytes: int) -> Fetched:
        url = first
        timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
        async with httpx.AsyncClient(trust_env=False, timeout=timeout) as client:
            for _ in range(MAX_REDIRECTS + 1):
                parsed = check_url(url)
                client.cookies.clear()
                address = await self._address(parsed)
                reply = await client.send(_request(client, parsed, address), stream=True)
                async with aclosing(reply):
                    if reply.status_code not in _REDIRECTS:
                        return await _read(url, parsed, reply, max_bytes)
                    url = str(parsed.join(reply.headers.get("location", "")))
        raise ApiError("fetch_failed", f"{_shown(first)} redirects more than {MAX_REDIRECTS} times")

    async def _address(self, url: httpx.URL) -> Address:
        """The one address to connect to. A host with any address that is not allowed is refused whole."""
        port = url.port or (443 if url.scheme == "https" else 80)
        addresses = await self._resolve(_host(url), port)
        if not addresses or not all(map(self._policy, addresses)):
            raise ApiError("url_refused", f"the host {url.host[:80]!r} is not a public one")
        return addresses[0]


def check_url(url: str) -> httpx.URL:
    """A URL whose form is sound. Raises `ApiError` (url_refused)."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as e:
        raise ApiError("url_refused", "this is no URL") from e
    if len(url) > MAX_URL:
        raise ApiError("url_refused", f"the URL is longer than {MAX_URL} characters")
    if parsed.scheme not in ("http", "https"):
        raise ApiError("url_refused", f"the URL's scheme must be http or https, got {parsed.scheme[:40]!r}")
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise ApiError("url_refused", f"the URL's port is {parsed.port}")
    if parsed.userinfo:
        raise ApiError("url_refused", "the URL must hold no user name or password")
    if not parsed.host or _is_odd_number(parsed.host):
        raise ApiError("url_refused", f"the host {parsed.host[:80]!r} is neither a name nor a plain address")
    return parsed


def _is_odd_number(host: str) -> bool:
    """Whether a host is an address in disguise: 2130706433, 0x7f.1, 0177.0.0.1. Those have a number at the end."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return re.fullmatch(r"(?:.*\.)?(?:[0-9]+|0[xX][0-9a-fA-F]*)\.?", host) is not None
    return False


def _host(url: httpx.URL) -> str:
    """The host as name servers and certificates know it."""
    return url.raw_host.decode("ascii")


def _request(client: httpx.AsyncClient, url: httpx.URL, address: Address) -> httpx.Request:
    """A request to the address that is, for the server and its certificate, one to the host."""
    headers = {"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity", "User-Agent": "foreword"}
    pinned = url.copy_with(host=str(address), fragment=None)
    return client.build_request("GET", pinned, headers=headers, extensions={"sni_hostname": _host(url)})


async def _read(url: str, parsed: httpx.URL, reply: httpx.Response, max_bytes: int) -> Fetched:
    if reply.status_code != 200:
        raise ApiError("fetch_failed", f"{_shown(url)} answered with status {reply.status_code}")
    if reply.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError("fetch_failed", f"{_shown(url)} came compressed, which was not asked for")
    data = bytearray()
    async for chunk in reply.aiter_raw():
        data += chunk
        if len(data) > max_bytes:
            raise ApiError("request_too_large", f"{_shown(url)} has more than {max_bytes} bytes")
    name = PurePosixPath(parsed.path).name or parsed.host
    return Fetched(
        url, name, media_type_of(url, reply.headers.get("content-type", ""), bytes(data[:1024])), bytes(data)
    )


def media_type_of(url: str, header: str, head: bytes) -> str:
    """The type of what was fetched: by what it is where that is certain, else as its server says; never by its name.

    Raises `ApiError` (unsupported_type).
    """
    said = header.partition(";")[0].strip().lower()
    if head.startswith(b"%PDF-"):
        return "application/pdf"
    if re.match(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype html|html)[\s>]", head, re.IGNORECASE) or "xhtml" in said:
        return "text/html"
    if said in SUPPORTED.values():
        return said
    if said.startswith("text/"):
        return "text/plain"
    raise ApiError("unsupported_type", f"{_shown(url)} is of the type {said[:80]!r}, which cannot be ingested")


def _shown(url: str) -> str:
    return repr(url[:200])
