"""Who may ask the server of `trimtab watch`: this machine's browser, with the token of the address, to read.

Another page in the same browser cannot: it does not know the token, may not read the answers, and a name of its own
that it points to this machine (DNS rebinding) is refused by the Host header.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

HOSTS = ("127.0.0.1", "localhost", "[::1]")  # with any port, since ssh may forward another one
PAGE = "/"  # the only address that takes the token in its query; all others take it in a header
NOT_SECRET = ("/favicon.ico",)
HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
NO_TOKEN = "Refused: use the whole address that `trimtab watch` printed; it ends with a token."
NO_HOST = "Refused: the page is served to localhost only. See docs/watch.md for a remote machine."
NO_METHOD = "Refused: this server can only be read."


@dataclass(frozen=True)
class Guard:
    """An ASGI app that passes requests on to another one if they may read."""

    app: App
    token: str

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return
        refusal = self.refusal(scope)
        if refusal is not None:
            status, words = refusal
            headers = [(b"content-type", b"text/plain; charset=utf-8"), *_fixed_headers(())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            body = b"" if scope["method"] == "HEAD" else words.encode()
            await send({"type": "http.response.body", "body": body})
            return

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                message["headers"] = [*headers, *_fixed_headers({name for name, _ in headers})]
            await send(message)

        await self.app(scope, receive, guarded)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the words of a refusal; None for a request that may read."""
        headers = dict(scope["headers"])
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not _is_loopback(hosts[0].decode("latin-1")):
            return 403, NO_HOST
        # A link in a mail or on another page may open the page itself, which then asks for the rest.
        opens = scope["path"] == PAGE and headers.get(b"sec-fetch-mode") == b"navigate"
        if headers.get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none") and not opens:
            return 403, NO_TOKEN
        if scope["method"] not in ("GET", "HEAD"):
            return 405, NO_METHOD
        if scope["path"] in NOT_SECRET:
            return None
        given = headers.get(b"authorization", b"")
        found = given[7:] if given[:7].lower() == b"bearer " else b""
        if not found and scope["path"] == PAGE:
            query = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=20)
            found = query.get("token", [""])[0].encode("utf-8", "replace")
        # Compared in constant time, so that nobody learns from the time how much of a guess is right.
        return None if hmac.compare_digest(found, self.token.encode()) else (403, NO_TOKEN)


def _is_loopback(host: str) -> bool:
    name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    return (name.lower() in HOSTS and port.isdecimal()) or host.lower() in HOSTS


def _fixed_headers(given: Any) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given]
