"""The same tokens through TRL's trainer and through the core give the same loss and gradient, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest

from helpers.thorough import THOROUGH

pytest.importorskip("trl", reason="trl is not installed here: `make test-engines` runs these tests")

import torch

import trimtab as tt
from helpers.engines import trl_runs
from helpers.engines.trl_fakes import KnownModel, Rollout, install, rollout
from helpers.objectives.batches import EVERY
from trimtab.engines.common import LOSS_METRICS
from trimtab.engines.options import missing_fields
from trimtab.engines.trl.padded import RESPONSE_INDEX
from trimtab.objectives import merge_metrics

BATCHES = 50 if THOROUGH else 15


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trl_runs.trainer(trl_runs.demo_model(0), trl_runs.config(tmp_path_factory.mktemp("equal")))


def model_of(made: Rollout, seed: int) -> KnownModel:
    rng = torch.Generator().manual_seed(seed + 2)
    old = made.padded["old_logp"]
    return KnownModel(old, old + 0.3 * torch.randn(old.shape, generator=rng), made.padded["entropy"])


def walk(trainer: Any, made: Rollout, model: KnownModel, steps: int) -> list[tuple[list[int], torch.Tensor]]:
    """The responses and the loss of every micro-batch that TRL trains on; gradients add up in the model."""
    seen = []
    for _ in range(steps):
        inputs = trainer._prepare_inputs([{}] * made.rows)
        loss = trainer._compute_loss(model, inputs)
        loss.backward()
        seen.append((inputs[RESPONSE_INDEX].tolist(), loss.detach()))
        trainer._step += 1
    return seen


def core(objective: tt.Objective, made: Rollout, model: KnownModel, order: list[list[int]]) -> Any:
    """One update on those micro-batches by the core alone: the losses, the gradient by response, metrics."""
    rows = [row for part in order for row in part]
    batch = made.batch(objective, rows)
    plan = objective.plan(batch)
    new = batch.pack(model.new.detach()[rows]).requires_grad_()
    outs = [objective.loss(new[part.slice], part) for part in plan.split([len(part) for part in order])]
    losses = torch.stack([out.loss for out in outs])
    for loss in losses:
        loss.backward(retain_graph=True)
    assert new.grad is not None
    gradient = torch.zeros_like(model.new)
    gradient[rows] = batch.unpack(new.grad)
    return losses.detach(), gradient, merge_metrics([out.metrics for out in outs]), plan.metrics


@pytest.mark.parametrize("name", [name for name in EVERY if not missing_fields(tt.objective(name), "TRL")])
def test_every_objective_gives_the_loss_and_gradient_of_the_core(
    name: str, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(BATCHES):
        rng = random.Random(seed)
        accumulation, (updates, passes) = rng.choice([1, 2, 4]), rng.choice([(1, 1), (1, 1), (2, 1), (1, 2)])
        samples, micro = rng.choice([2, 4]), rng.choice([1, 2, 3])
        rows = micro * accumulation * updates * samples
        made = rollout(seed, rows, samples, columns=rng.randint(2, 12))
        model = model_of(made, seed)
        trainer.objective = tt.objective(name)
        install(trainer, made, model, monkeypatch)
        trainer.args.gradient_accumulation_steps = trainer.current_gradient_accumulation_steps = accumulation
        trainer.args.steps_per_generation, trainer.num_iterations = accumulation * updates, passes
        mine = tt.objective(name)
        mine.observe(made.batch(mine, list(range(rows))))
        for _ in range(updates * passes):
            model.zero_grad()
            seen = walk(trainer, made, model, accumulation)
            losses, gradient, _, _ = core(mine, made, model, [part for part, _ in seen])
            assert torch.equal(torch.stack([loss for _, loss in seen]), losses), f"{name}, batch {seed}: loss"
            assert model.new.grad is not None
            assert torch.equal(model.new.grad, gradient), f"{name}, batch {seed}: gradient"
        assert mine.state_dict() == trainer.objective.state_dict()


@pytest.mark.parametrize("host", ["dapo", "gspo"])
def test_an_entropy_bonus_with_its_own_gradient_reaches_trls_entropies(
    host: str, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rollout(3, 16, 4, columns=9)
    model = model_of(made, 3)
    model.entropy = entropy = model.entropy.clone().requires_grad_()
    objective = trainer.objective = tt.objective(f"{host} + entropy_bonus(coef=0.1, gradient=exact)")
    install(trainer, made, model, monkeypatch)
    trainer.args.gradient_accumulation_steps = trainer.current_gradient_accumulation_steps = 2
    trainer.args.steps_per_generation, trainer.num_iterations = 2, 1
    rows = [row for part, _ in walk(trainer, made, model, 2) for row in part]
    plan = objective.plan(made.batch(objective, rows))
    assert entropy.grad is not None and plan.entropy_grad is not None
    found = made.batch(objective, rows).pack(entropy.grad[rows])
    assert found.lt(0).all() and torch.equal(found, plan.entropy_grad)
    assert not entropy.grad[~made.padded["mask"]].any()
    model.entropy = entropy.detach()
    trainer._step, trainer._buffered_inputs, trainer._plans = 0, None, {}
    with pytest.raises(ValueError, match="a term of the entropy, and it has no gradient"):
        walk(trainer, made, model, 1)


@pytest.fixture
def walked(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rollout of 16 responses in two updates of two micro-batches each, under STAPO."""
    made = rollout(7, 16, 4, columns=9)
    model = model_of(made, 7)
    trainer.objective = tt.objective("stapo", tau_p=0.2)
    install(trainer, made, model, monkeypatch)
    trainer.args.gradient_accumulation_steps = trainer.current_gradient_accumulation_steps = 2
    trainer.args.steps_per_generation, trainer.num_iterations = 4, 1
    trainer._metrics["train"].clear()
    return made, model


def test_the_metrics_in_trls_log_are_those_of_the_update(trainer: Any, walked: Any) -> None:
    made, model = walked
    seen = walk(trainer, made, model, 2)
    _, _, metrics, planned = core(trainer.objective, made, model, [part for part, _ in seen])
    logged = trainer._metrics["train"]
    assert set(metrics) == set(LOSS_METRICS)
    for name, value in {**metrics, **planned}.items():
        assert logged[name] == [pytest.approx(float(value), rel=1e-6)], name
    tokens = made.batch(trainer.objective, [row for part, _ in seen for row in part])
    assert logged["entropy"] == [pytest.approx(float(tokens.entropy.mean()), rel=1e-5)]
    assert "tokens/silenced_share" in logged


def test_the_old_policy_scores_a_rollout_once(trainer: Any, walked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, model = walked
    monkeypatch.setattr(trainer.args, "per_device_train_batch_size", 8)
    walk(trainer, made, model, 4)
    assert model.passes.count("old") == 2  # 16 responses in chunks of 8
    assert model.passes.count("new") == 4


def test_the_output_of_a_tool_has_no_gradient(trainer: Any, walked: Any) -> None:
    made, model = walked
    assert made.tool_mask is not None and bool((made.completion_mask & ~made.tool_mask).any())
    walk(trainer, made, model, 4)
    assert model.new.grad is not None
    assert not model.new.grad[~made.padded["mask"]].any()
    assert model.new.grad[made.padded["mask"]].any()


def test_rules_read_the_current_policy_where_that_is_configured(trainer: Any, walked: Any) -> None:
    made, model = walked
    trainer.objective = tt.objective("stapo", tau_p=0.2, token_stats="current")
    walk(trainer, made, model, 2)
    first = model.passes.count("old")
    drifted = model.old - 0.5
    model.old = drifted  # as if the first update had moved the policy
    seen = walk(trainer, made, model, 2)
    assert model.passes.count("old") > first, "the second update must score its tokens again"
    rows = [row for part, _ in seen for row in part]
    batch = made.batch(trainer.objective, rows)
    current = tt.TokenBatch.from_padded(
        made.padded["mask"][rows],
        old_logp=made.padded["old_logp"][rows],
        current_logp=drifted[rows],
        entropy=made.padded["entropy"][rows],
        advantage=batch.unpack(batch.advantage),
    )
    plan = trainer.objective.plan(current)
    silenced = trainer._metrics["train"]["tokens/silenced_share"][-1]
    assert silenced == pytest.approx(float(plan.metrics["tokens/silenced_share"]))


def test_a_token_that_vllm_could_not_score_is_not_corrected(trainer: Any, walked: Any) -> None:
    made, _ = walked
    trainer.objective = tt.objective("dapo + tis")
    made.padded["sampler_logp"] = (made.padded["old_logp"] + torch.log(torch.tensor(2.0))).clamp(max=0.0)
    made.padded["sampler_logp"][:, 0] = torch.nan
    inputs = trainer._prepare_inputs([{}] * made.rows)
    plan = inputs["trimtab_plan"]
    first = [plan.offsets[n] for n in range(plan.responses) if inputs["completion_mask"][n, 0]]
    tools = inputs.get("tool_mask")
    spoken = [bool(tools[n, 0]) for n in range(plan.responses)] if tools is not None else [True] * plan.responses
    weights = plan.weight[[at for at, mine in zip(first, spoken, strict=True) if mine]]
    assert torch.equal(weights, torch.ones_like(weights))
    assert torch.allclose(plan.weight.min(), torch.tensor(0.5))
