"""What holds for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# How long an example takes says more about what else the machine does than about the code.
# The same examples in every run, so that none fails by chance; new ones are tried with TRIMTAB_THOROUGH=1.
settings.register_profile("trimtab", deadline=None, derandomize=not os.environ.get("TRIMTAB_THOROUGH"))
settings.load_profile("trimtab")

# A shell starts what it runs in the background with Ctrl-C ignored, and the tests' own processes would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
