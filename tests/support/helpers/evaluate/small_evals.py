"""Small evaluations, and a server that can misbehave in every way.

The benchmark is GSM8K's format with sums that the demo model can tokenize; answers are numbers, graded by `number`.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from trimtab.experiments.evaluate import EvalOptions
from trimtab.experiments.evaluate.folder import Generation
from trimtab.experiments.evaluate.launch import PlainProgress
from trimtab.experiments.evaluate.metrics import GradedSample
from trimtab.grading import Verdict

SUMS = [("1+1=", "2"), ("2+3=", "5"), ("10+7=", "17"), ("4+4=", "8"), ("120+3=", "123"), ("9+0=", "9")]


def write_sums(folder: Path, sums: Sequence[tuple[str, str]] = SUMS) -> Path:
    """Write a benchmark into a folder and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"question": question, "answer": f"Add.\n#### {answer}"}) for question, answer in sums]
    (folder / "gsm8k_test.jsonl").write_text("".join(f"{row}\n" for row in rows))
    return folder


def small(folder: Path, **changes: Any) -> EvalOptions:
    """Return the options of the demo model on the sums: three samples each, in batches of two problems."""
    defaults: dict[str, Any] = {
        "model": "demo",
        "benchmarks": "gsm8k",
        "data": write_sums(folder / "data"),
        "samples": 3,
        "max_new_tokens": 6,
        "suffix": "",
        "rule": "number",
        "batch": 6,
        "device": "cpu",
        "out": folder / "out",
    }
    return EvalOptions(**{**defaults, **changes})


def served(folder: Path, server: Server, **changes: Any) -> EvalOptions:
    """Return the options of the sums sampled from a server."""
    how = {
        "endpoint": server.url,
        "model_name": "tiny",
        "concurrency": 2,
        "retries": 3,
        "timeout": 120.0,
    }  # not by a busy machine alone
    return small(folder, **{"model": None, **how, **changes})


def graded(
    problem: str, kind: str | None, extracted: str | None = None, score: float | None = None, **fields: Any
) -> GradedSample:
    """Return a sample of a problem with a verdict of this kind; None: it could not be generated."""
    verdict = None if kind is None else Verdict(kind, extracted, score=score)  # type: ignore[arg-type]
    return GradedSample(Generation("gsm8k", problem, 0, "", "", 0, **fields), verdict)


@dataclass
class RecordedProgress:
    """A progress that keeps all messages and batches."""

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

    def has_message(self, *words: str) -> bool:
        """Return whether one message has all the words."""
        return any(all(word in line for word in words) for line in self.lines)


def completion(texts: Sequence[str], **changes: Any) -> dict[str, Any]:
    """Return a chat completion as servers send it."""
    choices = [
        {"index": n, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        for n, text in enumerate(texts)
    ]
    return {"object": "chat.completion", "choices": choices, "usage": {"completion_tokens": 7 * len(texts)}, **changes}


Reply = Callable[["Handler", dict[str, Any]], None]


def answer(texts: Callable[[dict[str, Any]], Sequence[str]] | None = None, **changes: Any) -> Reply:
    """Reply with as many correct answers as requested, or with what `texts` returns for the request."""

    def reply(handler: Handler, request: dict[str, Any]) -> None:
        made = texts(request) if texts else [f"It is {_sum(request)}."] * request.get("n", 1)
        handler.send(200, json.dumps(completion(made, **changes)).encode())

    return reply


def status(code: int, body: bytes = b'{"error": "busy"}', **headers: str) -> Reply:
    """Reply with an error status."""
    return lambda handler, request: handler.send(code, body, **headers)


def body(content: bytes, length: int | None = None) -> Reply:
    """Reply with these bytes; with another length than they have, the connection breaks off in the middle."""
    return lambda handler, request: handler.send(200, content, length=length)


def hang_up(handler: Handler, request: dict[str, Any]) -> None:
    """Close the connection without a reply."""
    handler.close_connection = True


def hang(handler: Handler, request: dict[str, Any]) -> None:
    """Send nothing until the server is shut down."""
    handler.server.closing.wait()
    hang_up(handler, request)


def trickle(handler: Handler, request: dict[str, Any]) -> None:
    """Send a byte now and then until the server is shut down or the client leaves."""
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.closing.wait(0.02):
        handler.wfile.write(b" ")
        handler.wfile.flush()
    handler.close_connection = True


class Handler(BaseHTTPRequestHandler):
    """Sends the next reply of its server's script, and after the script the server's default."""

    server: Server

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        if not content:  # the client disconnected
            return
        request = json.loads(content)
        with self.server.lock:
            self.server.requests.append(request)
            self.server.keys.append(self.headers.get("authorization"))
            reply = self.server.script.popleft() if self.server.script else self.server.otherwise
        try:
            reply(self, request)
        except OSError:  # the client disconnected
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
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()
        self.closing = threading.Event()  # ends the replies that wait

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


@contextmanager
def serving(*script: Reply, otherwise: Reply | None = None) -> Iterator[Server]:
    """Run a server during the block."""
    with Server(*script, otherwise=otherwise) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()


def _sum(request: dict[str, Any]) -> int:
    question = request["messages"][-1]["content"].rstrip("=")
    return sum(map(int, question.split("+")))
