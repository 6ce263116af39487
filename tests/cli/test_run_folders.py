"""A run's folder belongs to one run, and is never made a second time.

Of two commands on one folder exactly one goes on, whenever the other starts; a folder that goes away ends its run.
The second command starts in the middle of the first, in the same process: locks are of open files, not of processes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from helpers.train.short_runs import SETTINGS, contents
from trimtab.cli import launch
from trimtab.cli.launch import launch_run, resolve_request
from trimtab.trainer.train import INVALID, checkpoints, run_state
from trimtab.trainer.train import run as run_module
from trimtab.trainer.train.run import Run
from trimtab.trainer.train.run_folder import RunFolder

SHORT = {**SETTINGS, "run.steps": "2", "run.checkpoint_every": "1", "run.report": "false"}


def train(folder: Path, *, resume: bool = False, **more: str) -> tuple[int, str]:
    """Run `trimtab train`; return the exit code and what it printed."""
    settings = [f"{key}={value}" for key, value in {**SHORT, **more}.items()]
    out, resumed = (None, folder) if resume else (folder, None)
    request = resolve_request(None if resume else "addition", settings, out, resumed)
    printed: list[str] = []
    code = launch_run(request, quiet=True, print_line=printed.append, print_error=printed.append)
    return code, "\n".join(printed)


MOMENTS: dict[str, tuple[Any, str]] = {
    "locked, before the configuration is written": (RunFolder, "create"),
    "before the model is built": (run_module, "build_trainer"),
    "in the warm start": (run_module, "warm_start"),
    "at the first checkpoint": (checkpoints, "save"),
    "after a step": (Run, "finish_step"),
    "when the model is written": (run_state, "publish_model"),
}


def at(moment: str, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something once, when a run comes to a moment."""
    where, name = MOMENTS[moment]
    original, done = getattr(where, name), []

    def with_action(*args: Any, **options: Any) -> Any:
        if not done:
            done.append(moment)
            if isinstance(args[0], Run) and args[0].trainer.recorder is not None:
                args[0].trainer.recorder.flush()  # its thread would write in the middle of the action
            action()
        return original(*args, **options)

    monkeypatch.setattr(where, name, with_action)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_second_run_on_the_same_new_folder_is_refused_and_touches_nothing(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, str]] = []

    def second() -> None:
        before = contents(tmp_path)
        seen.append(train(tmp_path / "run"))
        assert contents(tmp_path) == before

    at(moment, second, monkeypatch)
    code, printed = train(tmp_path / "run")
    assert code == 0, printed
    assert seen[0][0] == INVALID and "is in use by another process" in seen[0][1]
    assert {"config.toml", "model/config.json"} <= set(contents(tmp_path / "run"))


def test_a_run_that_looked_before_the_other_had_begun_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_reporter, folder = launch.make_reporter, RunFolder(tmp_path / "run")
    with ExitStack() as other:

        def other_starts(request: Any, *rest: Any) -> Any:
            other.enter_context(folder.locked())
            folder.create(request.config)
            return make_reporter(request, *rest)

        monkeypatch.setattr(launch, "make_reporter", other_starts)
        code, printed = train(tmp_path / "run")
        assert code == INVALID and "is in use by another process" in printed
        assert folder.config.exists(), "the other run's"


def test_of_two_resumes_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "run")
    seen: list[tuple[int, str]] = []

    def second() -> None:
        before = contents(tmp_path)
        seen.append(train(tmp_path / "run", resume=True, **{"run.steps": "3"}))
        assert contents(tmp_path) == before

    at("after a step", second, monkeypatch)
    assert train(tmp_path / "run", resume=True, **{"run.steps": "3"})[0] == 0
    assert seen[0][0] == INVALID and "is in use by another process" in seen[0][1]
    assert [record["step"] for record in RunFolder(tmp_path / "run").records()] == [0, 1, 2, 3]


def test_a_run_that_fails_before_its_first_step_leaves_files_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert train(tmp_path / "run", **{"model.path": str(tmp_path)})[0] == INVALID
    assert set(contents(tmp_path / "run")) == {"notes.txt"}


# --- a folder that goes away


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def _move(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def _replace(folder: Path) -> None:
    _move(folder)
    folder.mkdir()


def _empty(folder: Path) -> None:
    _remove(folder)  # and made again, with the inode of before where the file system gives it again
    folder.mkdir()


@pytest.mark.parametrize("change", [_remove, _move, _replace, _empty])
@pytest.mark.parametrize("moment", ["in the warm start", "at the first checkpoint", "after a step"])
def test_a_folder_that_goes_away_ends_the_run_and_is_not_made_again(
    moment: str, change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    at(moment, lambda: change(folder), monkeypatch)
    code, printed = train(folder)
    assert code == INVALID and "during the run" in printed and "resume" not in printed
    assert folder.exists() == (change in (_replace, _empty)) and not list(folder.rglob("*"))


def test_a_folder_that_goes_away_at_the_very_end_is_an_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at("when the model is written", lambda: _remove(tmp_path / "run"), monkeypatch)
    code, printed = train(tmp_path / "run")
    assert code != 0 and "could not be written" in printed
    assert not (tmp_path / "run").exists()


def test_checkpoints_that_are_removed_during_a_run_cost_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at("after a step", lambda: shutil.rmtree(tmp_path / "run" / "checkpoints"), monkeypatch)
    code, printed = train(tmp_path / "run")
    assert code == 0, printed
    assert checkpoints.list_checkpoints(tmp_path / "run" / "checkpoints")


def test_records_that_are_removed_during_a_run_end_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at("after a step", lambda: _remove(tmp_path / "run" / "tokens"), monkeypatch)
    code, printed = train(tmp_path / "run")
    assert code == 0 and "nothing more is recorded" in printed
    assert not (tmp_path / "run" / "tokens").exists()
