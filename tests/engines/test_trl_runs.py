"""Real runs of TRL's trainer on a CPU: they learn, their loss is ours, and what belongs to a run is in its place."""

from __future__ import annotations

import copy
import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest

from helpers.thorough import slow_but

pytest.importorskip("trl", reason="trl is not installed here: `make test-engines` runs these tests")

import torch
import trl

from helpers.engines import trl_runs
from helpers.engines.trl_worker import known_rollout
from trimtab.engines.trl import TrimtabTrainer
from trimtab.trainer.train import RunFolder


@pytest.fixture(scope="module")
def warm() -> Any:
    return trl_runs.warm_model()


@pytest.mark.parametrize("name", slow_but(["stapo(tau_p=0.2)"], ["stapo(tau_p=0.2)", "stare", "sspo"]))
def test_the_reward_rises(name: str, warm: Any, tmp_path: Path) -> None:
    options = {"max_steps": 45, "per_device_train_batch_size": 128, "num_generations": 8, "learning_rate": 7e-4}
    trainer = trl_runs.trainer(copy.deepcopy(warm), trl_runs.config(tmp_path, objective=name, **options))
    trainer.train()
    rewards = trl_runs.logged(trainer, "reward")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.08, rewards


@pytest.fixture
def short(warm: Any, tmp_path: Path) -> Any:
    def make(kind: type[Any] = TrimtabTrainer, trainer: dict[str, Any] | None = None, **options: Any) -> Any:
        return trl_runs.trainer(copy.deepcopy(warm), trl_runs.config(tmp_path, **options), kind=kind, **(trainer or {}))

    return make


def test_the_objective_is_printed_at_the_start_and_its_loss_is_used(
    short: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("TRL's own loss was used")

    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", never)
    trainer = short(objective="stapo")
    assert capsys.readouterr().out.startswith("trimtab 0.1.0: stapo: Clip-higher PPO that silences")
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_loss_that_is_not_ours_ends_the_run(short: Any) -> None:
    class Bypassed(TrimtabTrainer):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
            return sum(p.sum() for p in model.parameters()) * 0.0

    with pytest.raises(RuntimeError, match="did not use the objective's loss"):
        short(Bypassed).train()


def test_other_objectives_give_other_weights(short: Any) -> None:
    ends = []
    for name in ("dapo", "stare(gate=none, boost=2)", "dapo"):
        trainer = short(objective=name)
        trainer.train()
        ends.append(torch.cat([w.flatten() for w in trl_runs.weights(trainer.model).values()]))
    assert not torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_each_update_on_a_rollout_has_its_plan_and_the_rollout_is_scored_once(
    short: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[bool] = []
    forward = trl.GRPOTrainer._get_per_token_logps_and_entropies

    def noted(*args: Any, **options: Any) -> Any:
        passes.append(torch.is_grad_enabled())
        return forward(*args, **options)

    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", noted)
    trainer = short(
        objective="stapo(tau_p=0.2)",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=8,
        record=str(tmp_path / "record"),
    )
    plans: list[int] = []
    planned = trainer.objective.plan
    object.__setattr__(
        trainer.objective, "plan", lambda batch, comm: plans.append(batch.responses) or planned(batch, comm)
    )
    trainer.train()
    assert plans == [16] * 8  # two rollouts, two mini-batches of 16 responses, two passes
    assert (passes.count(False), passes.count(True)) == (
        2,
        16,
    )  # scoring of each rollout, and the micro-batches
    ratios = trl_runs.logged(trainer, "update/ratio_max")
    assert ratios[0] == 1.0
    assert min(ratios[1:4]) > 1.0
    lines = [json.loads(line) for line in (tmp_path / "record" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert {"policy/entropy", "reward/mean", "update/clip_share", "tokens/count"} <= set(lines[0])


def test_the_record_of_a_run_can_be_replayed_and_has_its_responses(short: Any, tmp_path: Path) -> None:
    from trimtab.insight.replay import replay
    from trimtab.record import open_run

    trainer = short(objective="stare", record=str(tmp_path / "record"), max_steps=3, record_every=2)
    trainer.train()
    assert replay(tmp_path / "record", ["recorded", "stapo"]).recorded == "stare"
    records = open_run(tmp_path / "record")
    assert records.steps == [1, 3]
    step = records.step(3)
    assert step.info.controllers == trainer.objective.state_dict()
    assert step.info.observed_entropy == trainer.objective.controllers["stare"].entropy
    assert len(set(step.responses["group"].tolist())) == 4
    assert sorted(step.responses["sample"].tolist()) == sorted([0, 1, 2, 3] * 4)
    right = [
        float(step.text(n) == str(sum(map(int, prompt.removesuffix("=").split("+")))))
        for n, prompt in enumerate(step.responses["prompt"])
    ]
    assert right == step.responses["reward"].tolist()


def test_a_share_of_the_groups_can_be_recorded(short: Any, tmp_path: Path) -> None:
    from trimtab.record import open_run

    short(record=str(tmp_path / "record"), max_steps=1, record_group_share=0.5).train()
    records = open_run(tmp_path / "record")
    assert records.manifest.settings.group_share == 0.5
    step = records.step(1)
    groups = step.responses["group"].tolist()
    assert 1 <= len(set(groups)) < 4 and len(groups) == 4 * len(set(groups))
    assert not step.info.complete


def close(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    """A number between 0 and 1, and none for a text that is no number."""
    pairs = zip(completions, answer, strict=True)
    return [1 / (1 + abs(int(c) - int(a))) if c.strip().isdecimal() else None for c, a in pairs]


def brief(completions: list[str], **_: Any) -> list[float]:
    return [1.0 / (1 + len(text)) for text in completions]


def test_a_recorded_run_has_rewards_by_function_verdicts_and_what_the_optimizer_did(short: Any, tmp_path: Path) -> None:
    from trimtab.record import open_run

    folder = tmp_path / "record"
    options = {"max_steps": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2, "learning_rate": 1e-3}
    short(record=str(folder), trainer={"reward_funcs": [close, brief]}, **options).train()
    first, second = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    step = open_run(folder).step(1)
    rewards = [json.loads(text) for text in step.responses["rewards"]]
    verdicts = list(step.responses["verdict"])
    wanted = ["ungraded" if "close" not in r else "correct" if r["close"] >= 0.99 else "wrong" for r in rewards]
    assert verdicts == wanted and "wrong" in wanted  # a positive reward is not a right answer
    graded = [r["close"] for r in rewards if "close" in r]
    assert first["rewards/close"] == first["reward/score"] == pytest.approx(sum(graded) / len(graded))
    assert first["rewards/brief"] == pytest.approx(sum(r["brief"] for r in rewards) / len(rewards))
    assert first["reward/accuracy"] == pytest.approx(wanted.count("correct") / len(graded))
    assert first["response/length_mean"] == pytest.approx(sum(step.responses["tokens"]) / len(rewards))
    assert first["response/truncated_share"] == pytest.approx(1 - sum(step.responses["finished"]) / len(rewards))
    assert first["update/lr"] == 1e-3 and first["update/grad_norm"] > 0 and "update/loss" in first
    assert {"groups/mixed_share", "tokens/spurious_share", "rewards/close_spread"} <= set(first) == set(second)


def test_alarms_look_during_the_run_and_say_which_could_not(
    short: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from trimtab.cli import app
    from trimtab.insight.alarms import AlarmMonitor
    from trimtab.insight.report import write_report
    from trimtab.trainer.train import Alarm

    ring = Alarm(2, "clip", "too much is clipped")
    monkeypatch.setattr(AlarmMonitor, "__call__", lambda self, record: [ring] if record["step"] == 2 else [])
    trainer = short(record=str(tmp_path / "record"), max_steps=2)
    with pytest.warns(UserWarning, match="alarm: step 2: too much is clipped"):
        trainer.train()
    monkeypatch.undo()
    assert json.loads((tmp_path / "record/alarms.jsonl").read_text())["alarm"] == "clip"
    told = CliRunner().invoke(app, ["alarms", str(tmp_path / "record")]).output
    assert "not checked" in told and "sampler_mismatch" in told
    assert "length_drift" not in told and "clip (" not in told and "no_signal" not in told
    page = write_report([tmp_path / "record"], None).read_text()
    assert "config.toml is missing" not in page and "too much is clipped" in page


def test_the_model_card_names_the_objective(short: Any) -> None:
    trainer = short(objective="stapo", max_steps=1)
    trainer.create_model_card(model_name="mine")
    card = (Path(trainer.args.output_dir) / "README.md").read_text()
    assert "trained with trimtab's stapo" in card and "papers/2602.15620" in card
    assert "GRPO" not in card and "grpo" not in card


def test_a_new_run_does_not_write_over_the_records_of_another(short: Any, tmp_path: Path) -> None:
    short(record=str(tmp_path / "record"), max_steps=1).train()
    with pytest.raises(ValueError, match="holds the records of another run"):
        short(record=str(tmp_path / "record"), max_steps=1).train()


def test_metrics_that_a_full_disk_refused_are_written_with_the_next_step(
    short: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RunFolder.append_metrics
    refused = iter([True])

    def on_a_full_disk(folder: RunFolder, record: dict[str, Any]) -> None:
        if next(refused, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, record)

    monkeypatch.setattr(RunFolder, "append_metrics", on_a_full_disk)
    trainer = short(record=str(tmp_path / "record"), max_steps=2)
    with pytest.warns(UserWarning, match="metrics of 1 step.* not written yet: .*No space left"):
        trainer.train()
    steps = [json.loads(line)["step"] for line in (tmp_path / "record/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]


def test_an_evaluation_plans_for_itself_and_leaves_the_gate_alone(short: Any) -> None:
    trainer = short(
        objective="stare",
        trainer={"eval_dataset": trl_runs.dataset(8, seed=5)},
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=8,
    )
    seen: list[float] = []
    gate = trainer.objective.controllers["stare"]
    observe = gate.observe
    gate.observe = lambda entropy: seen.append(entropy) or observe(entropy)
    trainer.train()
    assert len(seen) == 2  # one rollout per step, none of an evaluation
    assert len(trl_runs.logged(trainer, "eval_update/clip_share")) == 2
    assert all(abs(loss) < 10 for loss in trl_runs.logged(trainer, "eval_loss"))


def test_adapters_and_a_reference_model_work_as_in_trl(short: Any) -> None:
    from peft import LoraConfig

    trainer = short(
        objective="sspo + kl(coef=0.1)",
        trainer={"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")},
        num_iterations=2,
        max_steps=3,
        learning_rate=1e-2,
    )
    before = trl_runs.weights(trainer.model)
    trainer.train()
    moved = {name for name, value in trl_runs.weights(trainer.model).items() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora" in name for name in moved)
    kl = trl_runs.logged(trainer, "kl")
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 0


def test_the_advantages_are_the_objectives_unless_configured_otherwise(short: Any) -> None:
    ends: dict[str, list[float]] = {}
    for source in ("method", "trl"):
        trainer = short(
            objective="dr_grpo(length=4)", advantage=source, max_steps=1, trainer={"rollout_func": known_rollout}
        )
        trainer.train()
        ends[source] = list(trainer._logs["advantages"])
    assert len(ends["method"]) == 16
    reward = torch.tensor([a > 0 for a in ends["trl"]]).float()
    centered = (reward.view(-1, 4) - reward.view(-1, 4).mean(1, keepdim=True)).flatten()
    assert ends["method"] == pytest.approx(centered.tolist())
    assert ends["trl"] != pytest.approx(centered.tolist())


def test_rewards_are_weighted_and_one_that_is_none_is_left_out(short: Any) -> None:
    def brief(completions: list[str], **_: Any) -> list[float | None]:
        return [None if text == "7" else float(len(text) == 1) for text in completions]

    trainer = short(
        objective="dr_grpo(length=4)",
        reward_weights=[1.0, 0.5],
        max_steps=1,
        trainer={"reward_funcs": [trl_runs.is_right, brief]},
    )
    trainer.train()
    given = trainer._logs["rewards"]
    total = [a + 0.5 * (0.0 if math.isnan(b) else b) for a, b in zip(given["is_right"], given["brief"], strict=True)]
    rows = torch.tensor(total).view(-1, 4)
    assert list(trainer._logs["advantages"]) == pytest.approx((rows - rows.mean(1, keepdim=True)).flatten().tolist())


def test_truncated_responses_can_be_left_out(short: Any) -> None:
    trainer = short(objective="stapo", max_completion_length=1, mask_truncated_completions=True, max_steps=1)
    before = trl_runs.weights(trainer.model)
    trainer.train()
    after = trl_runs.weights(trainer.model)
    assert trl_runs.logged(trainer, "completions/clipped_ratio")[0] > 0.5
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert before.keys() == after.keys()
