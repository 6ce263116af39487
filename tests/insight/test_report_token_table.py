"""A token's numbers are what the objective did to it, checked against full gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.insight.report_runs import Made, data_of, decode_array, make_run, response_of
from helpers.train.short_runs import trained
from trimtab.insight.replay import recorded_objective
from trimtab.insight.report import write_report
from trimtab.insight.report.tokens import mini_batches, step_effects, token_table
from trimtab.objectives import objective, theory
from trimtab.record import Records, open_run

SHORT = {"run.steps": "2", "run.eval_every": "0", "run.checkpoint_every": "0", "objective.tau_p": "0.2"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    trained(folder, SHORT)
    return folder


@pytest.fixture(scope="module")
def records(run: Path) -> Records:
    return open_run(run)


def test_the_coefficient_is_advantage_times_ratio_times_weight_where_nothing_is_clipped(records: Records) -> None:
    step = records.step(1)
    table = token_table(step, recorded_objective(records.manifest.objective))
    effects = table.effects
    update = step.updates[0]
    scale = step.tokens["scale"] * update.info.tokens
    expected = effects.advantage * np.exp(table.log_ratio) * effects.weight * scale
    free = ~effects.clipped[update.tokens]
    assert effects.coefficient[update.tokens][free] == pytest.approx(expected[update.tokens][free], rel=1e-4)
    assert (effects.coefficient[effects.clipped] == 0).all()


def test_the_gradient_norm_is_that_of_the_logits(records: Records) -> None:
    """On made-up distributions, whose full gradient can be taken."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(40, 17, generator=generator)).requires_grad_()
    sampled = torch.randint(0, 17, (40,), generator=generator)
    found = theory.moments(logits.detach(), sampled)
    logits.log_softmax(-1).gather(-1, sampled[:, None]).sum().backward()
    assert logits.grad is not None
    table = token_table(records.step(1), None)
    like = replace(
        table, logp=found.logp.numpy(), entropy=found.entropy.numpy(), sum_p2=found.sum_p2.numpy(),
        sum_p2_logp=found.sum_p2_logp.numpy(),
    )  # fmt: skip
    assert like.logp_grad_norm == pytest.approx(logits.grad.norm(dim=-1).numpy(), rel=1e-3, abs=1e-3)
    assert like.phi == pytest.approx(theory.phi(*found).numpy())
    assert like.critical_surprisal == pytest.approx(theory.critical_surprisal(*found[1:]).numpy())


def test_without_the_objective_coefficients_are_unknown_and_the_rest_is_there(records: Records) -> None:
    table = token_table(records.step(1), None)
    assert np.isnan(table.grad_norm).all()
    assert np.isfinite(table.logp_grad_norm).all() and np.isfinite(table.effects.weight).all()


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "stare", "sspo", "cispo"])
def test_another_objective_is_planned_over_the_recorded_mini_batches(records: Records, name: str) -> None:
    step, other = records.step(2), objective(name)
    batches = mini_batches(step, other.needs)
    effects = step_effects(step, other, batches)
    assert len(effects.reason) == step.info.tokens == sum(recorded.batch.tokens for recorded in batches)
    fresh = objective(name)
    for controller in fresh.controllers.values():
        controller.observe(step.info.observed_entropy or 0.0)
    first = batches[0]
    plan = fresh.plan(first.batch)
    span = first.update.tokens
    assert np.array_equal(effects.weight[span], plan.weight.numpy())
    assert np.array_equal(effects.reason[span], plan.reason.numpy())
    expected = -fresh.loss_and_grad(first.new_logp, plan)[1] * first.batch.tokens
    assert effects.coefficient[span] == pytest.approx(expected.numpy(), rel=1e-5, abs=1e-6)


def test_an_objective_with_advantages_of_its_own_gets_them(records: Records) -> None:
    step, other = records.step(1), objective("dr_grpo")
    effects = step_effects(step, other, mini_batches(step, other.needs))
    reward, group = step.responses["reward"], step.responses["group"]
    expected = other.advantages(torch.tensor(reward), torch.tensor(group)).numpy().repeat(step.responses["tokens"])
    assert effects.advantage == pytest.approx(expected)


def test_a_record_of_half_the_groups_keeps_the_recorded_weights(tmp_path: Path) -> None:
    trained(tmp_path / "run", {**SHORT, "record.group_share": "0.5"})
    records = open_run(tmp_path / "run")
    step = records.step(1)
    assert not step.info.complete
    table = token_table(step, recorded_objective(records.manifest.objective))
    assert np.array_equal(table.effects.weight, step.tokens["weight"])
    free = ~table.effects.clipped & (table.effects.advantage != 0) & (table.effects.weight == 1)
    ratio = table.effects.coefficient[free] / (table.effects.advantage * np.exp(table.log_ratio))[free]
    assert ratio == pytest.approx(1, abs=0.5)  # the number of tokens that were not recorded is estimated


def test_every_number_of_the_page_is_the_readers(run: Path, records: Records) -> None:
    page = write_report([run]).read_text(encoding="utf-8")
    entries = data_of(page)["runs"][0]["responses"]
    assert len(entries) > 10
    for entry in entries[:: max(1, len(entries) // 12)]:
        block, step = response_of(page, entry["block"]), records.step(entry["step"])
        first = step.offsets[entry["response"]] + entry["start"]
        span = slice(first, first + entry["tokens"])
        assert "".join(block["pieces"]) == records.vocabulary.decode(step.tokens["token"][span].tolist())
        assert np.array_equal(decode_array(block["arrays"]["logp"]), step.tokens["old_logp"][span])
        assert np.array_equal(decode_array(block["arrays"]["entropy"]), step.tokens["entropy"][span])
        assert np.array_equal(decode_array(block["arrays"]["segment"]), step.tokens["segment"][span])
        for name in ("weight", "clip_low", "clip_high", "reason", "clipped", "advantage"):
            assert np.array_equal(decode_array(block["recorded"][name]), step.tokens[name][span]), name
        assert block["prompt"] == step.responses["prompt"][entry["response"]]
        assert entry["verdict"] == step.responses["verdict"][entry["response"]]
        assert entry["reward"] == step.responses["reward"][entry["response"]]


def test_a_missing_vocabulary_shows_tokens_by_number(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=1))
    (run / "tokens" / "vocabulary.parquet").unlink()
    page = write_report([run]).read_text(encoding="utf-8")
    assert response_of(page, 0)["pieces"][0].startswith("<")
    assert any("shown by their numbers" in note for note in data_of(page)["runs"][0]["notes"])
