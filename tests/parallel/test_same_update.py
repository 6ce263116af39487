"""Ranks that share a run sample the same tokens, make the same plans and take the same updates as one process.

The ranks are threads here; `test_processes.py` has real ones. `TRIMTAB_THOROUGH=1` trains 20 steps with 2 and with 4
ranks in every case, without it 2 or 3 steps with 3 ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from helpers.parallel.thread_ranks import Trained, plan_tensors, train_ranks, use_sgd
from helpers.thorough import THOROUGH, slow_but
from helpers.train.scripted_turns import ScriptedTurns
from helpers.train.short_runs import recipe
from trimtab.objectives import METHODS, Plan
from trimtab.trainer.model import LossScale
from trimtab.trainer.parallel import ShardedOptimizer
from trimtab.trainer.train.trainer import Trainer

STEPS = 20 if THOROUGH else 3
METHOD_STEPS = 20 if THOROUGH else 2
SIZES = (2, 4) if THOROUGH else (3,)
SOME_METHODS = ("grpo", "stapo", "stare", "sspo", "gspo", "gmpo", "kl_cov", "lp_reg", "otb", "gdpo")
# How far the weights may be from one process's, as a share of the way that they have gone (Euclidean norms). Gradients
# differ by about 1e-6 of their size, because their addends are in another order.
TOLERANCE = 1e-3 if THOROUGH else 1e-4
METRIC_TOLERANCE = 1e-3 if THOROUGH else 1e-4
# Weights that differ in their last bits sample another token about once in a million. After that two runs differ, so
# other seeds are tried. So they are for runs of 20 steps that amplify rounding, with one process as with several.
SEEDS = 8 if THOROUGH else 3
STEADY = 1e-4  # how far gradient norms may be from those of a run that starts from weights with other last bits

BASE = {
    "warm_start.steps": "0",
    "objective": '"grpo"',
    "rollout.prompts": "4",
    "rollout.samples": "3",
    "update.per_step": "1",
}
FEATURES: dict[str, dict[str, str]] = {
    "fewer prompts than ranks": {"rollout.prompts": "1"},
    "fewer responses than ranks": {"rollout.prompts": "1", "rollout.samples": "2"},
    "dynamic sampling": {"rollout.dynamic_sampling": "true", "rollout.dynamic_max_rounds": "3"},
    "several updates": {"update.per_step": "4", "objective": '"stapo"'},
    "several passes": {"update.passes": "2", "update.per_step": "2"},
    "current statistics": {"objective": '"stapo"', "update.per_step": "2", "update.token_stats": '"current"'},
    "lora": {"model.lora_rank": "4"},
    "gradient checkpointing": {"model.gradient_checkpointing": "true"},
    "controller": {"objective": '"stapo + stare(adaptive=true)"', "update.per_step": "2"},
    "trim": {
        "objective": '"sspo + trim(floor=9) + stare(boost=critical, variant=C1)"',
        "update.per_step": "2",
        "update.measure_every": "2",
    },
    "reference": {"objective": '"grpo + kl"', "model.reference": '"start"', "update.per_step": "2"},
    "reward noise": {"reward.noise": "0.3"},
    "excluded responses": {"reward.no_answer": '"exclude"', "rollout.samples": "6"},
    "groups without signal": {"objective": '"dapo"', "objective.count": '"signal"', "update.per_step": "2"},
    "entropy controllers": {
        "objective": '"entropic(target=9.0) + repo_r + entrocraft(floor=8.0, ceiling=9.0) + clip_v + steer"',
        "update.per_step": "2",
    },
    "small micro-batches": {"update.token_budget": "8", "update.head_chunk": "3"},
}


def nothing(trainer: Trainer) -> None:
    """Leave a trainer as it is."""


def trained(
    changes: dict[str, str],
    size: int,
    steps: int = STEPS,
    prepare: Callable[[Trainer], object] = nothing,
    plans: Sequence[Plan] = (),
) -> list[Trained]:
    return train_ranks(recipe(BASE | changes), size, steps, prepare, plans)


def assert_same_bits(ranks: list[Trained], others: list[Trained]) -> None:
    """Two lists of ranks have the same tokens, plans, metrics, controllers and weights, to the bit."""
    for one, other in zip(ranks, others, strict=True):
        assert one.tokens == other.tokens
        assert [plan_bits(plan) for plan in one.plans] == [plan_bits(plan) for plan in other.plans]
        assert untimed(one.metrics) == untimed(other.metrics)
        assert one.progress == other.progress
        assert one.trainer.objective.state_dict() == other.trainer.objective.state_dict()
        assert torch.equal(one.weights, other.weights)


def assert_same_run(ranks: list[Trained], alone: Trained, tolerance: float = TOLERANCE) -> None:
    """All ranks have the same bits, and they are those of one process, to rounding."""
    assert_same_bits(ranks, [ranks[0]] * len(ranks))
    assert ranks[0].tokens == alone.tokens
    assert ranks[0].progress == alone.progress
    for step, (several, one) in enumerate(zip(ranks[0].metrics, alone.metrics, strict=True), 1):
        assert several.keys() == one.keys()
        for name in (name for name in one if not name.startswith(("time/", "memory/"))):
            near = pytest.approx(one[name], rel=METRIC_TOLERANCE, abs=METRIC_TOLERANCE, nan_ok=True)
            assert several[name] == near, f"step {step}: {name}"
    assert distance(ranks[0], alone) < tolerance


def distance(one: Trained, other: Trained) -> float:
    """Return how far two runs are from each other, as a share of the way that their weights have gone."""
    way = (other.weights - other.start).norm()
    assert way > 0, "nothing was learnt"
    share = float((one.weights - other.weights).norm() / way)
    print(f"distance {share:.1e}")  # noqa: T201
    return share


def plan_bits(plan: Any) -> list[tuple[str, bytes]]:
    return [(name, value.numpy().tobytes()) for name, value in plan_tensors(plan).items()]


def untimed(records: list[dict[str, float]]) -> list[dict[str, str]]:
    return [
        {n: repr(value) for n, value in record.items() if not n.startswith(("time/", "memory/"))} for record in records
    ]


def same_tokens(ranks: list[Trained], alone: Trained) -> bool:
    """Return whether two runs sampled the same; the first step, from the same weights, must."""
    assert ranks[0].tokens[0] == alone.tokens[0]
    return ranks[0].tokens == alone.tokens


def is_steady(settings: dict[str, str], alone: Trained) -> bool:
    """Return whether a run of one process hardly depends on the last bits of the weights that it starts from."""
    rounded = trained(settings, 1, prepare=change_last_bits)[0]
    norms = [[record.get("update/grad_norm", 0.0) for record in run.metrics] for run in (rounded, alone)]
    return rounded.tokens == alone.tokens and norms[0] == pytest.approx(norms[1], rel=STEADY)


def change_last_bits(trainer: Trainer) -> None:
    generator = torch.Generator().manual_seed(0)
    for weight in trainer.policy.model.parameters():
        weight.data *= 1 + 6e-8 * torch.randint(-1, 2, weight.shape, generator=generator)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", slow_but(SOME_METHODS, METHODS))
def test_every_method_trains_the_same_with_several_ranks(method: str, size: int) -> None:
    """Its plans are those that one process makes from the same scores, and so are the updates by these plans.

    Scores themselves differ in their last bits, because other responses share a forward pass. A rule that takes some
    tokens of a ranking can then take another one.
    """
    for seed in range(SEEDS):
        # The penalty of KL-Cov is the distance from the old log-prob. It has a kink where every first update starts, so
        # rounding decides on its sign there.
        objective = "kl_cov(coef=1e-4)" if method == "kl_cov" else method
        settings = {"objective": f'"{objective}"', "update.per_step": "2", "run.seed": str(seed)}
        ranks = trained(settings, size, METHOD_STEPS)
        assert_plans_of_one_process(ranks[0], settings)
        alone = trained(settings, 1, METHOD_STEPS, plans=ranks[0].plans)[0]
        if same_tokens(ranks, alone):
            assert_same_run(ranks, alone)
            return
    pytest.fail("other tokens were sampled with every seed")


def assert_plans_of_one_process(rank: Trained, settings: dict[str, str]) -> None:
    objective, plans = recipe(BASE | settings).build_objective(), iter(rank.plans)
    for call, batch in rank.seen:
        if call == "observe":
            objective.observe(batch)
        else:
            assert plan_bits(objective.plan(batch)) == plan_bits(next(plans))
    assert objective.state_dict() == rank.trainer.objective.state_dict()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_run_trains_the_same_with_several_ranks(feature: str, size: int) -> None:
    for seed in range(SEEDS):
        settings = FEATURES[feature] | {"run.seed": str(seed)}
        ranks, alone = trained(settings, size), trained(settings, 1)[0]
        if same_tokens(ranks, alone) and (not THOROUGH or is_steady(settings, alone)):
            assert_same_run(ranks, alone)
            assert feature != "excluded responses" or alone.metrics[0]["reward/excluded"] > 0
            assert feature != "dynamic sampling" or sum(each["groups/dropped"] for each in alone.metrics) > 0
            return
    pytest.fail("other tokens were sampled with every seed")


def test_conversations_with_tools_train_the_same_with_several_ranks() -> None:
    scripts = [["calculator(6*7)", "42"], ["7"], ["calculator(6*)", "no"]]

    def scripted(trainer: Trainer) -> None:
        trainer.sampler = ScriptedTurns(trainer.policy, scripts)

    tools = {
        "model.path": '"demo-tools"',
        "tools.use": '["calculator"]',
        "rollout.max_turns": "2",
        "rollout.max_observation_tokens": "24",
    }
    settings = {**tools, "rollout.max_new_tokens": "32", "reward.overlong_buffer": "31"}
    alone = trained(settings, 1, 2, scripted)[0]
    assert alone.metrics[0]["tools/calls"] > 0
    assert_same_run(trained(settings, 3, 2, scripted), alone)


def test_bits_repeat_at_a_fixed_number_of_ranks() -> None:
    settings = {"objective": '"stapo + stare(adaptive=true)"', "update.per_step": "2"}
    assert_same_bits(trained(settings, 3), trained(settings, 3))


# --- gradients: AdamW divides a gradient by its own size, and so hides a factor


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_have_the_same_size_with_several_ranks(size: int) -> None:
    settings = {"update.per_step": "2"}
    alone, ranks = trained(settings, 1, 3)[0], trained(settings, size, 3)
    norms = [[record["update/grad_norm"] for record in rank.metrics] for rank in (alone, ranks[0])]
    assert all(norm > 1e-3 for norm in norms[0])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.parametrize("clip", ["1.0", "1e-3"])
def test_plain_sgd_takes_the_same_steps_with_several_ranks(clip: str) -> None:
    """A step of SGD is as long as the gradient: one that is halved, or clipped by another norm, is found here."""
    settings = {"update.max_grad_norm": clip, "update.lr": str(0.05 / float(clip))}
    alone = trained(settings, 1, 3, use_sgd)[0]
    assert_same_run(trained(settings, 4, 3, use_sgd), alone, tolerance=1e-5)


def test_the_comparison_with_sgd_finds_a_factor_that_adamw_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ShardedOptimizer.reduce

    def halved(self: ShardedOptimizer, max_norm: float) -> torch.Tensor:
        assert self._flat is not None
        self._flat.mul_(0.5)
        return original(self, max_norm)

    settings = {"update.max_grad_norm": "100"}
    alone = {prepare: trained(settings, 1, 2, prepare)[0] for prepare in (nothing, use_sgd)}
    monkeypatch.setattr(ShardedOptimizer, "reduce", halved)
    for prepare, hidden in ((nothing, True), (use_sgd, False)):
        assert (distance(trained(settings, 2, 2, prepare)[0], alone[prepare]) < 0.1) is hidden


# --- an update that is not finite


@pytest.mark.parametrize("value", ["gradient", "log-probability"])
def test_an_update_that_is_not_finite_on_one_rank_is_refused_on_all(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, bad = sys.modules["trimtab.trainer.model.update"], []
    original = module.forward_backward

    def broken(policy: Any, objective: Any, micro: Any, *rest: Any) -> Any:
        out, new_logp = original(policy, objective, micro, *rest)
        if bad and policy is bad[0]:
            if value == "gradient":
                next(p for p in policy.model.parameters() if p.grad is not None).grad.view(-1)[0] = math.nan
            else:
                new_logp[-1] = math.nan
        return out, new_logp

    def prepare(trainer: Trainer) -> None:
        if trainer.world.rank == 2:
            bad.append(trainer.policy)

    monkeypatch.setattr(module, "forward_backward", broken)
    ranks = trained({}, 3, 1, prepare)
    assert_same_bits(ranks, [ranks[0]] * 3)
    for rank in ranks:
        assert rank.metrics[0]["update/skipped"] == 1
        assert torch.equal(rank.weights, rank.start)
        assert not rank.trainer.optimizer.inner.state, "the optimizer's state has not changed"  # type: ignore[union-attr]


def test_an_overflow_on_one_rank_lowers_the_loss_scale_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    module, limited = sys.modules["trimtab.trainer.model.update"], []
    original = module.forward_backward

    def overflowing(policy: Any, *rest: Any) -> Any:
        found = original(policy, *rest)
        if limited and policy is limited[0] and rest[-1] > 2.0**13:
            next(p for p in policy.model.parameters() if p.grad is not None).grad.view(-1)[0] = math.inf
        return found

    def prepare(trainer: Trainer) -> None:
        if trainer.world.rank == 2:
            limited.append(trainer.policy)

    monkeypatch.setattr(module, "forward_backward", overflowing)
    ranks = trained({"model.precision": "fp16"}, 3, 1, prepare)
    assert_same_bits(ranks, [ranks[0]] * 3)
    for rank in ranks:
        assert rank.trainer.loss_scale == LossScale(2.0**13, 1)
        assert rank.metrics[0]["update/skipped"] == 0
        assert not torch.equal(rank.weights, rank.start)
    assert ranks[0].metrics[0]["update/overflows"] == 3
