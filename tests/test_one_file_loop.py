"""The program in one file learns, with the public API only."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from statistics import fmean

import pytest
import torch

EXAMPLE = Path(__file__).parent.parent / "examples/one_file_loop.py"


def test_it_learns_sums_from_rewards_only(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        right = runpy.run_path(str(EXAMPLE))["train"](steps=70)
    finally:
        torch.set_num_threads(threads)
    assert fmean(right[:5]) < 0.1 and fmean(right[-10:]) > 0.3
    shown = capsys.readouterr().out
    assert "stapo: Clip-higher PPO" in shown and "token " in shown.splitlines()[-1]


def test_it_imports_only_what_users_may_import() -> None:
    api = (EXAMPLE.parent.parent / "docs/api.md").read_text()
    text = EXAMPLE.read_text()
    names = re.findall(r"from (trimtab[\w.]*) import (.+)", text)
    assert names and all(f"::: {module}.{name}" in api for module, given in names for name in given.split(", "))
    assert 150 < len(text.splitlines()) < 220
