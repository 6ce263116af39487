"""A server below HTTP: it reads a request and then writes whatever bytes a test wants, for as long as it wants."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from helpers.evaluate.small_evals import completion

Bytes = Callable[[], Iterable[bytes]]  # the pieces of a reply; an empty piece is a pause
PAUSE = 0.02  # seconds
GOOD_BODY = json.dumps(completion(["2", "2", "2"])).encode()
GOOD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(GOOD_BODY) + GOOD_BODY


@dataclass
class RawServer:
    """The address of the server, the requests it read, and whether it should end."""

    url: str
    requests: list[bytes] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)


@contextmanager
def raw_serving(reply: Bytes) -> Iterator[RawServer]:
    """Run a server that sends the same reply to every request, and then closes the connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        server = RawServer(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
        threads = [threading.Thread(target=_accept, args=(listener, server, reply), daemon=True)]
        threads[0].start()
        try:
            yield server
        finally:
            server.closing.set()
            with suppress(OSError):  # wakes `accept`
                listener.shutdown(socket.SHUT_RDWR)
            threads[0].join(timeout=60)


def _accept(listener: socket.socket, server: RawServer, reply: Bytes) -> None:
    with suppress(OSError):
        while not server.closing.is_set():
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, server, reply), daemon=True).start()


def _serve(connection: socket.socket, server: RawServer, reply: Bytes) -> None:
    with connection, suppress(OSError):  # the client may leave at any time
        server.requests.append(_read_request(connection))
        for piece in reply():
            if server.closing.is_set():
                return
            if piece:
                connection.sendall(piece)
            else:
                server.closing.wait(PAUSE)
        connection.shutdown(socket.SHUT_WR)


def _read_request(connection: socket.socket) -> bytes:
    """Read headers and body, so that no reply is lost to a reset."""
    request = b""
    while b"\r\n\r\n" not in request and (piece := connection.recv(1 << 16)):
        request += piece
    head, _, body = request.partition(b"\r\n\r\n")
    length = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length:" in line), 0)
    while len(body) < length and (piece := connection.recv(1 << 16)):
        body += piece
    return head + b"\r\n\r\n" + body
