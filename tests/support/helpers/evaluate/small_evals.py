"""Evaluations so small that they take no time, and a server that can misbehave in every way.

The benchmark is GSM8K's form with sums that the demo model can read; its answers are numbers, graded by `number`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from trimtab.evaluate.endpoint import Connection
from trimtab.evaluate.folder import Generation
from trimtab.evaluate.progress import PlainProgress
from trimtab.evaluate.run import EvalRequest

SUMS = [("1+1=", "2"), ("2+3=", "5"), ("10+7=", "17"), ("4+4=", "8"), ("120+3=", "123"), ("9+0=", "9")]


def write_sums(folder: Path, sums: Sequence[tuple[str, str]] = SUMS) -> Path:
    """A folder with a benchmark in it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"question": question, "answer": f"Add.\n#### {answer}"}) for question, answer in sums]
    (folder / "gsm8k_test.jsonl").write_text("".join(f"{row}\n" for row in rows))
    return folder


def small(folder: Path, **changes: Any) -> EvalRequest:
    """The demo model on the sums: three samples each, in batches of two problems."""
    defaults: dict[str, Any] = {
        "model": "demo",
        "benchmarks": ("gsm8k",),
        "data": write_sums(folder / "data"),
        "samples": 3,
        "max_new_tokens": 6,
        "suffix": "",
        "rule": "number",
        "batch": 6,
        "device": "cpu",
        "out": folder / "out",
    }
    return EvalRequest(**{**defaults, **changes})


def served(folder: Path, server: Server, **changes: Any) -> EvalRequest:
    """The sums put to a server, with retries that do not wait long."""
    how = {"retries": changes.pop("retries", 3), "timeout": changes.pop("timeout", 5.0)}
    connection = Connection(server.url, concurrency=changes.pop("concurrency", 2), pause=0.01, **how)
    return small(folder, model=None, connection=connection, model_name="tiny", **changes)


@dataclass
class Heard:
    """A progress that remembers."""

    lines: list[str] = field(default_factory=list)
    batches: list[list[Generation]] = field(default_factory=list)

    def message(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def samples(self, total: int, done: int) -> Iterator[Callable[[Sequence[Generation]], None]]:
        with PlainProgress(self.lines.append, every=0.0).samples(total, done) as advance:

            def note(batch: Sequence[Generation]) -> None:
                self.batches.append(list(batch))
                advance(batch)

            yield note

    def heard(self, *words: str) -> bool:
        """Whether one message has all the words."""
        return any(all(word in line for word in words) for line in self.lines)


def completion(texts: Sequence[str], **changes: Any) -> dict[str, Any]:
    """A chat completion as servers give it."""
    choices = [
        {"index": n, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        for n, text in enumerate(texts)
    ]
    return {"object": "chat.completion", "choices": choices, "usage": {"completion_tokens": 7 * len(texts)}, **changes}


Reply = Callable[["Handler", dict[str, Any]], None]


def answer(texts: Callable[[dict[str, Any]], Sequence[str]] | None = None, **changes: Any) -> Reply:
    """As many right answers as were asked for, or what `texts` makes of the request."""

    def reply(handler: Handler, asked: dict[str, Any]) -> None:
        made = texts(asked) if texts else [f"It is {_sum(asked)}."] * asked.get("n", 1)
        handler.send(200, json.dumps(completion(made, **changes)).encode())

    return reply


def status(code: int, body: bytes = b'{"error": "busy"}', **headers: str) -> Reply:
    """An error."""
    return lambda handler, asked: handler.send(code, body, **headers)


def body(content: bytes, length: int | None = None) -> Reply:
    """These very bytes; with another length than they have, the connection breaks off in the middle."""
    return lambda handler, asked: handler.send(200, content, length=length)


def hang_up(handler: Handler, asked: dict[str, Any]) -> None:
    """Close the connection without a word."""
    handler.close_connection = True


def sleep(seconds: float) -> Reply:
    """Say nothing for a while, then break off."""

    def reply(handler: Handler, asked: dict[str, Any]) -> None:
        time.sleep(seconds)
        hang_up(handler, asked)

    return reply


def trickle(seconds: float) -> Reply:
    """Send a byte now and then, so that no single wait is long."""

    def reply(handler: Handler, asked: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.end_headers()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.02)
        handler.close_connection = True

    return reply


class Handler(BaseHTTPRequestHandler):
    """Answers with the next reply of its server's script, and when that is over, rightly."""

    server: Server

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        if not content:  # the client went away
            return
        asked = json.loads(content)
        with self.server.lock:
            self.server.asked.append(asked)
            self.server.keys.append(self.headers.get("authorization"))
            reply = self.server.script.popleft() if self.server.script else self.server.otherwise
        try:
            reply(self, asked)
        except OSError:  # the client had enough
            self.close_connection = True

    def send(self, code: int, content: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible server that follows a script."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, *script: Reply, otherwise: Reply | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.otherwise = deque(script), otherwise or answer()
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


@contextmanager
def serving(*script: Reply, otherwise: Reply | None = None) -> Iterator[Server]:
    """A server that runs meanwhile."""
    with Server(*script, otherwise=otherwise) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _sum(asked: dict[str, Any]) -> int:
    question = asked["messages"][-1]["content"].rstrip("=")
    return sum(map(int, question.split("+")))
