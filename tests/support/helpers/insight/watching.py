"""A server of `trimtab watch` in a thread of the test, and runs that grow while it serves them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from helpers.insight.report_runs import CONFIG, Made, step_of
from trimtab.insight.watch.server import WatchServer
from trimtab.insight.watch.watched_run import WatchedRun
from trimtab.loopback import listen
from trimtab.record import Manifest, RecordWriter, Vocabulary

TOKEN = "a-token-of-a-test"
LONG_SECONDS = 120.0  # for what takes a moment: a loaded machine may take long


@dataclass
class Watching:
    """A server that is running."""

    server: WatchServer
    root: str

    @property
    def address(self) -> str:
        """The address that `trimtab watch` would print."""
        return f"{self.root}/?token={TOKEN}"

    def get(self, path: str, token: str | None = TOKEN, **headers: str) -> httpx.Response:
        """Ask as the page does."""
        given = ({} if token is None else {"Authorization": f"Bearer {token}"}) | headers
        return httpx.get(self.root + path, headers=given, timeout=LONG_SECONDS)

    def json(self, path: str) -> Any:
        """Return the JSON at a path."""
        answer = self.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, known: Sequence[Sequence[int]] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events of the stream as they come, each with its name."""
        path = f"{self.root}/events?known={json.dumps(known or [])}"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.stream("GET", path, headers=headers, timeout=LONG_SECONDS) as answer:
            name = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))

    def stop(self) -> None:
        """Tell the server to end, as Ctrl-C does."""
        self.server.server.should_exit = True


@contextmanager
def watching(*runs: Path) -> Iterator[Watching]:
    """Serve runs until the block ends."""
    server = WatchServer([WatchedRun(run) for run in runs], TOKEN)
    listener = listen()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(listener)), daemon=True)
    thread.start()
    found = Watching(server, f"http://127.0.0.1:{listener.getsockname()[1]}")
    try:
        yield found
    finally:
        found.stop()
        thread.join(LONG_SECONDS)
        assert not thread.is_alive()


class GrowingRun:
    """A run that takes its steps when the test says so."""

    def __init__(self, folder: Path, made: Made | None = None, steps: int = 8) -> None:
        self.folder, self.made = folder, made or Made()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(CONFIG.replace("steps = 8", f"steps = {steps}"))
        text = [piece.encode("utf-8", "surrogatepass") for piece in self.made.pieces]
        vocabulary = Vocabulary(text, [n == 0 for n in range(len(text))])
        manifest = Manifest(objective=dict(self.made.objective), advantage="group_normalized")
        self._writer = RecordWriter(folder / "tokens", manifest, vocabulary, print)
        self._writer.start(0)
        self.step = 0

    def take(self, steps: int = 1, **more: float) -> None:
        """Take steps, with metrics besides the usual ones."""
        for _ in range(steps):
            self.step += 1
            step = self.step
            data = step_of(step, self.made)
            self._writer.write(step, lambda data=data: data)  # type: ignore[misc]
            self.add(step_line(step, **more))

    def add(self, text: str, name: str = "metrics.jsonl") -> None:
        """Append text to a file of the run."""
        with (self.folder / name).open("a") as file:
            file.write(text)

    def alarm(self, **fields: Any) -> None:
        """Raise an alarm at the present step."""
        self.add(json.dumps({"step": self.step, **fields}) + "\n", "alarms.jsonl")

    def close(self) -> None:
        """End the run's writer of records."""
        self._writer.close()


def step_line(step: int, **more: float) -> str:
    """Return the line of metrics of a step."""
    record = {
        "step": step, "reward/mean": step / (step + 4), "reward/accuracy": step / (step + 4),
        "policy/entropy": 1 / step, "tokens/count": 33, "tokens/silenced_share": 1e-4 * step,
        "update/clip_share": 0.01, "update/loss": 0.1, "update/grad_norm": 1.5, "response/length_mean": 8.25,
        "groups/mixed_share": 0.5, "time/rollout": 1.0, "time/update": 1.0, "time/sampling": 0.75,
        "time/scoring": 0.25,
    }  # fmt: skip
    return json.dumps(record | more) + "\n"
