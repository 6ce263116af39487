"""An update does not depend on how TRL cuts it: micro-batches, processes, a kill in between, or our own trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not installed here: `make test-engines` runs these tests")

import torch
from safetensors.torch import load_file

import trimtab as tt
from helpers.engines import trl_runs
from helpers.engines.trl_worker import known_rollout, run, save_start
from trimtab.engines.common import STATE_FILE
from trimtab.objectives import segment_ids
from trimtab.trainer.model import Policy, Transcript, UpdateOptions, update
from trimtab.trainer.model.loading import demo_tokenizer

SUPPORT = Path(__file__).parents[1] / "support"
OBJECTIVES = (
    "stapo(tau_p=0.2)",
    "stare(adaptive=true, target=2) + trim(floor=9, max_weight=2)",
    "sspo + s2t(tau_p=0.2) + tis",
)
STEPS = 4
# Plain gradient descent: Adam divides by the size of a gradient, and so makes noise of a gradient that is rounding.
COMMON: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.5, "max_steps": STEPS, "max_grad_norm": 0.3}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("start") / "start.safetensors"
    save_start(path, trl_runs.warm_model(60))
    return path


def order(start: Path, folder: Path, name: str, **options: Any) -> dict[str, Any]:
    return {
        "start": str(start),
        "folder": str(folder / name),
        "out": str(folder / f"{name}.safetensors"),
        "options": {**COMMON, "per_device_train_batch_size": 32, **options},
    }


def launch(orders: list[dict[str, Any]], folder: Path, processes: int) -> int:
    """Run orders in processes of their own; the exit status."""
    path = folder / "orders.json"
    path.write_text(json.dumps(orders))
    command = [sys.executable, str(SUPPORT / "helpers" / "engines" / "trl_worker.py"), str(path)]
    if processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command[1:1] = torchrun
    there = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": there, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode > 0:
        raise AssertionError(done.stderr[-3000:])
    return done.returncode


def assert_close(mine: Any, yours: Any, start: Path) -> None:
    """The same weights to fp32 rounding, and not those of the start."""
    one, other, before = load_file(mine), load_file(yours), load_file(start)
    furthest = max(float((one[name] - other[name]).abs().max()) for name in one)
    moved = max(float((one[name] - before[name]).abs().max()) for name in one)
    assert furthest < 1e-6, furthest
    assert moved > 1e-3, moved


def losses(weights: Any) -> Any:
    """What TRL logged as the loss of each step."""
    return pytest.approx(json.loads(Path(weights).with_suffix(".json").read_text()), abs=1e-6)


@pytest.fixture(scope="module")
def whole(start: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each objective in one process and one micro-batch."""
    folder = tmp_path_factory.mktemp("whole")
    outs = {}
    for number, name in enumerate(OBJECTIVES):
        wanted = order(start, folder, f"{number}", objective=name)
        run(wanted)
        outs[name] = Path(wanted["out"])
    return outs


@pytest.mark.parametrize("name", OBJECTIVES)
def test_four_micro_batches_update_as_one(name: str, whole: Any, start: Path, tmp_path: Path) -> None:
    wanted = order(
        start, tmp_path, "four", objective=name, per_device_train_batch_size=8, gradient_accumulation_steps=4
    )
    run(wanted)
    assert_close(wanted["out"], whole[name], start)
    assert losses(wanted["out"]) == losses(whole[name]).expected


def test_two_processes_update_as_one(whole: Any, start: Path, tmp_path: Path) -> None:
    orders = [
        order(
            start,
            tmp_path,
            f"{number}",
            objective=name,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            record=str(tmp_path / f"record-{number}"),
        )
        for number, name in enumerate(OBJECTIVES)
    ]
    launch(orders, tmp_path, processes=2)
    for name, wanted in zip(OBJECTIVES, orders, strict=True):
        assert_close(wanted["out"], whole[name], start)
        assert losses(wanted["out"]) == losses(whole[name]).expected
        assert_replays(Path(wanted["options"]["record"]), STEPS)


def assert_replays(folder: Path, steps: int) -> None:
    """The records are complete, and the recorded objective plans them again as it did."""
    from trimtab.insight.replay import replay
    from trimtab.insight.replay.batches import recorded_mini_batch, recorded_objective, replan, set_controllers
    from trimtab.record import open_run

    records = open_run(folder)
    assert records.steps == list(range(1, steps + 1))
    objective = recorded_objective(records.manifest.objective)
    for step in records:
        assert step.info.complete
        set_controllers(objective, step, recorded=True)
        for one in step.updates:
            (plan,) = replan(objective, recorded_mini_batch(one, objective.needs).batch, one)
            for column in ("weight", "scale", "clip_low", "clip_high", "reason"):
                again = getattr(plan, column)
                assert torch.equal(again, torch.from_numpy(one.column(column).copy())), column
    assert len(replay(folder, ["recorded", "gspo"]).steps) == steps


def test_a_killed_run_resumes_with_its_controllers_as_they_were(start: Path, tmp_path: Path) -> None:
    options = {"objective": OBJECTIVES[1], "save_strategy": "steps", "save_steps": 2}
    undisturbed = run(order(start, tmp_path, "whole", **options))
    killed = {**order(start, tmp_path, "killed", **options, record=str(tmp_path / "record")), "die_at": 3}
    assert launch([killed], tmp_path, processes=1) == -signal.SIGKILL
    checkpoint = tmp_path / "killed" / "checkpoint-2"
    saved, same = (
        json.loads((tmp_path / name / "checkpoint-2" / STATE_FILE).read_text())["controllers"]
        for name in ("killed", "whole")
    )
    assert saved == same
    assert saved["stare"]["boost"] == pytest.approx(1.1 + 2 * 0.01)
    assert saved["trim"]["rollouts"] == 2
    assert 0.02 < saved["trim"]["integral"] < 0.04  # two errors of nearly 1
    del killed["die_at"]
    resumed = run({**killed, "resume": str(checkpoint)})
    assert resumed.objective.state_dict() == undisturbed.objective.state_dict()
    assert_close(killed["out"], tmp_path / "whole.safetensors", start)
    assert_replays(tmp_path / "record", STEPS)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_trls_trainer_and_ours_make_the_same_update(name: str, start: Path, tmp_path: Path) -> None:
    wanted = order(start, tmp_path, "trl", objective=name)
    wanted["options"] |= {"max_steps": 1}
    trainer = run(wanted)
    model = trl_runs.demo_model(0)
    model.load_state_dict(load_file(start), strict=False)
    model.tie_weights()
    rows = trl_runs.dataset().select(_drawn(trainer))
    native_update(name, model, rows, trainer)
    theirs = load_file(wanted["out"])
    for key, value in trl_runs.weights(model).items():
        assert torch.allclose(value, theirs[key], rtol=0, atol=1e-6), key


def _drawn(trainer: Any) -> list[int]:
    """The rows of the first rollout batch."""
    return list(trainer._get_train_sampler())[:32]


def native_update(name: str, model: Any, rows: Any, trainer: Any) -> None:
    """One update by `trimtab.trainer.model.update` on what TRL trained on."""
    from trimtab.trainer.model.score import score

    class First:
        num_generations = trainer.num_generations
        accelerator = trainer.accelerator
        state = type("Start", (), {"global_step": 0})

    drawn = known_rollout(rows["prompt"], First)
    tokenizer = demo_tokenizer()
    texts = tokenizer.batch_decode(drawn["completion_ids"], skip_special_tokens=True)
    reward = torch.tensor(trl_runs.is_right(texts, rows["answer"]))
    group = torch.arange(32) // 4
    policy = Policy(model, tokenizer, torch.device("cpu"))
    transcripts = [Transcript(p, c) for p, c in zip(drawn["prompt_ids"], drawn["completion_ids"], strict=True)]
    objective = tt.objective(name)
    measured = score(policy, transcripts, 1.0, 10_000, 4096)
    lengths = torch.tensor([len(t.response) for t in transcripts])
    sequence = torch.repeat_interleave(torch.arange(32), lengths)
    token = torch.tensor([i for t in transcripts for i in t.response])
    batch = tt.TokenBatch(
        old_logp=measured.logp,
        entropy=measured.entropy,
        advantage=objective.advantages(reward, group)[sequence],
        sequence=sequence,
        token=token,
        segment=segment_ids(token, tokenizer, sequence=sequence),
        sampler_logp=torch.tensor([lp for row in drawn["logprobs"] for lp in row]),
        group=group,
        reward=reward,
    )
    objective.observe(batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=COMMON["learning_rate"])
    options = UpdateOptions(10_000, 4096, 1.0, COMMON["max_grad_norm"])
    assert update(policy, optimizer, objective, objective.plan(batch), transcripts, options).taken
