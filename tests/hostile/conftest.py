"""What the suites of signals and kills share: a process that starts commands, and runs that were left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.hostile import disturbed_runs
from helpers.hostile.started_commands import Starter
from helpers.made_once import made_once, shared_folder


@pytest.fixture(scope="session")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    made = Starter(tmp_path_factory.mktemp("commands"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all test processes have in common."""
    return shared_folder(tmp_path_factory)


@pytest.fixture(scope="session")
def finished(starter: Starter, shared: Path) -> Path:
    """A folder with `run`, which was left alone."""

    def make(folder: Path) -> None:
        disturbed_runs.prepare(folder)
        disturbed_runs.check_end(starter.start(disturbed_runs.train_words(), folder), {0})

    return made_once(shared, "left-alone", make)


@pytest.fixture(scope="session")
def finished_by_rule(starter: Starter, shared: Path) -> Path:
    """A folder with `run`, which was left alone and is graded by a function in a worker."""

    def make(folder: Path) -> None:
        disturbed_runs.prepare(folder)
        words = disturbed_runs.train_words(disturbed_runs.OWN_RULE)
        disturbed_runs.check_end(starter.start(words, folder), {0})

    return made_once(shared, "left-alone-by-rule", make)


@pytest.fixture(scope="session")
def undisturbed(finished: Path) -> dict[str, str]:
    return disturbed_runs.contents(finished / "run")
