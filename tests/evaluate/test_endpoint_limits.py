"""Limits of a request that hold whatever a server sends: time, memory, where the key goes, and an end in words."""

from __future__ import annotations

import base64
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator
from io import BytesIO
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import pytest

from helpers.evaluate.raw_server import GOOD, GOOD_BODY, Bytes, RawServer, raw_serving
from helpers.evaluate.small_evals import RecordedProgress, Reply, completion, serving, small, status, write_sums
from trimtab import bounded_http
from trimtab.experiments.evaluate.endpoint import EndpointConnection, EndpointError
from trimtab.experiments.evaluate.folder import EvalFolder
from trimtab.experiments.evaluate.run import EvalResult, evaluate

TIMEOUT = 0.5
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
KEY = "sk-secret-4242"


def options(folder: Path, url: str, **changes: Any) -> Any:
    """One problem, three samples, one try."""
    how = {"endpoint": url, "model_name": "tiny", "concurrency": 2, "retries": 0, "timeout": 120.0, "problems": 1}
    return small(folder, **{"model": None, **how, **changes})


def run(folder: Path, reply: Bytes, **changes: Any) -> tuple[EvalResult, RecordedProgress, RawServer]:
    """An evaluation against a server that always replies so."""
    log = RecordedProgress()
    with raw_serving(reply) as server:
        return evaluate(options(folder, server.url, **changes), log), log, server


def reasons(done: EvalResult) -> set[str | None]:
    """Why samples failed."""
    return {generation.failed for generation in done.folder.read()}


def slowly(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Pieces with a pause after each."""
    return chain.from_iterable((piece, b"") for piece in pieces)


ENDLESS: dict[str, Bytes] = {
    "nothing": lambda: repeat(b""),
    "headers, one now and then": lambda: chain([OK], slowly(b"x-%d: y\r\n" % n for n in range(10**9))),
    "a header, byte by byte": lambda: chain([OK, b"x: "], slowly(repeat(b"y"))),
    "a status line, byte by byte": lambda: chain([b"HTTP/1.1 200 "], slowly(repeat(b"O"))),
    "100 Continue now and then": lambda: slowly(repeat(b"HTTP/1.1 100 Continue\r\n\r\n")),
    "100 Continue at full speed": lambda: repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "103 Early Hints with headers": lambda: slowly(repeat(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")),
    "a body, byte by byte": lambda: chain([OK, b"content-length: 100000\r\n\r\n"], slowly(repeat(b" "))),
    "a body without length": lambda: chain([OK, b"\r\n"], slowly(repeat(b" "))),
    "chunks of one byte": lambda: chain([CHUNKED], slowly(repeat(b"1\r\n \r\n"))),
    "a chunk extension": lambda: chain([CHUNKED, b"1;"], slowly(repeat(b"x"))),
    "trailers": lambda: chain([CHUNKED, b"0\r\n"], slowly(b"x-%d: y\r\n" % n for n in range(10**9))),
    "a good reply with a missing end": lambda: chain([GOOD[:-1]], repeat(b"")),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_reply_without_end_ends_with_the_timeout(name: str, tmp_path: Path) -> None:
    began = time.monotonic()
    done, log, server = run(tmp_path, ENDLESS[name], timeout=TIMEOUT)
    assert reasons(done) == {"no complete response within 0.5 s"}
    assert time.monotonic() - began < 120 * TIMEOUT
    assert log.has_message("warning", server.url, "3 samples", "no complete response within 0.5 s", "--retry-failed")


def test_a_name_that_cannot_be_looked_up_in_time_is_given_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, real = threading.Event(), socket.getaddrinfo

    def stall(host: Any, *args: Any, **named: Any) -> Any:
        if host in ("slow.invalid", b"slow.invalid"):
            released.wait(300)
            raise OSError("no such name")
        return real(host, *args, **named)

    monkeypatch.setattr(socket, "getaddrinfo", stall)
    done = evaluate(options(tmp_path, "http://slow.invalid/v1", timeout=TIMEOUT), RecordedProgress())
    assert reasons(done) == {"no complete response within 0.5 s"}
    assert not released.is_set()
    released.set()


def test_a_tls_handshake_that_stalls_is_given_up_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts in the backlog, and never says a word
        url = f"https://127.0.0.1:{silent.getsockname()[1]}/v1"
        done = evaluate(options(tmp_path, url, timeout=TIMEOUT), RecordedProgress())
    assert reasons(done) == {"no complete response within 0.5 s"}


def test_a_server_that_does_not_read_is_given_up_on(tmp_path: Path) -> None:
    long = write_sums(tmp_path / "long", [("1+1=" + " " * 6_000_000, "2")])  # more than the buffers of a socket hold
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        done = evaluate(options(tmp_path, url, timeout=TIMEOUT, data=long), RecordedProgress())
    assert reasons(done) == {"no complete response within 0.5 s"}


def packed(layers: int) -> bytes:
    """A gigabyte of zeros and more, compressed so often that few bytes are left."""
    body = gzip.compress(bytes(10_000_000))
    for _ in range(layers - 1):
        body = gzip.compress(body)
    return body


@pytest.mark.parametrize(
    ("head", "body", "words"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n", packed(1), "content-encoding 'gzip'"),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip, gzip\r\n\r\n", packed(2), "content-encoding 'gzip, gzip'"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\n\r\n", b"", "content-encoding 'br'"),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-encoding: x\r\n\r\n", b"", "content-encoding"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n", b" " * 20_000_000, "of more than 16,777,216 bytes"),
        (CHUNKED, b"fffffff\r\n" + b" " * 20_000_000, "of more than 16,777,216 bytes"),
        (b"", b"", "Server disconnected"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"", "illegal status line"),
        (b"\x00\xff\x1b[31mgarbage\r\n\r\n", b"", "illegal status line"),
        (b"HTTP/1.1 abc OK\r\n\r\n", b"", "illegal status line"),
        (b"HTTP/9.9 200 OK\r\n\r\n", b"", "no|not|ill|unknown"),
        (b"HTTP/1.1 099 Low\r\n\r\n", b"", "099|99|status"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n", b"", "Content-Length"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", b"", "Content-Length"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", b"", "illegal header line"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 1_000_000, b"", "RemoteProtocolError"),
        (CHUNKED, b"zz\r\n", "illegal chunk header"),
        (CHUNKED, b"5\r\n{", "closed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n", b"{", "closed"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", "not a chat completion"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", b"", "without a pending proposal"),
        (b"HTTP/1.0 200 OK\r\n\r\n", GOOD_BODY[:-20], "not a chat completion"),
        (b"HTTP/1.1 999 Odd\r\n\r\n", b"", "status 999"),
        (b"HTTP/1.1 418 Teapot\r\n\r\n", b"short and stout", "status 418: short and stout"),
    ],
)
def test_what_is_no_reply_fails_the_samples_in_words(head: bytes, body: bytes, words: str, tmp_path: Path) -> None:
    done, log, server = run(tmp_path, lambda: [head, body])
    (reason,) = reasons(done)
    assert reason is not None
    assert any(word in reason for word in words.split("|")), reason
    assert len(reason) <= 300
    assert reason.isprintable()
    assert log.has_message("warning", server.url, reason)


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 Fine\r\ncontent-type: text/html\r\n\r\n"])
def test_a_body_that_ends_with_the_connection_is_read(head: bytes, tmp_path: Path) -> None:
    done, _, _ = run(tmp_path, lambda: [head, GOOD_BODY])
    assert reasons(done) == {None}


def test_no_compression_is_requested(tmp_path: Path) -> None:
    _, _, server = run(tmp_path, lambda: [GOOD])
    assert b"accept-encoding: identity\r\n" in server.requests[0].lower()


def test_a_redirect_is_not_followed_and_the_key_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving() as other, serving(otherwise=status(307, b"", location=f"{other.url}?{KEY}")) as server:
        with pytest.raises(EndpointError) as error:
            evaluate(options(tmp_path, server.url), RecordedProgress())
        assert other.requests == []
    assert f"the server at {server.url} returned status 307 (redirected to {other.url}?(the key))" in str(error.value)
    assert "check --endpoint" in str(error.value)


@pytest.mark.parametrize("offset", range(270, 330, 7))
def test_no_part_of_the_key_is_shown_or_stored(offset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a message is cut off in the middle of the key, and where a response repeats it."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    texts = [f"{KEY} is {KEY}", "2", KEY[:3] + "\u002d" + KEY[3:]]
    answers: list[Reply] = [status(500, b"x" * offset + KEY.encode()), status(400, b" " * offset + KEY.encode())]
    log = RecordedProgress()
    with serving(*answers, otherwise=lambda h, r: h.send(200, json.dumps(completion(texts)).encode())) as server:
        evaluate(options(tmp_path, server.url, problems=3, concurrency=1), log)
    shown = "".join(log.lines) + (tmp_path / "out/generations.jsonl").read_text()
    assert KEY[:8] not in shown.replace(KEY[:3] + "-" + KEY[3:], "")
    assert "(the key) is (the key)" in shown


def test_the_key_is_found_however_it_is_written() -> None:
    key = 'sk-"se/cret"-42+'
    forms = [key, json.dumps(key), json.dumps(json.dumps(key)), ascii(key), urllib.parse.quote(key, safe=""), key * 2]
    forms += ["".join(f"\\u{ord(c):04X}" for c in key), "".join(f"%{ord(c):02x}" for c in key)]
    forms += [base64.b64encode(f"{before}{key}".encode()).decode() for before in ("", "a", "Bearer ")]
    forms += [base64.urlsafe_b64encode(f"user:{key}!".encode()).decode()]
    for form in forms:
        hidden = bounded_http.hide_key(f"<{form}>", key)
        assert "(the key)" in hidden and len(hidden) < 40, form
    for text in ("sk-", "e/cret", "\\u0073k", "\ud800", "any words"):
        assert bounded_http.hide_key(text, key) == text


def test_a_key_that_an_excerpt_cuts_off_is_not_shown() -> None:
    client = bounded_http.BoundedClient(1, seconds=1.0, max_bytes=1, key=KEY)
    for form in (KEY, "".join(f"\\u{ord(c):04x}" for c in KEY)):
        for offset in range(len(form)):
            body = BytesIO((form * (bounded_http.EXCERPT // len(form) + 2)).encode()[offset:])
            rest = client._excerpt(body).decode().partition("(the key)")[2].replace("(the key)", "")
            assert "(the key)".startswith(rest), form


def test_a_short_key_is_no_secret_and_stays_in_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    reply = json.dumps(completion(["The set is EMPTY."] * 3)).encode()
    done, _, _ = run(tmp_path, lambda: [OK, b"\r\n", reply])
    assert {generation.text for generation in done.folder.read()} == {"The set is EMPTY."}


@pytest.mark.parametrize("key", ["sk-ä", "sk-\nx-evil: 1", "sk-\x00"])
def test_a_key_that_no_header_can_hold_is_refused_unseen(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "OPENAI_API_KEY": key})
    with pytest.raises(ValueError, match="OPENAI_API_KEY contains a character") as error:
        EndpointConnection("http://host/v1")
    assert "sk-" not in str(error.value)


def test_a_key_with_a_line_end_is_sent_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\r\n")
    _, _, server = run(tmp_path, lambda: [GOOD])
    assert f"authorization: bearer {KEY}\r\n".encode() in server.requests[0].lower()


def test_no_cookies_are_kept(tmp_path: Path) -> None:
    cookie = GOOD.replace(b"content-type", b"set-cookie: a=b; path=/\r\ncontent-type")
    _, _, server = run(tmp_path, lambda: [cookie], problems=3, concurrency=1)
    assert len(server.requests) == 3
    assert all(b"cookie" not in request.lower() for request in server.requests)


def test_a_request_needs_no_connection_that_another_has_used(tmp_path: Path) -> None:
    # This server never answers a second request on a connection; others close theirs just as a request is sent.
    done, _, server = run(tmp_path, lambda: chain([GOOD], repeat(b"")), problems=3, concurrency=1, timeout=30.0)
    assert reasons(done) == {None}
    assert len(server.requests) == 3


def test_unusable_log_probabilities_are_left_out_and_said_once(tmp_path: Path) -> None:
    reply = completion(["2", "2", "2"])
    reply["choices"][0]["logprobs"] = {"content": [{"logprob": -1.7e308}] * 3}
    reply["choices"][1]["logprobs"] = {"content": [{"logprob": -0.5}]}
    body = json.dumps(reply).encode()
    done, log, server = run(tmp_path, lambda: [OK, b"\r\n", body], problems=4)
    assert reasons(done) == {None}
    assert done.metrics["gsm8k"].surprisal is not None
    assert done.metrics["gsm8k"].surprisal.mean == 0.5
    said = [line for line in log.lines if "log-probabilities" in line]
    assert len(said) == 1
    assert server.url in said[0] and "4 replies" in said[0] and "logprob is -1.7e+308" in said[0]


def test_numbers_that_no_float_can_hold_do_not_stop_an_evaluation(tmp_path: Path) -> None:
    huge = "1" + "0" * 400
    body = json.dumps(completion(["2", "2", "2"])).replace("21", huge).encode()
    assert huge.encode() in body
    done, _, _ = run(tmp_path, lambda: [OK, b"\r\n", body])
    assert reasons(done) == {None}
    assert done.metrics["gsm8k"].length is None


def test_samples_that_arrived_before_a_fatal_reply_are_stored(tmp_path: Path) -> None:
    """Of a request for three samples two arrive; the request for the third is refused."""
    two = json.dumps(completion(["2", "2"])).encode()
    replies = cycle([[OK, b"\r\n", two], [b"HTTP/1.1 401 No\r\n\r\n"]])
    with raw_serving(lambda: next(replies)) as server, pytest.raises(EndpointError, match="401"):
        evaluate(options(tmp_path, server.url), RecordedProgress())
    assert [generation.sample for generation in EvalFolder(tmp_path / "out").read()] == [0, 1]


def test_a_suffix_that_is_not_utf8_is_sent(tmp_path: Path) -> None:
    """Python reads such bytes of a command line as halves of surrogate pairs."""
    done, _, server = run(tmp_path, lambda: [GOOD], suffix="\udcff")
    assert reasons(done) == {None}
    assert b"\\udcff" in server.requests[0]


@pytest.mark.parametrize("url", ["http://[::1", "http://host:99999/v1", "http://host/v1?key=1", "http://\x1b[31m/"])
def test_an_address_that_cannot_be_used_is_refused_in_words(url: str) -> None:
    with pytest.raises(ValueError, match="is not a URL") as error:
        EndpointConnection(url)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("timeout", [float("nan"), float("inf")])
def test_a_timeout_that_is_no_number_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="--timeout more than 0 and finite"):
        EndpointConnection("http://host/v1", timeout=timeout)


def test_a_name_that_is_none_ends_the_evaluation(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no server answers at http://a"):
        evaluate(options(tmp_path, f"http://{'a' * 70}/v1"), RecordedProgress())


@pytest.mark.parametrize("proxy", ["gopher://127.0.0.1:1", "socks5://127.0.0.1:1", "http://127.0.0.1:port"])
def test_a_proxy_that_cannot_be_used_is_said(proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ValueError, match="HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used"):
        evaluate(options(tmp_path, "http://host.invalid/v1"), RecordedProgress())


def test_fetch_follows_redirects_within_its_limits() -> None:
    def get(reply: Bytes, **limits: Any) -> bytes:
        with raw_serving(reply) as server:
            return bounded_http.fetch(server.url, **{"seconds": 60.0, "max_bytes": 1_000_000, **limits})

    assert get(lambda: [OK, b"\r\nhello"]) == b"hello"
    moved = iter([[b"HTTP/1.1 302 Moved\r\nlocation: /other\r\nconnection: close\r\n\r\n"], [OK, b"\r\nthere"]])
    assert get(lambda: next(moved)) == b"there"
    with pytest.raises(bounded_http.HttpError, match=r"within 0.5 s"):
        get(ENDLESS["100 Continue now and then"], seconds=TIMEOUT)
    for reply, words in (
        ([b"HTTP/1.1 302 Moved\r\nlocation: /again\r\nconnection: close\r\n\r\n"], "redirects"),
        ([b"HTTP/1.1 302 Moved\r\nlocation: file:///etc/passwd\r\n\r\n"], "Unsupported"),
        ([b"HTTP/1.1 404 No\r\n\r\n"], "status 404"),
        ([OK, b"\r\n", b"x" * 2_000_000], "more than 1,000,000 bytes"),
    ):
        with pytest.raises(bounded_http.HttpError, match=words):
            get(lambda pieces=reply: pieces)


MEMORY_PROBE = """
import re, sys
from pathlib import Path
from helpers.evaluate.small_evals import small
from trimtab.experiments.evaluate.launch import PlainProgress
from trimtab.experiments.evaluate.run import evaluate

changes = dict(max_new_tokens=20_480, samples=int(sys.argv[3]), concurrency=16, retries=0, timeout=300.0, model=None)
options = small(Path(sys.argv[1]), endpoint=sys.argv[2], model_name="tiny", **changes)
evaluate(options, PlainProgress(lambda text: print(text, file=sys.stderr)))
# Not ru_maxrss: that starts with the memory of the process that started this one.
print(int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
"""
UNPARSED = b'{"a": "' + b"x" * 10_000_000 + b'", "b": [' + b"[]," * 2_000_000 + b"0]}"
LARGEST_TEXTS = json.dumps(completion(["x" * 700_000] * 8)).encode()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is reported in kilobytes")
@pytest.mark.parametrize(
    ("body", "samples"),
    [
        # Six replies of 16 MB at the same time, which can be refused only once they are complete.
        pytest.param(UNPARSED, 8, id="replies that take too much memory"),
        pytest.param(LARGEST_TEXTS, 64, id="270 MB of text", marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_stays_within_500_megabytes(body: bytes, samples: int, tmp_path: Path) -> None:
    with raw_serving(lambda: [OK, b"\r\n", body]) as server:
        command = [sys.executable, "-c", MEMORY_PROBE, str(tmp_path), server.url, str(samples)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 500
