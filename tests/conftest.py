"""What holds for all tests."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """A run sets how many threads torch has; the next test is not to feel it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
