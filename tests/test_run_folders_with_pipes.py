"""A stranger's run folder may hold pipes that nobody writes to and endless devices in the place of files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.insight.report_runs import Made, make_run
from trimtab.cli import app
from trimtab.files import read_bounded
from trimtab.stress import read_stress

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


@pytest.mark.parametrize("kind", STRANGE)
def test_only_files_are_read_whole(tmp_path: Path, kind: str) -> None:
    STRANGE[kind](tmp_path / "stress.json")
    with pytest.raises(ValueError, match="it is not a regular file"):
        read_bounded(tmp_path / "stress.json", 10)
    with pytest.raises(ValueError, match="it is not a regular file"):
        read_stress(tmp_path)
