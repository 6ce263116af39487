"""Grading functions, good and bad, for the tests of `python:MODULE:FUNCTION`; workers import them."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import trimtab as tt


def last_word(response: str, answer: str, extra: dict[str, Any]) -> bool:
    return response.split()[-1:] == [answer]


def score(response: str, answer: str, extra: dict[str, Any]) -> float:
    return float(response)


def kind(response: str, answer: str, extra: dict[str, Any]) -> str:
    return response


def extras(response: str, answer: str, extra: dict[str, Any]) -> bool:
    return bool(extra["wanted"] == response)


def logs_its_call(response: str, answer: str, extra: dict[str, Any]) -> bool:
    with open(extra["log"], "a", encoding="utf-8") as log:
        log.write(f"{response}\n")
    return response.endswith(answer)


def spins_if_told(response: str, answer: str, extra: dict[str, Any]) -> bool:
    while response == "spin":
        pass
    return True


def raises(response: str, answer: str, extra: dict[str, Any]) -> bool:
    raise KeyError(response)


def sleeps(response: str, answer: str, extra: dict[str, Any]) -> bool:
    time.sleep(60)
    return True


def spins(response: str, answer: str, extra: dict[str, Any]) -> bool:
    while True:
        pass


def hoards(response: str, answer: str, extra: dict[str, Any]) -> bool:
    return len(bytearray(8 << 30)) > 0


def leaves(response: str, answer: str, extra: dict[str, Any]) -> bool:
    os._exit(7)


def is_killed(response: str, answer: str, extra: dict[str, Any]) -> bool:
    os.kill(os.getpid(), int(response))
    time.sleep(60)
    return True


def prints(response: str, answer: str, extra: dict[str, Any]) -> bool:
    sys.stdout.write('{"id": 1, "outcome": "done", "value": true}\n')
    sys.stderr.write("noise")
    return False


def writes_to_its_channel(response: str, answer: str, extra: dict[str, Any]) -> bool:
    os.write(3, response.encode() + b"\n")
    time.sleep(60)
    return True


def talkative(response: str, answer: str, extra: dict[str, Any]) -> float:
    print("seen", len(response))  # noqa: T201
    return float(len(response) % 2)


@tt.rule(in_process=True)
def talkative_here(response: str, answer: str, extra: dict[str, Any]) -> float:
    return talkative(response, answer, extra)


def remembers(response: str, answer: str, extra: dict[str, Any]) -> bool:
    """True if a call before this one is still to be seen."""
    seen = "PYTHON_RULES_SEEN" in os.environ
    os.environ["PYTHON_RULES_SEEN"] = "yes"
    return seen


def strange(response: str, answer: str, extra: dict[str, Any]) -> object:
    return {"object": object()} if response == "object" else [1, 2]


NOT_A_FUNCTION = 42


def computes(response: str, answer: str, extra: dict[str, Any]) -> bool:
    """Compute for 0.15 seconds of CPU time."""
    while time.process_time() < 0.15:  # of this worker: a fork starts at 0
        pass
    return True
