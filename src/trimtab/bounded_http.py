"""HTTP requests within limits that no server can exceed: seconds for the whole exchange, bytes of the reply.

httpx's own timeouts bound single reads, so a server that sends a header or a `100 Continue` now and then outlasts them.
Here a request is a task that is cancelled at its deadline, whatever it is waiting for. Replies are requested without
compression, since a few kilobytes can decompress to gigabytes.

Some servers repeat the key that they got. It is removed here from all that a server sends, so that no caller can store
or show it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
import re
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from http.cookiejar import CookieJar
from typing import TYPE_CHECKING, Any

# httpx takes a tenth of a second to import, which commands without a request should not pay.
if TYPE_CHECKING:
    import httpx

RETRY_STATUS = (408, 409, 425, 429)  # and all from 500 on
FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0  # seconds before the first retry, doubled before each next one
IN_MEMORY = 1 << 16  # bytes of a body; the rest waits in a temporary file, since many requests may run at a time
CONNECT_SECONDS = 30.0  # where the deadline is later: a model may need half an hour for a reply, a connection does not
SECRET_LENGTH = 8  # characters; a shorter key, as vLLM's EMPTY, is no secret and may well be in a response
HIDDEN = "(the key)"
EXCERPT = 1 << 16  # bytes of a body in which an excerpt is searched for the key

# The connections that a request opened. httpcore leaves one open whose TLS handshake is cancelled.
_opened: ContextVar[list[asyncio.BaseTransport]] = ContextVar("opened")


class HttpError(Exception):
    """A request that got no complete reply; the message says why."""


class NoConnectionError(HttpError):
    """A request that reached no server."""


@dataclass(frozen=True)
class HttpReply:
    """A complete reply to a request with `key`. Header names are in lower case; their values do not hold the key."""

    status: int
    headers: Mapping[str, str]
    body: tempfile.SpooledTemporaryFile[bytes]
    key: str = field(default="", repr=False)

    def read(self) -> bytes:
        """Return the body without the key, unless that is too short to be one."""
        self.body.seek(0)
        body = self.body.read()
        return _key_pattern(self.key).sub(HIDDEN.encode(), body) if len(self.key) >= SECRET_LENGTH else body

    def excerpt(self, longest: int = 2000) -> str:
        """Return the beginning of the body for a message, without the key, however short that is."""
        self.body.seek(0)
        body = self.body.read(EXCERPT)
        if self.key:
            cut_off = 9 * len(self.key) if len(body) == EXCERPT else 0  # a key that is cut in the middle is not found
            body = _key_pattern(self.key).sub(HIDDEN.encode(), body)
            body = body[: len(body) - cut_off]
        return body[:longest].decode("utf-8", "replace")


class NoCookies(CookieJar):
    """Keeps no cookies: a server could otherwise fill memory with them, reply by reply."""

    def extract_cookies(self, response: Any, request: Any) -> None:
        """Ignore a reply's cookies."""


def read_key(variable: str) -> str:
    """Return the key that an environment variable holds, '' without one; ValueError if no HTTP header can hold it."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{variable} contains a character that no HTTP header can hold: check where it is set")
    return key


def hide_key(text: str, key: str) -> str:
    """Return a text without a key: as it is, escaped as JSON, Python and URLs do it, or in base64."""
    if not key:
        return text
    hidden = _key_pattern(key).sub(HIDDEN.encode(), text.encode("utf-8", "surrogatepass"))
    return hidden.decode("utf-8", "surrogatepass")


@lru_cache(maxsize=16)
def _key_pattern(key: str) -> re.Pattern[bytes]:
    forms = ["".join(map(_character_pattern, key))]
    if len(key) >= SECRET_LENGTH:  # the few characters that a shorter one gives may be in any word
        forms += _base64_forms(key)
    return re.compile("|".join(forms).encode())


def _character_pattern(character: str) -> str:
    plain, code = re.escape(character), f"(?i:{ord(character):02x})"
    # Up to four backslashes: JSON in a string of JSON has two for one.
    return rf"(?:{plain}|\\\\{{0,3}}(?:{plain}|u00{code}|x{code})|%{code})"


def _base64_forms(key: str) -> Iterator[str]:
    """Yield the characters that a key gives in base64, behind 0, 1 or 2 bytes of something else, as of `Bearer `."""
    for before in range(3):
        data = bytes(before) + key.encode()
        encoded = base64.b64encode(data).decode()[-(-8 * before // 6) : 8 * len(data) // 6]
        yield re.escape(encoded)
        yield re.escape(encoded.translate(str.maketrans("+/", "-_")))


def open_client(connections: int, key: str = "", **options: Any) -> httpx.AsyncClient:
    """Return a client for so many requests at a time, which sends the key with each of them."""
    import httpx

    if key:
        options["headers"] = {"Authorization": f"Bearer {key}"}
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)  # the rest is limited by `bounded_request`
    # A connection for each request: a server may close an idle one just as the next request is sent on it.
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=0)
    try:
        return httpx.AsyncClient(timeout=timeout, limits=limits, cookies=NoCookies(), **options)
    except (httpx.InvalidURL, ValueError, ImportError) as error:  # the last where a SOCKS proxy needs a package
        raise ValueError(f"the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used: {error}") from None


async def bounded_request(
    client: httpx.AsyncClient, method: str, url: str, *, seconds: float, max_bytes: int, **options: Any
) -> HttpReply:
    """Send a request and return the complete reply, or raise `HttpError`."""
    headers = {**options.pop("headers", {}), "Accept-Encoding": "identity"}
    key = client.headers.get("Authorization", "").removeprefix("Bearer ")
    body = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - part of the reply
    opened: list[asyncio.BaseTransport] = []
    _opened.set(opened)
    try:
        async with asyncio.timeout(seconds), client.stream(method, url, headers=headers, **options) as reply:
            encoding = reply.headers.get("content-encoding", "identity").strip()
            if encoding.lower() not in ("identity", ""):
                what = f"a compressed response (content-encoding {hide_key(encoding, key)!r})"
                raise HttpError(f"{what}, which was not requested")
            async for chunk in reply.aiter_raw():
                if body.tell() + len(chunk) > max_bytes:
                    raise HttpError(f"a response of more than {max_bytes:,} bytes")
                body.write(chunk)
            found = {name.lower(): hide_key(value, key) for name, value in reply.headers.items()}
            return HttpReply(reply.status_code, found, body, key)
    except BaseException as error:
        body.close()
        for transport in opened:
            transport.close()
        if isinstance(error, TimeoutError):
            raise HttpError(f"no complete response within {seconds:g} s") from None
        if type(error).__name__ in ("ConnectError", "ConnectTimeout"):  # httpx's
            raise NoConnectionError(_message(error, key)) from None
        # Any exception: bytes that no server should send reach four libraries below, each with its own.
        if isinstance(error, Exception) and not isinstance(error, HttpError):
            raise HttpError(_message(error, key)) from None
        raise


def _message(error: BaseException, key: str) -> str:
    return hide_key(f"{type(error).__name__}: {error}".removesuffix(": "), key)


def fetch(url: str, *, seconds: float, max_bytes: int) -> bytes:
    """Return what is at an address, redirects followed; raise `HttpError` for any failure."""

    async def get() -> bytes:
        async with open_client(1, follow_redirects=True) as client:
            reply = await bounded_request(client, "GET", url, seconds=seconds, max_bytes=max_bytes)
        with reply.body:
            if reply.status != 200:
                raise HttpError(f"status {reply.status}")
            return reply.read()

    with event_loop_thread() as loop:
        return asyncio.run_coroutine_threadsafe(get(), loop).result()


def is_retryable(status: int) -> bool:
    """Return whether a request that got this status may be answered when it is sent again."""
    return status in RETRY_STATUS or status >= 500


def retry_pause(attempt: int) -> float:
    """Return the seconds before a retry: doubled each time, and jittered, so that clients do not retry in step."""
    return min(MAX_PAUSE, FIRST_PAUSE * 2.0**attempt) * random.uniform(0.5, 1.0)


def retry_after(header: str | None) -> float:
    """Return the seconds of a Retry-After header, within bounds."""
    try:
        return min(MAX_PAUSE, max(0.0, float(header or 0)))  # in this order NaN becomes 0
    except ValueError:
        return 0.0


@contextmanager
def event_loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a daemon thread; at the end of the block its tasks are cancelled.

    In a thread, because the caller may have an event loop of its own, as notebooks do.
    """
    loop = _EventLoop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_tasks(), loop).result(timeout=10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10.0)
        if not thread.is_alive():
            loop.close()


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _EventLoop(asyncio.SelectorEventLoop):
    """An event loop that looks names up in daemon threads, and notes the connections of each request."""

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        """Connect, and note the connection."""
        transport, protocol = await super().create_connection(*args, **options)
        _opened.get([]).append(transport)  # also in the tasks of a request, which inherit its context
        return transport, protocol

    async def getaddrinfo(self, *args: Any, **options: Any) -> Any:
        """Look a name up. The threads of asyncio's own executor would be waited for when the process ends."""
        found: asyncio.Future[Any] = self.create_future()

        def finish(result: Any, error: Exception | None) -> None:
            if not found.done():  # the request's deadline may have passed
                found.set_exception(error) if error else found.set_result(result)

        def look_up() -> None:
            result, failure = None, None
            try:
                result = socket.getaddrinfo(*args, **options)
            except Exception as error:  # OSError, or UnicodeError for a name that is none
                failure = error
            with suppress(RuntimeError):  # the loop may be closed
                self.call_soon_threadsafe(finish, result, failure)

        threading.Thread(target=look_up, daemon=True).start()
        return await found
