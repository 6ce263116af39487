"""A stranger's run folder may hold pipes that nobody writes to and endless devices in the place of files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.insight.report_runs import Made, make_run
from helpers.train.short_runs import short_run
from trimtab.cli import app
from trimtab.experiments.grid import read_stress
from trimtab.files import MARKER, read_bounded
from trimtab.trainer.train import STOPPED, UNSAVED
from trimtab.trainer.train.loop import train

STRANGE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}
FILES = ["config.toml", "metrics.jsonl", "alarms.jsonl", "nonfinite.jsonl", "tokens/manifest.json"]
COMMANDS = [["alarms"], ["report"], ["replay"], ["train", "--quiet", "--resume"]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("file", FILES)
def test_every_command_that_reads_a_run_ends_in_words(tmp_path: Path, file: str, kind: str) -> None:
    run = make_run(tmp_path / "run", Made(steps=1))
    (run / file).unlink(missing_ok=True)
    STRANGE[kind](run / file)
    # A run is resumed only as far as its recipe: the others of these files are not read before its checkpoints.
    for command in COMMANDS if file == "config.toml" else COMMANDS[:3]:
        result = CliRunner().invoke(app, [*command, str(run)])
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        assert result.exit_code in (0, 2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one step, on rows of a file, whose hashes it notes."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    changes = {"task.size": None, "task.digits": None, "task.name": "file", "task.path": str(folder / "rows.jsonl")}
    columns = {"task.columns.prompt": "prompt", "task.columns.answer": "answer", "task.rule": "math"}
    steps = {"run.steps": "1", "run.checkpoint_every": "1", "run.eval_every": "0", "warm_start.steps": "0"}
    train(short_run(folder / "run", {**changes, **columns, **steps, "rollout.prompts": "1", "update.per_step": "1"})[0])
    return folder / "run"


TRAINED = [
    "inputs.json", "metrics.jsonl", "alarms.jsonl", "rule_errors.jsonl", "rule_output.txt", "report.html",
    "tokens/manifest.json", "tokens/vocabulary.parquet", "tokens/step-00000001/tokens.parquet", "tokens",
    "checkpoints/step-00000001/model.safetensors", "checkpoints/step-00000001/state.json", "model/model.safetensors",
    "checkpoints/step-00000001", "model",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("file", TRAINED)
def test_a_trained_run_is_resumed_or_refused_in_words(finished: Path, tmp_path: Path, file: str, kind: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    if (run / file).is_dir():
        shutil.rmtree(run / file)
    (run / file).unlink(missing_ok=True)
    STRANGE[kind](run / file)
    result = CliRunner().invoke(app, ["train", "--quiet", "--resume", str(run), "--set", "run.steps=2"])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 2, STOPPED, UNSAVED)
    assert result.exit_code == 0 or "trimtab: " in result.stderr


@pytest.mark.parametrize("kind", STRANGE)
def test_a_log_that_is_no_file_ends_a_comparison(kind: str, tmp_path: Path) -> None:
    (tmp_path / "out" / "logs").mkdir(parents=True)
    (tmp_path / "out" / MARKER).touch()
    STRANGE[kind](tmp_path / "out" / "logs" / "grpo-seed0.log")
    words = ["compare", "grpo", "--recipe", "addition", "--seeds", "1", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    wrong = "a link" if kind == "device" else "not a regular file"  # the device is behind a link
    assert result.exit_code == 2 and f"grpo-seed0.log is {wrong}" in result.output


@pytest.mark.parametrize("kind", STRANGE)
def test_only_files_are_read_whole(tmp_path: Path, kind: str) -> None:
    STRANGE[kind](tmp_path / "stress.json")
    with pytest.raises(ValueError, match="it is not a regular file"):
        read_bounded(tmp_path / "stress.json", 10)
    with pytest.raises(ValueError, match="it is not a regular file"):
        read_stress(tmp_path)
