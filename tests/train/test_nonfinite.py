"""NaN and infinity never reach weights, optimizer, controllers or checkpoints, and are recorded in nonfinite.jsonl."""

from __future__ import annotations

import errno
import importlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.thorough import slow_but
from helpers.train.short_runs import MessageLog, contents, differences, short_run, trained
from trimtab.data import Response
from trimtab.files import read_json_lines
from trimtab.objectives import Objective
from trimtab.trainer.model import Policy
from trimtab.trainer.train import Run, RunStoppedError, StopReason, checkpoints, loop, rewards, scoring
from trimtab.trainer.train.checkpoints import trained_parameters
from trimtab.trainer.train.loop import train
from trimtab.trainer.train.run_folder import RunFolder

STEP, STEPS = 2, 3  # the value is injected in the second of three steps
CHANGES = {"run.steps": str(STEPS), "run.checkpoint_every": "1", "run.keep_checkpoints": "9", "run.eval_every": "0"}
VALUES = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass
class Injection:
    """Changes a tensor at the `count`-th call in the chosen step, and only there."""

    run: Run
    value: float
    count: int = 1
    place: int = 0
    calls: int = 0
    done: int = 0

    def __call__(self, values: Tensor) -> Tensor:
        if self.run.progress.step + 1 != STEP:
            return values
        self.calls += 1
        if self.calls != self.count:
            return values
        self.done += 1
        factor = torch.zeros_like(values)
        factor.view(-1)[self.place] = self.value
        return values + factor


Place = Callable[[pytest.MonkeyPatch, Injection], None]


def in_the_new_log_probs(patch: pytest.MonkeyPatch, inject: Injection) -> None:
    module = importlib.import_module("trimtab.trainer.model.update")
    whole = module.log_probs
    patch.setattr(module, "log_probs", lambda *args: inject(whole(*args)))


def in_the_logits_of_the_update(patch: pytest.MonkeyPatch, inject: Injection) -> None:
    whole = Policy.logits

    def logits(self: Policy, hidden: Tensor, temperature: float) -> Tensor:
        made = whole(self, hidden, temperature)
        return inject(made) if self.model.training and torch.is_grad_enabled() else made

    patch.setattr(Policy, "logits", logits)


def in_the_hidden_states_of_the_update(patch: pytest.MonkeyPatch, inject: Injection) -> None:
    inject.place = 3 * 64  # the first token of the response is predicted from the fourth of the prompt
    whole = Policy.hidden_states
    patch.setattr(
        Policy,
        "hidden_states",
        lambda self, *args: inject(whole(self, *args)) if self.model.training else whole(self, *args),
    )


def in_the_loss(patch: pytest.MonkeyPatch, inject: Injection) -> None:
    whole = Objective.loss

    def loss(self: Objective, *args: Any) -> Any:
        out = whole(self, *args)
        return replace(out, loss=inject(out.loss[None]).squeeze(0))

    patch.setattr(Objective, "loss", loss)


def in_the_gradient(patch: pytest.MonkeyPatch, inject: Injection) -> None:
    """Of one weight, by a hook: log-probabilities and loss are all right."""
    whole = loop.update

    def update(policy: Policy, *args: Any) -> Any:
        weight = list(policy.model.parameters())[3]
        handle = weight.register_hook(inject)
        result = whole(policy, *args)
        handle.remove()
        return result

    patch.setattr(loop, "update", update)


def in_the_plan(field: str) -> Place:
    def place(patch: pytest.MonkeyPatch, inject: Injection) -> None:
        whole = Objective.plan

        def plan(self: Objective, batch: Any, comm: Any = None) -> Any:
            made = whole(self, batch, comm)
            return replace(made, **{field: inject(getattr(made, field))})

        patch.setattr(Objective, "plan", plan)

    return place


def in_the_score(field: str) -> Place:
    """In what the policy measures of the responses before any update."""

    def place(patch: pytest.MonkeyPatch, inject: Injection) -> None:
        whole = scoring.score
        patch.setattr(
            scoring, "score", lambda *args: (made := whole(*args))._replace(**{field: inject(getattr(made, field))})
        )

    return place


def in_the_reward(patch: pytest.MonkeyPatch, inject: Injection) -> None:
    whole = rewards.reward_of
    patch.setattr(rewards, "reward_of", lambda *args: float(inject(torch.tensor([whole(*args)]))))


def in_the_advantages(patch: pytest.MonkeyPatch, inject: Injection) -> None:
    whole = Objective.advantages
    patch.setattr(Objective, "advantages", lambda self, *values: inject(whole(self, *values)))


def in_the_samplers_log_probs(patch: pytest.MonkeyPatch, inject: Injection) -> None:
    whole = Response.__init__

    def start(self: Response, tokens: list[int], logp: list[float], *args: Any, **options: Any) -> None:
        whole(self, tokens, inject(torch.tensor(logp)).tolist(), *args, **options)

    patch.setattr(Response, "__init__", start)


# Where it is injected, at which call in the step, and what the record calls it.
UPDATES: dict[str, tuple[Place, list[int], str]] = {
    "new log-probabilities": (in_the_new_log_probs, [1, 2], "log-probability"),
    "logits": (in_the_logits_of_the_update, [1, 3], "log-probability"),
    "hidden states": (in_the_hidden_states_of_the_update, [1, 2], "log-probability"),
    "loss": (in_the_loss, [1, 2], "loss"),
    "gradient": (in_the_gradient, [1, 2], "gradient"),
    "plan's weight": (in_the_plan("weight"), [1, 2], "loss"),
    "plan's scale": (in_the_plan("scale"), [1, 2], "loss"),
    "plan's advantage": (in_the_plan("advantage"), [1, 2], "loss"),
}
SCORES: dict[str, tuple[Place, int, str]] = {
    "score's log-probability": (in_the_score("logp"), 1, "old_logp"),
    "score's entropy": (in_the_score("entropy"), 1, "entropy"),
    "score's sum of p^2": (in_the_score("sum_p2"), 1, "sum_p2"),
    "score's sum of p^2 ln p": (in_the_score("sum_p2_logp"), 1, "sum_p2_logp"),
    "first reward": (in_the_reward, 1, "reward"),
    "a later reward": (in_the_reward, 9, "reward"),
    "advantages": (in_the_advantages, 1, "advantage"),
    "sampler's log-probabilities": (in_the_samplers_log_probs, 5, "sampler_logp"),
}


def assert_all_finite(run: Run) -> None:
    """Weights, optimizer and controllers now, and in every checkpoint."""
    trainer = run.trainer
    held = [
        *trained_parameters(trainer.policy.model).values(),
        *checkpoints.optimizer_tensors(trainer.optimizer).values(),
    ]
    assert len(held) > 50 and all(bool(value.isfinite().all()) for value in held)
    paths = checkpoints.list_checkpoints(run.folder.checkpoints)
    assert len(paths) > 1
    for path in paths:
        saved = checkpoints.read(path)
        values = [value for group in saved.tensors.values() for value in group.values()]
        assert all(bool(value.isfinite().all()) for value in values)
        assert all(math.isfinite(value) for gate in saved.state["objective"].values() for value in gate.values())
    assert "NaN" not in run.folder.metrics.read_text() and "Infinity" not in run.folder.metrics.read_text()


def injected(
    tmp_path: Path, patch: pytest.MonkeyPatch, place: Place, count: int, value: float, **changes: str
) -> tuple[Run, MessageLog]:
    run, log = short_run(tmp_path / "run", {**CHANGES, **changes})
    inject = Injection(run, value, count)
    with patch.context() as context:
        place(context, inject)
        try:
            train(run)
        finally:
            assert inject.done == 1, "the value was injected"
    return run, log


def before_the_step(run: Run) -> dict[str, Tensor]:
    return checkpoints.read(run.folder.checkpoints / f"step-{STEP - 1:08d}").tensors["model"]


@pytest.mark.parametrize(
    ("where", "count", "value"),
    slow_but(
        [*((where, 1, "NaN") for where in UPDATES), ("logits", 3, "inf"), ("gradient", 2, "inf")],
        ((where, n, value) for where, (_, counts, _) in UPDATES.items() for n in counts for value in ("NaN", "inf")),
    ),
)
def test_an_update_that_is_not_finite_is_skipped(
    where: str, count: int, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _, value_name = UPDATES[where]
    run, log = injected(tmp_path, monkeypatch, place, count, VALUES[value])
    assert_all_finite(run)
    (record,) = read_json_lines(run.folder.nonfinite)
    assert record["step"] == STEP and value_name in record["value"]
    assert record["count"] == len(record["responses"])
    assert [r["update/skipped"] for r in run.folder.records()] == [0, 1, 0]
    assert log.has(f"warning: step {STEP}", "not finite", value_name)
    assert run.progress.step == STEPS and run.progress.updates_skipped == 1


@pytest.mark.parametrize(
    ("where", "value"),
    slow_but(
        [*((where, "NaN") for where in SCORES), ("first reward", "inf")],
        ((where, value) for where in SCORES for value in ("NaN", "inf")),
    ),
)
def test_a_step_whose_scores_are_not_finite_is_skipped(
    where: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, count, value_name = SCORES[where]
    run, log = injected(tmp_path, monkeypatch, place, count, VALUES[value])
    assert_all_finite(run)
    (record,) = read_json_lines(run.folder.nonfinite)
    assert (record["step"], record["value"]) == (STEP, value_name) and 1 <= record["count"] <= 4
    after = checkpoints.read(run.folder.checkpoints / f"step-{STEP:08d}")
    assert all(torch.equal(after.tensors["model"][name], weight) for name, weight in before_the_step(run).items())
    assert log.has(f"warning: step {STEP}", value_name)
    assert run.progress.position == STEPS * 4, "the next step goes on with the next prompts"


def test_a_log_probability_of_minus_infinity_is_a_valid_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = injected(tmp_path, monkeypatch, in_the_score("logp"), 1, -math.inf)
    assert_all_finite(run)
    assert not read_json_lines(run.folder.nonfinite)


def test_the_record_names_the_response_with_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = injected(tmp_path, monkeypatch, in_the_new_log_probs, 1, math.nan)
    (record,) = read_json_lines(run.folder.nonfinite)
    (response,) = record["responses"]
    assert record["update"] == 0 and record["count"] == 1
    assert response["prompt"] in range(4, 8), "the second step has the prompts 4 to 7 of the stream"
    assert response["sample"] in range(4) and isinstance(response["text"], str)


@pytest.mark.parametrize("where", ["logits", "loss", "gradient", "plan's scale"])
def test_the_other_update_of_the_step_is_taken(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = injected(tmp_path, monkeypatch, UPDATES[where][0], 1, math.nan)
    (record,) = read_json_lines(run.folder.nonfinite)
    assert record["update"] == 0
    after = checkpoints.read(run.folder.checkpoints / f"step-{STEP:08d}").tensors
    assert not all(torch.equal(after["model"][name], weight) for name, weight in before_the_step(run).items())
    assert float(after["optimizer"]["0/step"]) == 3, "two updates of the first step and one of the second"


@pytest.mark.parametrize("where", slow_but(["gradient", "first reward"], [*UPDATES, *SCORES]))
def test_a_run_with_on_nonfinite_stop_ends_with_a_diagnosis_and_saves_nothing_of_the_step(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, count = (UPDATES[where][0], 1) if where in UPDATES else SCORES[where][:2]
    with pytest.raises(RunStoppedError, match=r"step 2 was not finite .*--set update.on_nonfinite=skip") as caught:
        injected(tmp_path, monkeypatch, place, count, math.nan, **{"update.on_nonfinite": "stop"})
    assert caught.value.reason is StopReason.NONFINITE
    folder = short_run(tmp_path / "run", CHANGES)[0].folder
    assert checkpoints.list_checkpoints(folder.checkpoints)[-1].name == f"step-{STEP - 1:08d}"
    assert [record["step"] for record in folder.records()] == [1]
    assert len(read_json_lines(folder.nonfinite)) == 1


def test_a_stopped_run_can_be_resumed_with_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = trained(tmp_path / "whole", CHANGES)
    with pytest.raises(RunStoppedError):
        injected(tmp_path, monkeypatch, in_the_loss, 1, math.nan, **{"update.on_nonfinite": "stop"})
    run, _ = trained(tmp_path / "run", CHANGES, resume=True)
    assert not differences(contents(run.folder.path), contents(whole.folder.path))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("every", "ends"), [("1", STEP), ("0", STEP + 1)])
def test_weights_that_are_not_finite_end_the_run_before_they_are_saved(
    value: str, every: str, ends: int, tmp_path: Path
) -> None:
    """Without a checkpoint, which refuses them, the scores of the next step show it."""
    run, log = short_run(tmp_path / "run", {**CHANGES, "run.checkpoint_every": every, "run.steps": "9"})

    def break_a_weight(step: int) -> None:
        if step == STEP:
            with torch.no_grad():
                list(run.trainer.policy.model.parameters())[4].view(-1)[7] = VALUES[value]

    log.at_step = break_a_weight
    with pytest.raises(RunStoppedError, match=r"not finite.*[Ll]ower") as caught:
        train(run)
    assert caught.value.reason is run.stopped is StopReason.NONFINITE and run.progress.step == ends
    for path in checkpoints.list_checkpoints(run.folder.checkpoints):
        assert all(bool(w.isfinite().all()) for w in checkpoints.read(path).tensors["model"].values())


def test_an_extreme_learning_rate_never_leaves_a_bad_checkpoint(tmp_path: Path) -> None:
    run, _ = short_run(tmp_path / "run", {**CHANGES, "update.lr": "1e19", "update.weight_decay": "1e19"})
    with pytest.raises(RunStoppedError, match="not finite"):
        train(run)
    for path in checkpoints.list_checkpoints(run.folder.checkpoints):
        assert all(bool(w.isfinite().all()) for w in checkpoints.read(path).tensors["model"].values())


def test_a_run_in_which_no_update_is_finite_stops_with_that_diagnosis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Objective.loss
    monkeypatch.setattr(
        Objective, "loss", lambda self, *args: replace(out := whole(self, *args), loss=out.loss * math.nan)
    )
    run, _ = short_run(tmp_path / "run", {**CHANGES, "run.steps": "9", "run.patience": "3"})
    with pytest.raises(RunStoppedError, match=r"3 steps in a row .*no update was finite.*lower update.lr"):
        train(run)
    assert run.progress.step == 3 and len(read_json_lines(run.folder.nonfinite)) == 6


def test_a_record_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = RunFolder.append

    def full(self: RunFolder, file: Path, record: dict[str, Any]) -> None:
        if file == self.nonfinite:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, file, record)

    monkeypatch.setattr(RunFolder, "append", full)
    run, log = injected(tmp_path, monkeypatch, in_the_loss, 1, math.nan)
    assert run.progress.step == STEPS and log.has("warning", "nonfinite.jsonl", "No space left")


def test_the_record_of_a_skipped_update_is_plain_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = injected(tmp_path, monkeypatch, in_the_score("entropy"), 1, math.nan)
    (line,) = run.folder.nonfinite.read_text().splitlines()
    record = json.loads(line, parse_constant=pytest.fail)
    assert set(record) == {"step", "update", "value", "count", "responses"}
