"""From a command line to a run and back to an exit code: which recipe, which folder, which display, and what to say."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.config import Config, find_recipe, load
from trimtab.console.display import LiveReporter
from trimtab.console.reporters import PlainReporter
from trimtab.console.summary_text import model_words, summarize, task_words
from trimtab.memory import advice, is_out_of_memory
from trimtab.objectives import EntropyGate
from trimtab.train import Reporter, Run, RunFolder, RunStoppedError, Stop, Watcher, train

DEFAULT_RECIPE = "demo"
WRONG, STOPPED, INTERRUPTED = 2, 3, 130  # exit codes

Say = Callable[[str], object]


@dataclass(frozen=True)
class Launch:
    """A run that could start: `recipe` is what the user called it; without `out` a folder is chosen."""

    config: Config
    recipe: str
    out: Path | None = None
    resume: Path | None = None


def resolve(recipe: str | None, settings: Sequence[str], out: Path | None, resume: Path | None) -> Launch:
    """Read and check everything that can be checked before anything is loaded."""
    if resume is None:
        if out is not None and out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is a file; a run is a folder")
        recipe = recipe or DEFAULT_RECIPE
        return Launch(load(recipe, settings), recipe, out)
    if out is not None:
        raise ValueError("--resume goes on in its own folder: leave --out away")
    if not (resume / "config.toml").exists():
        raise ValueError(f"{resume} holds no run to resume")
    return Launch(load(recipe or resume / "config.toml", settings), recipe or str(resume / "config.toml"), None, resume)


def launch_run(
    wanted: Launch,
    quiet: bool,
    say: Say,
    complain: Say,
    watcher: Watcher | None = None,
    report: Callable[[Path], object] | None = None,
) -> int:
    """Run it, end with a summary, and give the exit code. What goes wrong is said in words, never as a traceback.

    `report` is called with the folder of a run that has something to show, before the summary.
    """
    folder = RunFolder(wanted.resume or wanted.out or claim_folder(wanted))
    new = wanted.resume is None and not (folder.path / "config.toml").exists()
    _hush_libraries()
    reporter = make_reporter(wanted, folder, quiet, say)
    run = Run(wanted.config, folder, reporter, wanted.resume is not None, watcher)
    began = time.monotonic()
    code, fault = _run(run, reporter)
    seconds = time.monotonic() - began
    if fault:
        complain(f"trimtab: {fault}")
    if new and not folder.checkpoints.exists():
        forget(folder)
        return code
    if folder.records() and code in (0, STOPPED, INTERRUPTED):
        if report is not None and wanted.config.run.report and code != INTERRUPTED:
            report(folder.path)
        say(summarize(wanted.config, folder, seconds, wanted.recipe))
    return code


def _run(run: Run, reporter: Reporter) -> tuple[int, str]:
    """Train; an exit code, and what is to be said about it."""
    try:
        train(run)
    except RunStoppedError as error:
        return STOPPED, f"stopped after step {run.progress.step}: {error}"
    except KeyboardInterrupt:
        if not run.folder.checkpoints.exists():
            return INTERRUPTED, "stopped before the first step; the same command goes on with the warm start"
        return INTERRUPTED, f"stopped at once; go on with: trimtab train --resume {run.folder.path}"
    except (ValueError, OSError) as error:
        return WRONG, str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return WRONG, advice(error, run.config)
    finally:
        reporter.close()
    return (STOPPED if run.stopped is Stop.INTERRUPTED else 0), ""


def make_reporter(wanted: Launch, folder: RunFolder, quiet: bool, say: Say) -> Reporter:
    """The live display in a terminal, else plain lines."""
    if quiet or not sys.stdout.isatty():
        return PlainReporter(say)
    objective = wanted.config.build_objective()
    gates = [gate for gate in objective.controllers.values() if isinstance(gate, EntropyGate)]
    title = f"{objective.name} · {model_words(wanted.config)} · {task_words(wanted.config)} · {folder.path}"
    return LiveReporter(title, gates[0].target if gates else None, earlier=folder.records())


def claim_folder(wanted: Launch, parent: Path = Path("runs")) -> Path:
    """runs/<recipe>-<objective>-<n> with the first n that is free; made at once, so two runs never share it."""
    stem = f"{recipe_name(wanted.recipe)}-{slug(str(wanted.config.objective['name']))}"
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        try:
            (parent / f"{stem}-{number}").mkdir()
        except FileExistsError:
            number += 1
        else:
            return parent / f"{stem}-{number}"


def forget(folder: RunFolder) -> None:
    """Take away the folder of a run that never began, so that the same command can be given again."""
    (folder.path / "config.toml").unlink(missing_ok=True)
    folder.metrics.unlink(missing_ok=True)
    if folder.path.is_dir() and not any(folder.path.iterdir()):
        folder.path.rmdir()


def recipe_name(recipe: str) -> str:
    """A recipe's short name."""
    return find_recipe(recipe).stem


def slug(objective: str) -> str:
    """An objective's name as a folder name: `sspo + s2t` is `sspo+s2t`."""
    tight = re.sub(r"\s*\+\s*", "+", objective.strip())
    return re.sub(r"[^\w.+=,-]+", "-", tight).strip("-")


def _hush_libraries() -> None:
    """Progress bars of libraries would write over the display."""
    from transformers.utils import logging

    logging.disable_progress_bar()
