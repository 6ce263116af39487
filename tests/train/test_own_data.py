"""Data of one's own: several files with weights, prompts that are too long, problems that occur more than once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from helpers.train.short_runs import contents, differences, recipe, short_run, trained
from trimtab.cli.summary import closing_summary
from trimtab.data import FixedTask, Problem, build_task, problem_index, stream_index, user
from trimtab.own_parts import register
from trimtab.trainer.train.loop import train
from trimtab.trainer.train.run import Run


def write(path: Path, *prompts: str) -> str:
    rows = [json.dumps({"prompt": prompt, "reward_model": {"ground_truth": "2"}}) for prompt in prompts]
    path.write_text("".join(f"{row}\n" for row in rows))
    return str(path)


def file_settings(path: object, **more: str) -> dict[str, str | None]:
    none = dict.fromkeys(("task.size", "task.digits", "warm_start.eval_every", "warm_start.batch_size"))
    given = {key.replace("__", "."): value for key, value in more.items()}
    return {**none, "warm_start.steps": "0", "task.name": "file", "task.path": _toml(path), **given}


def _toml(path: object) -> str:
    if isinstance(path, dict):
        return "{" + ", ".join(f'"{key}" = {weight}' for key, weight in path.items()) + "}"
    return json.dumps(path)


@pytest.fixture
def two_files(tmp_path: Path) -> tuple[str, str]:
    few = write(tmp_path / "few.jsonl", *(f"1+{n}=" for n in range(5)))
    return few, write(tmp_path / "many.jsonl", *(f"2+{n}=" for n in range(25)))


# --- several files


def file_task(path: object) -> FixedTask:
    task = build_task("file", {"path": path}, "train", 10)
    assert isinstance(task, FixedTask)
    return task


def stream(task: FixedTask, count: int, seed: int = 3, first: int = 0) -> list[str]:
    return [task[stream_index(task, seed, n)].prompt[0]["content"] for n in range(first, first + count)]


def test_a_list_of_files_is_one_file_with_all_rows(two_files: tuple[str, str], tmp_path: Path) -> None:
    joined = tmp_path / "joined.jsonl"
    joined.write_text("".join(Path(path).read_text() for path in two_files))
    assert stream(file_task(list(two_files)), 90) == stream(file_task(str(joined)), 90)
    assert file_task(list(two_files)).name == "few + many"


def test_one_file_comes_in_the_order_it_always_had(two_files: tuple[str, str]) -> None:
    alone = file_task(two_files[1])
    indices = [problem_index(25, 3, n) for n in range(60)]
    for path in (two_files[1], [two_files[1]], {two_files[1]: 2.0}):
        assert [stream_index(file_task(path), 3, n) for n in range(60)] == indices
    assert file_task([two_files[1]]) == alone


def test_weights_are_shares_of_the_prompts_of_every_epoch(two_files: tuple[str, str]) -> None:
    task = file_task({two_files[0]: 2.0, two_files[1]: 1.0})
    for epoch in range(4):
        prompts = stream(task, 30, first=30 * epoch)
        assert Counter(prompt[0] for prompt in prompts) == {"1": 20, "2": 10}


def test_a_file_is_used_up_before_any_of_its_problems_comes_again(two_files: tuple[str, str]) -> None:
    task = file_task({two_files[0]: 2.0, two_files[1]: 1.0})
    prompts = stream(task, 30 * 5)
    assert set(Counter(prompt for prompt in prompts if prompt[0] == "1").values()) == {20}
    assert set(Counter(prompt for prompt in prompts if prompt[0] == "2").values()) == {2}
    assert stream(task, 30) != stream(task, 30, seed=4)


def test_a_position_has_one_problem_however_it_is_reached(two_files: tuple[str, str]) -> None:
    arguments = {two_files[0]: 2.0, two_files[1]: 1.0}
    forwards = stream(file_task(arguments), 200)
    turned = file_task(dict(reversed(arguments.items())))  # the order of a table means nothing
    assert [stream(turned, 1, first=n)[0] for n in reversed(range(200))] == forwards[::-1]


def test_a_weight_that_leaves_a_file_without_prompts_is_an_error(two_files: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"weight 0\.001 has 5 problems and gets 0 of the 30 prompts"):
        file_task({two_files[0]: 0.001, two_files[1]: 1.0})


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("[]", "task.path: [] names no file"),
        ('["a.jsonl", 3]', "task.path[1] = 3: must be text"),
        ('["a.jsonl", "a.jsonl"]', "names a file twice"),
        ("{a = -1}", "the weight of 'a' is -1.0: it must be above 0"),
        ("{a = 'x'}", "task.path.a = 'x': must be a number"),
        ("3", "task.path = 3: must be text, in quotes or a list, in brackets or a table"),
    ],
)
def test_paths_that_name_no_files_are_errors_in_words(path: str, words: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        recipe({"task.size": None, "task.digits": None, "task.name": "file", "task.path": path})
    assert words in str(error.value)
    assert "str]" not in str(error.value)


def test_a_run_on_a_mixture_resumes_to_the_bit(two_files: tuple[str, str], tmp_path: Path) -> None:
    settings = file_settings({two_files[0]: 2.0, two_files[1]: 1.0})
    whole, _ = short_run(tmp_path / "whole", settings)
    train(whole)
    cut, _ = short_run(tmp_path / "cut", {**settings, "run.steps": "2"})
    train(cut)
    resumed, _ = short_run(tmp_path / "cut", settings, resume=True)
    train(resumed)
    assert not differences(contents(tmp_path / "whole"), contents(tmp_path / "cut"))


# --- prompts that are too long


LONG = "1+" * 30 + "1="


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", "1+1=", LONG, *(f"1+{n}=" for n in range(2, 9)))
    settings = file_settings(path, rollout__max_prompt_tokens="20")
    with pytest.raises(ValueError, match=r"mine\.jsonl, row 2: .*task\.long_prompts"):
        trained(tmp_path / "stops", settings)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"1 of 9 problems of mine are left out .* more than 20 tokens: .*row 2"):
        run, _ = trained(tmp_path / "drops", {**settings, "task.long_prompts": "drop"})  # type: ignore[dict-item]
    assert len(run.trainer.task) == 8


def test_prompts_without_room_for_a_response_are_left_out_too(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", "1+1=", "1+" * 29 + "1=")  # 60 of the demo's 64 positions
    eval_path = write(tmp_path / "test.jsonl", LONG, "3+3=")
    settings = file_settings(path, task__eval_path=json.dumps(eval_path), rollout__max_new_tokens="5")
    run, _ = short_run(tmp_path / "run", {**settings, "task.long_prompts": "drop"})
    with pytest.warns(UserWarning, match="more than 59 tokens") as warned:
        trainer = run.prepare()
    assert len([each for each in warned if "left out" in str(each.message)]) == 2
    assert (len(trainer.task), len(trainer.test_task or ())) == (1, 1)
    run.discard_if_unused()


def test_a_file_of_long_prompts_alone_is_an_error(tmp_path: Path) -> None:
    settings = file_settings(write(tmp_path / "mine.jsonl", LONG), rollout__max_prompt_tokens="20")
    with pytest.raises(ValueError, match="all 1 prompts have more than 20 tokens; none is left"):
        trained(tmp_path / "run", {**settings, "task.long_prompts": "drop"})  # type: ignore[dict-item]


def test_weights_stay_after_problems_are_left_out(two_files: tuple[str, str]) -> None:
    task = file_task({two_files[0]: 2.0, two_files[1]: 1.0}).without({0, 7, 8})
    assert task.weights == ((4, 2.0), (23, 1.0))
    assert Counter(prompt[0] for prompt in stream(task, 27)) == {"1": 18, "2": 9}


# --- problems that occur more than once


def summary(run: Run) -> str:
    return closing_summary(run.config, run.folder, 1.0)


def test_held_out_problems_in_training_are_reported_and_not_called_new(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", "1+1=", "1+2=", "1+1=", "4+4=")
    seen, new = write(tmp_path / "seen.jsonl", " 1+2=\n", "9+9="), write(tmp_path / "new.jsonl", "8+8=", "9+9=")
    run, log = trained(tmp_path / "a", file_settings(path, task__eval_path=json.dumps(seen)))  # type: ignore[arg-type]
    assert log.has("warning", "1 training problem repeats", "mine.jsonl, row 3")
    assert log.has("warning", "1 of 2 held-out problem repeats", "seen.jsonl, row 1")
    assert "50.0% of them were trained on too" in summary(run)
    assert "not trained on" not in summary(run)
    run, log = trained(tmp_path / "b", file_settings(path, task__eval_path=json.dumps(new)))  # type: ignore[arg-type]
    assert not log.has("held-out problem")
    assert "on problems it was not trained on" in summary(run)


def test_problems_of_a_warm_start_are_trained_on_too(tmp_path: Path) -> None:
    path, eval_path = write(tmp_path / "mine.jsonl", "1+1=", "1+2="), write(tmp_path / "test.jsonl", "3+3=")
    worked = tmp_path / "worked.jsonl"
    worked.write_text(json.dumps({"prompt": "3+3=", "solution": "6"}) + "\n")
    warm = {"warm_start.steps": "1", "warm_start.path": json.dumps(str(worked))}
    settings = {**file_settings(path, task__eval_path=json.dumps(eval_path)), **warm}
    _, log = trained(tmp_path / "run", settings)  # type: ignore[arg-type]
    assert log.has("warning", "1 of 1 held-out problem repeats")


def listed(split: str = "train") -> list[Problem]:
    """Return the same problems to train on and to evaluate on."""
    return [Problem(user(f"{n}+{n}="), str(2 * n), "exact", "mine") for n in range(1, 5)]


def test_repeats_in_a_list_of_ones_own_are_found(tmp_path: Path) -> None:
    register(listed)
    own = {"task.name": "python:listed"}
    none = dict.fromkeys(("task.size", "task.digits"))
    run, log = trained(tmp_path / "run", {**none, **own, "warm_start.steps": "0"})  # type: ignore[arg-type]
    assert log.has("4 of 4 held-out problems repeat")
    assert "100.0% of them were trained on too" in summary(run)
