"""verl, imported without its warnings (errors in these tests); where it is not installed, its tests are skipped."""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("verl", reason="verl is not installed here: make test-engines")
    import verl.workers.engine  # noqa: F401

    import trimtab.engines.verl.trainer  # noqa: F401
