"""The connections to the endpoint: no more than its process has files to spare."""

from __future__ import annotations

import asyncio
import resource
from typing import Any


def connections_allowed(most: int) -> int:
    """Return how many connections a server may have: with all of its files open a trainer could save no checkpoint."""
    # A quarter, because asyncio accepts as many again before one of them is known to the protocol.
    return min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


def bounded_protocol(most: int) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol for a server with at most so many connections.

    For one more, the one that has sent nothing for longest is closed, unless its request is under way. Agents that
    make a client for each request leave connections behind, and one that opens thousands must not shut out the others.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    connections: dict[Any, None] = {}  # the one that was heard last is at the end
    base: Any = AutoHTTPProtocol

    class BoundedProtocol(base):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            connections[self] = None
            if len(connections) > most:
                closed = next((each for each in connections if not _is_busy(each)), self)
                del connections[closed]
                closed.transport.close()

        def data_received(self, data: bytes) -> None:
            if self in connections:
                del connections[self]
                connections[self] = None
            super().data_received(data)

        def connection_lost(self, error: Exception | None) -> None:
            connections.pop(self, None)
            super().connection_lost(error)

    return BoundedProtocol


def _is_busy(protocol: Any) -> bool:
    return protocol.cycle is not None and not protocol.cycle.response_complete
