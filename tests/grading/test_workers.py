"""Workers: limits hold, failures are told apart, nothing outlives its call; they call users' grading functions.

No bound here is tight in wall-clock time: a busy machine may be many times slower. Where time is looked at, a limit is
compared with another that is far from it.
"""

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

from trimtab.data import Problem
from trimtab.data.problems import user
from trimtab.grading import Verdict, grade, grade_many
from trimtab.grading.python_rule import CALL_RULE, LIMITS
from trimtab.workers import WorkerLimits, WorkerResult, calls, result_of, submit_call
from trimtab.workers.calls import client

RULES = "helpers.grading.python_rules"
USERS = f"{CALL_RULE}@python:{RULES}"  # with a name: a rule of the user's own
CALL = WorkerLimits(seconds=30.0, cpu_seconds=10.0)
SYMPY_CHECK = "trimtab.grading.mathematics.sympy_check:grade_pair"
HANG = 300.0  # seconds after which a process is taken for hung


@pytest.fixture(autouse=True, scope="module")
def no_workers_afterwards() -> Iterator[None]:
    yield
    calls.close()


def call(name: str, response: str = "x", limits: WorkerLimits = CALL) -> WorkerResult:
    function = f"{USERS}:{name}"
    return result_of(submit_call(function, (response, "42", {}), limits), function)


def kind_by(name: str, response: str, extra: dict[str, object] | None = None) -> str:
    return grade(response, "42", f"python:{RULES}:{name}", extra).kind


def test_a_grading_function_returns_true_or_false() -> None:
    assert kind_by("last_word", "it is 42") == "correct"
    assert kind_by("last_word", "it is 41") == "wrong"


@pytest.mark.parametrize("kind", ["correct", "wrong", "no_answer", "ambiguous", "too_costly", "crashed"])
def test_a_function_may_return_the_kind_of_verdict(kind: str) -> None:
    assert kind_by("kind", kind) == kind


def test_another_return_value_or_an_exception_is_a_crash() -> None:
    assert kind_by("kind", "maybe") == "crashed"
    assert kind_by("strange", "list") == "crashed"
    assert kind_by("strange", "object") == "crashed"
    assert kind_by("raises", "x") == "crashed"


def test_a_function_sees_the_problems_extra() -> None:
    assert kind_by("extras", "yes", {"wanted": "yes"}) == "correct"


def test_the_error_of_a_call_is_reported() -> None:
    assert call("raises", "the key").error == "KeyError: 'the key'"


def test_a_call_that_sleeps_is_ended_by_the_clock() -> None:
    result = call("sleeps", limits=WorkerLimits(seconds=0.5))  # it would sleep for a minute
    assert result.outcome == "too_costly"
    assert 0.5 <= result.seconds < 30


def test_a_call_that_computes_is_ended_by_its_cpu_time() -> None:
    result = call("spins", limits=WorkerLimits(seconds=60.0, cpu_seconds=0.2))
    assert result.outcome == "too_costly"
    assert result.seconds < 55, "it was not the clock"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not tell who waits for a CPU")
def test_a_call_is_not_charged_for_the_time_of_others() -> None:
    """Together they take far longer than each may."""
    limits, function = WorkerLimits(seconds=0.4, cpu_seconds=5.0), f"{USERS}:computes"
    pending = [submit_call(function, ("x", "42", {}), limits) for _ in range(12 * (os.cpu_count() or 1))]
    assert [result_of(each, function, 60.0).outcome for each in pending] == ["done"] * len(pending)


def test_a_call_that_takes_too_much_memory_is_too_costly() -> None:
    assert call("hoards").outcome == "too_costly"


def test_a_call_that_ends_its_process_has_crashed() -> None:
    assert call("leaves").outcome == "crashed"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_a_call_whose_worker_is_killed_from_outside_has_crashed(number: int) -> None:
    """As the kernel does when memory is short: the response is not to blame."""
    verdict = grade(str(number), "42", f"python:{RULES}:is_killed")
    assert verdict.kind == call("is_killed", str(number)).outcome == "crashed"
    assert signal.Signals(number).name in verdict.error and "killed from outside" in verdict.error


def test_a_call_that_breaks_its_own_process_is_too_costly() -> None:
    assert call("is_killed", str(signal.SIGSEGV.value)).outcome == "too_costly"


def test_a_rule_without_time_or_memory_has_failed() -> None:
    assert kind_by("hoards", "x") == "crashed"


def test_what_a_call_prints_is_not_taken_for_a_result() -> None:
    assert call("prints").value is False


@pytest.mark.parametrize("written", ["5", "[]", "{}", '"done"', "{"])
def test_what_a_function_writes_to_its_channel_ends_its_own_call_only(written: str) -> None:
    result = call("writes_to_its_channel", written)
    assert result.outcome == "crashed" and "the worker ended" not in result.error
    assert call("prints").value is False


def test_no_call_sees_what_another_left_behind() -> None:
    assert [call("remembers").value for _ in range(3)] == [False] * 3


def test_a_short_call_overtakes_long_ones() -> None:
    """The long ones would run for a minute; the short one is done while all of them still run."""
    function = f"{USERS}:spins_if_told"
    limits = WorkerLimits(seconds=60.0, cpu_seconds=50.0)
    slow = [submit_call(function, ("spin", "42", {}), limits) for _ in range(32)]
    assert call("spins_if_told", "x", limits).value is True
    assert not any(future.done() for future in slow)
    calls.close()
    assert {result_of(future, function).outcome for future in slow} == {"crashed"}


def test_a_worker_that_is_killed_is_replaced() -> None:
    first = client(SYMPY_CHECK)
    assert grade(r"\boxed{2\sin x\cos x}", r"\sin 2x").kind == "correct"
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    assert grade(r"\boxed{2\sin x\cos x}", r"\sin 2x").kind == "correct"
    assert client(SYMPY_CHECK) is not first


def test_a_signal_that_stops_a_run_leaves_its_step_under_way_the_verdicts() -> None:
    """Ctrl-C in a terminal, and the SIGTERM of a scheduler, reach the workers too."""
    server = client(SYMPY_CHECK)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(server.process.pid, number)
    assert grade(r"\boxed{2\sin x\cos x}", r"\sin 2x").kind == "correct"
    assert client(SYMPY_CHECK) is server and server.process.poll() is None


def test_a_module_that_never_loads_keeps_no_process_for_ever(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time; time.sleep(600)")
    code = (
        "import socket; from trimtab.workers import call_server as server; server.MAX_LOAD_SECONDS = 1; "
        "server.main(socket.socket(), 'endless:grade', [])"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=HANG, check=False)
    assert process.returncode == -signal.SIGALRM


def test_what_was_under_way_when_a_worker_died_has_crashed() -> None:
    function = f"{USERS}:sleeps"
    future = submit_call(function, ("x", "42", {}), WorkerLimits(seconds=60.0))
    while not future.done():
        client(function).process.kill()
        time.sleep(0.05)
    assert result_of(future, function).outcome == "crashed"


@pytest.mark.parametrize("path", ["no_such_module:f", f"{RULES}:no_such", f"{RULES}:NOT_A_FUNCTION"])
def test_a_function_that_does_not_exist_is_an_error_and_no_verdict(path: str) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=f"python:{path}: "):
            grade("x", "42", f"python:{path}")


def test_many_threads_share_a_worker() -> None:
    def one(number: int) -> str:
        return grade(rf"\boxed{{{number}\sin x\cos x}}", r"\sin 2x").kind

    with ThreadPoolExecutor(8) as threads:
        kinds = list(threads.map(one, [2, 3] * 12))
    assert kinds == ["correct", "wrong"] * 12


def test_a_worker_outlives_the_thread_that_started_it() -> None:
    calls.close()
    thread = threading.Thread(target=lambda: grade(r"\boxed{2\sin x\cos x}", r"\sin 2x"))
    thread.start()
    thread.join()
    started = client(SYMPY_CHECK)
    assert grade(r"\boxed{\sin 2x}", r"2\sin x\cos x").kind == "correct"
    assert client(SYMPY_CHECK) is started


def test_verdicts_come_in_the_order_of_the_pairs() -> None:
    cases = [("math", r"\boxed{2\sin x\cos x}", r"\sin 2x"), ("math", r"\boxed{1}", "1"), ("exact", "b", "a")] * 4
    verdicts = grade_many([(response, Problem(user("?"), answer, rule, "test")) for rule, response, answer in cases])
    assert [verdict.kind for verdict in verdicts] == ["correct", "correct", "wrong"] * 4


def test_workers_do_not_load_torch() -> None:
    code = (
        "import sys, trimtab.workers.call_server; from trimtab.grading.mathematics import sympy_check; "
        "sympy_check.warm_up(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG)
    assert done.stdout.strip() == "False"


def test_the_package_still_has_its_objectives() -> None:
    code = "import sys, trimtab as tt; a = 'torch' in sys.modules; print(a, tt.objective('stapo').name, len(dir(tt)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG)
    loaded, name, names = done.stdout.split()
    assert (loaded, name) == ("False", "stapo")
    assert int(names) > 10


def test_what_the_package_does_not_have_is_an_attribute_error() -> None:
    import trimtab

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = trimtab.nonsense


def test_the_limits_are_those_of_the_documentation() -> None:
    assert (WorkerLimits().cpu_seconds, WorkerLimits().seconds) == (1.0, 1.5)
    assert (LIMITS.cpu_seconds, LIMITS.seconds) == (5.0, 10.0)


def test_grading_leaves_no_files_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(3):
        assert grade(r"\boxed{2\sin x\cos x}", r"\sin 2x") == Verdict("correct", r"2\sin x\cos x")
        calls.close()
    after = len(os.listdir("/proc/self/fd")) if before else 0
    assert after <= before


@pytest.mark.skipif(not Path("/proc/sys/kernel/seccomp").exists(), reason="this kernel has no filters")
def test_code_of_ours_grades_without_sockets_files_to_write_and_privileges(tmp_path: Path) -> None:
    """A filter and no_new_privs are on the server of our own function, which its workers inherit; not on the user's."""
    assert grade(r"\boxed{\sin^2 x}", r"1 - \cos^2 x").kind == "correct"  # by algebra: both servers have loaded
    kind_by("last_word", "it is 42")
    code = """
import os, socket, sys
from trimtab.workers import confine
confine()
for step in (socket.socket, lambda: open(sys.argv[1], "w"), lambda: os.unlink(sys.argv[2])):
    try:
        step()
    except OSError as error:
        print(type(error).__name__)
os.nice(1)  # what the server does
if pid := os.fork():
    print(os.waitpid(pid, 0)[1], open(os.devnull, "w").write("x"))"""
    (tmp_path / "there").touch()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x"), str(tmp_path / "there")], capture_output=True, text=True,
        check=False, timeout=HANG,
    )  # fmt: skip
    assert (_walls_of(SYMPY_CHECK), _walls_of(f"{USERS}:last_word")["Seccomp"]) == ({"NoNewPrivs": 1, "Seccomp": 2}, 0)
    denied = ["PermissionError"]
    assert done.stdout.splitlines() in ([*denied * 3, "0 1"], [*denied, "0 1"]), done  # the second without landlock


def _walls_of(function: str) -> dict[str, int]:
    lines = Path(f"/proc/{client(function).process.pid}/status").read_text().splitlines()
    values = dict(line.split(":\t", 1) for line in lines)
    return {name: int(values[name]) for name in ("NoNewPrivs", "Seccomp")}
