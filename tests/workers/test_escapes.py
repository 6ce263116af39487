"""Programs that are meant to escape get nowhere, leave nothing behind and end in time; the same programs win where
there are no walls.

An eighth of them is tried as the user of the tests, another as an ordinary one, and an eighth without walls;
`TRIMTAB_THOROUGH=1` tries all everywhere, `ESCAPES="network: a raw"` only those whose kind and name contain it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from helpers.thorough import THOROUGH
from helpers.workers.arena_start import outcomes_of
from helpers.workers.attempts import all_attempts

ROOT = os.geteuid() == 0
MARKS = {"as it is": (), "ordinary": pytest.mark.skipif(not ROOT, reason="only root can become another user")}


def may_do_all() -> bool:
    """Whether this process has the capability that mounting needs: root in a container may lack it."""
    status = Path("/proc/self/status").read_text()
    capabilities = next(line for line in status.splitlines() if line.startswith("CapEff"))
    return bool(int(capabilities.split()[1], 16) >> 21 & 1)


def may_trace() -> bool:
    """Whether a process may trace another one of the same user."""
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    return not path.exists() or path.read_text().strip() == "0"


def lines(outcomes: list[dict[str, Any]]) -> str:
    """Show attempts with their signs and results."""
    return "\n".join(f"{o['kind']}: {o['name']}\n    {o['signs']}\n    {o.get('results')}" for o in outcomes)


def test_there_are_many_attempts_of_many_kinds() -> None:
    attempts = all_attempts()
    assert len(attempts) >= 120 and len({attempt.kind for attempt in attempts}) >= 15
    assert len({(attempt.kind, attempt.name) for attempt in attempts}) == len(attempts)
    shown = [attempt for attempt in attempts if not attempt.proof.startswith("no")]
    assert len(shown) >= 120


SHARES = {"as it is": ("0/8",), "ordinary": ("3/8",)}
if THOROUGH:
    SHARES = dict.fromkeys(SHARES, ("0/2", "1/2"))


@pytest.mark.parametrize(
    ("user", "share"), [pytest.param(user, share, marks=MARKS[user]) for user in SHARES for share in SHARES[user]]
)
def test_no_attempt_escapes(user: str, share: str) -> None:
    outcomes = outcomes_of("sandbox", share, ordinary_user=user == "ordinary")
    successes = [outcome for outcome in outcomes if outcome["signs"]]
    assert outcomes and not successes, f"{len(successes)} of {len(outcomes)} succeed\n{lines(successes)}"


@pytest.mark.parametrize("user", ["as it is", pytest.param("ordinary", marks=(pytest.mark.slow, MARKS["ordinary"]))])
def test_the_attempts_win_where_there_are_no_walls(user: str) -> None:
    outcomes = outcomes_of("plain", "0/1" if THOROUGH else "0/8", ordinary_user=user == "ordinary")
    certain = {"plain", "shared"}
    if ROOT and user != "ordinary" and may_do_all():
        certain |= {"root", "ptrace"}
    elif may_trace():
        certain |= {"ptrace"}
    failed = [outcome for outcome in outcomes if outcome["proof"] in certain and not outcome["signs"]]
    assert outcomes and not failed, f"{len(failed)} of {len(outcomes)} do not win\n{lines(failed)}"
