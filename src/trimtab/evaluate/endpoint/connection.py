"""How to reach a server: its address, the key that is never shown, and errors that may be shown."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from trimtab.text import printable

MESSAGE_LENGTH = 300  # characters of a server's message that are kept
EXAMPLE = "give one like http://host:port/v1"


class EndpointError(ValueError):
    """There is no server, or it refuses every request: the address, the key or the model's name is wrong."""


@dataclass(frozen=True)
class EndpointConnection:
    """How to reach a server. The key is read from OPENAI_API_KEY and neither stored nor shown."""

    url: str
    concurrency: int = 16
    timeout: float = 1800.0  # seconds for a complete reply
    retries: int = 6

    def __post_init__(self) -> None:
        import httpx

        parts, wrong = httpx.URL(""), ""
        try:
            parts = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            wrong = f" ({error})"
        if parts.userinfo or (wrong and "@" in self.url):  # before any message shows the address
            raise ValueError("--endpoint contains a password: put the key into OPENAI_API_KEY instead")
        known = parts.scheme in ("http", "https") and parts.host and (parts.port or 0) < 1 << 16
        if not known or parts.query or parts.fragment:
            raise ValueError(f"--endpoint {for_message(self.url)} is not a URL of a server{wrong}: {EXAMPLE}")
        if self.concurrency < 1 or self.retries < 0 or not 0 < self.timeout < math.inf:
            raise ValueError("--concurrency must be at least 1, --retries at least 0, --timeout more than 0 and finite")
        key = api_key()
        if not (key.isascii() and key.isprintable()):
            raise ValueError("OPENAI_API_KEY contains a character that no HTTP header can hold: check where it is set")


def api_key() -> str:
    """Return the key of the environment; empty without one."""
    return os.environ.get("OPENAI_API_KEY", "").strip()


def key_header() -> dict[str, str]:
    """Return the header with the key; none without one."""
    return {"Authorization": f"Bearer {key}"} if (key := api_key()) else {}


def hide_key(text: str, shortest: int = 1) -> str:
    """Remove the key from a text: some servers repeat the key that they refuse."""
    key = api_key()
    return text.replace(key, "(the key)") if len(key) >= shortest else text


def for_message(text: str) -> str:
    """Return a message that can be shown: without the key, printable, on one line and short."""
    return " ".join(printable(hide_key(text)).split())[:MESSAGE_LENGTH]
