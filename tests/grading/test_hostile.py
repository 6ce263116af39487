"""Hostile answers: none is rewarded, none hangs, none costs the caller its memory, none is run as code, and honest ones
beside them are graded as if they were alone. `TRIMTAB_THOROUGH=1` tries all of them; else a tenth.

Work is measured in the caller's own CPU time. Bounds in wall-clock time leave room for a busy machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path

import pytest

from helpers.grading import grading_runs
from helpers.grading.grading_runs import as_pairs, descendants, gone, honest, resident
from helpers.grading.hostile import FAMILIES, PER_FAMILY, Hostile, hostiles
from helpers.grading.hostile_text import injections, soup
from helpers.thorough import THOROUGH, slow_but
from trimtab.grading import Verdict, grade, grade_many

EACH = PER_FAMILY if THOROUGH else 10
LIMIT = 5.0  # seconds for any verdict: the workers' 1.5, and room for a busy machine
HANG = 300.0  # seconds after which a verdict or a process is taken for hung
MEGABYTE = 2**20
MOST_WORK = 0.25  # seconds of the caller's own CPU time
SOUPS = 10_000 if THOROUGH else 300
LARGE_BATCH = 1_000 if THOROUGH else 200  # questions at once
MOST_GROWTH = 32 * MEGABYTE

linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory and processes are read from /proc")


@dataclass(frozen=True)
class Trial:
    """One hostile answer, its verdict, how long the caller waited for it, and how long it worked itself."""

    hostile: Hostile
    verdict: Verdict
    waited: float
    worked: float

    def __str__(self) -> str:
        answer = ascii(self.hostile.response)
        return f"{self.hostile.name} ({self.hostile.rule}): {self.verdict.kind} after {self.waited:.2f} s, {answer}"


@dataclass(frozen=True)
class Siege:
    """All trials, and by how many bytes the process grew over them."""

    trials: list[Trial]
    growth: int
    canary: Path


def watched(answers: Iterator[Hostile]) -> Iterator[Trial]:
    """Grades in a thread and watches it from here, so that a hang is a failure and not a hang of the tests."""
    done: queue.Queue[Trial | BaseException | None] = queue.Queue()

    def work() -> None:
        try:
            for each in answers:
                began, worked = time.perf_counter(), time.thread_time()
                verdict = grade(each.response, each.truth, each.rule)
                waited, worked = time.perf_counter() - began, time.thread_time() - worked
                done.put(Trial(replace(each, response=each.response[:100]), verdict, waited, worked))
            done.put(None)
        except BaseException as error:
            done.put(error)

    threading.Thread(target=work, daemon=True).start()
    last = "the first"
    while True:
        try:
            trial = done.get(timeout=HANG)
        except queue.Empty:
            pytest.fail(f"no verdict after {HANG:g} s: hangs on what comes after {last}")
        if trial is None:
            return
        if isinstance(trial, BaseException):
            raise AssertionError(f"raised on what comes after {last}") from trial
        last = trial.hostile.name
        yield trial


@pytest.fixture(scope="module")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Siege:
    canary = tmp_path_factory.mktemp("canary") / "written"
    grade(r"\boxed{\sin^2 x}", r"1 - \cos^2 x")  # once per process, what does the algebra has to be loaded
    answers = hostiles(EACH, str(canary))
    trials = list(watched(islice(answers, len(FAMILIES))))  # whatever is loaded once is loaded here
    before = resident() if Path("/proc/self/statm").exists() else 0
    trials += watched(answers)
    growth = resident() - before if before else 0
    return Siege(trials, growth, canary)


def test_there_are_twenty_families_of_a_hundred_that_are_all_different() -> None:
    everything = {hash((each.response, each.rule, each.truth)): each.name for each in hostiles(PER_FAMILY)}
    assert len(FAMILIES) == 20
    assert len(everything) > 0.9 * 20 * PER_FAMILY


def test_no_hostile_answer_is_correct(siege: Siege) -> None:
    assert len(siege.trials) == len(FAMILIES) * EACH
    rewarded = [str(trial) for trial in siege.trials if trial.verdict.kind == "correct"]
    assert not rewarded, "\n".join(rewarded)


def test_every_verdict_comes_in_time(siege: Siege) -> None:
    late = [str(trial) for trial in siege.trials if max(trial.waited, trial.verdict.seconds) > LIMIT]
    assert not late, "\n".join(late)


def test_the_caller_works_little_itself(siege: Siege) -> None:
    """A batch is thousands of answers, and what the caller does it does for one after the other."""
    busy = [f"{trial.worked:.2f} s: {trial}" for trial in siege.trials if trial.worked > MOST_WORK]
    assert not busy, "\n".join(busy)


def test_no_soup_of_tokens_raises_or_is_right() -> None:
    rng = random.Random("soup")
    truths = (
        "104729",
        "x^2 + 1009",
        r"\{2, 1009\}",
        "(3, 1009)",
        "[0, 1009)",
        r"\text{purple}",
        "y = 1009x",
        "1, 1009",
    )
    pairs = [(rf"\boxed{{{soup(rng)}}}", grading_runs.problem(rng.choice(truths))) for _ in range(SOUPS)]
    kinds = Counter(verdict.kind for verdict in grade_many(pairs))
    assert set(kinds) <= {"wrong", "no_answer", "ambiguous", "too_costly"}, kinds


def test_a_soup_is_right_where_it_is_the_truth_itself() -> None:
    """Whatever a data set holds: who writes just that is right."""
    rng = random.Random("broth")
    answers = [answer for answer in (soup(rng).strip() for _ in range(600)) if fits_in_a_box(answer)]
    verdicts = grade_many((rf"\boxed{{{answer}}}", grading_runs.problem(answer)) for answer in answers)
    refused = [answer for answer, verdict in zip(answers, verdicts, strict=True) if verdict.kind != "correct"]
    assert len(answers) > 200
    assert not refused, refused


def fits_in_a_box(answer: str) -> bool:
    """Whether its braces close, and it is not empty but for signs that end a sentence or make a space."""
    bare = re.sub(r"\\[\\{}]", "", answer)
    depths = list(accumulate((char == "{") - (char == "}") for char in bare))
    says = re.search(r"\w|[-+*/=<>|!]", bare.replace(r"\,", ""))
    return bool(says) and min(depths) == 0 == depths[-1] and not answer.endswith("\\")


def test_the_seconds_of_a_verdict_are_those_it_took(siege: Siege) -> None:
    wrong = [f"{t}, says {t.verdict.seconds}" for t in siege.trials if not 0 <= t.verdict.seconds <= t.waited + 0.05]
    assert not wrong, "\n".join(wrong)


def test_the_grader_itself_does_not_fail(siege: Siege) -> None:
    """`crashed` says that the grader failed, which excuses the answer: no answer may bring that about at will."""
    crashed = [str(trial) for trial in siege.trials if trial.verdict.kind == "crashed"]
    assert not crashed, "\n".join(crashed)


def test_most_hostile_answers_cost_little(siege: Siege) -> None:
    """A policy that writes them by the thousand must not slow a run much: few may take the whole limit."""
    costly = Counter(trial.hostile.family for trial in siege.trials if trial.waited > 0.5)
    assert costly.total() <= 0.15 * len(siege.trials), costly


@linux
def test_the_caller_does_not_grow(siege: Siege) -> None:
    assert siege.growth < MOST_GROWTH, f"{siege.growth / MEGABYTE:.0f} MB"


def test_what_is_shown_of_an_answer_is_short(siege: Siege) -> None:
    assert max(len(trial.verdict.extracted or "") for trial in siege.trials) <= 10_000


def test_nothing_is_run(siege: Siege) -> None:
    assert not siege.canary.exists()
    assert not list(siege.canary.parent.iterdir())


def test_the_canary_would_sing(tmp_path: Path) -> None:
    """The payloads do what they say where something runs them: here, on purpose, the first ones."""
    canary = tmp_path / "canary"
    for number in range(2):
        payload = injections(random.Random(number), number, str(canary))
        subprocess.run([sys.executable, "-c", payload], check=True, timeout=HANG)
        assert canary.exists()
        canary.unlink()


def test_honest_answers_among_hostile_ones_are_correct() -> None:
    """And prompt: beyond the workers' limit of 1.5 seconds they would be too costly."""
    queued = as_pairs(list(islice(hostiles(2), 32)))
    mixed = [pair for both in zip(honest(), queued, strict=False) for pair in both][:24]
    pairs = [*queued, *honest(3), *mixed]
    verdicts = grade_many(pairs)
    texts = {response for response, _ in honest()}
    of_honest = [(p, v) for p, v in zip(pairs, verdicts, strict=True) if p[0] in texts]
    of_hostile = [v for p, v in zip(pairs, verdicts, strict=True) if p[0] not in texts]
    refused = [f"{verdict.kind}: {pair[1].answer}" for pair, verdict in of_honest if verdict.kind != "correct"]
    assert not refused, refused
    assert all(verdict.kind != "correct" for verdict in of_hostile)


def test_a_large_batch_of_algebra_is_judged_like_a_small_one() -> None:
    """No honest answer may go unpaid because many others are worked on at the time."""
    pairs = [(rf"\boxed{{\sin^2 {k}x}}", grading_runs.problem(rf"1 - \cos^2 {k}x")) for k in range(2, LARGE_BATCH)]
    kinds = Counter(verdict.kind for verdict in grade_many(pairs))
    assert kinds == {"correct": len(pairs)}


def test_the_verdicts_come_in_the_order_of_the_answers() -> None:
    pairs = [(rf"\boxed{{{k}}}", grading_runs.problem(str(k if k % 3 else -k - 1))) for k in range(60)]
    pairs[7:7] = as_pairs([next(hostiles(1))])
    verdicts = grade_many(pairs)
    kinds = [verdict.kind for verdict in verdicts[:7] + verdicts[8:]]
    assert kinds == ["correct" if k % 3 else "wrong" for k in range(60)]
    assert grade_many([]) == []


def test_several_threads_grade_at_once() -> None:
    attacks = list(hostiles(1))
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn, (response, problem) in enumerate(honest()):
            if turn % 10 == number:
                attack = attacks[(turn + number) % len(attacks)]
                if grade(attack.response, attack.truth, attack.rule).kind == "correct":
                    wrong.append(attack.name)
            verdict = grade(response, problem.answer, problem.rule)
            if verdict.kind != "correct":
                wrong.append(f"{number}: {verdict.kind} {problem.answer}")

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=2 * HANG)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong, wrong


@pytest.mark.parametrize("daemon", [False, True], ids=["spawned", "daemonic"])
def test_a_process_of_multiprocessing_grades_as_well(daemon: bool) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=grading_runs.into, args=(results, 3), daemon=daemon)
    process.start()
    try:
        _, was_daemon, errors = results.get(timeout=2 * HANG)
    finally:
        process.join(timeout=HANG)
        exitcode = process.exitcode
        process.kill()
    assert was_daemon is daemon
    assert not errors, errors
    assert exitcode == 0


def start(ending: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", grading_runs.__file__, ending]
    paths = os.pathsep.join([str(Path(grading_runs.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, start_new_session=True
    )


@linux
@pytest.mark.parametrize("ending", slow_but(["error", "killed"], ["by itself", "error", "os exit", "killed", "forked"]))
def test_no_process_is_left_behind(ending: str) -> None:
    process = start(ending)
    assert process.stdout
    try:
        report = json.loads(process.stdout.readline())
        children = {int(pid): began for pid, began in report["children"].items()}
        if ending == "killed":
            time.sleep(0.3)  # it is grading a hostile answer now
            children |= descendants(process.pid)
            process.send_signal(signal.SIGKILL)
        code = process.wait(timeout=HANG)
        assert gone(children), f"left behind: {grading_runs.alive(children)}"
    finally:
        process.kill()
        process.stdout.close()
    assert not report["errors"], report["errors"]
    assert code == {"error": 1, "killed": -signal.SIGKILL}.get(ending, 0)


@linux
def test_grading_again_and_again_starts_no_more_processes() -> None:
    attacks = as_pairs(list(hostiles(1)))
    grade_many([*attacks[:6], *honest()])
    few = len(descendants(os.getpid()))
    for _ in range(2):
        grade_many([*attacks[:6], *honest()])
    assert len(descendants(os.getpid())) <= few + 1
