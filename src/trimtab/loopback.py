"""A server on the loopback address that says nothing by itself: the endpoint of agents, and `trimtab watch`."""

from __future__ import annotations

import socket
from typing import Any

LOOPBACK = "127.0.0.1"
BACKLOG = 2_048  # connections that wait to be accepted


def listen(port: int = 0) -> socket.socket:
    """Return a socket that listens on a port of the loopback address; 0 takes a free one."""
    # Named as TCP, or asyncio leaves Nagle's algorithm on, and an answer takes 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if port:  # a server that has just ended leaves its port in TIME_WAIT
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def quiet_server(app: Any, **options: Any) -> Any:
    """Return a uvicorn server of an ASGI app which logs nothing and tells nothing about this machine.

    `options` are uvicorn's own.
    """
    import uvicorn

    quiet = {
        "lifespan": "off",
        "ws": "none",
        "access_log": False,
        "log_config": None,  # uvicorn's own would take over the process's logging
        "log_level": "critical",  # it warns of every request that is no HTTP, into a run's display
        "server_header": False,
        "date_header": False,
        "proxy_headers": False,
        "timeout_graceful_shutdown": 1,
    }
    return uvicorn.Server(uvicorn.Config(app, **{**quiet, **options}))
