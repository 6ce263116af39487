"""The clock and the power of a GPU are the medians of what its driver says meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kernel_times import clock_and_power

DRIVER = """#!/bin/sh
echo '1500, 640.5, 700.00'
echo '1980, 300.0, 700.00'
echo '1400, 690.0, 700.00'
echo '[N/A], 700.0, 700.00'
printf '1500, 64'
touch {said}
exec sleep 60
"""


def test_medians_of_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, said, seen = tmp_path / "nvidia-smi", tmp_path / "said", dict[str, Any]()
    driver.write_text(DRIVER.format(said=said))
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with clock_and_power(seen):
        deadline = time.monotonic() + 60
        while not said.exists() and time.monotonic() < deadline:
            time.sleep(0.01)  # until the next look
    assert seen == {"clock_mhz": 1500.0, "power_watts": 640.5, "power_limit_watts": 700.0}


def test_nothing_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    seen = dict[str, Any]()
    with clock_and_power(seen):
        pass
    assert seen == {}
