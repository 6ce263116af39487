"""Workers: limits hold, failures are told apart, nothing outlives its job; they call functions of one's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trimtab.rewards import Verdict, grade, grade_many, pool
from trimtab.rewards.pool import Limits, Result, ask, wait, worker
from trimtab.rewards.python_rule import LIMITS
from trimtab.tasks import Problem
from trimtab.tasks.problems import user

OWN = "helpers.rewards.own_rules"
SHORT = Limits(seconds=1.0, processor=0.3)
SYMBOLS = "trimtab.rewards.mathematics.sympy_check:judge"


@pytest.fixture(autouse=True, scope="module")
def no_workers_afterwards() -> Iterator[None]:
    yield
    pool.close()


def call(name: str, response: str = "x", limits: Limits = SHORT) -> Result:
    function = f"{OWN}:{name}"
    return wait(ask(function, (response, "42", {}), limits), function)


def own(name: str, response: str, extra: dict[str, object] | None = None) -> str:
    return grade(response, "42", f"python:{OWN}:{name}", extra).kind


def test_a_function_of_ones_own_says_right_or_wrong() -> None:
    assert own("last_word", "it is 42") == "correct"
    assert own("last_word", "it is 41") == "wrong"


@pytest.mark.parametrize(
    ("score", "kind"),
    [("1", "correct"), ("0.99", "correct"), ("0.5", "wrong"), ("0", "wrong"), ("1.5", "crashed"), ("-1", "crashed")],
)
def test_a_score_is_right_from_099_on_and_must_be_between_nought_and_one(score: str, kind: str) -> None:
    assert own("score", score) == kind


def test_not_a_number_is_no_score() -> None:
    assert own("score", "nan") == "crashed"


@pytest.mark.parametrize("kind", ["correct", "wrong", "no_answer", "ambiguous", "too_costly", "crashed"])
def test_a_function_may_say_the_kind_itself(kind: str) -> None:
    assert own("kind", kind) == kind


def test_what_is_no_verdict_is_the_functions_failure() -> None:
    assert own("kind", "maybe") == "crashed"
    assert own("strange", "list") == "crashed"
    assert own("strange", "object") == "crashed"
    assert own("raises", "x") == "crashed"


def test_a_function_sees_the_problems_extra() -> None:
    assert own("extras", "yes", {"wanted": "yes"}) == "correct"


def test_an_error_is_told_in_words() -> None:
    assert call("raises", "the key").error == "KeyError: 'the key'"


def test_a_job_that_sleeps_is_ended_by_the_clock() -> None:
    start = time.monotonic()
    assert call("sleeps").outcome == "too_costly"
    assert 0.9 < time.monotonic() - start < 5


def test_a_job_that_computes_is_ended_by_its_processor_time() -> None:
    result = call("spins", limits=Limits(seconds=30.0, processor=0.3))
    assert result.outcome == "too_costly"
    assert result.seconds < 20


def test_a_job_that_takes_too_much_memory_is_too_costly() -> None:
    assert call("hoards").outcome == "too_costly"


def test_a_job_that_ends_its_process_has_crashed() -> None:
    assert call("leaves").outcome == "crashed"


def test_what_a_job_prints_is_not_taken_for_a_result() -> None:
    assert call("prints").value is False


def test_no_job_sees_what_another_left_behind() -> None:
    assert [call("remembers").value for _ in range(3)] == [False] * 3


def test_a_short_job_overtakes_long_ones() -> None:
    slow = [ask(f"{OWN}:spins", ("x", "42", {}), Limits(seconds=3.0, processor=2.0)) for _ in range(32)]
    start = time.monotonic()
    assert grade("it is 42", "42", f"python:{OWN}:last_word").kind == "correct"
    function = f"{OWN}:spins"
    assert time.monotonic() - start < 8  # another function's worker starts in this time
    assert {wait(future, function).outcome for future in slow} == {"too_costly"}


def test_a_worker_that_is_killed_is_replaced() -> None:
    first = worker(SYMBOLS)
    assert grade(r"\boxed{2\sin x\cos x}", r"\sin 2x").kind == "correct"
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    assert grade(r"\boxed{2\sin x\cos x}", r"\sin 2x").kind == "correct"
    assert worker(SYMBOLS) is not first


def test_what_was_under_way_when_a_worker_died_has_crashed() -> None:
    function = f"{OWN}:sleeps"
    future = ask(function, ("x", "42", {}), Limits(seconds=60.0))
    while not future.done():
        worker(function).process.kill()
        time.sleep(0.05)
    assert wait(future, function).outcome == "crashed"


@pytest.mark.parametrize("path", ["no_such_module:f", f"{OWN}:no_such", f"{OWN}:NOT_A_FUNCTION"])
def test_a_function_that_is_not_there_is_an_error_and_no_verdict(path: str) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=f"the grading function {path} cannot be loaded: .*Error"):
            grade("x", "42", f"python:{path}")


def test_many_threads_share_a_worker() -> None:
    def one(number: int) -> str:
        return grade(rf"\boxed{{{number}\sin x\cos x}}", r"\sin 2x").kind

    with ThreadPoolExecutor(8) as threads:
        kinds = list(threads.map(one, [2, 3] * 12))
    assert kinds == ["correct", "wrong"] * 12


def test_a_worker_outlives_the_thread_that_started_it() -> None:
    pool.close()
    thread = threading.Thread(target=lambda: grade(r"\boxed{2\sin x\cos x}", r"\sin 2x"))
    thread.start()
    thread.join()
    started = worker(SYMBOLS)
    assert grade(r"\boxed{\sin 2x}", r"2\sin x\cos x").kind == "correct"
    assert worker(SYMBOLS) is started


def test_verdicts_come_in_order_whoever_gives_them() -> None:
    cases = [("math", r"\boxed{2\sin x\cos x}", r"\sin 2x"), ("math", r"\boxed{1}", "1"), ("exact", "b", "a")] * 4
    verdicts = grade_many([(response, Problem(user("?"), answer, rule, "test")) for rule, response, answer in cases])
    assert [verdict.kind for verdict in verdicts] == ["correct", "correct", "wrong"] * 4


def test_workers_do_not_load_torch() -> None:
    code = (
        "import sys, trimtab.rewards.worker; from trimtab.rewards.mathematics import sympy_check; "
        "sympy_check.prepare(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_the_package_still_has_its_objectives() -> None:
    code = "import sys, trimtab as tt; a = 'torch' in sys.modules; print(a, tt.objective('stapo').name, len(dir(tt)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded, name, names = done.stdout.split()
    assert (loaded, name) == ("False", "stapo")
    assert int(names) > 10


def test_what_the_package_does_not_have_is_an_attribute_error() -> None:
    import trimtab

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = trimtab.nonsense


def test_one_second_is_the_limit_for_symbols_and_ten_for_ones_own() -> None:
    assert (pool.LIMITS.processor, pool.LIMITS.seconds) == (1.0, 1.5)
    assert (LIMITS.processor, LIMITS.seconds) == (5.0, 10.0)


def test_grading_leaves_no_files_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(3):
        assert grade(r"\boxed{2\sin x\cos x}", r"\sin 2x") == Verdict("correct", r"2\sin x\cos x")
        pool.close()
    after = len(os.listdir("/proc/self/fd")) if before else 0
    assert after <= before
