"""Sessions keep their names; sandboxes work from threads, after a fork and when pickled; nothing is left behind."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trimtab.workers import Sandbox, SandboxError

PATIENT = 60.0  # seconds, for what ends by itself on a machine of any load


def test_a_session_keeps_names_imports_and_files(sandbox: Sandbox) -> None:
    with sandbox.session(timeout=PATIENT) as session:
        assert session.run("import math\nx = 3\ndef f(n):\n    return n + x\nopen('a', 'w').write('kept')").kind == "ok"
        assert session.run("x = 4\nprint(f(1), math.pi > 3, open('a').read())").stdout == "5 True kept\n"


def test_an_exception_does_not_end_a_session(sandbox: Sandbox) -> None:
    with sandbox.session(timeout=PATIENT) as session:
        session.run("def f():\n    return 1 / 0")
        result = session.run("f()")
        assert result.kind == "exception"
        # The line of an earlier program is shown too.
        assert '  File "program-1.py", line 2, in f\n    return 1 / 0\n' in result.error
        assert session.run("import sys\nsys.exit(3)").error == "the program ended with exit code 3"
        assert session.run("print('still here')").stdout == "still here\n"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("timeout", "while True:\n    pass"),
        ("output", "while True:\n    print('x' * 1000)"),
        ("killed", "import ctypes\nctypes.string_at(1)"),
    ],
)
def test_a_program_that_is_killed_ends_its_session(sandbox: Sandbox, kind: str, code: str) -> None:
    with sandbox.session(timeout=PATIENT) as session:
        assert session.run(code, timeout=1.0 if kind == "timeout" else PATIENT).kind == kind
        after = session.run("print(1)")
    assert after.kind == "refused"
    assert after.error == f"the session has ended with an earlier program ({kind}); open a new one"


def test_a_closed_session_refuses(sandbox: Sandbox) -> None:
    session = sandbox.session()
    session.close()
    assert session.run("print(1)").error == "the session is closed"


def test_a_process_that_a_session_forked_takes_no_programs(sandbox: Sandbox) -> None:
    with sandbox.session(timeout=PATIENT) as session:
        assert session.run("import os\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)").kind == "ok"
        assert session.run("print(pid > 0)").stdout == "True\n"


def test_threads_of_a_session_wait_with_it(sandbox: Sandbox) -> None:
    """The thread counts while programs run, and not between them."""
    code = """
import threading, time
count = 0
def tick():
    global count
    while True:
        count += 1
        time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
while count < 10:
    time.sleep(0.001)
"""
    with sandbox.session(timeout=PATIENT) as session:
        assert session.run(code).kind == "ok"
        assert (
            session.run("before = count\nwhile count == before:\n    time.sleep(0.001)\nprint('on')").stdout == "on\n"
        )


def test_sessions_know_nothing_of_each_other(sandbox: Sandbox) -> None:
    with sandbox.session(timeout=PATIENT) as one, sandbox.session(timeout=PATIENT) as two:
        one.run("import numpy\nnumpy.pi = 3\nsecret = 1\nopen('/tmp/f', 'w')")
        code = "import numpy, os\nprint(numpy.pi > 3.1, 'secret' in globals(), os.path.exists('/tmp/f'))"
        assert two.run(code).stdout == "True False False\n"
        assert sandbox.run(code, timeout=PATIENT).stdout == "True False False\n"


def test_many_threads_get_their_own_results(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: sandbox.run(f"print({n} ** 2)", timeout=PATIENT).stdout, range(24)))
    assert results == [f"{n**2}\n" for n in range(24)]


def test_no_more_programs_run_at_once_than_there_are_workers() -> None:
    """Each run holds a worker until its deadline; of three runs on one worker, none overlaps another."""
    with Sandbox(workers=1, level="limits") as narrow, ThreadPoolExecutor(3) as pool:
        code = "import time\na = time.monotonic()\ntime.sleep(0.2)\nprint(a, time.monotonic())"
        texts = list(pool.map(lambda _: narrow.run(code, timeout=PATIENT).stdout, range(3)))
    spans = sorted(tuple(map(float, text.split())) for text in texts)
    assert spans[0][1] <= spans[1][0] and spans[1][1] <= spans[2][0]


def test_a_forked_child_has_a_server_of_its_own(sandbox: Sandbox) -> None:
    with sandbox.session(timeout=PATIENT) as session:
        session.run("x = 1")
        pid = os.fork()
        if pid == 0:
            good = False
            try:
                refused = session.run("print(x)")
                good = "belongs to the process that has forked" in refused.error
                good = good and sandbox.run("print('child')", timeout=PATIENT).stdout == "child\n"
                sandbox.close()
            finally:
                os._exit(0 if good else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert session.run("print(x)").stdout == "1\n", "the child has not closed it"
    assert sandbox.run("print('parent')", timeout=PATIENT).stdout == "parent\n"


def test_a_pickled_sandbox_starts_anew() -> None:
    with Sandbox(workers=3, level="limits", output_bytes=10) as first:
        second = pickle.loads(pickle.dumps(first))
    with second:
        assert (second.workers, second.output_bytes) == (3, 10)
        assert second.run("print(2)", timeout=PATIENT).stdout == "2\n"


def test_a_server_that_is_killed_is_replaced(sandbox: Sandbox) -> None:
    session = sandbox.session(timeout=PATIENT)
    sandbox.server().process.kill()  # type: ignore[attr-defined]
    assert session._running.control.recv(1) == b""  # type: ignore[union-attr]  # the kernel has killed the rest
    assert session.run("print(1)").kind == "killed"
    assert sandbox.run("print(1)", timeout=PATIENT).stdout == "1\n"


def test_signals_that_stop_a_run_leave_its_sandbox_and_programs_heed_theirs(sandbox: Sandbox) -> None:
    server = sandbox.server().process  # type: ignore[attr-defined]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(server.pid, number)
    assert sandbox.run("import signal\nprint(signal.pthread_sigmask(0, ()))", timeout=PATIENT).stdout == "set()\n"
    assert sandbox.server().process is server  # type: ignore[attr-defined]


def test_a_closed_sandbox_says_so() -> None:
    sandbox = Sandbox(workers=1, level="limits")
    sandbox.close()
    sandbox.close()
    with pytest.raises(SandboxError, match="the sandbox is closed"):
        sandbox.run("print(1)")


def test_many_runs_leave_descriptors_and_processes_as_they_were(sandbox: Sandbox) -> None:
    sandbox.run("print(1)", timeout=PATIENT)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        sandbox.run("print(1)", timeout=PATIENT)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_server_ends_with_its_client(tmp_path: Path) -> None:
    """The client is killed while a program runs; the socket that the server and the run hold closes with the last."""
    code = (
        "import os, signal, threading\nfrom trimtab.workers import Sandbox\n"
        "sandbox = Sandbox(workers=1, level='limits')\n"
        "session = sandbox.session(timeout=60)\n"
        "session.run('import os; os.fork()')\n"
        "print(sandbox.server().process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    pid = int(done.stdout)
    # Not our child: it cannot be waited for, but a descriptor of it becomes readable when it ends.
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    assert poll.poll(1e3 * PATIENT)
    os.close(ended)


def test_the_package_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, trimtab.workers; print([m for m in ('torch', 'numpy', 'sympy', 'httpx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
