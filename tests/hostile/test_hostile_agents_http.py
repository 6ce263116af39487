"""What is no proper HTTP, or too much of it: the server of agents answers or hangs up, and others notice nothing."""

from __future__ import annotations

import gc
import json
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from helpers.agents.asking import USER, ask, client, post, raw, serving
from helpers.agents.fake_sampler import FakeSampler
from trimtab.agents import Endpoint, Session
from trimtab.agents.connections import connections_allowed

KEPT = 48 << 20  # bytes that the process may have more after thousands of requests than after the first
BODY = json.dumps({"messages": USER}).encode()
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer KEY\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer KEY\r\n"
LENGTH = b"content-length: %d\r\n\r\n" % len(BODY)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Endpoint, FakeSampler]]:
    with serving() as made:
        yield made


@pytest.fixture
def bystander(served: tuple[Endpoint, FakeSampler]) -> Iterator[Session]:
    """Another rollout, which is answered before and after, and has nothing else in it."""
    endpoint, _ = served
    session = endpoint.open(7, 100)
    connection = client(endpoint, session)
    assert ask(connection).choices[0].message.content == "7"
    yield session
    assert ask(connection).choices[0].message.content == "7"
    sealed = session.seal()
    assert (sealed.stats.requests, sealed.stats.refused, sealed.stats.error) == (2, {}, "")
    assert [branch.requests for branch in sealed.branches] == [(0,), (1,)]


def connect(endpoint: Endpoint) -> socket.socket:
    address = urlsplit(endpoint.url)
    return socket.create_connection((address.hostname, address.port), timeout=60)


def exchange(endpoint: Endpoint, session: Session, data: bytes) -> bytes:
    """Send bytes and that no more will come; return all that the server says before it hangs up."""
    heard = b""
    with connect(endpoint) as connection:
        try:
            connection.sendall(data.replace(b"KEY", session.api_key.encode()))
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(1 << 16):
                heard += more
        except OSError:  # it has hung up on us
            pass
    return heard


NO_HTTP = {
    "nothing": b"",
    "tls": bytes.fromhex("1603010200010001fc0303") + b"\0" * 500,
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": b"GET /v1/models\r\n\r\n",
    "half of a header": POST[:40],
    "half of a body": POST + LENGTH + BODY[:10],
    "no body": POST + LENGTH,
    "a body longer than said": POST + b"content-length: 3\r\n\r\n" + BODY,
    "a body shorter than said": POST + b"content-length: 99999\r\n\r\n" + BODY,
    "a negative length": POST + b"content-length: -5\r\n\r\n" + BODY,
    "a length in words": POST + b"content-length: many\r\n\r\n" + BODY,
    "a length of thirty digits": POST + b"content-length: " + b"9" * 30 + b"\r\n\r\n" + BODY,
    "a length of other digits": POST + "content-length: ５\r\n\r\n".encode() + BODY,
    "two lengths": POST + b"content-length: 3\r\n" + LENGTH + BODY,
    "a length and chunks": POST + b"transfer-encoding: chunked\r\n" + LENGTH + b"0\r\n\r\n" + GET + b"\r\n",
    "broken chunks": POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + BODY,
    "half of a chunk": POST + b"transfer-encoding: chunked\r\n\r\nffff\r\n" + BODY,
    "a chunk of 2**64 bytes": POST + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 16 + b"\r\n" + BODY,
    "a header of a megabyte": POST + b"x: " + b"y" * (1 << 20) + b"\r\n" + LENGTH + BODY,
    "fifty thousand headers": POST + b"x: y\r\n" * 50_000 + LENGTH + BODY,
    "a header without a name": POST + b": y\r\n" + LENGTH + BODY,
    "a zero byte in a header": POST + b"x: \0\r\n" + LENGTH + BODY,
    "an address of a megabyte": b"GET /" + b"x" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
    "an address of bytes": b"GET /\xff\xfe%00%ff HTTP/1.1\r\nhost: x\r\n\r\n",
    "no method that is known": POST.replace(b"POST", b"BREW") + LENGTH + BODY,
    "a body that waits to be asked for": POST + b"expect: 100-continue\r\n" + LENGTH,
    "another protocol": GET + b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\r\n",
    "bytes that are no text": POST + b"content-length: 4\r\n\r\n\xff\xfe\0\x80",
}


@pytest.mark.parametrize("name", NO_HTTP)
def test_what_is_no_request_disturbs_nobody(
    served: tuple[Endpoint, FakeSampler], bystander: Session, name: str
) -> None:
    endpoint, sampler = served
    session = endpoint.open(1, 100)
    before = len(sampler.requests)
    heard = exchange(endpoint, session, NO_HTTP[name])
    assert heard == b"" or heard.startswith(b"HTTP/1.1 ")
    assert session.api_key.encode() not in heard
    assert session.seal().branches == () and len(sampler.requests) == before


def test_requests_behind_each_other_on_a_connection_are_answered_in_order(
    served: tuple[Endpoint, FakeSampler], bystander: Session
) -> None:
    endpoint, _ = served
    session = endpoint.open(1, 100)
    wrong = POST.replace(b"KEY", b"wrong") + LENGTH + BODY
    asked = POST + LENGTH + BODY
    with connect(endpoint) as connection:
        requests = [asked, wrong, asked, GET + b"\r\n", asked, GET + b"connection: close\r\n\r\n"]
        connection.sendall(b"".join(requests).replace(b"KEY", session.api_key.encode()))
        heard = b""
        while more := connection.recv(1 << 16):
            heard += more
    states = [part[:3] for part in heard.split(b"HTTP/1.1 ")[1:]]
    assert states == [b"200", b"401", b"200", b"200", b"200", b"200"]
    sealed = session.seal()
    assert (sealed.stats.requests, sealed.stats.turns, sealed.stats.error) == (3, 3, "")


def test_connections_that_stay_half_open_disturb_nobody(
    served: tuple[Endpoint, FakeSampler], bystander: Session
) -> None:
    endpoint, sampler = served
    session = endpoint.open(1, 100)
    before = len(sampler.requests)
    with ExitStack() as connections:
        for number in range(300):
            half = POST[: number % len(POST)] if number % 2 else POST + LENGTH + BODY[: number % len(BODY)]
            connections.enter_context(connect(endpoint)).sendall(half.replace(b"KEY", session.api_key.encode()))
        assert ask(client(endpoint, endpoint.open(9, 100))).choices[0].message.content == "7"
    assert session.seal().branches == () and len(sampler.requests) == before + 1


def test_clients_that_do_not_read_their_answers_disturb_nobody(
    served: tuple[Endpoint, FakeSampler], bystander: Session
) -> None:
    endpoint, _ = served
    session = endpoint.open(1, 10_000)
    with ExitStack() as connections:
        for _ in range(50):
            connections.enter_context(raw(endpoint, session, BODY, headers="x-stainless-retry-count: 0\r\n"))
        assert post(endpoint, session).status_code == 200
    assert session.seal().stats.error == ""


def test_connections_that_are_left_open_cost_neither_files_nor_other_requests() -> None:
    with (
        serving(max_connections=20) as (endpoint, sampler),
        ExitStack() as connections,
        ThreadPoolExecutor() as threads,
    ):
        session, other = endpoint.open(1, 100), endpoint.open(2, 100)
        sampler.free.clear()
        asking = threads.submit(post, endpoint, other)
        sampler.wait_for(1)
        idle = [connections.enter_context(connect(endpoint)) for _ in range(100)]
        for each in idle[:81]:  # the oldest are closed; with the one that waits for its answer, twenty stay
            assert each.recv(1) == b""
        sampler.free.set()
        assert asking.result().status_code == 200
        assert ask(client(endpoint, other)).choices[0].message.content == "7"
        idle[-1].sendall((GET + b"\r\n").replace(b"KEY", session.api_key.encode()))
        assert idle[-1].recv(12) == b"HTTP/1.1 200"


def test_a_server_has_no_more_than_a_quarter_of_the_files_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, 4_096))
    assert connections_allowed(4_096) == 256
    assert connections_allowed(100) == 100


def resident() -> int:
    """Return how much memory the process has now, in bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_does_not_grow(served: tuple[Endpoint, FakeSampler], bystander: Session) -> None:
    endpoint, _ = served
    floods = [
        b"[" * (7 << 20),
        b'{"messages": ' + b"[" * (7 << 20),
        b'{"a":' * (1 << 20),
        b"[" + b"0," * (2 << 20) + b"0]",
        b'{"messages": [{"role": "user", "content": "' + b"\\u00e9" * (1 << 20) + b'"}], "n": 2}',
        b"x" * (50 << 20),
    ]

    def flood() -> None:
        session = endpoint.open(1, 100)
        for body in floods:
            assert post(endpoint, session, body).status_code in (400, 413)
        for _ in range(50):
            exchange(endpoint, session, NO_HTTP["half of a body"])
        session.seal()

    flood()
    flood()
    before = resident()
    for _ in range(6):
        flood()
    assert resident() - before < KEPT
