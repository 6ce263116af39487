"""The `eval` command: evaluate or regrade, compare, and show and store the result."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

from trimtab.experiments.evaluate import report
from trimtab.experiments.evaluate.folder import BASELINE, EvalFolder
from trimtab.experiments.evaluate.held_out import with_benchmarks
from trimtab.experiments.evaluate.options import EvalOptions
from trimtab.experiments.evaluate.progress import EvalProgress, LiveProgress, PlainProgress
from trimtab.experiments.evaluate.run import EvalResult, evaluate, grade_evaluation, trusted_rule
from trimtab.experiments.evaluate.settings import parse_benchmarks
from trimtab.files import locked
from trimtab.stop_signals import exit_code
from trimtab.trainer.train import hub_note

NOTHING_EVALUATED = 2  # the exit code


def evaluate_and_show(options: EvalOptions) -> int:
    """Evaluate, compare where `--against` is given, show and store the result; return the exit code."""
    console = make_console()
    progress = make_progress(console, options.quiet)
    # A mistyped run looks like a model of the hub, whose evaluation may end for other reasons.
    if options.connection is None and (note := hub_note(options.name, "MODEL")):
        progress.message(note)
    options = with_benchmarks(options)
    options.folder.check()
    try:
        # The baseline first: where it cannot be compared with, nothing else is sampled.
        baseline = evaluate_baseline(options, options.against, progress) if options.against is not None else None
        if baseline is not None:
            check_comparable(baseline, parse_benchmarks(options.benchmarks))
        result = evaluate(options, progress)
    except KeyboardInterrupt as error:
        progress.message(f"stopped; every finished batch is in {options.folder.path}: the same command resumes it")
        return exit_code(error)
    finish(console, result, baseline, options.papers)
    if all(metrics.average is None for metrics in result.metrics.values()):
        progress.message("nothing was evaluated: no response could be generated and graded; the notes above say why")
        return NOTHING_EVALUATED
    return 0


def check_comparable(baseline: EvalResult, benchmarks: Sequence[str]) -> None:
    """Raise before anything is sampled where a finished evaluation has none of the benchmarks."""
    theirs = baseline.settings.benchmarks
    if not set(theirs) & set(benchmarks):
        raise ValueError(
            f"--against {baseline.folder.path} has {', '.join(theirs)} and no benchmark in common with "
            f"{', '.join(benchmarks)}: nothing could be compared; choose others with --benchmarks"
        )


def regrade_and_show(path: Path, options: EvalOptions) -> int:
    """Grade a folder's generations again, by its own rule or `--rule`; return the exit code."""
    folder, console = EvalFolder(path), make_console()
    settings = folder.settings()
    log = make_progress(console, options.quiet).message
    with locked(folder.path):
        result = grade_evaluation(folder, options.rule or trusted_rule(folder, settings.rule), log)
    finish(console, result, None, options.papers)
    return 0


def evaluate_baseline(options: EvalOptions, against: str, progress: EvalProgress) -> EvalResult:
    """Return the evaluation to compare with: a finished one by its folder, or another model evaluated the same way."""
    folder = EvalFolder(Path(against).expanduser())
    if (folder.path / "settings.json").is_file():
        result = grade_evaluation(folder)
        requested = result.settings.samples
        if sum(map(len, result.samples.values())) < sum(requested[item.benchmark] for item in folder.problems()):
            raise ValueError(f"the evaluation in {folder.path} is not finished: run its command again")
        return result
    model = replace(options, model=against, model_name=against if options.endpoint else None, resume=False)
    result = evaluate(replace(model, out=options.out / BASELINE if options.out else None), progress)
    report.write(result)
    return result


def finish(console: Console, result: EvalResult, baseline: EvalResult | None, papers: bool) -> None:
    """Show and store a result."""
    report.write(result, baseline, papers)
    report.show(console, result, baseline, papers)
    files = "result.md, result.json, generations.jsonl, verdicts.jsonl"
    console.print(f"kept in {result.folder.path}: {files}", markup=False)


def make_console() -> Console:
    """Return a console; a log file gets wide lines, so that tables are not folded."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def make_progress(console: Console, quiet: bool) -> EvalProgress:
    """Return a progress bar in a terminal, else plain lines."""
    if quiet or not sys.stdout.isatty():
        return PlainProgress(typer.echo)
    return LiveProgress(console)
