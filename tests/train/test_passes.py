"""`update.passes`: several passes over the mini-batches of a step, each update with the rollout's old log-probs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.train.scripted import MixedGroups, scripted_trainer, small_config
from helpers.train.short_runs import contents, differences, short_run, trained
from trimtab.files import read_json_lines
from trimtab.insight.replay import replay
from trimtab.objectives import Objective, TokenBatch
from trimtab.record import open_run
from trimtab.trainer.config import load, parse
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.train import checkpoints, loop
from trimtab.trainer.train.loop import train
from trimtab.trainer.train.rollouts import collect_rollouts
from trimtab.trainer.train.scoring import score_rollouts
from trimtab.trainer.train.trainer import RunProgress

SHORT = {"run.steps": "3", "run.checkpoint_every": "1", "run.keep_checkpoints": "9", "run.eval_every": "0"}
PASSES = {**SHORT, "update.passes": "3"}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=0)


def taken_updates(folder: Path, step: int) -> float:
    saved = checkpoints.read(folder / "checkpoints" / f"step-{step:08d}")
    return float(saved.tensors["optimizer"]["0/step"])


def test_every_pass_has_the_same_minibatches_in_the_same_order(policy: Policy) -> None:
    trainer = scripted_trainer(policy, MixedGroups(policy, 2), small_config(update={"per_step": 2}))
    experience = score_rollouts(trainer, collect_rollouts(trainer, RunProgress()))
    made = list(experience.minibatches(3))
    assert [(m.number, m.first, m.last_pass) for m in made] == [
        (0, 0, False), (1, 4, False), (2, 0, False), (3, 4, False), (4, 0, True), (5, 4, True),
    ]  # fmt: skip
    for again in (made[2:4], made[4:]):
        assert [m.transcripts for m in again] == [m.transcripts for m in made[:2]]
        assert all(torch.equal(a.batch.old_logp, b.batch.old_logp) for a, b in zip(again, made, strict=False))


def test_a_step_takes_so_many_updates_and_observes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observed: list[int] = []
    planned: list[TokenBatch] = []
    observe, plan = Objective.observe, Objective.plan

    def counted_observe(self: Objective, batch: TokenBatch, *args: Any) -> None:
        observed.append(batch.responses)
        observe(self, batch, *args)

    def counted_plan(self: Objective, batch: TokenBatch, *args: Any) -> Any:
        planned.append(batch)
        return plan(self, batch, *args)

    monkeypatch.setattr(Objective, "observe", counted_observe)
    monkeypatch.setattr(Objective, "plan", counted_plan)
    trained(tmp_path / "run", PASSES)
    assert observed == [16] * 3, "controllers see the rollout batch, not the updates"
    assert len(planned) == 3 * 2 * 3
    first, later = planned[:2], planned[2:6]
    assert all(torch.equal(a.old_logp, b.old_logp) for a, b in zip(first * 2, later, strict=True))
    assert [taken_updates(tmp_path / "run", step) for step in (1, 2, 3)] == [6, 12, 18]


def test_one_pass_is_the_default() -> None:
    assert load(None).update.passes == 1


def test_later_passes_are_off_policy_even_with_one_update_each(tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run", {**PASSES, "update.per_step": "1"})
    assert all(row["update/ratio_max"] > 1.001 for row in run.folder.records())


def test_the_metrics_of_a_step_are_those_of_all_its_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []
    update = loop.update

    def noted(*args: Any) -> Any:
        result = update(*args)
        losses.append(result.metrics["update/loss"])
        return result

    monkeypatch.setattr(loop, "update", noted)
    run, _ = trained(tmp_path / "run", PASSES)
    for row, start in zip(run.folder.records(), range(0, 18, 6), strict=True):
        assert row["update/loss"] == pytest.approx(sum(losses[start : start + 6]) / 6)


def test_a_record_has_every_response_once_as_the_last_pass_trained_on_it(tmp_path: Path) -> None:
    trained(tmp_path / "run", PASSES)
    for step in open_run(tmp_path / "run"):
        assert step.info.complete and step.info.responses == 16
        assert [update.info.update for update in step.updates] == [4, 5]
        assert set(step.responses["update"].tolist()) == {4, 5}
        assert (step.tokens["new_logp"] != step.tokens["old_logp"]).mean() > 0.9
    assert replay(tmp_path / "run").exact


def test_a_run_that_ends_within_a_pass_is_resumed_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = trained(tmp_path / "whole" / "run", PASSES)
    calls: list[int] = []
    update = loop.update

    def ends(*args: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 6 + 4:  # the second update of the second pass of the second step
            raise RuntimeError("power cut")
        return update(*args)

    run, _ = short_run(tmp_path / "cut" / "run", PASSES)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", ends)
        with pytest.raises(RuntimeError, match="power cut"):
            train(run)
    _, log = trained(tmp_path / "cut" / "run", PASSES, resume=True)
    assert log.has("resumed from step 1")
    assert not differences(contents(tmp_path / "cut" / "run"), contents(whole.folder.path))


@pytest.mark.parametrize("number", [1, 4])
def test_an_update_that_is_not_finite_is_named_by_its_number_and_responses(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Sequence[Any]] = []
    update = loop.update

    def with_nan(policy: Any, optimizer: Any, objective: Any, plan: Any, transcripts: Any, *rest: Any) -> Any:
        calls.append(transcripts)
        if len(calls) == number:
            scale = plan.scale.clone()
            scale[-1] = math.nan  # the last token of the mini-batch's last response
            plan = replace(plan, scale=scale)
        return update(policy, optimizer, objective, plan, transcripts, *rest)

    monkeypatch.setattr(loop, "update", with_nan)
    run, log = trained(tmp_path / "run", {**PASSES, "run.steps": "1"})
    (record,) = read_json_lines(run.folder.nonfinite)
    assert (record["step"], record["update"], record["count"]) == (1, number - 1, 1)
    expected = run.trainer.policy.decode(calls[number - 1][-1].response)
    assert record["responses"][0]["text"] == expected
    assert run.folder.records()[0]["update/skipped"] == 1 and log.has("1 update(s) not finite")
    assert taken_updates(tmp_path / "run", 1) == 5


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True])
def test_passes_are_a_whole_number_from_one(value: object) -> None:
    with pytest.raises(ValueError, match=r"update\.passes"):
        parse({"update": {"passes": json.loads(json.dumps(value))}})
