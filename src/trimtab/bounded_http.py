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
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from http.cookiejar import CookieJar
from typing import IO, Any

import httpx  # takes a tenth of a second: commands without a request import this module only where they send one

from trimtab.text import printable

IN_MEMORY = 1 << 16  # bytes of a body; the rest waits in a temporary file, since many requests may run at a time
CONNECT_SECONDS = 30.0  # where the deadline is later: a model may need half an hour for a reply, a connection does not
SECRET_LENGTH = 8  # characters; a shorter key, as vLLM's EMPTY, is no secret and may well be in a response
HIDDEN = "(the key)"
MESSAGE_LENGTH = 300  # characters of a server's message that are kept
EXCERPT = 1 << 16  # bytes of a body in which an excerpt is searched for the key
KEPT_HEADERS = ("location", "retry-after")  # of a reply; its charset, for one, could name any codec
# What openai's client tells about this machine and its user's account, besides what a request needs.
PRIVATE_HEADERS = ("x-stainless-", "openai-")

HttpError = httpx.TransportError  # what a request raises that got no complete reply; the message says why

# The connections that a request opened. httpcore leaves one open whose TLS handshake is cancelled.
_opened: ContextVar[list[asyncio.BaseTransport]] = ContextVar("opened")


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


def url_problem(url: str, query: bool = True) -> str:
    """Return what is wrong with the address of a server: 'password' if it contains one, else why it is none, or ''."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        return "password" if "@" in url else f"is not a URL of a server ({error})"
    known = parts.scheme in ("http", "https") and parts.host and (parts.port or 0) < 1 << 16
    if parts.userinfo or (not known and "@" in url):
        return "password"
    return "" if known and not parts.fragment and (query or not parts.query) else "is not a URL of a server"


def for_message(text: str) -> str:
    """Return what a server sent as a message that can be shown: printable, on one line and short."""
    return " ".join(printable(text).split())[:MESSAGE_LENGTH]


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


class BoundedClient(httpx.AsyncClient):
    """A client whose requests end within their read timeout, all together, and with at most `max_bytes` of a reply.

    `key` is sent with every request. A request that fails in any way raises `HttpError`, and its subclass
    `httpx.ConnectError` if it reached no server. With `parse`, the body of a successful reply is given to it and not
    kept; what it returns is the reply's `extensions["parsed"]`. One reply is parsed at a time, and the others wait on
    the disk, so that memory does not grow with the number of connections.
    """

    def __init__(
        self,
        connections: int,
        *,
        seconds: float,
        max_bytes: int,
        key: str = "",
        parse: Callable[[bytes], Any] | None = None,
        follow_redirects: bool = False,
    ) -> None:
        self._max_bytes = max_bytes
        self._key = key
        self._parse = parse
        self._parsing = asyncio.Lock()
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        # A connection for each request: a server may close an idle one just as the next request is sent on it.
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=0)
        try:
            super().__init__(timeout=timeout, limits=limits, cookies=NoCookies(), follow_redirects=follow_redirects)
        except (httpx.InvalidURL, ValueError, ImportError) as error:  # the last where a SOCKS proxy needs a package
            raise ValueError(f"the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used: {error}") from None

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Send a request and return the complete reply, without most of its headers and without the key."""
        self._set_headers(request)
        opened: list[asyncio.BaseTransport] = []
        _opened.set(opened)
        seconds = request.extensions["timeout"]["read"]
        with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY) as body:
            try:
                async with asyncio.timeout(seconds):
                    reply = await super().send(request, **{**options, "stream": True})
                    await self._read(reply, body)
            except BaseException as error:
                for transport in opened:
                    transport.close()
                if isinstance(error, TimeoutError):
                    raise httpx.ReadTimeout(f"no complete response within {seconds:g} s") from None
                if not isinstance(error, Exception):
                    raise
                # Any exception: bytes that no server should send reach four libraries below, each with its own.
                unreached = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                message = f"{type(error).__name__}: {error}".removesuffix(": ").removeprefix("_ReplyError: ")
                raise (httpx.ConnectError if unreached else HttpError)(hide_key(message, self._key)) from None
            body.seek(0)
            if reply.is_success and self._parse is not None:
                async with self._parsing:
                    content, parsed = b"", {"parsed": self._parse(self._hide(body.read()))}
            else:
                content, parsed = self._hide(body.read()) if reply.is_success else self._excerpt(body), {}
        headers = {name: hide_key(reply.headers[name], self._key) for name in KEPT_HEADERS if name in reply.headers}
        return httpx.Response(reply.status_code, headers=headers, content=content, extensions=parsed, request=request)

    def _set_headers(self, request: httpx.Request) -> None:
        for name in [name for name in request.headers if name.startswith(PRIVATE_HEADERS)]:
            del request.headers[name]
        request.headers["Accept-Encoding"] = "identity"
        request.headers.pop("Authorization", None)
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"

    async def _read(self, reply: httpx.Response, body: IO[bytes]) -> None:
        try:
            encoding = reply.headers.get("content-encoding", "identity").strip()
            if encoding.lower() not in ("identity", ""):
                what = f"a compressed response (content-encoding {hide_key(encoding, self._key)!r})"
                raise _ReplyError(f"{what}, which was not requested")
            async for chunk in reply.aiter_raw():
                if body.tell() + len(chunk) > self._max_bytes:
                    raise _ReplyError(f"a response of more than {self._max_bytes:,} bytes")
                body.write(chunk)
        finally:
            await reply.aclose()

    def _hide(self, content: bytes) -> bytes:
        """Return a body without the key, unless that is too short to be one."""
        secret = len(self._key) >= SECRET_LENGTH
        return _key_pattern(self._key).sub(HIDDEN.encode(), content) if secret else content

    def _excerpt(self, body: IO[bytes]) -> bytes:
        """Return the beginning of a body for a message, without the key, however short that is."""
        content = body.read(EXCERPT)
        if self._key:
            cut_off = 9 * len(self._key) if len(content) == EXCERPT else 0  # a key cut in the middle is not found
            content = _key_pattern(self._key).sub(HIDDEN.encode(), content)
            content = content[: len(content) - cut_off]
        return content


class _ReplyError(Exception):
    """A reply that is not read on; the message says why."""


def fetch(url: str, *, seconds: float, max_bytes: int) -> bytes:
    """Return what is at an address, redirects followed; raise `HttpError` for any failure."""

    async def get() -> bytes:
        async with BoundedClient(1, seconds=seconds, max_bytes=max_bytes, follow_redirects=True) as client:
            reply = await client.get(url)
        if reply.status_code != 200:
            raise HttpError(f"status {reply.status_code}")
        return reply.content

    with event_loop_thread() as loop:
        return asyncio.run_coroutine_threadsafe(get(), loop).result()


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
