"""`trimtab watch` and `trimtab train --watch` as processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from helpers.insight.report_runs import Made, make_run
from helpers.train.short_runs import SETTINGS
from trimtab.cli import app
from trimtab.insight.watch.launch import start_watch
from trimtab.trainer.train import STOPPED

ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)")
TRIMTAB = [sys.executable, "-P", "-m", "trimtab"]
LONG_SECONDS = 300.0  # for what takes seconds: a loaded machine may take long


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Start a command that prints the address of a page; yield it, the address's root and the token."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        assert process.stdout is not None
        try:
            found = next(match for line in process.stdout if (match := ADDRESS.search(line)))
            yield process, f"http://127.0.0.1:{found[1]}", found[2]
        finally:
            process.kill()


def data(root: str, token: str) -> Any:
    answer = httpx.get(f"{root}/data", headers={"Authorization": f"Bearer {token}"}, timeout=LONG_SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def gone(root: str) -> bool:
    try:
        httpx.get(root, timeout=LONG_SECONDS)
    except httpx.TransportError:
        return True
    return False


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + LONG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_newest_run_is_watched_until_ctrl_c(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/one", Made(steps=2))
    with started([*TRIMTAB, "watch"], tmp_path) as (process, root, token):
        assert data(root, token)["runs"][0]["name"] == "one"
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG_SECONDS) == 0
        assert gone(root)


def test_a_run_is_watched_from_beside_and_the_page_ends_with_it(tmp_path: Path) -> None:
    endless = {"run.steps": "100000", "run.checkpoint_every": "0", "run.eval_every": "0", "run.patience": "0"}
    settings = [f"--set={key}={value}" for key, value in {**SETTINGS, **endless}.items()]
    command = [*TRIMTAB, "train", "addition", "--watch", "--out", "run", *settings]
    with started(command, tmp_path) as (process, root, token):
        wait_until(lambda: data(root, token)["runs"][0]["live"]["status"]["state"] == "running")
        commands = command_lines()  # now: a process that has just been started may have none yet
        assert any(b"watch\0run\0" in each for each in commands)
        assert not any(token.encode() in each for each in commands)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_SECONDS) == STOPPED
        assert gone(root)


def command_lines() -> list[bytes]:
    """The command lines of all processes, as every user of the machine can read them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            found.append(path.read_bytes())
    return found


def test_a_page_that_dies_does_not_end_its_run_and_is_named(tmp_path: Path) -> None:
    beside = start_watch(make_run(tmp_path / "run", Made(steps=1)))
    os.kill(beside.process.pid, signal.SIGKILL)
    beside.process.wait()
    assert beside.stop() == "the page of the run ended early, with exit code -9; the run was not affected"


def test_a_page_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    make_run(tmp_path / "run", Made(steps=1))
    script = (
        "import sys, time; from pathlib import Path; from trimtab.insight.watch import start_watch; "
        "found = start_watch(Path('run')); print(found.address, flush=True); time.sleep(1000)"
    )
    with started([sys.executable, "-c", script], tmp_path) as (parent, root, token):
        assert data(root, token)["runs"][0]["name"] == "run"
        parent.kill()
        parent.wait()
        wait_until(lambda: gone(root))


def test_what_is_no_run_is_refused_in_words(tmp_path: Path) -> None:
    runner = CliRunner()
    for words, said in (
        (["watch", str(tmp_path / "nowhere")], "there is no such folder"),
        (["watch", str(tmp_path)], "has none of config.toml"),
    ):
        result = runner.invoke(app, words)
        assert result.exit_code == 2 and said in result.stderr
