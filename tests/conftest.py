"""What holds for all tests."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from hypothesis import settings

from helpers.thorough import THOROUGH

# How long an example takes says more about what else the machine does than about the code.
# The same examples in every run, so that none fails by chance; new ones are tried by `make thorough`.
settings.register_profile("trimtab", deadline=None, derandomize=not THOROUGH)
settings.load_profile("trimtab")

# A shell starts what it runs in the background with Ctrl-C ignored, and the tests' own processes would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


NUMBERS = count()  # of modules, for folders of their own


def pytest_configure(config: pytest.Config) -> None:
    """Let `make thorough` run the slow tests too, which pyproject.toml leaves out."""
    if THOROUGH and config.option.markexpr == "not gpu and not slow":
        config.option.markexpr = "not gpu"


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_not_collected_again() -> None:
    """Keep the collector from all that was imported: the full collection of each run in a test took 0.4 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def environment_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command sets PYTHONSAFEPATH for the processes it starts; scripts of later tests import their neighbours."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)


@pytest.fixture(autouse=True, scope="module")
def warm_starts_of_the_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What fixtures of a module train shares warm starts with nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIMTAB_WARM_START", str(tmp_path_factory.getbasetemp() / f"warm-{next(NUMBERS)}"))
        yield


@pytest.fixture(autouse=True)
def warm_starts_of_the_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test finds no warm start of another one, and its own beside its runs."""
    if "tmp_path" in request.fixturenames:
        monkeypatch.setenv("TRIMTAB_WARM_START", str(request.getfixturevalue("tmp_path") / ".warm_start"))


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """A run sets how many threads torch has; the next test is not to feel it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
