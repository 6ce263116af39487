"""Resuming a run: at its end, across an epoch, for more steps, with a changed recipe, after Ctrl-C."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import trimtab
from helpers.thorough import slow_but
from helpers.train.short_runs import STOPPED, RunProcess, contents, differences, short_run, trained
from trimtab.objectives import TokenBatch, entropy_control
from trimtab.trainer.train import RunStoppedError, StopReason, checkpoints, loop
from trimtab.trainer.train.loop import train
from trimtab.trainer.train.metrics import StepResult
from trimtab.trainer.train.run_folder import RunFolder
from trimtab.trainer.train.warm_start import cache_key

TENSORS = "checkpoints/step-00000006/model.safetensors", "checkpoints/step-00000006/optimizer.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    trained(folder)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def cut_back(folder: Path, step: int) -> None:
    """Remove later checkpoints, as if the run had ended right after it saved a step."""
    for path in checkpoints.list_checkpoints(folder / "checkpoints"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


# --- where a run can be resumed


def test_a_finished_run_is_left_unchanged(whole: Path, copy: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (copy / "checkpoints").rglob("*")}
    _, log = trained(copy, resume=True)
    assert log.has("resumed from step 6")
    assert not differences(contents(copy), contents(whole))
    assert {path: path.stat().st_mtime_ns for path in (copy / "checkpoints").rglob("*")} == before


def test_a_finished_run_without_its_model_gets_it(whole: Path, copy: Path) -> None:
    shutil.rmtree(copy / "model")
    trained(copy, resume=True)
    assert not differences(contents(copy), contents(whole))


@pytest.mark.parametrize("every", slow_but(["3"], ["1", "3", "5"]))
def test_a_run_can_be_resumed_from_any_checkpoint(whole: Path, tmp_path: Path, every: str) -> None:
    """Ten problems and four prompts a step: an epoch ends inside the third step and, with every = 5, at the fifth."""
    changes = {"run.checkpoint_every": every, "run.keep_checkpoints": "9"}
    trained(tmp_path / "run", changes)
    for path in checkpoints.list_checkpoints(tmp_path / "run" / "checkpoints")[:-1][::-1]:
        step = int(path.name.removeprefix("step-"))
        cut_back(tmp_path / "run", step)
        _, log = trained(tmp_path / "run", changes, resume=True)
        assert log.has(f"resumed from step {step}")
        now, then = contents(tmp_path / "run"), contents(whole)
        assert not [name for name in (*TENSORS, *(f"step {n}" for n in range(7))) if now[name] != then[name]]


def test_a_resumed_run_goes_on_with_the_fit_of_its_entropy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropy_control, "MIN_POINTS", 2)
    changes = {"objective": '"dapo + trim(floor=5.0)"', "update.measure_every": "1"}
    trained(tmp_path / "whole", changes)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    cut_back(tmp_path / "run", 4)
    trained(tmp_path / "run", changes, resume=True)
    assert not differences(contents(tmp_path / "run"), contents(tmp_path / "whole"))
    assert "trim/r2" in RunFolder(tmp_path / "run").records()[-1]


def test_every_problem_of_an_epoch_is_sampled_once_across_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[str] = []
    collect = loop.collect_rollouts

    def noted(*args: object) -> object:
        rollouts = collect(*args)  # type: ignore[arg-type]
        sampled.extend(dict.fromkeys(response.problem.prompt[0]["content"] for response in rollouts.responses))
        return rollouts

    monkeypatch.setattr(loop, "collect_rollouts", noted)
    changes = {"task.size": "12", "run.checkpoint_every": "1"}
    trained(tmp_path / "run", {**changes, "run.steps": "1"})
    trained(tmp_path / "run", {**changes, "run.steps": "2"}, resume=True)
    trained(tmp_path / "run", {**changes, "run.steps": "3"}, resume=True)
    assert len(sampled) == 12 and len(set(sampled)) == 12


def test_a_run_resumed_for_more_steps_equals_the_run_that_had_them_from_the_start(whole: Path, tmp_path: Path) -> None:
    trained(tmp_path / "run", {"run.steps": "3"})
    run, _ = trained(tmp_path / "run", resume=True)
    assert not differences(contents(run.folder.path), contents(whole))


def test_a_run_resumed_for_fewer_steps_than_it_has_is_left_as_it_is(copy: Path) -> None:
    before = contents(copy)
    with pytest.raises(ValueError, match=r"run\.steps = 4, but .* is at step 6: set it to 6 to end the run there"):
        trained(copy, {"run.steps": "4"}, resume=True)
    assert contents(copy) == before


def test_a_kl_penalty_compares_with_the_same_start_after_a_resume(tmp_path: Path) -> None:
    changes = {"objective": '"grpo + kl"', "model.reference": '"start"'}
    trained(tmp_path / "whole", changes)
    trained(tmp_path / "run", {**changes, "run.steps": "3"})
    trained(tmp_path / "run", changes, resume=True)
    assert not differences(contents(tmp_path / "run"), contents(tmp_path / "whole"))
    start = checkpoints.read(tmp_path / "run" / "reference" / "step-00000000").tensors["model"]
    end = checkpoints.read(tmp_path / "run" / "checkpoints" / "step-00000006").tensors["model"]
    assert not any(torch.equal(start[name], end[name]) for name in start)


def test_statistics_of_the_current_policy_work_with_a_controller(tmp_path: Path) -> None:
    changes = {"update.token_stats": "current"}
    trained(tmp_path / "whole", changes)
    trained(tmp_path / "run", {**changes, "run.steps": "3"})
    trained(tmp_path / "run", changes, resume=True)
    assert not differences(contents(tmp_path / "run"), contents(tmp_path / "whole"))


@pytest.mark.parametrize(
    "objective",
    [
        "entropic(target=9.0) + repo_r(target=9.0) + entrocraft(floor=8.0, ceiling=9.0, fall_steps=3)",
        "otb(count=signal)",
    ],
)
def test_entropy_controllers_and_token_baselines_go_on_as_they_were(objective: str, tmp_path: Path) -> None:
    changes = {"objective": f'"{objective}"'}
    trained(tmp_path / "whole", changes)
    trained(tmp_path / "run", {**changes, "run.steps": "3"})
    trained(tmp_path / "run", changes, resume=True)
    assert not differences(contents(tmp_path / "run"), contents(tmp_path / "whole"))


# --- when a run cannot be resumed


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("update.lr", "1e-5"),
        ("run.seed", "7"),
        ("objective", '"dapo"'),
        ("rollout.samples", "8"),
        ("task.digits", "2"),
        ("warm_start.steps", "5"),
        ("reward.wrong", "-1.0"),
        ("update.betas", "[0.9, 0.99]"),
    ],
)
def test_a_recipe_that_would_change_results_is_an_error_that_names_the_key(copy: Path, key: str, value: str) -> None:
    before = contents(copy)
    with pytest.raises(ValueError, match=f"another recipe; these keys differ:\n  {key}"):
        trained(copy, {key: value}, resume=True)
    assert contents(copy) == before


def test_all_keys_that_differ_are_named(copy: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.seed: 0 -> 7\n  update\.lr: 0\.003 -> 1e-05\nTo go on"):
        trained(copy, {"update.lr": "1e-5", "run.seed": "7"}, resume=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"run.patience": "7"},
        {"run.keep_checkpoints": "1"},
        {"run.checkpoint_every": "1"},
        {"update.on_nonfinite": "stop"},
    ],
)
def test_keys_that_do_not_change_results_may_differ(whole: Path, copy: Path, changes: dict[str, str]) -> None:
    cut_back(copy, 4)
    trained(copy, changes, resume=True)
    now, then = contents(copy), contents(whole)
    assert all(now[name] == then[name] for name in TENSORS)


def test_another_number_of_threads_is_a_warning(copy: Path) -> None:
    _, log = trained(copy, {"run.threads": "2"}, resume=True)
    assert log.has("warning: threads was 1 and is 2", "last bits")


def test_other_versions_are_a_warning(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimtab, "__version__", "9.9")
    _, log = trained(copy, resume=True)
    assert log.has("warning: trimtab was", "and is 9.9", "last bits")


def test_there_is_no_warning_if_nothing_has_changed(copy: Path) -> None:
    _, log = trained(copy, resume=True)
    assert not log.has("warning:")


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run to resume"):
        trained(tmp_path / "run", resume=True)


def test_a_folder_with_a_run_is_not_overwritten(copy: Path) -> None:
    before = contents(copy)
    with pytest.raises(ValueError, match=r"already holds a run: choose another --out.*trimtab train --resume"):
        trained(copy)
    assert contents(copy) == before


def test_a_folder_in_use_is_left_alone(copy: Path) -> None:
    before = contents(copy)
    with RunFolder(copy).locked(), pytest.raises(ValueError, match="in use by another process"):
        trained(copy, resume=True)
    assert contents(copy) == before
    trained(copy, resume=True)  # and free again afterwards


def test_a_killed_process_releases_its_folder(whole: Path, tmp_path: Path) -> None:
    process = RunProcess(tmp_path / "run", failpoint="step.done:2")
    assert process.run() < 0
    assert process.resumed().run() == 0
    assert not differences(contents(whole), contents(process.folder))


# --- the warm start's cache


def test_a_warm_start_is_shared_by_runs_that_differ_only_afterwards(whole: Path, tmp_path: Path) -> None:
    one, other = (short_run(tmp_path, changes)[0].config for changes in ({}, {"objective": '"dapo"', "run.steps": "9"}))
    assert cache_key(one) == cache_key(other)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("update.betas", "[0.8, 0.9]"),
        ("update.max_grad_norm", "0.1"),
        ("update.token_budget", "32"),
        ("warm_start.lr", "0.1"),
        ("warm_start.batch_size", "2"),
        ("run.seed", "3"),
        ("task.size", "11"),
    ],
)
def test_a_warm_start_is_not_shared_where_it_would_differ(tmp_path: Path, key: str, value: str) -> None:
    one, other = (short_run(tmp_path, changes)[0].config for changes in ({}, {key: value}))
    assert cache_key(one) != cache_key(other)


def test_a_warm_start_is_repeated_when_its_file_has_changed(tmp_path: Path) -> None:
    solutions = tmp_path / "solutions.jsonl"
    config = short_run(tmp_path, {"warm_start.path": f'"{solutions}"'})[0].config
    keys = set()
    for answer in ("2", "33"):
        solutions.write_text(json.dumps({"prompt": "1+1=", "solution": answer}))
        keys.add(cache_key(config))
    assert len(keys) == 2


# --- no signal


NOTHING_TO_LEARN = {"reward.overlong_buffer": "0", "run.eval_every": "0", "task.digits": "9", "run.steps": "9"}


def test_steps_without_reward_spread_are_counted_and_warned_of_once(tmp_path: Path) -> None:
    run, log = trained(tmp_path / "run", {**NOTHING_TO_LEARN, "run.steps": "3"})
    assert run.progress.steps_without_signal == 3
    assert log.has("warning: step 1: rewards do not differ within any group")
    assert len([text for text in log.messages if "rewards do not differ" in text]) == 1


def test_a_run_without_any_signal_stops_with_a_diagnosis(tmp_path: Path) -> None:
    run, _ = short_run(tmp_path / "run", {**NOTHING_TO_LEARN, "run.patience": "4"})
    with pytest.raises(RunStoppedError, match=r"4 steps in a row without learning signal \(accuracy 0.00.*easier task"):
        train(run)
    assert run.stopped is StopReason.NO_SIGNAL and run.progress.step == 4
    assert checkpoints.list_checkpoints(run.folder.checkpoints)[-1].name == "step-00000004", (
        "with patience it can be gone on with"
    )
    again, log = short_run(tmp_path / "run", {**NOTHING_TO_LEARN, "run.patience": "0"}, resume=True)
    train(again)
    assert log.has("resumed from step 4") and again.progress.step == 9


def test_a_run_whose_responses_are_all_right_stops_with_that_diagnosis(tmp_path: Path) -> None:
    run, _ = short_run(tmp_path / "run", {**NOTHING_TO_LEARN, "run.patience": "2"})
    run.prepare()
    run.progress.step = 5
    flat = {"update/skipped": 0, "reward/accuracy": 1.0, "groups/mixed_share": 0.0, "update/loss": 0.0}
    run.finish_step(StepResult({**flat, "tokens/count": 1}))
    with pytest.raises(RunStoppedError, match="every response is right: use a harder task"):
        run.finish_step(StepResult({**flat, "tokens/count": 1}))


def test_one_step_with_signal_resets_the_count(tmp_path: Path) -> None:
    run, _ = short_run(tmp_path / "run", {"run.patience": "2", "run.eval_every": "0", "run.checkpoint_every": "0"})
    run.prepare()
    for mixed in (0.0, 0.5, 0.0, 0.5, 0.0):
        run.finish_step(
            StepResult({"update/skipped": 0, "groups/mixed_share": mixed, "update/loss": 0.0, "tokens/count": 1})
        )
    assert run.progress.steps_without_signal == 1


def test_dynamic_sampling_that_finds_no_group_with_reward_spread_makes_an_empty_step(tmp_path: Path) -> None:
    changes = {
        **NOTHING_TO_LEARN,
        "rollout.dynamic_sampling": "true",
        "rollout.dynamic_max_rounds": "2",
        "run.patience": "2",
    }
    run, _ = short_run(tmp_path / "run", changes)
    with pytest.raises(RunStoppedError, match="2 steps in a row without learning signal"):
        train(run)
    assert [record["tokens/count"] for record in run.folder.records()] == [0, 0]
    assert all(record["groups/dropped"] > 0 for record in run.folder.records())


# --- Ctrl-C


def test_ctrl_c_finishes_the_step_saves_and_prints_how_to_resume(whole: Path, tmp_path: Path) -> None:
    process = RunProcess(tmp_path / "run", interrupts={3: 1})
    assert process.run() == 0
    assert "finishing this step; press Ctrl-C again" in process.messages
    assert f"stopped after step 3; go on with: trimtab train --resume {process.folder}" in process.messages
    assert checkpoints.list_checkpoints(process.folder / "checkpoints")[-1].name == "step-00000003"
    assert not (process.folder / "model").exists()
    assert process.resumed(interrupts={}).run() == 0
    now, then = contents(process.folder), contents(whole)
    assert not [name for name in then if not name.startswith("checkpoints/") and now.get(name) != then[name]]
    assert all(now[name] == then[name] for name in TENSORS)


def test_a_second_ctrl_c_stops_at_once_and_the_run_can_still_be_resumed(whole: Path, tmp_path: Path) -> None:
    process = RunProcess(tmp_path / "run", interrupts={3: 2})
    assert process.run() not in (0, STOPPED)
    assert "stopped after" not in process.messages
    assert checkpoints.list_checkpoints(process.folder / "checkpoints")[-1].name == "step-00000002"
    assert process.resumed(interrupts={}).run() == 0
    assert not differences(contents(process.folder), contents(whole))


def test_ctrl_c_in_the_last_step_is_just_the_end(whole: Path, tmp_path: Path) -> None:
    process = RunProcess(tmp_path / "run", interrupts={6: 1})
    assert process.run() == 0
    assert not differences(contents(process.folder), contents(whole))


def test_the_handler_of_ctrl_c_is_restored_after_the_run(tmp_path: Path) -> None:
    import signal

    before = signal.getsignal(signal.SIGINT)
    trained(tmp_path / "one", {"run.steps": "1"})
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(RunStoppedError):
        trained(tmp_path / "two", {**NOTHING_TO_LEARN, "run.patience": "1"})
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_about_values_names_every_response_with_one(tmp_path: Path) -> None:
    from trimtab.objectives.token_batch import NotFiniteError

    values = torch.tensor([-1.0, float("nan"), -1.0, float("inf")])
    with pytest.raises(NotFiniteError) as caught:
        TokenBatch(old_logp=values, advantage=torch.zeros(4), sequence=torch.tensor([0, 1, 2, 3]))
    assert (caught.value.field, caught.value.responses) == ("old_logp", [1, 3])
