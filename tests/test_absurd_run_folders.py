"""Whatever the files of a run hold, its commands end with a result or with an error in words.

The files are changed at random by a fixed seed and sealed again, so that no checksum finds it: a few of them in CI,
hundreds with `TRIMTAB_THOROUGH=1`.
"""

from __future__ import annotations

import faulthandler
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from helpers import absurd_runs
from helpers.absurd_runs import change_tensor, seal_checkpoint
from helpers.thorough import THOROUGH
from helpers.train.short_runs import short_run
from trimtab.cli import app
from trimtab.record.layout import json_with_digest
from trimtab.trainer.train.loop import train

HANG = 600.0  # seconds after which a command is taken for hung
READS = [absurd_runs.change_record_json, absurd_runs.change_record_table, absurd_runs.change_line]
READS += [absurd_runs.change_config, absurd_runs.change_kind_of_file]
RESUMES = [absurd_runs.change_checkpoints, absurd_runs.change_checkpoints, *READS]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "run"
    run, _ = short_run(folder, {"run.steps": "3", "warm_start.steps": "0", "run.report": "false"})
    train(run)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    faulthandler.dump_traceback_later(HANG, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def call(*words: str | Path) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert len(result.stderr) < 10_000
    assert "\x1b" not in result.stderr
    return result


def resume(run: Path) -> Any:
    return call("train", "--resume", run, "--quiet", "--set", "run.steps=4", "--set", "run.report=false")


@pytest.mark.filterwarnings("ignore")  # a step that is left out is a warning
@pytest.mark.parametrize("seed", range(400 if THOROUGH else 4))
@pytest.mark.parametrize("change", READS, ids=lambda change: change.__name__)
def test_reading_an_absurd_run_ends_in_words(copy: Path, change: Callable[..., None], seed: int) -> None:
    change(copy, random.Random(seed))
    call("alarms", copy)
    call("replay", copy, "--objective", "recorded", "--objective", "sspo + s2t")
    call("report", copy, "--out", copy.parent / "report.html")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(60 if THOROUGH else 1))
@pytest.mark.parametrize("change", RESUMES, ids=lambda change: change.__name__)
def test_resuming_an_absurd_run_ends_in_words(copy: Path, change: Callable[..., None], seed: int) -> None:
    change(copy, random.Random(seed))
    resume(copy)


@pytest.mark.parametrize("kind", [kind for kind in absurd_runs.TENSORS if kind != "huge"])
def test_a_resealed_tensor_that_does_not_fit_is_named_and_not_used(copy: Path, kind: str) -> None:
    for name in ("optimizer", "model"):
        last = copy / "checkpoints/step-00000003"
        shutil.rmtree(copy / "checkpoints/step-00000002", ignore_errors=True)
        tensors = load_file(last / f"{name}.safetensors")
        key = next(key for key in sorted(tensors) if name == "model" or key.endswith("/exp_avg_sq"))
        if name == "model" and kind == "negative":
            continue
        change_tensor(tensors, key, kind)
        save_file(tensors, last / f"{name}.safetensors")
        seal_checkpoint(last)
        result = resume(copy)
        assert result.exit_code == 2
        assert "step-00000003 does not fit" in result.stdout and "it is not used" in result.stdout
        assert "no checkpoint under" in result.stderr


@pytest.mark.parametrize("value", [-1, 10**30, "3"])
def test_a_resealed_progress_that_is_no_count_is_named(copy: Path, value: Any) -> None:
    state = copy / "checkpoints/step-00000003/state.json"
    table = json.loads(state.read_text())
    table["progress"]["position"] = value
    state.write_text(json.dumps(table))
    seal_checkpoint(state.parent)
    assert f"progress.position is {value!r}" in resume(copy).stdout


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("threads", 1_000_000, "`threads` is 1000000"),
        ("step", -1, "`step` is -1"),
        ("tokens", 10**30, "`tokens` is 1000"),
        ("tokens", 1, "its updates have"),
        ("observed_entropy", "x", "`observed_entropy` is 'x'"),
        ("updates", [], "its updates have 0 responses"),
    ],
)
def test_a_resealed_step_with_an_absurd_field_is_named(copy: Path, key: str, value: Any, words: str) -> None:
    for path in copy.glob("tokens/*/step.json"):
        table = {name: each for name, each in json.loads(path.read_text()).items() if name != "sha256"}
        path.write_text(json_with_digest({**table, key: value}))
    result = call("replay", copy)
    assert result.exit_code == 2
    assert words in " ".join((result.stdout + result.stderr).split())
