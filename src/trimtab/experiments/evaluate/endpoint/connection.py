"""How to reach a server: its address, and messages about it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.bounded_http import hide_key, read_key
from trimtab.text import printable

MESSAGE_LENGTH = 300  # characters of a server's message that are kept
KEY_VARIABLE = "OPENAI_API_KEY"
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
        key = read_key(KEY_VARIABLE)
        known = parts.scheme in ("http", "https") and parts.host and (parts.port or 0) < 1 << 16
        if not known or parts.query or parts.fragment:
            shown = for_message(hide_key(self.url, key))
            raise ValueError(f"--endpoint {shown} is not a URL of a server{wrong}: {EXAMPLE}")
        if self.concurrency < 1 or self.retries < 0 or not 0 < self.timeout < math.inf:
            raise ValueError("--concurrency must be at least 1, --retries at least 0, --timeout more than 0 and finite")


def for_message(text: str) -> str:
    """Return a message that can be shown: printable, on one line and short."""
    return " ".join(printable(text).split())[:MESSAGE_LENGTH]
