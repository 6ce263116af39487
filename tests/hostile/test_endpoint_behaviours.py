"""Servers that misbehave: `trimtab eval --endpoint` says so in words, within the timeout and within 500 MB.

One evaluation asks one problem of each behaviour: the server reads in the prompt how to misbehave. What was drawn from
well-behaved replies is kept, and `--retry-failed` gets all the rest from a server that has come to its senses.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers.hostile.endpoint_behaviours import BAD, BEHAVIOURS, GOOD, KEY, REFUSALS, RIGHT, completion, reply
from helpers.thorough import slow_but

TIMEOUT = 5.0  # seconds that a request may take
LATE = 40.0  # beyond the timeout: for a machine whose every core is taken several times
GIVE_UP = 120.0  # seconds after which the server ends a behaviour that the client did not end
MEMORY = 500 << 20


@dataclass
class Server:
    """A server on a free port that reads in each request how to answer it, and notes how long each connection took."""

    seconds: dict[str, float] = field(default_factory=dict)
    ended_by_client: dict[str, bool] = field(default_factory=dict)
    requests: list[bytes] = field(default_factory=list)
    one_reply: bytes = b""  # what every request is answered with, if anything

    def __post_init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        began = time.monotonic()
        name = ""

        def send(data: bytes) -> None:
            if time.monotonic() - began > GIVE_UP:
                raise TimeoutError
            if data:
                connection.sendall(data.replace(b"PORT/stolen", b"%d/stolen" % self.port))
                return
            connection.settimeout(0.5)  # nothing to send: wait whether the client ends the connection
            try:
                if not connection.recv(1):
                    raise BrokenPipeError
            except TimeoutError:
                pass
            connection.settimeout(GIVE_UP)

        with connection:
            try:
                connection.settimeout(GIVE_UP)
                request = read_request(connection)
                self.requests.append(request)
                if (found := re.search(rb"behaviour (\d+)\.", request)) is None:
                    return
                name = list(BEHAVIOURS)[int(found[1])]
                if self.one_reply:
                    send(self.one_reply)
                else:
                    BEHAVIOURS[name](send)
            except (OSError, TimeoutError) as error:
                self.ended_by_client[name] = not isinstance(error, TimeoutError)
            finally:
                self.seconds[name] = time.monotonic() - began


def read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(65536)):
            return data
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    while length and len(body) < int(length[1]):
        if not (more := connection.recv(65536)):
            break
        body += more
    return head + b"\r\n\r\n" + body


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@dataclass(frozen=True)
class Outcome:
    code: int
    output: str
    peak_memory: int
    seconds: float
    folder: Path

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return what is kept of each behaviour's problem, the newest line of each."""
        lines = [json.loads(line) for line in (self.folder / "generations.jsonl").read_text().splitlines()]
        return {list(BEHAVIOURS)[int(line["problem"].split("-")[1])]: line for line in lines}


def evaluate(server: Server, folder: Path, *options: str) -> Outcome:
    """Evaluate a problem for each behaviour, in a process of its own."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    rows = [
        {"prompt": f"behaviour {i}. What is 3 + 4?", "reward_model": {"ground_truth": "7"}}
        for i in range(len(BEHAVIOURS))
    ]
    (data / "aime24.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        sys.executable, "-P", "-m", "trimtab", "eval", "--endpoint", f"http://127.0.0.1:{server.port}/v1",
        "--model-name", "m",
        "--data", str(data), "--benchmarks", "aime24", "--samples", "1", "--max-new-tokens", "100", "--quiet",
        "--timeout", str(TIMEOUT), "--retries", "0", "--concurrency", "16", "--out", str(folder / "out"), *options,
    ]  # fmt: skip
    began = time.monotonic()
    with (folder / "log").open("w+b") as log:
        environment = {**os.environ, "OPENAI_API_KEY": KEY, "COLUMNS": "200"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        # Not ru_maxrss: it starts with the memory of the process that forked, which is this one.
        peak = 0
        while process.poll() is None:
            if found := re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{process.pid}/status").read_text()):
                peak = int(found[1]) * 1024
            time.sleep(0.05)
        log.seek(0)
        output = log.read().decode(errors="surrogateescape")
    took = time.monotonic() - began
    return Outcome(process.returncode, output, peak, took, folder / "out")


@pytest.fixture(scope="module")
def outcome(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return evaluate(server, tmp_path_factory.mktemp("behaviours"))


def test_the_suite_has_behaviours_of_every_kind() -> None:
    assert len(BEHAVIOURS) + len(REFUSALS) > 350
    assert len(GOOD) >= 7
    assert len(BAD) >= 150


def test_no_behaviour_ends_the_evaluation(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.output[-3000:]
    assert outcome.rows().keys() == BEHAVIOURS.keys()


def test_every_failure_is_said_in_words(outcome: Outcome) -> None:
    rows = outcome.rows()
    assert "Traceback" not in outcome.output
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", outcome.output)
    wrong = {name: rows[name]["text"][:60] for name in sorted(BAD) if not rows[name]["failed"]}
    assert not wrong, "these have a response that no server sent"
    messages = {name: row["failed"] for name, row in rows.items() if row["failed"]}
    odd = {name: text for name, text in messages.items() if not 10 < len(text) < 1000 or not text.isprintable()}
    assert not odd


def test_right_replies_in_unusual_form_are_kept(outcome: Outcome) -> None:
    rows = outcome.rows()
    assert {name: rows[name]["failed"] for name in sorted(GOOD) if rows[name]["failed"]} == {}
    assert {rows[name]["text"] for name in GOOD} == {r"It is \boxed{7}"}


def test_no_server_makes_responses_longer_than_was_asked_for(outcome: Outcome) -> None:
    assert not [name for name, row in outcome.rows().items() if (row["tokens"] or 0) > 100]


def test_every_request_ends_within_its_timeout(outcome: Outcome, server: Server) -> None:
    assert not {name for name, ended in server.ended_by_client.items() if not ended}, "the server had to give up"
    assert {name: seconds for name, seconds in server.seconds.items() if seconds > TIMEOUT + LATE} == {}


def test_memory_stays_below_500_megabytes(outcome: Outcome) -> None:
    assert outcome.peak_memory < MEMORY


def test_the_key_reaches_neither_other_places_nor_files(outcome: Outcome, server: Server) -> None:
    assert KEY.encode() in server.requests[0]
    assert not [request for request in server.requests if b"stolen" in request.splitlines()[0]]
    assert KEY not in outcome.output
    assert not [file for file in outcome.folder.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]


def test_a_reply_sent_ahead_is_not_taken_for_the_next_request(outcome: Outcome) -> None:
    assert not [name for name, row in outcome.rows().items() if "forged" in row["text"]]


def test_all_that_failed_is_had_from_a_server_that_works_again(outcome: Outcome, server: Server) -> None:
    before = outcome.rows()
    server.one_reply = reply(RIGHT)
    again = evaluate(server, outcome.folder.parent, "--retry-failed")
    assert again.code == 0, again.output[-3000:]
    after = again.rows()
    assert not [name for name, row in after.items() if row["failed"]]
    assert {name: after[name]["text"] for name in BAD} == dict.fromkeys(BAD, r"It is \boxed{7}")
    assert {name: row for name, row in before.items() if not row["failed"]}.items() <= after.items()


@pytest.mark.parametrize("name", slow_but(["status_401"], sorted(REFUSALS)))
def test_a_refused_request_ends_in_words(name: str, tmp_path: Path) -> None:
    server = Server(one_reply=REFUSALS[name])
    outcome = evaluate(server, tmp_path)
    server.close()
    assert outcome.code in (0, 2)
    assert "Traceback" not in outcome.output
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", outcome.output)
    assert f"127.0.0.1:{server.port}" in outcome.output
    assert str(re.findall(r"\d{3}", name)[0]) in outcome.output if any(map(str.isdigit, name)) else True
    assert KEY not in outcome.output
    assert all(request.startswith(b"POST /v1/chat/completions ") for request in server.requests)


@pytest.mark.slow
def test_large_replies_to_many_requests_at_once_stay_within_memory(tmp_path: Path) -> None:
    server = Server(one_reply=reply(completion("x" * (14 << 20) + r"\boxed{7}")))
    outcome = evaluate(server, tmp_path, "--max-new-tokens", "4000000", "--problems", "48", "--timeout", "300")
    server.close()
    assert outcome.code == 0, outcome.output[-3000:]
    assert outcome.peak_memory < MEMORY
