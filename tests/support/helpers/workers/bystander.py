"""A process beside the sandbox: it serves sockets and counts what reaches it; `report` on stdin asks for the count."""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys


def main() -> None:
    """Serve until stdin ends."""
    folder, abstract, secret = sys.argv[1], sys.argv[2], os.environ["BYSTANDER_SECRET"].encode()
    hits: list[str] = []
    for number in (signal.SIGURG, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT, signal.SIGHUP):
        signal.signal(number, lambda number, _: hits.append(f"signal {number} reached a process outside"))
    selector = selectors.DefaultSelector()
    ports = {}
    for name, family, kind, address in (
        ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        ("tcp6", socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)),
        ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        ("unix", socket.AF_UNIX, socket.SOCK_STREAM, f"{folder}/socket"),
        ("unix_datagram", socket.AF_UNIX, socket.SOCK_DGRAM, f"{folder}/datagrams"),
        ("abstract", socket.AF_UNIX, socket.SOCK_STREAM, "\0" + abstract),
        ("abstract datagram", socket.AF_UNIX, socket.SOCK_DGRAM, "\0" + abstract + "-datagram"),
    ):
        try:
            server = socket.socket(family, kind)
            server.bind(address)
        except OSError:  # a machine without IPv6
            ports[name] = 1
            continue
        if kind == socket.SOCK_STREAM:
            server.listen(64)
        if isinstance(address, str) and address[0] == "/":
            os.chmod(address, 0o777)
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ, name)
        ports[name] = server.getsockname()[1] if isinstance(address, tuple) else 0

    def drain() -> None:
        for key, _ in selector.select(0):
            hits.append(f"{key.data} reached a server outside")
            if key.fileobj.type == socket.SOCK_DGRAM:
                key.fileobj.recv(65536)
                continue
            connection, _ = key.fileobj.accept()
            # What a page is asked for may come later than the answer, which must not be cut off by a reset.
            kept.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + secret)
                connection.shutdown(socket.SHUT_WR)

    kept: list[socket.socket] = []
    selector.register(sys.stdin, selectors.EVENT_READ, "stdin")
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    while True:
        selector.select()
        selector.unregister(sys.stdin)  # the others first: what arrived before the question is in the answer
        while selector.select(0):
            drain()
        selector.register(sys.stdin, selectors.EVENT_READ, "stdin")
        if any(key.data == "stdin" for key, _ in selector.select(0)):
            if not sys.stdin.readline():
                return
            sys.stdout.write(json.dumps(sorted(set(hits))) + "\n")
            sys.stdout.flush()
            hits.clear()


if __name__ == "__main__":
    main()
