"""Runs attempts to escape, in a process of its own that may be killed: `python arena.py FOLDER MODE SHARE SECRET`.

MODE is sandbox, or plain for the proof that the attempts are real. The outcomes are written to FOLDER/outcomes.json.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

from helpers.workers.attempts import ORDINARY, Attempt, all_attempts
from helpers.workers.stand_ins import MERCY, BareProcess, SharedInterpreter
from helpers.workers.world import World

PATIENCE = 5.0  # seconds after a run until what it started must be gone
GRACE = 2.0  # seconds that a run may take beyond its deadline
TRIES = 3  # a run counts as late if it is late so often: a busy machine may delay one
LIMITS = {"memory_mb": 256, "disk_mb": 16, "processes": 32, "output_bytes": 65536}
KINDS = {"ok", "exception", "timeout", "memory", "output", "killed", "refused"}
SUBREAPER, PARENT_DEATH_SIGNAL = 36, 1


class Arena:
    """A world, a runner, and what is looked for after each attempt."""

    def __init__(self, world: World, runner: Any, sandboxed: bool) -> None:
        self.world, self.runner, self.sandboxed = world, runner, sandboxed
        self.fresh = world.secrets["conversation"]
        self.grace = GRACE if sandboxed else MERCY / 2

    def learn_ordinary(self) -> None:
        """Learn what an ordinary run prints as long as nothing has been attempted."""
        for _ in range(3):
            self.expected = self.runner.run(ORDINARY, timeout=30.0)
        assert self.expected.kind == "ok", self.expected

    def open_neighbour(self) -> None:
        """Open a conversation that lives beside the attempts and must not feel them."""
        self.neighbour = self.runner.session(timeout=30.0)
        self.neighbour.__enter__()
        self.neighbour.run(f"kept = {self.fresh!r}; turns = 0")
        self.turns = 0

    def outcome(self, attempt: Attempt) -> dict[str, Any]:
        """Run one attempt and return the signs of its success."""
        sys.stderr.write(f"{time.monotonic():.1f} {attempt.kind}: {attempt.name}\n")  # the last one, if this hangs
        beside: list[Any] = []
        thread = threading.Thread(target=lambda: beside.append(self._ordinary_signs("beside it")))
        if attempt.beside and self.sandboxed:
            thread.start()
        signs, results = self._run(attempt)
        if attempt.beside and self.sandboxed:
            thread.join()
            signs += beside[0] if beside else ["an ordinary run beside it raised"]
        signs += self.world.signs()
        left = self.world.left_processes(PATIENCE if self.sandboxed else 0.2)
        if left:
            signs.append(f"left processes: {[tuple(process) for process in left]}, {self.world.known} belong there")
        if self.sandboxed:
            signs += self._ordinary_signs("after it") + self._neighbour_signs()
        return {"kind": attempt.kind, "name": attempt.name, "proof": attempt.proof, "signs": signs, "results": results}

    def _run(self, attempt: Attempt) -> tuple[list[str], list[dict[str, Any]]]:
        signs: list[str] = []
        results = []
        facts = {**self.world.facts(self.sandboxed), **LIMITS}
        session: Any = None
        with contextlib.ExitStack() as sessions:
            for number, program in enumerate(attempt.programs):
                code = attempt.program(number, facts, self.fresh)
                for _ in range(TRIES if self.sandboxed else 1):
                    began = time.monotonic()
                    try:
                        if attempt.in_session and self.sandboxed:
                            if session is None or not attempt.turns:
                                session = sessions.enter_context(self.runner.session(timeout=attempt.timeout))
                            result = session.run(code)
                        else:
                            result = self.runner.run(code, timeout=attempt.timeout)
                    except Exception as error:
                        signs.append(f"the runner raised {error!r}")
                        break
                    seconds = time.monotonic() - began
                    if seconds <= attempt.timeout + self.grace:
                        break
                else:
                    signs.append(f"took {seconds:.1f} s, its deadline is {attempt.timeout:g} s")
                if signs and signs[-1].startswith("the runner raised"):
                    break
                signs += self._result_signs(result, knows="FRESH_SECRET" in program, lie=attempt.lie)
                shown = {"kind": result.kind, "seconds": round(seconds, 3)}
                results.append({**shown, "stdout": result.stdout[:300], "error": result.error[-400:]})
                for _ in range(5 * attempt.turns):  # time in which the session waits
                    signs += self._ordinary_signs("between its turns")
        return signs, results

    def _result_signs(self, result: Any, *, knows: bool, lie: str) -> list[str]:
        signs = [line for line in result.stdout.splitlines() if line.startswith(self.world.tag)][:3]
        text = result.stdout + result.error
        for name, value in self.world.secrets.items():
            if value in text and not (knows and name == "conversation"):
                signs.append(f"shows the secret of: {name}")
        most = 2 * LIMITS["output_bytes"] + 10_000
        signs += [f"{len(part)} characters of output" for part in (result.stdout, result.error) if len(part) > most]
        if lie and result.kind == lie:
            signs.append(f"is {lie}, though it was not")
        if self.sandboxed and result.kind not in KINDS:
            signs.append(f"is {result.kind}")
        try:
            text.encode()
        except UnicodeError as error:
            signs.append(f"is no text: {error}")
        return signs

    def _ordinary_signs(self, when: str) -> list[str]:
        try:
            result = self.runner.run(ORDINARY, timeout=30.0)
        except Exception as error:
            return [f"an ordinary run {when} raised {error!r}"]
        if (result.kind, result.stdout) == ("ok", self.expected.stdout):
            return []
        lines = zip(result.stdout.splitlines(), self.expected.stdout.splitlines(), strict=False)
        changed = next(((now[:1500], before[:1500]) for now, before in lines if now != before), "it is shorter")
        return [f"an ordinary run {when} is {result.kind} {result.error[-300:]}: {changed}"]

    def _neighbour_signs(self) -> list[str]:
        self.turns += 1
        try:
            result = self.neighbour.run("turns += 1; print(kept, turns)")
        except Exception as error:
            self.open_neighbour()
            return [f"another conversation raised {error!r}"]
        if result.stdout != f"{self.fresh} {self.turns}\n":
            self.open_neighbour()
            return [f"another conversation answers {result.kind}: {result.stdout[:200]} {result.error[-200:]}"]
        return []


def own_terminal() -> tuple[int, str]:
    """Make a new terminal the one of this session; return the end at which it is read, and its name."""
    keyboard, screen = os.openpty()
    os.set_blocking(keyboard, False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    fcntl.ioctl(screen, termios.TIOCSCTTY, 0)
    os.set_inheritable(screen, True)
    return keyboard, os.ttyname(screen)


def in_sandbox(world: World, attempts: list[Attempt]) -> list[dict[str, Any]]:
    """Run attempts in the sandbox."""
    from trimtab.workers import Sandbox

    with Sandbox(workers=3, **LIMITS) as sandbox:
        arena = Arena(world, sandbox, sandboxed=True)
        arena.learn_ordinary()
        arena.open_neighbour()
        world.remember_processes()
        outcomes = []
        for attempt in attempts:
            outcomes.append(arena.outcome(attempt))
            if outcomes[-1]["signs"]:
                world.remember_processes()  # the next attempt is not blamed
    world.known = 1  # the bystander
    left = world.left_processes(PATIENCE)
    if left:
        outcomes.append({"kind": "end", "name": "all", "signs": [f"left when the sandbox was closed: {left}"]})
    return outcomes


def in_plain_processes(world: World, attempts: list[Attempt]) -> list[dict[str, Any]]:
    """Run attempts without walls."""
    shared = SharedInterpreter(world.folder)
    bare, interpreter = Arena(world, BareProcess(), sandboxed=False), Arena(world, shared, sandboxed=False)
    world.remember_processes()
    outcomes = []
    for attempt in attempts:
        if attempt.proof.startswith("no"):
            continue
        arena = interpreter if attempt.proof == "shared" else bare
        outcomes.append(arena.outcome(attempt))
        world.end_strangers({shared._process.pid})
    shared.close()
    return outcomes


def main(folder: Path, mode: str, share: str, secret: str) -> None:
    """Run this process's share of the attempts."""
    # Orphans become children of this process, wherever they hide, and are counted.
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    given = {name: os.environ[name] for name in ("PLANTED_VARIABLE", "HF_TOKEN")}
    given["argument"] = secret
    given["input"] = (folder / "input").read_text()  # what stands unread in stdin
    (folder / "input").unlink()
    terminal = own_terminal()
    world = World(folder, given, terminal)
    world.secrets["conversation"] = f"planted-conversation-{os.urandom(8).hex()}"
    part, parts = map(int, share.split("/"))
    attempts = [a for a in all_attempts() if os.environ.get("ESCAPES", "") in f"{a.kind}: {a.name}"][part::parts]
    try:
        outcomes = (in_sandbox if mode == "sandbox" else in_plain_processes)(world, attempts)
    finally:
        world.close()
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
