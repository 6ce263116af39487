"""Training with vLLM from the command line: runs finish, and sampler and trainer agree at every step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.vllm import vllm_models as small
from trimtab.cli import app

pytest.importorskip("vllm", reason="make test-vllm has an environment with it", exc_type=ImportError)

SETTINGS = {
    "rollout.engine": "vllm",
    "rollout.vllm_options": "{kv_cache_memory_bytes = 67108864}",
    "rollout.batch_size": "64",
    "rollout.prompts": "8",
    "rollout.samples": "4",
    "rollout.max_new_tokens": "6",
    "reward.overlong_buffer": "6",  # rewards differ by length, so that every step teaches
    "update.per_step": "2",
    "update.lr": "3e-4",
    "warm_start.steps": "20",
    "run.steps": "10",
    "run.eval_every": "5",
    "run.eval_problems": "8",
    "run.checkpoint_every": "5",
    "run.report": "false",
    "run.device": "cpu",
    "run.threads": "1",
}


def train(out: Path, **changes: str) -> list[dict[str, float]]:
    """Train, and return the metrics of every step."""
    settings = [word for key, value in {**SETTINGS, **changes}.items() for word in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(app, ["train", "addition", "--out", str(out), "--quiet", *settings])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_in_ten_steps_vllm_agrees_with_the_trainer(tmp_path: Path) -> None:
    model = small.save_model(tmp_path / "start")
    records = train(tmp_path / "run", **{"model.path": str(model), "objective": "stapo + tis"})
    assert [record["step"] for record in records] == list(range(11))
    steps = records[1:]
    assert all(record["sampler/mismatch_max"] < 5e-5 for record in steps)
    assert all(record["update/skipped"] == 0 and record["update/grad_norm"] > 0 for record in steps)
    assert all(record["correction/weight_mean"] == pytest.approx(1, abs=1e-4) for record in steps)
    assert {record["step"] for record in records if "eval/accuracy" in record} == {0, 5, 10}
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_resumed_run_with_vllm_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", **{"run.steps": "6", "run.checkpoint_every": "3"})
    train(tmp_path / "parts", **{"run.steps": "3", "run.checkpoint_every": "3"})
    resumed = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "parts"), "--quiet", "--set", "run.steps=6"])
    assert resumed.exit_code == 0, resumed.output
    parts = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert [lasting(record) for record in parts if record["step"] > 3] == [lasting(r) for r in whole if r["step"] > 3]


def lasting(record: dict[str, float]) -> dict[str, float]:
    """A step's metrics without clocks and evaluations, which the last step of a run adds."""
    return {name: value for name, value in record.items() if not name.startswith(("time/", "memory/", "eval/"))}
