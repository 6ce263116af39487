"""Whole runs of verl under trimtab: Ray, the v1 trainer, FSDP2, checkpoints; killed without warning and resumed."""

from __future__ import annotations

import helpers.engines.verl_quiet  # noqa: F401  # isort: skip

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

import trimtab as tt
from helpers.engines.verl_runs import TIMEOUT, command, environment, run, write_inputs
from trimtab.engines.verl.trainer import TrimtabRayTrainer
from trimtab.record import open_run

MODE = "trainer.v1.trainer_mode=trimtab"
STARE = (
    MODE,
    '+trimtab.objective="stare + trim"',
    "+trimtab.target=9.0",
    "+trimtab.adaptive=true",
    "+trimtab.floor=9.0",
    "trainer.save_freq=1",
)
RATE = 0.01


def steps_of(folder: Path) -> list[dict[str, float]]:
    """The metrics that verl logged, step by step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["data"] for line in lines]


def controllers(folder: Path, step: int) -> dict[str, dict[str, float]]:
    state = json.loads((folder / f"checkpoints/global_step_{step}/trimtab.json").read_text())
    found: dict[str, dict[str, float]] = state["controllers"]
    return found


def latest(folder: Path) -> int:
    try:
        return int((folder / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return 0


def killed_after(folder: Path, step: int, *options: str) -> int:
    """Run until there is a checkpoint of `step`, then kill all processes; return the last checkpoint's step."""
    log = (folder / "killed.txt").open("w")
    driver = subprocess.Popen(
        command(folder, 99, *options),
        cwd=folder,
        env=environment(folder),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + TIMEOUT
    try:
        while latest(folder) < step and driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        log.close()
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    assert latest(folder) >= step, (folder / "killed.txt").read_text()[-3000:]
    return latest(folder)


@pytest.mark.slow
def test_a_killed_run_resumes_with_its_controllers_as_they_were(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    record = f"+trimtab.record={tmp_path}/records"
    last = killed_after(tmp_path, 2, *STARE, record)
    assert controllers(tmp_path, last)["stare"]["boost"] == pytest.approx(1.1 + last * RATE)
    assert controllers(tmp_path, last)["trim"]["rollouts"] == last

    code, said = run(tmp_path, last + 1, *STARE, record)
    assert code == 0, said[-3000:]
    assert re.search(r"trimtab \S+: stare \+ trim: ", said)
    assert controllers(tmp_path, last + 1)["stare"]["boost"] == pytest.approx(1.1 + (last + 1) * RATE)
    assert controllers(tmp_path, last + 1)["trim"]["rollouts"] == last + 1
    assert controllers(tmp_path, last + 1)["trim"]["integral"] > controllers(tmp_path, last)["trim"]["integral"]
    step = steps_of(tmp_path)[-1]
    assert step["training/global_step"] == last + 1
    assert step["trimtab/tokens/boosted_share"] > 0
    assert step["trimtab/update/ratio_max"] > 1  # the second of the step's two updates is off the old policy

    records = open_run(tmp_path / "records")
    assert records.steps == list(range(1, last + 2))
    recorded = records.step(last + 1)
    assert len(recorded.info.updates) == 2 and recorded.info.responses == 16
    assert recorded.info.controllers["stare"]["boost"] == pytest.approx(1.1 + (last + 1) * RATE)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("stapo", "+trimtab.tau_p=0.05"), ("sspo",), ("grpo",), ("dapo + kl + tis",)])
def test_a_run_under_each_method_trains(tmp_path: Path, options: tuple[str, ...]) -> None:
    write_inputs(tmp_path)
    name, *more = options
    code, said = run(tmp_path, 3, MODE, f'+trimtab.objective="{name}"', *more)
    assert code == 0, said[-3000:]
    steps = steps_of(tmp_path)
    assert [step["training/global_step"] for step in steps] == [1, 2, 3]
    assert all(step["actor/grad_norm"] > 0 for step in steps)  # no two responses are worth the same here
    assert all("trimtab/update/clip_share" in step for step in steps)
    if name == "stapo":
        assert any(step["trimtab/tokens/silenced_share"] > 0 for step in steps)


@pytest.mark.slow
def test_two_workers_get_the_mini_batches_that_were_planned(tmp_path: Path) -> None:
    """The loss on each worker checks the update's number and the mini-batch's tokens against the plan's."""
    write_inputs(tmp_path)
    two = ("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=2")
    code, said = run(tmp_path, 2, MODE, "+trimtab.objective=stapo", "+trimtab.tau_p=0.05", *two)
    assert code == 0, said[-3000:]
    assert all(step["actor/grad_norm"] > 0 for step in steps_of(tmp_path))


@pytest.mark.slow
def test_a_setting_of_verls_own_loss_stops_the_run_at_once(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    code, said = run(tmp_path, 1, MODE, "+trimtab.objective=stapo", "actor_rollout_ref.actor.clip_ratio_high=0.28")
    assert code != 0
    assert "use +trimtab.clip_high" in said and "step:1" not in said


def test_a_checkpoint_holds_the_controllers_before_verl_marks_it_as_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the slow test above shows of a whole run, for the two methods of the trainer alone."""
    seen: list[bool] = []

    def trainer() -> TrimtabRayTrainer:
        made = object.__new__(TrimtabRayTrainer)
        made.config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path), "resume_mode": "auto"}})
        made.objective, made.recorder, made.global_steps = tt.objective("stare(adaptive=true) + trim"), None, 3
        return made

    saved = tmp_path / "global_step_3/trimtab.json"
    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", lambda self: seen.append(saved.exists()))
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: None)
    first, second = trainer(), trainer()
    state = first.objective.state_dict()
    state["stare"]["boost"] = 1.37
    state["trim"] = {"integral": 0.1, "rollouts": 3.0, "first": 0.9, "entropy": 0.2, "change": -0.1}
    first.objective.load_state_dict(state)
    first._save_checkpoint()
    second._load_checkpoint()
    assert seen == [True]
    assert second.objective.state_dict() == state != trainer().objective.state_dict()


def test_options_without_the_trainer_stop_the_command(tmp_path: Path) -> None:
    code, said = run(tmp_path, 1, "+trimtab.objective=stapo")
    assert code != 0
    assert "trimtab.objective is set, but trainer.v1.trainer_mode=trimtab is not" in said
