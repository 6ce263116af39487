"""The tables beside vLLM and TRL: the best rival counts, one that wins is shown winning, failures are said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gpu_tables
import rival_tables

ABOUT = {"machine": "a GPU", "date": "2026-01-02", "versions": {"python": "3.12", "vllm": "0.24.0"}}


def sampled(ours: int, best: int) -> dict[str, Any]:
    found = {"setting": "own process", "tokens_per_second": best, "times_faster": round(ours / best, 2)}
    return {"trimtab": {"tokens_per_second": ours}, "best with log-probs": found, "share_of_limit": 0.5, "lengths": "1"}


def test_sampling_beside_vllm_says_where_the_aim_is_missed_and_what_failed() -> None:
    shapes = {
        "135M": {"start_seconds": {"in process": 9.0}, "512 x 128": sampled(300_000, 40_000)},
        "1.7B": {
            "64 sequences": sampled(1000, 2000),
            "failed": {"in process": "no room. Process 7 has 40 GiB"},
            "new_weights_seconds": {"trimtab": 0.001, "vLLM": 0.05},
            "log_prob_distance": {"trimtab": {"mean": 0.02}, "vLLM": {"mean": 0.03}},
        },
    }
    made = " ".join(rival_tables.sampling(ABOUT | {"shapes": shapes}))
    assert "| 1.7B: 64 sequences | 1,000 | 2,000 (own process) |  | 0.50 | 50% |" in made
    assert "reached: 135M, 512 x 128 (7.50); missed: 1.7B, 64 sequences (0.50)" in made
    assert "To reach the target, 1.7B, 64 sequences would need 130% of the limit." in made
    assert "vLLM at 1.7B, in process, did not finish: no room." in made
    assert "| 1.7B | 1.0 | 50.0 | 0.02 | 0.03 |" in made
    assert rival_tables.sampling(ABOUT) == []


def test_a_load_that_only_one_large_shape_has_is_not_measured_for_the_other() -> None:
    shapes = {"1.7B": {"64": sampled(3, 1), "512": sampled(3, 1)}, "8B": {"64": sampled(3, 1)}, "135M": {}}
    made = rival_tables.sampling(ABOUT | {"shapes": shapes})
    assert [line for line in made if "not measured" in line] == ["| 8B: 512 | not measured |  |  |  |  |"]


def test_a_step_beside_trl_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tables, "RESULTS", tmp_path)
    assert rival_tables.steps().startswith("Not measured yet")
    fixed = {"trimtab": {"seconds": 2.0, "tokens": 1000}, "trl-vllm": {"seconds": 5.0}}
    (tmp_path / "step-vllm-135m-h200.json").write_text(json.dumps(ABOUT | {"fixed": fixed}))
    fixed["trl-vllm"] = {"error": "OutOfMemoryError"}  # type: ignore[dict-item]
    (tmp_path / "step-vllm-1.7b-h200.json").write_text(json.dumps(ABOUT | {"fixed": fixed}))
    made = rival_tables.steps()
    assert "| 135M | 1,000 | TRL + vLLM | 2.00 | 5.00 | 2.50 |" in made
    assert "| 1.7B | 1,000 | TRL + vLLM | 2.00 | OutOfMemoryError |  |" in made
    assert "missed: 135M beside TRL + vLLM (2.50)" in made


def test_an_engine_that_failed_leaves_its_row_out() -> None:
    native = {"seconds": 1.0, "rollout_seconds": 0.4, "update_seconds": 0.5, "start_seconds": 3.0}
    native |= {"mismatch_mean": [0.02, 0.03], "mismatch_max": [0.4]}
    memory = {"gigabytes": {"before": 1.0, "asleep": 2.0, "awake": 30.0}}
    memory |= {"wake_up_with_new_weights_seconds": 0.2, "sleep_seconds": 0.1, "enforce_eager": True}
    made = rival_tables.engine(ABOUT | {"vllm": {"error": "no"}, "native": native, "engine": memory})
    assert [line for line in made if line.startswith("| vLLM |")] == ["| vLLM | 1.0 | 2.0 | 30.0 | 200 | 100 |"]
    assert "| native | 0.40 | 0.50 | 3 | 0.030 | 0.40 |" in made and made[-1].startswith("Without CUDA graphs")
    assert rival_tables.engine(ABOUT | {"vllm": {"error": "no"}}) == []


def test_a_long_step_is_held_against_its_estimate() -> None:
    result = ABOUT | {
        "setting": {"responses": 64, "new_tokens": 15_360},
        "measured": {
            "where": {"sample": {"ms": 40_000.0, "share": 0.8}, "grade": {"ms": 0.1, "share": 0.0}},
            "lengths": {"mean": 5000.0, "longest": 15_360},
            "peaks": {"update": 100e9},
            "tokens": 320_000,
            "seconds": 50.0,
        },
        "limits": {"sample": {"seconds": 30.0, "share": 0.75}},
        "estimated": {"peak": 104e9},
        "ratios": {"peak": 1.04},
    }
    made = rival_tables.long_step(result)
    assert "| sample | 40.0 | 80% | 75% |" in made and not any("grade" in line for line in made)
    assert "reached: 4.0% off (1.04)" in " ".join(made)
    assert rival_tables.long_step(ABOUT | {"error": "out of memory"}) == []
