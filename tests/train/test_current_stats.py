"""`update.token_stats = "current"`: rules look at tokens as the policy has them before each update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.train.short_runs import recipe
from trimtab.objectives import Objective, TokenBatch
from trimtab.trainer.train import scoring
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.trainer import RunProgress, Trainer, build_trainer

CURRENT = {"update.token_stats": "current", "update.per_step": "4", "rollout.prompts": "8"}


def counted_step(trainer: Trainer, patch: pytest.MonkeyPatch) -> tuple[int, list[TokenBatch]]:
    """Take a step; return how many scoring passes over responses it took, and the batches that were planned."""
    planned: list[TokenBatch] = []
    passes: list[Any] = []
    score, plan = scoring.score, Objective.plan

    def counted_score(*args: Any) -> Any:
        passes.append(args)
        return score(*args)

    def kept_plan(self: Objective, batch: TokenBatch, *args: Any) -> Any:
        planned.append(batch)
        return plan(self, batch, *args)

    with patch.context() as context:
        context.setattr(scoring, "score", counted_score)
        context.setattr(Objective, "plan", kept_plan)
        train_step(trainer, RunProgress())
    return len(passes), planned


def test_the_first_update_takes_no_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, planned = counted_step(build_trainer(recipe({"objective.name": "stapo", **CURRENT})), monkeypatch)
    assert passes == 1 + 3, "the step's scores, and one pass for every later update"
    first, *later = planned
    assert torch.equal(first.judged_logp, first.old_logp)
    assert len(later) == 3
    assert not any(torch.equal(batch.judged_logp, batch.old_logp) for batch in later)


def test_scores_of_the_first_update_are_those_of_a_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(recipe({"objective.name": "stapo", **CURRENT, "update.lr": "1e-30"}))
    _, planned = counted_step(trainer, monkeypatch)
    for batch in planned:  # no weight moves, so later passes have the numbers of the first
        assert torch.allclose(batch.judged_logp, batch.old_logp, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "grpo + kl", "gspo"])
def test_methods_that_look_at_no_token_take_no_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = {"model.reference": "start"} if "kl" in name else {}
    passes, _ = counted_step(build_trainer(recipe({"objective.name": name, **CURRENT, **reference})), monkeypatch)
    assert passes == 1 + len(reference)
