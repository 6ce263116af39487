"""Train a recipe as the command line asks: recipe, folder, reporter, training, errors, summary."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.cli.display import LiveReporter, PlainReporter
from trimtab.cli.summary import closing_summary, fit_lines
from trimtab.process import STOP_SIGNALS, exit_code
from trimtab.text import PrintLine, command, slug
from trimtab.trainer.config import Config, RunModel, find_checkpoint, find_recipe, find_run_model, load
from trimtab.trainer.memory import is_out_of_memory, oom_message
from trimtab.trainer.model import DEMO_MODELS
from trimtab.trainer.parallel import LOST, LostProcessError, World, join_world
from trimtab.trainer.train import (
    INVALID,
    STOPPED,
    UNSAVED,
    Reporter,
    Run,
    RunFolder,
    RunStoppedError,
    StopReason,
    describe_model,
    describe_task,
    export_model,
    follow_run,
    train,
)


@dataclass(frozen=True)
class TrainRequest:
    """A checked command line: `recipe` as the user named it; without `out` and `resume` a new folder is made.

    That folder is called `name` or, by default, after recipe and objective.
    """

    config: Config
    recipe: str
    out: Path | None = None
    resume: Path | None = None
    name: str | None = None
    watch: bool = False  # whether a page follows the run


def resolve_request(
    recipe: str | None,
    settings: Sequence[str],
    out: Path | None = None,
    resume: Path | None = None,
    start: str | None = None,
    keep_optimizer: bool = False,
) -> TrainRequest:
    """Read and check everything that can be checked before anything is loaded."""
    if keep_optimizer and start is None:
        raise ValueError("--keep-optimizer goes with --from: it names the checkpoint whose optimizer is kept")
    if resume is None:
        if out is not None and out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is a file; a run is a folder")
        if start is not None:
            return _start_request(recipe, settings, out, find_checkpoint(start), keep_optimizer)
        recipe = recipe or "demo"
        return TrainRequest(load(recipe, settings), recipe, out)
    if start is not None:
        raise ValueError("--resume goes on with a run as it was, --from starts a new one: give one of them")
    if out is not None:
        raise ValueError("--resume continues in the run's own folder: leave out --out")
    if not (resume / "config.toml").exists():
        raise ValueError(f"{resume} holds no run to resume")
    recipe = recipe or str(resume / "config.toml")
    return TrainRequest(load(recipe, settings), recipe, None, resume)


def _start_request(
    recipe: str | None, settings: Sequence[str], out: Path | None, found: RunModel, keep_optimizer: bool
) -> TrainRequest:
    """Return a new run from a checkpoint; its recipe is, if none is given, that of the checkpoint's run."""
    if given := [each for each in settings if each.partition("=")[0].strip() in ("model", "model.path")]:
        raise ValueError(f"--from names the model already: leave out --set {given[0]}")
    before, checkpoint = found.config(), str(found.folder.absolute())
    recipe = recipe or str(found.run / "config.toml")
    # The warm start is behind the checkpoint; whoever wants another one says so.
    start = {
        "model.start_from": checkpoint,
        "model.start_optimizer": keep_optimizer,
        "model.path": before.model.path,
        "warm_start.steps": 0,
    }
    config = load(recipe, [*_as_settings(start), *settings])
    if not trains_the_same_weights(config, before):
        # Adapters of another shape, or none: the checkpoint's are merged into the model that the new run starts with.
        if keep_optimizer:
            raise ValueError("--keep-optimizer: the new run trains other weights (model.lora_*) than the checkpoint's")
        config = load(recipe, [*_as_settings(start | {"model.path": checkpoint}), *settings])
    step = found.folder.name.removeprefix("step-").lstrip("0") or "0"
    return TrainRequest(config, recipe, out, name=f"{found.run.absolute().name}-from-{step}")


def _as_settings(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]


def trains_the_same_weights(config: Config, before: Config) -> bool:
    """Return whether the weights that one run trains fit those of another: whole models, or the same adapters."""
    new, old = config.model, before.model
    if not new.lora_rank and not old.lora_rank:
        return True
    same_base = new.path == old.path and (new.path not in DEMO_MODELS or config.run.seed == before.run.seed)
    return same_base and all(
        getattr(new, key) == getattr(old, key) for key in ("lora_rank", "lora_alpha", "lora_targets")
    )


def export_run(path: str, out: Path | None, precision: str) -> Path:
    """Write the model of a run or a checkpoint to a folder in the format of transformers; return the folder."""
    hide_progress_bars()
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"--precision {precision}: it must be fp32 or bf16")
    found = find_run_model(path)
    if found is None:
        find_checkpoint(path)  # raises with the reason
        raise ValueError(f"{path} is no run")
    step = "" if found.checkpoint is None else f"-{found.checkpoint.name.removeprefix('step-').lstrip('0') or '0'}"
    folder = out or found.run / f"export{step}"
    export_model(path, folder, "bf16" if precision == "bf16" else "fp32")
    return folder


def hide_progress_bars() -> None:
    """Turn off the progress bars of transformers, which would write over the live display."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@dataclass(frozen=True)
class EndedRun:
    """The folder of a run that has ended, its exit code, and the error that ended it, empty if there was none."""

    folder: RunFolder
    code: int
    error: str


def launch_run(request: TrainRequest, *, quiet: bool, print_line: PrintLine, print_error: PrintLine) -> int:
    """Train as `train_in_folder` does, or follow the run of rank 0, and return the exit code; errors are printed."""
    hide_progress_bars()
    world = join_world(request.config.run.device)
    if not world.leads:
        return _follow(request.config, world, print_error)
    ended = train_in_folder(request, world, quiet=quiet, print_line=print_line, print_error=print_error)
    if ended.code == INVALID:
        print_error(f"trimtab: {ended.error}")
    return ended.code


def train_in_folder(
    request: TrainRequest, world: World, *, quiet: bool, print_line: PrintLine, print_error: PrintLine
) -> EndedRun:
    """Train, write the report, print a summary; say why a run that can be resumed has stopped, return other errors."""
    folder = RunFolder(request.resume or request.out or claim_folder(request))
    with _watched(request, folder, print_line, print_error):
        return _train_here(request, folder, world, quiet=quiet, print_line=print_line, print_error=print_error)


@contextmanager
def _watched(request: TrainRequest, folder: RunFolder, print_line: PrintLine, print_error: PrintLine) -> Iterator[None]:
    """Have a page follow the run, if it is asked for."""
    if not request.watch:
        yield
        return
    from trimtab.insight.watch import start_watch

    beside = start_watch(folder.path)
    print_line(f"watch: {beside.address}")
    try:
        yield
    finally:
        if problem := beside.stop():
            print_error(f"warning: {problem}")


def _train_here(
    request: TrainRequest,
    folder: RunFolder,
    world: World,
    *,
    quiet: bool,
    print_line: PrintLine,
    print_error: PrintLine,
) -> EndedRun:
    from trimtab.insight.alarms import alarm_monitor  # here: a dry run starts without them

    reporter = make_reporter(request, folder, quiet, print_line)
    monitor = alarm_monitor(request.config, print_error)
    run = Run(request.config, folder, reporter, request.resume is not None, monitor, world)
    if world.watch is not None:
        world.watch.tell(lambda reason: _say_lost(run, reporter, reason, print_error))
    began = time.monotonic()
    code, error = _train(run, reporter)
    seconds = time.monotonic() - began
    if error and code != INVALID:
        print_error(f"trimtab: {error}")
    if folder.records() and code != INVALID:
        # Who sends SIGTERM or SIGHUP may not wait for the report, and a person who pressed Ctrl-C twice does not.
        wanted = request.config.run.report and code in (0, STOPPED, UNSAVED) and not run.stop_request.urgent
        stopped, report = _write_report(folder, print_error) if wanted else (0, None)
        code = stopped or code
        summary = closing_summary(request.config, folder, seconds, report, world.size, has_model=not run.model_missing)
        print_line(fit_lines(summary, shutil.get_terminal_size().columns) if sys.stdout.isatty() else summary)
    return EndedRun(folder, code, error)


def _follow(config: Config, world: World, print_error: PrintLine) -> int:
    """Take part in the run of rank 0 until it ends; return the exit code."""
    # Only rank 0 decides when to stop, and says so to the others.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        follow_run(config, world)
    except (LostProcessError, KeyboardInterrupt):
        if world.watch is not None:
            world.watch.post("left", "another process has ended")
        return LOST  # rank 0 says why
    except (ValueError, OSError) as error:
        return _fail(world, str(error), print_error)
    except Exception as error:
        memory = is_out_of_memory(error)
        code = _fail(world, oom_message(error, config) if memory else repr(error), print_error)
        if not memory:  # a bug, which needs its traceback
            raise
        return code
    finally:
        world.leave()
    return 0


def _fail(world: World, error: str, print_error: PrintLine) -> int:
    """Have rank 0 say why this process ends; return the exit code."""
    if world.watch is None:
        print_error(f"trimtab: process {world.rank} of {world.size} failed: {error}")
    else:
        world.watch.post("failed", f"failed: {error}")
    return INVALID


def _say_lost(run: Run, reporter: Reporter, reason: str, print_error: PrintLine) -> None:
    """Say why the run ends, while its main thread cannot."""
    reporter.close()
    print_error(f"trimtab: {_lost_message(run, reason)}")


def _lost_message(run: Run, reason: str) -> str:
    if not run.folder.checkpoints.exists():
        return f"stopped before the first step: {reason}; {_start_again(run)}"
    return f"stopped after step {run.progress.step}: {reason}. Go on with: {run.resume_command}"


def _start_again(run: Run) -> str:
    cached = run.config.warm_start.steps and run.config.warm_start.cache
    return f"the same command {'continues the warm start' if cached else 'starts again'}"


def _write_report(folder: RunFolder, print_error: PrintLine) -> tuple[int, Path | None]:
    """Write the report; return 0 and its file if there is one, or the exit code of the signal that stopped it."""
    from trimtab.insight.report import try_report

    try:
        return 0, try_report([folder.path], print_error)
    except KeyboardInterrupt as error:
        print_error(f"trimtab: stopped while writing the report; write it with: {command('report', folder.path)}")
        return exit_code(error), None


def _train(run: Run, reporter: Reporter) -> tuple[int, str]:
    """Train; return the exit code and the error message, empty if there was none."""
    try:
        train(run)
    except (RunStoppedError, LostProcessError) as error:
        return _stopped(run, error)
    except KeyboardInterrupt as error:
        if not run.folder.checkpoints.exists():
            return exit_code(error), f"stopped before the first step; {_start_again(run)}"
        return exit_code(error), f"stopped at once; resume with: {run.resume_command}"
    except (ValueError, OSError) as error:
        return INVALID, str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):  # a bug, which needs its traceback
            raise
        several = run.world.size > 1
        name = f"process {run.world.rank} of {run.world.size} failed: " if several else ""
        return INVALID, name + oom_message(error, run.config)
    finally:
        reporter.close()  # before anything is printed, or the live display would draw over it
    return (STOPPED if run.stopped is StopReason.INTERRUPTED else 0), ""


def _stopped(run: Run, error: RunStoppedError | LostProcessError) -> tuple[int, str]:
    """Return the exit code and the message of a run that has stopped."""
    if isinstance(error, LostProcessError):
        return LOST, _lost_message(run, run.world.lost_reason(error))
    # Without a folder there is no checkpoint.
    code = INVALID if error.reason is StopReason.FOLDER_GONE else UNSAVED if run.unsaved else STOPPED
    return code, f"stopped after step {run.progress.step}: {error}"


def make_reporter(request: TrainRequest, folder: RunFolder, quiet: bool, print_line: PrintLine) -> Reporter:
    """Return the live display in a terminal, else plain lines."""
    objective = request.config.build_objective()
    if quiet or not sys.stdout.isatty():
        return PlainReporter(print_line, target_entropy=objective.entropy_target)
    title = f"{objective.name} · {describe_model(request.config)} · {describe_task(request.config)} · {folder.path}"
    return LiveReporter(title, objective.entropy_target, earlier=folder.records())


def claim_folder(request: TrainRequest) -> Path:
    """Make and return runs/<recipe>-<objective>-<n> with the first free n, or runs/<run>-from-<step>-<n>."""
    stem = request.name or f"{recipe_name(request.recipe)}-{slug(str(request.config.objective['name']))}"
    parent = Path("runs")
    parent.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        number += 1
        # mkdir fails if the folder exists, so two runs that start at the same time never share one.
        with suppress(FileExistsError):
            (folder := parent / f"{stem}-{number}").mkdir()
            return folder


def recipe_name(recipe: str) -> str:
    """Return a recipe's name for folders that are made from it; the config.toml of a run has the name of the run."""
    path = find_recipe(recipe)
    return path.absolute().parent.name if path.name == "config.toml" else path.stem
