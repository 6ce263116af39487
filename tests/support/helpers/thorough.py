"""What only `make thorough` does: tests with the marker `slow`, and all of what is else sampled."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from typing import Any

import pytest

THOROUGH = bool(os.environ.get("TRIMTAB_THOROUGH"))


def slow_but(chosen: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Return cases as parameters of a test: all but the chosen are slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in chosen else (pytest.mark.slow,)
        )
        for case in cases
    ]
