"""The benchmark of a whole step runs TRL's trainer beside ours, on the same prompts and with the same grader."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

pytest.importorskip("trl")

import torch

import step


def test_the_step_script_runs_its_peer(tmp_path: Path) -> None:
    threads, out = torch.get_num_threads(), tmp_path / "step.json"
    words = ["--small", "--steps", "1", "--warmup", "0", "--peer-steps", "1", "--out", str(out)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step.main(words)
    torch.set_num_threads(threads)
    result = json.loads(out.read_text())
    free, fixed = result["free"]["trl"], result["fixed"]["trl"]
    assert fixed["tokens"] == result["fixed"]["trimtab"]["tokens"] == 8 * 4 * 12
    assert 0 < free["tokens"] < fixed["tokens"]
    spent = {name: phase["ms"] for name, phase in free["where"].items()}
    assert all(spent[name] > 0 for name in ("sample", "grade", "forward and backward", "optimizer", "everything else"))
    assert spent["score"] == spent["plan"] == 0  # it has no such phases: old log-probabilities are those of the update
    assert result["free"]["times_faster"]["step"] > 0
