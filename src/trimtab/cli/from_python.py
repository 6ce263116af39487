"""`tt.train`: train from Python, as the command does."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trimtab.cli.launch import TrainRequest, hide_progress_bars, train_in_folder
from trimtab.text import printable, slug
from trimtab.trainer.config import load
from trimtab.trainer.parallel import World
from trimtab.trainer.train import INVALID, STOPPED, SavedRun, load_run


def train(
    recipe: str | Path | Mapping[str, Any] = "demo",
    settings: Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    quiet: bool = False,
) -> SavedRun:
    """Train as `trimtab train` does, and return the run.

    `recipe` is the name of a recipe that comes with trimtab, a .toml file, or a table of sections. `settings` change
    keys of it. `out` and `resume` are those of the command. With `quiet` only warnings and alarms are printed.

    Ctrl-C (in a notebook: interrupt) ends the run after its present step, with a checkpoint; a second one ends it at
    once. A run that stopped before its last step is returned too: `run.state` is then `"stopped"`.

    ```python
    run = tt.train("demo", {"objective": "stapo", "run.steps": 20})
    run = tt.train(resume=run.path, settings={"run.steps": 40})
    ```
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("tt.train trains in one process; on several GPUs: trimtab train RECIPE --gpus N")
    request = _request(recipe, settings or {}, out, resume)
    hide_progress_bars()
    # A notebook shows the two streams out of order, so all lines of a run go to one of them.
    warn = _print_error if quiet else _print_line
    threads = torch.get_num_threads()
    try:
        ended = train_in_folder(
            request,
            World(),
            quiet=quiet,
            print_line=_print_warning if quiet else _print_line,
            print_error=warn,
        )
    finally:
        torch.set_num_threads(threads)  # a small model trains on one; what comes next may be large
    if ended.code == INVALID:
        raise ValueError(ended.error)
    if ended.code not in (0, STOPPED):
        raise KeyboardInterrupt(ended.error)
    return load_run(ended.folder.path)


def _request(
    recipe: str | Path | Mapping[str, Any],
    settings: Mapping[str, Any],
    out: str | Path | None,
    resume: str | Path | None,
) -> TrainRequest:
    """Check everything that can be checked before anything is loaded."""
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    if resume is not None:
        if out is not None:
            raise ValueError("resume continues in the run's own folder: leave out `out`")
        before = load_run(resume).path / "config.toml"
        return TrainRequest(load(before, settings), str(before), resume=Path(resume))
    folder = None if out is None else Path(out)
    if folder is not None and (folder / "config.toml").exists():
        raise ValueError(
            f"{folder} already holds a run: choose another `out`, read it with tt.load_run, or go on with it: "
            f"tt.train(resume={str(folder)!r})"
        )
    config = load(recipe, settings)
    if isinstance(recipe, Mapping):
        return TrainRequest(config, "", folder, name=slug(f"{config.task.name}-{config.objective['name']}"))
    return TrainRequest(config, str(recipe), folder)


def _print_line(text: str) -> None:
    print(printable(text), flush=True)  # noqa: T201


def _print_error(text: str) -> None:
    print(printable(text), file=sys.stderr)  # noqa: T201


def _print_warning(line: str) -> None:
    if line.startswith("warning"):
        _print_error(line)
