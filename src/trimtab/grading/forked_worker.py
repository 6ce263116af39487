"""What runs in a forked worker: a call within its limits, or the calls of a session, and results as JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from trimtab.grading.python_rule import own_traceback
from trimtab.grading.verdicts import plain_result
from trimtab.worker_process import limit_memory, write_all

# Workers start at normal priority and are reniced after so much CPU time, so that a short call is never held up by long
# ones.
BOOST_CPU_SECONDS = 0.06
EXIT_OUT_OF_TIME = 97

Function = Callable[..., Any]


def run_call(function: Function, message: dict[str, Any], pipe: int) -> None:
    """Set limits, call the function and write the result; runs in the forked worker."""
    _keep_descriptors(pipe)
    _set_limits(message["memory"], message["cpu_seconds"])
    result = _result(function, message).encode()
    with contextlib.suppress(Exception):  # it would be lost: `_exit` writes nothing; the disk may be full
        sys.stdout.flush()
    write_all(pipe, result)
    os._exit(0)


def run_session(function: Function, message: dict[str, Any], calls: int, pipe: int) -> None:
    """Set limits, call the function once, and its result's methods as they are asked for; runs in the forked worker."""
    _keep_descriptors(calls, pipe)
    _set_limits(message["memory"], None)
    made: list[Any] = []

    def method(name: str, *arguments: Any, **keywords: Any) -> Any:
        if not made:
            made.append(function())
        return getattr(made[0], name)(*arguments, **keywords)

    with open(calls, "rb", closefd=False) as lines:
        for line in lines:
            write_all(pipe, _result(method, json.loads(line)).encode() + b"\n")
    os._exit(0)


def _keep_descriptors(*kept: int) -> None:
    """Close all descriptors but standard output, standard error and these; standard input becomes empty."""
    os.dup2(1, 0)
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _result(function: Function, message: dict[str, Any]) -> str:
    """Call the function and return the result as JSON."""
    try:
        value = function(*message["arguments"], **message["keywords"])
        try:
            return json.dumps({"outcome": "done", "value": value}, default=plain_result)
        except (TypeError, ValueError) as error:  # the function's own errors have a traceback, this has none
            return json.dumps({"outcome": "crashed", "error": str(error)[:500]})
    except (MemoryError, RecursionError) as error:
        limit = "memory" if isinstance(error, MemoryError) else "recursion"
        return json.dumps({"outcome": "too_costly", "limit": limit})
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"[:500]
        return json.dumps({"outcome": "crashed", "error": text, "traceback": own_traceback(error)})


def _set_limits(memory: int, cpu_seconds: float | None) -> None:
    """Limit memory and CPU time; after `BOOST_CPU_SECONDS` lower the priority, after `cpu_seconds` exit."""
    import resource

    def lower_priority(*_: object) -> None:
        os.nice(10)
        if cpu_seconds is None:
            return
        signal.signal(signal.SIGVTALRM, lambda *_: os._exit(EXIT_OUT_OF_TIME))
        signal.setitimer(signal.ITIMER_VIRTUAL, max(cpu_seconds - BOOST_CPU_SECONDS, 0.01))

    limit_memory(memory)
    if cpu_seconds is not None:
        # A second limit for code that never returns to the interpreter, where no signal handler runs.
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_seconds) + 1, int(cpu_seconds) + 2))
    signal.signal(signal.SIGVTALRM, lower_priority)
    signal.setitimer(signal.ITIMER_VIRTUAL, BOOST_CPU_SECONDS)
    sys.setrecursionlimit(2_000)
