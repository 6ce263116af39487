"""fp16: loss scaling keeps small gradients, an overflow lowers the scale and the update is taken all the same."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trimtab as tt
from helpers.train.short_runs import contents, differences, recipe, trained
from trimtab.files import read_json_lines
from trimtab.trainer.model import LossScale, Policy, Transcript, UpdateOptions, UpdateResult, load_policy, score, update
from trimtab.trainer.model.loss_scale import GROWTH_INTERVAL, LARGEST
from trimtab.trainer.train import checkpoints
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.trainer import RunProgress, build_trainer

UPDATES = sys.modules["trimtab.trainer.model.update"]  # `trimtab.trainer.model.update` is the function
FP16 = {"model.precision": "fp16"}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=3)


def transcripts() -> list[Transcript]:
    rng = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 17, (9,), generator=rng).tolist() for _ in range(12)]
    return [Transcript(row[:4], row[4 : 5 + n % 5]) for n, row in enumerate(rows)]


def updated(
    policy: Policy, scale: LossScale | None, fused: bool, budget: int = 10_000, weight: float = 1.0
) -> tuple[UpdateResult, Weights]:
    """Take an update by SGD, whose step is the gradient; `weight` multiplies the loss and divides the step."""
    mine = replace(policy, model=copy.deepcopy(policy.model))
    sequences, objective = transcripts(), tt.objective("dapo")
    measured = score(mine, sequences, 1.0, 4096, 4096)
    sequence = torch.repeat_interleave(torch.arange(12), torch.tensor([len(each.response) for each in sequences]))
    advantage = torch.linspace(-1, 1, 12)[sequence]
    batch = tt.TokenBatch(old_logp=measured.logp, entropy=measured.entropy, advantage=advantage, sequence=sequence)
    plan = objective.plan(batch)
    plan = replace(plan, scale=plan.scale * weight)
    optimizer = torch.optim.SGD(mine.model.parameters(), lr=1 / weight)
    options = UpdateOptions(budget, 7, 1.0, 1e9, fused)
    result = update(mine, optimizer, objective, plan, sequences, options, loss_scale=scale)
    before = dict(policy.model.named_parameters())
    return result, {name: (p - before[name]).detach() for name, p in mine.model.named_parameters()}


def norm(weights: Weights) -> float:
    return float(torch.cat([value.flatten() for value in weights.values()]).norm())


def distance(ours: Weights, theirs: Weights) -> float:
    """Return the distance of two gradients relative to the second."""
    return norm({name: ours[name] - theirs[name] for name in theirs}) / norm(theirs)


@pytest.mark.parametrize("fused", [False, True])
def test_in_fp32_no_scale_changes_a_bit(policy: Policy, fused: bool) -> None:
    _, plain = updated(policy, None, fused)
    _, scaled = updated(policy, LossScale(2.0**12), fused)
    assert all(torch.equal(scaled[name], plain[name]) for name in plain)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_fp16_would_lose_are_kept_by_the_scale(policy: Policy, fused: bool) -> None:
    """A loss of a thousandth of a millionth has gradients below the smallest number of fp16."""
    _, exact = updated(policy, None, False, weight=1e-8)
    half = replace(policy, precision="fp16")
    _, unscaled = updated(half, LossScale(1.0), fused, weight=1e-8)
    _, scaled = updated(half, LossScale(2.0**24), fused, weight=1e-8)
    assert distance(unscaled, exact) > 0.3
    assert distance(scaled, exact) < 0.02


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_is_closer_to_fp32_than_bf16_is(policy: Policy, fused: bool) -> None:
    _, exact = updated(policy, None, False)
    _, fp16 = updated(replace(policy, precision="fp16"), LossScale(), fused)
    _, bf16 = updated(replace(policy, precision="bf16"), None, fused)
    assert 3 * distance(fp16, exact) < distance(bf16, exact)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("budget", [1, 25, 60])
def test_the_update_does_not_depend_on_micro_batches(policy: Policy, fused: bool, budget: int) -> None:
    half = replace(policy, precision="fp16")
    _, whole = updated(half, LossScale(), fused)
    result, parts = updated(half, LossScale(), fused, budget)
    assert len(result.micro_batch_sizes) > 1
    assert distance(parts, whole) < 2e-3


def test_an_overflow_halves_the_scale_and_the_update_is_taken(policy: Policy) -> None:
    half, scale = replace(policy, precision="fp16"), LossScale(2.0**24)
    result, moved = updated(half, scale, True, weight=1.0)
    assert result.taken and result.overflows > 0
    assert scale.value == 2.0**24 / 2**result.overflows == result.metrics["update/loss_scale"]
    _, exact = updated(policy, None, False)
    assert distance(moved, exact) < 0.01


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_no_scale_mends_is_skipped_and_leaves_the_scale(
    policy: Policy, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, scale = replace(policy, precision="fp16"), LossScale(2.0**10, 3)
    clip: Callable[..., torch.Tensor] = UPDATES.clip_gradients
    monkeypatch.setattr(UPDATES, "clip_gradients", lambda *args: clip(*args) * value)
    result, moved = updated(half, scale, True)
    assert not result.taken and result.nonfinite == "gradient" and result.overflows == 10
    assert (scale.value, scale.updates) == (2.0**10, 3)
    assert norm(moved) == 0


def test_log_probs_that_are_not_finite_are_not_tried_again(policy: Policy) -> None:
    broken = copy.deepcopy(policy.model)
    with torch.no_grad():
        next(iter(broken.parameters()))[:] = float("nan")
    plan_policy, scale = policy, LossScale()
    sequences, objective = transcripts(), tt.objective("dapo")
    measured = score(plan_policy, sequences, 1.0, 4096, 4096)
    sequence = torch.repeat_interleave(torch.arange(12), torch.tensor([len(each.response) for each in sequences]))
    batch = tt.TokenBatch(
        old_logp=measured.logp, entropy=measured.entropy, advantage=torch.ones(len(sequence)), sequence=sequence
    )
    bad = replace(policy, model=broken, precision="fp16")
    optimizer = torch.optim.SGD(broken.parameters(), lr=1.0)
    result = update(
        bad, optimizer, objective, objective.plan(batch), sequences, UpdateOptions(999, 9, 1.0, 1.0), loss_scale=scale
    )
    assert not result.taken and "log-probability" in result.nonfinite
    assert result.overflows == 0 and scale == LossScale()


# --- the scale


def test_the_scale_doubles_after_many_updates_and_has_an_end() -> None:
    scale = LossScale(2.0)
    for _ in range(GROWTH_INTERVAL):
        assert scale.value == 2.0
        scale.keep()
    assert scale == LossScale(4.0, 0)
    assert scale.lower() and scale.lower() and not scale.lower() and scale.value == 1.0
    full = LossScale(LARGEST, GROWTH_INTERVAL - 1)
    full.keep()
    assert full.value == LARGEST


@pytest.mark.parametrize(
    "state",
    [
        {"value": 3.0, "updates": 0}, {"value": 0.5, "updates": 0}, {"value": float("inf"), "updates": 0},
        {"value": float("nan"), "updates": 0}, {"value": 2, "updates": 0}, {"value": 2.0, "updates": -1},
        {"value": 2.0, "updates": 0.5}, {"value": 2.0, "updates": GROWTH_INTERVAL},
    ],
)  # fmt: skip
def test_a_state_that_is_not_valid_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the loss scale is"):
        LossScale().load_state_dict(state)


# --- runs


def test_a_run_learns_as_one_in_fp32_does_and_logs_its_scale(tmp_path: Path) -> None:
    trained(tmp_path / "half", FP16)
    trained(tmp_path / "whole", {})
    found, exact = (list(read_json_lines(tmp_path / name / "metrics.jsonl")) for name in ("half", "whole"))
    assert all(
        line["update/loss_scale"] >= 1 and line["update/skipped"] == 0 for line in found if "update/loss" in line
    )
    assert not any("update/loss_scale" in line for line in exact)


def test_a_resumed_run_is_equal_to_the_bit(tmp_path: Path) -> None:
    changes = {**FP16, "warm_start.steps": "3"}
    trained(tmp_path / "whole", changes)
    trained(tmp_path / "run", {**changes, "run.steps": "3"})
    trained(tmp_path / "run", changes, resume=True)
    assert not differences(contents(tmp_path / "run"), contents(tmp_path / "whole"))
    state = checkpoints.read(sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]).state
    assert state["loss_scale"]["updates"] > 0


def test_the_sampler_has_the_trainers_precision() -> None:
    def mismatch(**precision: str) -> float:
        changes = {f"{key}.precision": value for key, value in precision.items()}
        trainer = build_trainer(recipe({"rollout.prompts": "16", **changes}))
        return train_step(trainer, RunProgress()).metrics["sampler/mismatch_mean"]

    assert mismatch(model="fp16") < 1e-5
    assert 1e-5 < 4 * mismatch(model="fp32", rollout="fp16") < mismatch(model="fp32", rollout="bf16")


def test_sharded_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="--gpus N"):
        build_trainer(recipe({**FP16, "model.shard": "true"}))
