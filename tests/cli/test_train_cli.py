"""`trimtab train` from the command line: real runs of a few steps, and the messages of errors."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from trimtab.cli import app
from trimtab.cli.launch import TrainRequest, claim_folder, recipe_name
from trimtab.cli.summary import closing_summary, fit_lines
from trimtab.experiments.grid import Grid
from trimtab.text import slug
from trimtab.trainer.config import json_schema, load
from trimtab.trainer.model import Policy
from trimtab.trainer.sampling import NativeSampler
from trimtab.trainer.train import accuracy_change, summarize_metrics
from trimtab.trainer.train.metrics import StepResult
from trimtab.trainer.train.reporting import Reporter
from trimtab.trainer.train.run import Run
from trimtab.trainer.train.run_folder import RunFolder

# Rewards fall with length, so that a model that knows nothing has something to learn from.
RECIPE = """
[objective]
name = "stapo"
[task]
size = 12
[rollout]
prompts = 4
samples = 4
max_new_tokens = 4
max_prompt_tokens = 16
[reward]
overlong_buffer = 4
[update]
per_step = 2
[run]
steps = 3
eval_every = 3
eval_problems = 4
threads = 1
device = "cpu"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    (tmp_path / "no-model").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trimtab(*words: str) -> Result:
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def train(*words: str) -> Result:
    return trimtab("train", *words)


def test_the_interval_of_a_change_in_accuracy_is_newcombes() -> None:
    """Against the example of his paper (1998, Table II): 9 of 10 and 3 of 10."""
    change = accuracy_change(0.3, 0.9, 10)
    assert change.difference == pytest.approx(0.6)
    assert (change.low, change.high) == (pytest.approx(0.1705, abs=1e-4), pytest.approx(0.8090, abs=1e-4))
    assert change.certain and not accuracy_change(0.40, 0.425, 40).certain
    for share in (0.0, 1.0):  # nothing changed, and that is not certain
        same = accuracy_change(share, share, 30)
        assert same.low < 0 < same.high and not same.certain


def test_a_run_ends_with_a_summary_and_the_next_commands(here: Path) -> None:
    result = train("tiny.toml")
    assert result.exit_code == 0
    for words in (
        "Trained the demo model on 2-digit addition with stapo: 3 of 3 steps",
        "held-out accuracy  ",
        "reward  ",
        "entropy  ",
        "silenced  ",
        "clipped  ",
        "run folder  runs/tiny-stapo-1",
        "model       runs/tiny-stapo-1/model",
        "compare with another objective (6 runs with run.steps = 3):",
        "trimtab compare stapo grpo --seeds 3 --recipe runs/tiny-stapo-1/config.toml",
        "trimtab train --resume runs/tiny-stapo-1 --set run.steps=6",
    ):
        assert words in result.output
    assert (here / "runs/tiny-stapo-1/model/config.json").exists()
    assert [record["step"] for record in RunFolder(here / "runs/tiny-stapo-1").records()] == [0, 1, 2, 3]


def test_what_the_summary_recommends_works(here: Path) -> None:
    train("tiny.toml", "--out", "a")
    longer = train("--resume", "a", "--set", "run.steps=5")
    assert longer.exit_code == 0
    assert "5 of 5 steps" in longer.output
    assert [record["step"] for record in RunFolder(here / "a").records()] == [0, 1, 2, 3, 4, 5]


def test_a_run_cannot_be_resumed_to_fewer_steps_than_it_has(here: Path) -> None:
    train("tiny.toml", "--out", "a")
    before = {path: path.read_bytes() for path in sorted((here / "a").rglob("*")) if path.is_file()}
    shorter = train("--resume", "a", "--set", "run.steps=2")
    assert shorter.exit_code == 2
    assert "run.steps = 2, but a is at step 3: set it to 3 to end the run there" in " ".join(shorter.stderr.split())
    assert {path: path.read_bytes() for path in sorted((here / "a").rglob("*")) if path.is_file()} == before


def test_a_summary_is_broken_between_words_and_its_commands_are_not_broken() -> None:
    command = "    trimtab compare stapo grpo --seeds 3 --recipe runs/demo/config.toml"
    text = f"Trained the demo model: 3 of 3 steps.\n\n  reward   0.1 -> 0.2   means over a-b\n  longer:\n{command}"
    assert fit_lines(text, 34).split("\n") == [
        "Trained the demo model: 3 of 3",
        "  steps.",
        "",
        "  reward   0.1 -> 0.2   means over",
        "  a-b",
        "  longer:",
        command,
    ]
    assert fit_lines(text, 80) == text


def summary_of(folder: Path, records: list[dict[str, float]], *checkpoints: int) -> str:
    """The summary of a run with these metrics, whose alarms rang."""
    config = load("tiny.toml", [f"run.steps={len(records) - 1}", "update.lr=0.03"])
    run = RunFolder(folder)
    run.create(config)
    for record in records:
        run.append_metrics(record)
    run.append(run.alarms, {"step": 11, "alarm": "entropy_explosion"})
    run.append(run.alarms, {"step": 30, "alarm": "entropy_explosion"})
    run.append(run.alarms, {"step": 12, "alarm": "\x1b[2Jforged\nline"})
    (run.path / "model").mkdir()
    for step in checkpoints:
        (run.checkpoints / f"step-{step:08}").mkdir(parents=True)
    return closing_summary(config, run, 60.0)


def test_the_summary_of_a_run_that_broke_tells_so_and_advises_accordingly(here: Path) -> None:
    reward = [0.54] + [0.05] * 20 + [0.2] * 19
    records = [{"step": 0, "eval/accuracy": 0.46}]
    records += [{"step": n, "reward/mean": value} for n, value in enumerate(reward, start=1)]
    for step in (10, 20, 30, 40):
        records[step] |= {"eval/accuracy": 0.0}
    text = summary_of(here / "a", records)
    assert "0.540 -> 0.200    the first step, and the mean over the last 10" in text
    assert "The run collapsed at step 10: accuracy is 0.00; its best was 0.46." in text
    assert "Alarms that rang: entropy_explosion (step 11), \\x1b[2Jforged\\nline (step 12)." in text
    assert f"    trimtab alarms {here / 'a'}" in text
    assert f"    trimtab train {here / 'a/config.toml'} --set update.lr=0.01" in text
    assert "more steps" not in text and "for longer" not in text
    kept = summary_of(here / "b", records, 0, 5, 9, 10, 40)
    assert f"    trimtab train --from {here / 'b'}@9 --set update.lr=0.01" in kept


@pytest.mark.parametrize(("silenced", "tau_p", "sweep"), [(0.0, 0.002, "0.01,0.05,0.2,0.5"), (9e-6, 0.2, "0.5")])
def test_a_run_whose_silencing_touched_almost_nothing_says_so_and_names_a_sweep(
    here: Path, silenced: float, tau_p: float, sweep: str
) -> None:
    run = RunFolder(here / "a run")
    run.create(load("tiny.toml", [f"objective.tau_p={tau_p}"]))
    run.append_metrics({"step": 1, "tokens/silenced_share": silenced, "s2t/candidate_share": 0.0})
    told = closing_summary(load(run.config), run, 1.0)
    assert "S2T silenced almost nothing" in told and "replay" not in told, "nothing was recorded"
    run.append_metrics({"step": 2, "tokens/silenced_share": silenced, "groups/mixed_share": 0.0})
    assert "S2T silenced" not in closing_summary(load(run.config), run, 1.0), "there was nothing to learn from"
    run.append_metrics({"step": 3, "tokens/silenced_share": silenced, "groups/mixed_share": 0.5})
    (run.path / "tokens").mkdir()
    text = closing_summary(load(run.config), run, 1.0)
    assert "S2T silenced almost nothing" in text and f"(it was {tau_p:g})" in text
    assert f"    trimtab replay '{here / 'a run'}' --sweep tau_p={sweep}" in text


@pytest.mark.parametrize("metrics", [{"tokens/silenced_share": 1e-4, "s2t/candidate_share": 0.1}, {}])
def test_a_run_that_silences_enough_or_has_no_such_rule_is_not_told_so(here: Path, metrics: dict[str, float]) -> None:
    run = RunFolder(here / "a")
    run.create(load("tiny.toml"))
    run.append_metrics({"step": 1, "tokens/silenced_share": 0.0, **metrics})
    assert "almost nothing" not in closing_summary(load(run.config), run, 1.0)


def test_a_run_without_anything_to_learn_from_says_so_and_advises_no_more_of_it(here: Path) -> None:
    idle = [{"step": step, "groups/mixed_share": 0.0} for step in range(1, 6)]
    text = summary_of(here / "a", [{"step": 0}, *idle])
    assert "Rewards never differed within a group, so there was nothing to learn from." in text
    assert "for longer" not in text
    text = summary_of(here / "b", [{"step": 0}, *idle[:-1], idle[-1] | {"groups/mixed_share": 0.1}])
    assert "nothing to learn from" not in text and "for longer" in text


def test_more_steps_are_not_advised_after_a_loss_that_is_no_chance(here: Path) -> None:
    accuracy = [{"step": step, "eval/accuracy": 0.9 - step / 20, "eval/problems": 500} for step in range(6)]
    text = summary_of(here / "a", accuracy)
    assert "Held-out accuracy fell (-25.0 points" in text and "try a lower update.lr" in text
    assert "for longer" not in text


def test_a_last_evaluation_as_good_as_the_best_leaves_no_better_step_to_go_back_to(here: Path) -> None:
    same = summary_of(here / "a", [{"step": step, "eval/accuracy": 0.5} for step in range(5)])
    assert "best step" not in same
    worse = summary_of(here / "b", [{"step": step, "eval/accuracy": 0.5 - step / 100} for step in range(5)])
    assert "best step   0, with a held-out score of 0.5" in worse


def test_the_summary_of_a_short_run_that_ends_low_does_not_advise_to_go_on(here: Path) -> None:
    text = summary_of(here / "a", [{"step": step, "eval/accuracy": 0.51 if step < 3 else 0.0} for step in range(10)])
    assert "The run fell at step 3 to below 50% of its best, and ended there: accuracy is 0.00; its best" in text
    assert "for longer" not in text


def test_the_comparison_that_the_summary_recommends_keeps_the_settings_of_the_run(here: Path) -> None:
    output = train("tiny.toml", "--out", "a", "--set", "run.steps=1", "--set", "update.lr=0.02").output
    (command,) = (line.split() for line in output.splitlines() if "trimtab compare" in line)
    assert command[2:] == ["stapo", "grpo", "--seeds", "3", "--recipe", "a/config.toml"]
    planned = Grid(tuple(command[2:4]), here / "compared", command[-1], int(command[5])).plan()
    assert {(run.objective, run.seed) for run in planned} == {(n, s) for n in ("stapo", "grpo") for s in range(3)}
    assert {(run.config.run.steps, run.config.update.lr) for run in planned} == {(1, 0.02)}


def test_a_method_with_attachments_is_compared_with_the_method_alone(here: Path) -> None:
    output = train("tiny.toml", "--out", "a", "--set", "run.steps=1", "--set", "objective.name=dapo + trim").output
    assert "trimtab compare 'dapo + trim' dapo --seeds 3 --recipe a/config.toml" in output


def test_what_is_made_from_the_recipe_of_a_run_has_the_runs_name(here: Path) -> None:
    train("tiny.toml", "--out", "a", "--set", "run.steps=1", "--set", "run.report=false")
    recipe = "a/config.toml"
    assert [recipe_name(name) for name in (recipe, "tiny.toml", "demo")] == ["a", "tiny", "demo"]
    assert str(claim_folder(TrainRequest(load(recipe), recipe))) == "runs/a-stapo-1"


@pytest.mark.parametrize("name", ["my run", "a;touch b", "$(x)"])
def test_commands_in_messages_are_quoted_for_the_shell(here: Path, name: str) -> None:
    again = train("tiny.toml", "--out", name, "--set", "run.steps=1", "--set", "run.report=false", "--quiet")
    for line in (line.strip() for line in again.output.splitlines() if line.startswith("    trimtab ")):
        assert name in line
        assert any(word.startswith(name) for word in shlex.split(line)), line
    for result in (train("tiny.toml", "--out", name), train("--resume", name, "--set", "update.lr=0.5")):
        command = "trimtab train --" + result.stderr.strip().rpartition("trimtab train --")[2]
        assert shlex.split(command)[3] == name
    run = Run(load("tiny.toml"), RunFolder(here / name), Reporter())
    assert shlex.split(run.resume_command)[3] == str(here / name)


def test_a_key_that_shapes_the_run_cannot_change_on_resuming(here: Path) -> None:
    train("tiny.toml", "--out", "a", "--set", "run.steps=1")
    result = train("--resume", "a", "--set", "update.lr=0.5")
    assert result.exit_code == 2
    assert "update.lr" in result.stderr
    assert "0.5" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "unknown recipe 'nowhere'"),
        (["nowhere.toml"], "nowhere.toml"),
        (["tiny.toml", "--set", "update.lrr=1"], "did you mean lr"),
        (["tiny.toml", "--set", "objective=stapoo"], "did you mean stapo"),
        (["tiny.toml", "--set", "model.path=no-model"], "no-model"),
        (["--resume", "nowhere"], "nowhere holds no run to resume"),
        (["--resume", "nowhere", "--out", "b"], "leave out --out"),
        (["tiny.toml", "--out", "tiny.toml"], "tiny.toml is a file"),
    ],
)
def test_an_invalid_command_line_is_an_error_message(here: Path, arguments: list[str], message: str) -> None:
    result = train(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("trimtab: ")
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_run_that_never_began_leaves_no_folder_behind(here: Path) -> None:
    train("tiny.toml", "--set", "model.path=no-model")
    train("tiny.toml", "--set", "model.path=no-model", "--out", "mine")
    assert not list((here / "runs").iterdir())
    assert not (here / "mine").exists()


def test_a_folder_with_a_run_in_it_is_left_alone(here: Path) -> None:
    train("tiny.toml", "--out", "a", "--set", "run.steps=1")
    before = (here / "a/metrics.jsonl").read_text()
    result = train("tiny.toml", "--out", "a", "--set", "run.steps=1")
    assert result.exit_code == 2
    assert "already holds a run" in result.stderr
    assert (here / "a/metrics.jsonl").read_text() == before


def test_a_run_without_learning_signal_stops_with_a_diagnosis(here: Path) -> None:
    result = train("tiny.toml", "--set", "reward.overlong_buffer=0", "--set", "run.patience=1", "--out", "a")
    assert result.exit_code == 3
    assert "trimtab: stopped after step 1: 1 steps in a row without learning signal" in result.stderr
    assert "trimtab train --resume a" in result.output


def test_ctrl_c_ends_the_run_after_its_step_with_exit_code_3(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Run.finish_step

    def interrupt(self: Run, result: StepResult) -> None:
        whole(self, result)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "finish_step", interrupt)
    result = train("tiny.toml", "--out", "a")
    assert result.exit_code == 3
    assert "1 of 3 steps" in result.output
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert "3 of 3 steps" in train("--resume", "a").output


def no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (NativeSampler, "_forward", "while sampling: lower rollout.batch_size (now 1024)"),
        (torch.Tensor, "backward", "in an update: lower update.token_budget (now 16384)"),
        (torch.optim.AdamW, "step", "in the optimizer step"),
        (Policy, "hidden_states", "before the first step"),
    ],
)
def test_running_out_of_memory_names_the_setting_to_lower(
    here: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, message: str
) -> None:
    monkeypatch.setattr(owner, name, no_memory)
    result = train("tiny.toml", "--set", "run.eval_every=0")
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_scoring_without_memory_names_the_token_budget(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["trimtab.trainer.model.score"], "moments", no_memory)
    result = train("tiny.toml", "--set", "run.eval_every=0")
    assert "while scoring responses: lower update.token_budget (now 16384), then update.head_chunk" in result.stderr


def test_gradient_checkpointing_in_use_is_not_advised(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "backward", no_memory)
    without = train("tiny.toml", "--set", "run.eval_every=0").stderr
    having = train("tiny.toml", "--set", "run.eval_every=0", "--set", "model.gradient_checkpointing=true").stderr
    assert "gradient_checkpointing" in without
    assert "gradient_checkpointing" not in having


def test_a_programming_error_is_not_hidden(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(NativeSampler, "sample", bug)
    result = CliRunner().invoke(app, ["train", "tiny.toml"])
    assert isinstance(result.exception, RuntimeError)


@pytest.mark.parametrize("moment", ["trimtab.trainer.train.run.warm_start", "trimtab.trainer.train.loop.update"])
def test_an_interruption_prints_how_to_resume_and_that_works(
    here: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    command = ["tiny.toml", "--out", "runs/here"]
    with monkeypatch.context() as patch:
        patch.setattr(moment, interrupt)
        result = train(*command)
    assert result.exit_code == 130
    if "--resume" in result.stderr:
        assert "resume with: trimtab train --resume runs/here" in result.stderr
        command = ["--resume", "runs/here"]
    else:
        assert "the same command starts again" in result.stderr
    assert train(*command).exit_code == 0


def test_a_dry_run_makes_and_loads_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.trainer.train.build.load_policy", no_memory)
    result = train("tiny.toml", "--dry-run", "--set", "objective=gspo")
    assert result.exit_code == 0
    assert "4 prompts x 4 samples = 16 responses" in result.output
    assert 'name = "gspo"' in result.output
    assert not (here / "runs").exists()


def test_no_recipe_means_the_demo(here: Path) -> None:
    assert train("--dry-run").output == train("demo", "--dry-run").output


def test_a_terminal_gets_the_live_display_unless_quiet(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Display:
        def __init__(self, title: str, target: float | None, **_: Any) -> None:
            made.append(f"{title} {target}")

        def message(self, text: str) -> None: ...
        def warm(self, step: int, steps: int, loss: float) -> None: ...
        def step(self, step: int, steps: int, metrics: object, samples: object = ()) -> None: ...
        def close(self) -> None:
            made.append("closed")

    class Terminal:
        isatty = staticmethod(lambda: True)

    monkeypatch.setattr("trimtab.cli.launch.LiveReporter", Display)
    monkeypatch.setattr("trimtab.cli.launch.sys", Terminal)
    monkeypatch.setattr(Terminal, "stdout", Terminal, raising=False)
    words = ["tiny.toml", "--set", "objective=stare(target=0.7)", "--set", "run.steps=1"]
    assert "step 1/1" not in train(*words).output
    assert made[0].startswith("stare")
    assert made[0].endswith("0.7")
    assert "closed" in made
    made.clear()
    assert "step 1/1" in train(*words, "--quiet").output
    assert made == []
    assert sys.stdout is not Terminal


def test_folders_are_named_after_recipe_and_objective_and_counted(here: Path) -> None:
    wanted = TrainRequest(load("tiny.toml", ["objective=sspo + s2t"]), "tiny.toml")
    assert [str(claim_folder(wanted)) for _ in range(2)] == ["runs/tiny-sspo+s2t-1", "runs/tiny-sspo+s2t-2"]
    assert slug("gspo + stare(variant=C2, share=0.1)") == "gspo+stare-variant=C2,-share=0.1"


def test_the_schema_is_json_and_knows_the_keys() -> None:
    schema = json.loads(trimtab("schema").output)
    assert schema == json_schema(), "run `make docs`"
    assert {"objective", "task", "model", "rollout", "update", "run"} <= set(schema["properties"])


def test_a_run_is_summarized_from_its_metrics() -> None:
    records: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": 0.1}]
    records += [{"step": n, "reward/mean": n / 8, "time/rollout": 1.0, "time/update": 0.5} for n in range(1, 9)]
    records[8] |= {"eval/accuracy": 0.6, "tokens/silenced_share": float("nan")}
    summary = summarize_metrics(records)
    assert (summary.accuracy_start, summary.accuracy_end) == (0.1, 0.6)
    assert (summary.reward_start, summary.reward_end) == (1 / 8, 7.5 / 8)  # the first step; the last two
    assert summary.seconds == 12.0
    assert summary.silenced is None
    assert summarize_metrics(records[:1]).accuracy_end is None
    assert summarize_metrics([]).steps == 0
    assert (summary.score_start, summary.score_end) == (None, None)
    graded = summarize_metrics([records[0] | {"eval/score": -0.5}, records[8] | {"eval/score": 1.5}])
    assert (graded.score_start, graded.score_end) == (-0.5, 1.5)


def test_the_closing_summary_has_scores_and_what_the_time_went_to(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(load(None))
    folder.append_metrics({"step": 0, "eval/accuracy": 0.1, "eval/score": -0.5, "time/warm_start": 1.0})
    folder.append_metrics({"step": 1, "eval/accuracy": 0.2, "eval/score": 1.5, "time/update": 2.0, "time/grading": 1.0})
    text = closing_summary(load(None), folder, 5.0)
    assert "  held-out score     -0.500 -> 1.500 " in text
    assert "  time               updates 50.0%, warm start 25.0%, grading 25.0%" in text
