"""From the command line to an evaluation and back to the screen."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

from trimtab.evaluate import report
from trimtab.evaluate.folder import EvalFolder
from trimtab.evaluate.progress import LiveProgress, PlainProgress, Progress
from trimtab.evaluate.run import EvalRequest, Evaluated, evaluate, graded, rule_of

INTERRUPTED = 130


def evaluate_and_show(
    wanted: EvalRequest, against: str | None = None, papers: bool = False, quiet: bool = False
) -> int:
    """Evaluate, compare where that is asked for, show and keep the result; the exit code."""
    console = make_console()
    progress = make_progress(console, quiet)
    try:
        theirs = other(wanted, against, progress) if against is not None else None
        ours = evaluate(wanted, progress)
    except KeyboardInterrupt:
        progress.message(f"stopped; every finished batch is kept in {wanted.folder.path}: the same command goes on")
        return INTERRUPTED
    finish(console, ours, theirs, papers)
    return 0


def regrade(path: Path, rule: str | None, papers: bool = False, quiet: bool = False) -> int:
    """Grade a folder's generations again, by its own rule or another."""
    folder, console = EvalFolder(path), make_console()
    settings = folder.settings()
    with folder.alone():
        done = graded(folder, rule or rule_of(folder, settings.rule), make_progress(console, quiet).message)
    finish(console, done, None, papers)
    return 0


def other(wanted: EvalRequest, against: str, progress: Progress) -> Evaluated:
    """The evaluation to compare with: a finished one by its folder, or one of another model, made now the same way."""
    folder = EvalFolder(Path(against).expanduser())
    if (folder.path / "settings.json").is_file():
        found = graded(folder)
        wanted_of = found.settings.samples
        if sum(map(len, found.samples.values())) < sum(wanted_of[q.benchmark] for q in folder.questions()):
            raise ValueError(f"the evaluation in {folder.path} is not finished: run its command again")
        return found
    model = replace(wanted, model=against, model_name=against if wanted.connection else None, resume=False)
    done = evaluate(replace(model, out=wanted.out / "against" if wanted.out else None), progress)
    report.write(done)
    return done


def finish(console: Console, ours: Evaluated, theirs: Evaluated | None, papers: bool) -> None:
    """Show and keep a result."""
    report.write(ours, theirs, papers)
    report.show(console, ours, theirs, papers)
    console.print(
        f"kept in {ours.folder.path}: result.md, result.json, generations.jsonl, verdicts.jsonl", markup=False
    )


def make_console() -> Console:
    """A log is as wide as its lines."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def make_progress(console: Console, quiet: bool) -> Progress:
    """A bar in a terminal, else plain lines."""
    if quiet or not sys.stdout.isatty():
        return PlainProgress(typer.echo)
    return LiveProgress(console)
