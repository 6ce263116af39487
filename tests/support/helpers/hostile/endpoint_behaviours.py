"""A table of the ways in which a server can misbehave."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Callable
from typing import Any

KEY = "sk-secret-credential-0123456789"

Send = Callable[[bytes], None]
Behaviour = Callable[[Send], None]
BEHAVIOURS: dict[str, Behaviour] = {}
GOOD: set[str] = set()  # replies that are right, if unusual: the response must be kept
BAD: set[str] = set()  # replies from which no response can be had
REFUSALS: dict[str, bytes] = {}  # replies that refuse the request itself: they may end the evaluation


def completion(content: object = r"It is \boxed{7}", **fields: object) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "stop", **fields.pop("choice", {})}  # type: ignore[dict-item]
    return {"id": "1", "object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": 5}, **fields}


def reply(body: bytes | str | object, status: str = "200 OK", *headers: str, length: object = None) -> bytes:
    data = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    size = len(data) if length is None else length
    lines = [
        f"HTTP/1.1 {status}",
        "Content-Type: application/json",
        f"Content-Length: {size}",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def add(name: str, *pieces: bytes, bad: bool = False, good: bool = False, stall: bool = False) -> None:
    """Add a behaviour that sends these bytes, then closes the connection or stalls."""

    def behave(send: Send) -> None:
        for piece in pieces:
            send(piece)
        while stall:
            send(b"")

    add_behaviour(name, behave, bad=bad, good=good)


def add_behaviour(name: str, behave: Behaviour, *, bad: bool = False, good: bool = False) -> None:
    assert name not in BEHAVIOURS
    BEHAVIOURS[name] = behave
    (GOOD if good else BAD if bad else set()).add(name)


def endless(name: str, head: bytes, piece: bytes, pause: float = 0.0) -> None:
    """Add a behaviour that never comes to an end, at full speed or with a pause before every piece."""

    def behave(send: Send) -> None:
        send(head)
        while True:
            time.sleep(pause)
            send(piece)

    add_behaviour(name, behave, bad=True)


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
RIGHT = json.dumps(completion()).encode()


def chunks(data: bytes, size: int, extension: bytes = b"") -> bytes:
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n\r\n"


def gzip_bomb(levels: int) -> Behaviour:
    """Return a behaviour that sends 300 MB of spaces, compressed so many times."""

    def behave(send: Send) -> None:
        data = gzip.compress(b" " * (300 << 20), 9)
        for _ in range(levels - 1):
            data = gzip.compress(data, 9)
        send(reply(data, "200 OK", f"Content-Encoding: {', '.join(['gzip'] * levels)}"))

    return behave


def fill_behaviours() -> None:  # noqa: PLR0912, PLR0915
    """Fill the table of behaviours."""
    # Connections that break, and replies cut off
    add("closed_at_once", bad=True)
    add("no_answer", bad=True, stall=True)
    add("half_status_line", b"HTTP/1.1 2", bad=True)
    add("half_status_line_stalled", b"HTTP/1.1 2", bad=True, stall=True)
    add("half_header", b"HTTP/1.1 200 OK\r\nContent-Le", bad=True)
    add("header_without_end", OK, bad=True, stall=True)
    add("half_body", reply(RIGHT, length=len(RIGHT) * 2), bad=True)
    add("half_body_stalled", reply(RIGHT, length=len(RIGHT) * 2), bad=True, stall=True)
    add("body_longer_than_said", reply(RIGHT + b"}}}}", length=len(RIGHT)))
    add("chunks_without_end", CHUNKED + chunks(RIGHT, 20)[:-5], bad=True)
    add("chunks_stalled", CHUNKED + chunks(RIGHT, 20)[:-5], bad=True, stall=True)

    # Lengths and framing
    for name, length in {
        "negative": -1, "word": "many", "empty": "", "float": "1e3", "huge": 10**30, "hex": "0x20", "two": "5, 6",
        "plus": "+5",
    }.items():  # fmt: skip
        add(f"content_length_{name}", reply(RIGHT, length=length))
    add("two_content_lengths", reply(RIGHT, "200 OK", "Content-Length: 3"))
    add("length_and_chunks", reply(chunks(RIGHT, 20), "200 OK", "Transfer-Encoding: chunked"))
    add("chunk_size_word", CHUNKED + b"zz\r\n" + RIGHT + b"\r\n0\r\n\r\n", bad=True)
    add("chunk_size_negative", CHUNKED + b"-5\r\n" + RIGHT + b"\r\n0\r\n\r\n", bad=True)
    add("chunk_size_huge", CHUNKED + b"FFFFFFFFFFFFFFFF\r\n" + RIGHT, bad=True)
    add("chunk_extensions", CHUNKED + chunks(RIGHT, 20, b";a=b"), good=True)
    add("unknown_transfer_encoding", OK + b"Transfer-Encoding: rot13\r\n\r\n" + RIGHT)
    add("no_length", OK + b"Connection: close\r\n\r\n" + RIGHT, good=True)
    add("http_1_0", b"HTTP/1.0 200 OK\r\n\r\n" + RIGHT, good=True)
    add("http_0_9", RIGHT, bad=True)
    add("http_9_9", b"HTTP/9.9 200 OK\r\n\r\n" + RIGHT)
    add("http_2_preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", bad=True)
    add("tls_alert", b"\x15\x03\x03\x00\x02\x02\x28", bad=True)
    add("ssh_banner", b"SSH-2.0-OpenSSH_9.6\r\n", bad=True)
    add("nul_bytes", bytes(10_000), bad=True)
    add("random_bytes", bytes(range(256)) * 40, bad=True)
    add("no_reason_phrase", b"HTTP/1.1 200\r\nContent-Length: %d\r\n\r\n" % len(RIGHT) + RIGHT)
    for code in ("abc", "99", "1000", "-1", "20", "", "2e2", "000"):
        add(f"status_code_{code}", reply(RIGHT, f"{code} Odd"))
    add("newlines_alone", (OK + b"Connection: close\r\n\r\n").replace(b"\r\n", b"\n") + RIGHT)

    # Headers
    add("header_without_colon", b"HTTP/1.1 200 OK\r\nnonsense\r\nConnection: close\r\n\r\n" + RIGHT)
    add("header_folded", b"HTTP/1.1 200 OK\r\nX-A: b\r\n c\r\nConnection: close\r\n\r\n" + RIGHT)
    add("header_with_escapes", b"HTTP/1.1 200 \x1b[31mRED\x1b]0;title\x07\r\nConnection: close\r\n\r\n" + RIGHT)
    add("header_of_a_megabyte", OK + b"X-A: " + b"a" * (1 << 20) + b"\r\n\r\n" + RIGHT, bad=True)
    add("many_headers", OK + b"X-A: b\r\n" * 100_000 + b"\r\n" + RIGHT, bad=True)
    add("set_cookie", reply(RIGHT, "200 OK", *(f"Set-Cookie: c{i}={'x' * 4000}" for i in range(20))))
    endless("endless_headers", OK, b"X-A: b\r\n" * 1000)
    endless("endless_header_line", OK + b"X-A: ", b"a" * 4096)
    endless("a_header_every_0.3_s", OK, b"X-A: b\r\n", 0.3)
    endless("a_header_byte_every_0.3_s", OK + b"X-A: ", b"a", 0.3)
    endless("a_status_byte_every_0.3_s", b"HTTP/1.1 200 ", b"O", 0.3)

    # 1xx replies
    for code, name in ((100, "Continue"), (102, "Processing"), (103, "Early Hints")):
        endless(f"endless_{code}", b"", b"HTTP/1.1 %d %s\r\n\r\n" % (code, name.encode()))
        endless(f"slow_{code}", b"", b"HTTP/1.1 %d %s\r\n\r\n" % (code, name.encode()), 0.3)
    endless("endless_103_with_links", b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n" * 100)
    add("one_100_then_the_reply", b"HTTP/1.1 100 Continue\r\n\r\n", reply(RIGHT), good=True)
    add("switching_protocols", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n", bad=True, stall=True)

    # Bodies that do not end, or are too large
    endless("endless_body", OK + b"\r\n", b" " * 65536)
    endless("endless_chunks", CHUNKED, b"10000\r\n" + b" " * 65536 + b"\r\n")
    endless("endless_chunk_extension", CHUNKED + b"5;a=", b"b" * 4096)
    endless("endless_trailers", CHUNKED + chunks(RIGHT, 50)[:-2], b"X-A: b\r\n" * 1000)
    endless("a_trailer_every_0.3_s", CHUNKED + chunks(RIGHT, 50)[:-2], b"X-A: b\r\n", 0.3)
    endless("a_body_byte_every_0.3_s", reply(b"", length=10_000), b" ", 0.3)
    endless("a_chunk_every_0.3_s", CHUNKED, b"1\r\n \r\n", 0.3)
    endless("endless_empty_lines", b"", b"\r\n" * 1000)
    add("body_of_100_megabytes", reply(b"", length=100 << 20), *[b" " * (1 << 20)] * 100, bad=True)
    add("text_of_15_megabytes", reply(completion("x" * (15 << 20) + r"\boxed{7}")))
    add(
        "text_of_15_megabytes_escaped",
        reply(b'{"choices":[{"message":{"content":"' + rb"\u0007" * (5 << 19) + b'"}}]}'),
    )

    # Encodings
    add("gzip", reply(gzip.compress(RIGHT), "200 OK", "Content-Encoding: gzip"))
    for levels in (1, 2, 3, 8):
        add_behaviour(f"gzip_bomb_{levels}", gzip_bomb(levels), bad=True)
    add(
        "gzip_bomb_endless_members",
        reply(gzip.compress(b" " * (1 << 20)) * 500, "200 OK", "Content-Encoding: gzip"),
        bad=True,
    )
    add("deflate_bomb", reply(zlib.compress(b" " * (1 << 25), 9), "200 OK", "Content-Encoding: deflate"), bad=True)
    for encoding in ("br", "zstd", "compress", "x-unknown", "identity, gzip", "gzip," * 50, "\x00"):
        add(f"encoding_{encoding[:16]!a}", reply(RIGHT, "200 OK", f"Content-Encoding: {encoding}"))
    add("identity_encoding", reply(RIGHT, "200 OK", "Content-Encoding: identity"), good=True)
    add("gzip_that_is_none", reply(RIGHT, "200 OK", "Content-Encoding: gzip"))
    add("gzip_cut_off", reply(gzip.compress(RIGHT)[:-9], "200 OK", "Content-Encoding: gzip"), bad=True)
    add("not_utf_8", reply(RIGHT.replace(b"It", b"\xff\xfe\xc0")))
    add("utf_16", reply(RIGHT.decode().encode("utf-16")))
    add("utf_8_with_bom", reply(b"\xef\xbb\xbf" + RIGHT))
    add("wrong_charset", reply(RIGHT, "200 OK", "Content-Type: text/html; charset=klingon"))

    # Status codes
    for code in (201, 202, 203, 206, 226):
        add(f"status_{code}", reply(RIGHT, f"{code} Fine"))
    for code in (204, 205, 408, 425, 500, 501, 502, 504, 505, 507, 508, 511, 520, 599):
        add(f"status_{code}", reply({"error": {"message": "no"}}, f"{code} Something"), bad=True)
    for code in (300, 304, 400, 401, 402, 403, 404, 405, 406, 409, 410, 411, 413, 414, 417, 418, 421, 422, 423, 424,
                 426, 428, 431, 451, 499, 600, 999):  # fmt: skip
        REFUSALS[f"status_{code}"] = reply({"error": {"message": "\x1b[2J no" * 100}}, f"{code} Something")
    for wait in ("1000000000", "-5", "NaN", "1e400", "Infinity", "soon", "Thu, 99 Foo 2099 99:99:99 GMT", "9" * 5000):
        add(f"retry_after_{wait[:12]}", reply({}, "429 Busy", f"Retry-After: {wait}"), bad=True)
    add(
        "busy_page",
        reply("<html><script>alert(1)</script>\x1b[2J busy</html>", "503 Busy", "Content-Type: text/html"),
        bad=True,
    )
    for code, to in ((301, "/v1/chat/completions"), (302, "file:///etc/passwd"), (303, "//127.0.0.1:1/x"),
                     (307, "gopher://x"), (308, "http://[::1"), (302, "\x1b[2J"), (301, ""),
                     (307, "http://127.0.0.1:PORT/stolen")):  # fmt: skip
        REFUSALS[f"redirect_{code}_{to!a}"] = reply({}, f"{code} Moved", f"Location: {to}")
    REFUSALS["redirect_without_location"] = reply({}, "302 Moved")

    # JSON of every form
    texts: dict[str, str | bytes] = {
        "nothing": "", "blank": " ", "html": "<html></html>", "event_stream": "data: {}\n\ndata: [DONE]\n\n",
        "cut_off": RIGHT[:-7], "two_objects": RIGHT + RIGHT, "single_quotes": "{'choices': []}", "comment": "// a\n{}",
        "nested_lists": "[" * 200_000, "nested_objects": '{"a":' * 200_000, "closed_lists": "[" * 50_000 + "]" * 50_000,
        "a_million_digits": "1" * 1_000_000, "a_large_number": "1e999", "nan": "NaN", "minus_infinity": "-Infinity",
        "null": "null", "true": "true", "list": "[]", "string": '"x"', "number": "7", "object": "{}",
        "a_key_a_million_times": "{" + ",".join(['"choices":[]'] * 100_000) + "}",
        "escapes": '"\\u001b[2J\\u0007"', "python": "__import__('os').system('id')",
    }  # fmt: skip
    for name, text in texts.items():
        add(f"json_{name}", reply(text), bad=True)
    add("json_nested_in_content", reply(RIGHT.replace(b'"It is', b"[" * 60_000 + b"]" * 60_000 + b', "')), bad=True)
    add("json_spaces_around", reply(b"\n" * 1000 + RIGHT + b" " * 1000), good=True)

    # Fields of the wrong kind
    odd: tuple[object, ...] = (None, True, 0, -1, 10**400, 1.5, "x", [], {}, [None], [[]], {"a": 1}, "\ud800")
    for value in odd:
        name = ascii(value)[:12]
        add(f"choices_{name}", reply({"choices": value}), bad=True)
        add(f"choice_{name}", reply({"choices": [value]}), bad=True)
        add(f"message_{name}", reply({"choices": [{"message": value}]}), bad=not isinstance(value, dict))
        add(f"content_{name}", reply(completion(value)))
        add(f"finish_reason_{name}", reply(completion(choice={"finish_reason": value})))
        add(f"index_{name}", reply(completion(choice={"index": value})))
        add(f"usage_{name}", reply(completion(usage=value)))
        add(f"completion_tokens_{name}", reply(completion(usage={"completion_tokens": value})))
        add(f"logprobs_{name}", reply(completion(choice={"logprobs": value})))
        add(f"logprobs_content_{name}", reply(completion(choice={"logprobs": {"content": value}})))
        add(f"logprob_{name}", reply(completion(choice={"logprobs": {"content": [{"token": "x", "logprob": value}]}})))
        add(f"error_{name}", reply({"error": value}), bad=True)
    for name, values in {
        "overflow": "-1.7e308, -1.7e308, -1.7e308", "infinite": "-Infinity", "nan": "NaN", "positive": "5.0",
        "huge": "1e400", "many_digits": "-" + "9" * 400, "long": "-0." + "1" * 100_000,
    }.items():  # fmt: skip
        entries = ",".join(f'{{"token":"x","logprob":{value}}}' for value in values.split(", "))
        body = RIGHT.replace(b'"index"', b'"logprobs":{"content":[%s]},"index"' % entries.encode())
        add(f"logprobs_{name}", reply(body))
    for tokens in ("1e400", "NaN", "9" * 5000, "-7", "1e308"):
        add(
            f"tokens_{tokens[:8]}",
            reply(RIGHT.replace(b'"completion_tokens": 5', b'"completion_tokens": %s' % tokens.encode())),
        )
    row = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}
    add("a_hundred_thousand_logprobs", reply(completion(choice={"logprobs": {"content": [row] * 100_000}})))
    add("no_choices", reply({"choices": []}), bad=True)
    add("two_choices", reply({"choices": completion()["choices"] * 2}))
    add("ten_thousand_choices", reply({"choices": completion()["choices"] * 10_000}))
    add("texts_full_of_escapes", reply(completion("\x1b[2J\x1b]0;owned\x07\u202e\x00 \\boxed{7}")))
    add("error_full_of_escapes", reply({"error": {"message": "\x1b[2J\x1b]0;owned\x07" * 50_000}}, "500 Bad"), bad=True)
    add("error_that_shows_the_key", reply({"error": {"message": f"bad key {KEY}"}}, "500 Error"), bad=True)
    add("error_with_status_200", reply({"error": {"message": "overloaded", "code": 503}}), bad=True)
    add("more_fields", reply({**completion(), "x": {"y": [1] * 1000}}), good=True)
    # A second, forged reply that waits in the connection for the next request
    forged = reply(completion("forged")).replace(b"Connection: close", b"Connection: keep-alive")
    add(
        "forged_reply_for_the_next",
        reply({}, "500 Error").replace(b"close", b"keep-alive") + forged,
        bad=True,
        stall=True,
    )


fill_behaviours()
