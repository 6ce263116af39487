"""Ctrl-C, SIGTERM and SIGHUP stop the work under way well, or at once; helpers end with the process that needs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from trimtab import process as signals
from trimtab.process import STOP_SIGNALS, SignalInterrupt, deferred_stop, exit_code

HANG = 120.0  # seconds after which a process is taken for hung


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """No stop signal is ignored (Ctrl-C is where the tests run in the background), and all are restored."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in STOP_SIGNALS}
    yield
    assert all(signal.getsignal(number) is signal.default_int_handler for number in STOP_SIGNALS)
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_a_request_and_the_second_an_exception(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "REPEAT_SECONDS", 0.0)
    seen: list[int] = []
    with deferred_stop(seen.append) as request:
        assert not request
        send(number)
        assert request.number == number and not request.again
        with pytest.raises(SignalInterrupt) as error:
            send(number)
    assert seen == [number]
    assert exit_code(error.value) == 128 + number


def test_only_ctrl_c_is_no_repetition_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends SIGTERM twice, and a closed terminal SIGHUP."""
    monkeypatch.setattr(signals, "REPEAT_SECONDS", 600.0)
    with deferred_stop(lambda number: None) as request:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            send(number)
        assert request.number == signal.SIGTERM and not request.again
        with pytest.raises(SignalInterrupt):
            send(signal.SIGINT)


def test_without_exceptions_the_second_signal_is_only_noted() -> None:
    with deferred_stop(lambda number: None, interrupt=False) as request:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert request.again


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with deferred_stop(pytest.fail) as request:
        send(signal.SIGHUP)
        assert not request
    assert signal.signal(signal.SIGHUP, signal.default_int_handler) is signal.SIG_IGN


def test_work_outside_of_the_main_thread_leaves_signals_alone() -> None:
    seen: list[Any] = []

    def work() -> None:
        with deferred_stop(pytest.fail) as request:
            seen.append((bool(request), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, signal.default_int_handler)]


def test_without_a_signal_number_the_exit_code_is_that_of_ctrl_c() -> None:
    assert exit_code(KeyboardInterrupt()) == 130


# In processes of their own, which import nothing else.


def python(code: str, **options: Any) -> subprocess.Popen[str]:
    imports = "import os, signal, subprocess, sys, time; from trimtab import process as signals; "
    command = [sys.executable, "-c", imports + code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)


def test_a_signal_is_announced_while_the_main_thread_waits_in_a_call_that_no_signal_ends() -> None:
    code = """
import ctypes
library = ctypes.CDLL(None)  # calls of which release the interpreter's lock
library.PyThread_allocate_lock.restype = ctypes.c_void_p
lock = ctypes.c_void_p(library.PyThread_allocate_lock())
library.PyThread_acquire_lock(lock, 1)
signals.interrupt_on_stop_signals()

def announce(number):
    print("announced", number, flush=True)
    library.PyThread_release_lock(lock)

with signals.deferred_stop(announce) as request:
    print("begun", flush=True)
    library.PyThread_acquire_lock(lock, 1)  # until it is announced
    print("stopping", request.number)
"""
    with python(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=HANG)[0] == "announced 2\nstopping 2\n"


def test_an_interrupt_that_was_lost_is_raised_before_work_begins() -> None:
    """Python drops exceptions in destructors, and some packages catch all of them while they are imported."""
    code = """
signals.interrupt_on_stop_signals()
try:
    os.kill(os.getpid(), signal.SIGTERM)
except BaseException:
    pass
try:
    with signals.deferred_stop(print):
        print("work")
except KeyboardInterrupt as error:
    sys.exit(signals.exit_code(error))
"""
    process = python(code)
    assert process.communicate(timeout=HANG)[0] == ""
    assert process.returncode == 128 + signal.SIGTERM


# A process that says when it has begun, and that goes on until it is stopped.
WORK = """
signals.interrupt_on_stop_signals()
signals.stop_at_input_end()
try:
    print("begun", os.getpid(), flush=True)
    time.sleep(600)
except KeyboardInterrupt as error:
    sys.exit(signals.exit_code(error))
"""


def test_a_process_stops_when_its_parent_closes_the_pipe() -> None:
    with python(WORK, env={**os.environ, signals.STOP_AT_INPUT_END: "1"}) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        process.stdin.close()
        assert process.wait(HANG) == 128 + signal.SIGTERM


def test_a_process_stops_when_its_parent_is_killed() -> None:
    parent = f"""
environment = {{**os.environ, signals.STOP_AT_INPUT_END: "1"}}
code = "import os, signal, sys, time; from trimtab import process as signals" + {WORK!r}
subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=environment).wait()
"""
    with python(parent) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("begun")
        process.kill()
        assert process.stdout.read() == "", "the end of its output, which the child has inherited: no process is left"


def test_a_command_in_a_pipe_does_not_stop_at_the_end_of_its_input() -> None:
    with python(WORK) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        process.stdin.close()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.kill()


def test_stop_signals_reach_no_process_that_is_needed_until_its_parent_has_stopped() -> None:
    code = "import sys; print('begun', flush=True); print(sys.stdin.read())"
    with signals.unheeded_in_children():
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOP_SIGNALS)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    for number in STOP_SIGNALS:
        process.send_signal(number)
    assert process.communicate("done", timeout=HANG)[0] == "done\n"
    assert process.returncode == 0


def test_a_signal_that_another_thread_gets_ends_a_wait_for_input() -> None:
    code = """
import os, signal, threading
from trimtab.process import interrupt_on_stop_signals

interrupt_on_stop_signals()

def send():  # to its own thread, so that no call of the main thread is interrupted
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Timer(0.5, send).start()
try:
    os.read(0, 1)
except KeyboardInterrupt:
    print("interrupted")
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.wait(HANG) == 0
        assert process.stdout.read() == "interrupted\n"


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_command_ends_quietly_with_the_code_of_the_signal(number: int) -> None:
    command, pipe = [sys.executable, "-P", "-m", "trimtab", "grade"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(json.dumps({"response": "\\boxed{1}", "answer": "1"}) + "\n")
        process.stdin.flush()
        assert "correct" in process.stdout.readline()  # from here on it waits for the next line
        process.send_signal(number)
        assert (process.wait(HANG), process.stderr.read()) == (128 + number, "")
