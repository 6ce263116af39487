"""The `eval` command: evaluate or regrade with a progress display, compare, and show and store the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.text import Text

from trimtab.experiments.evaluate import EvalOptions, report
from trimtab.experiments.evaluate.folder import BASELINE, EvalFolder, Generation
from trimtab.experiments.evaluate.run import EvalProgress, EvalResult, evaluate, grade_evaluation, trusted_rule
from trimtab.experiments.evaluate.settings import parse_benchmarks, with_benchmarks
from trimtab.files import locked
from trimtab.process import exit_code
from trimtab.text import PrintLine, clock, printable
from trimtab.trainer.train import hub_note

NOTHING_EVALUATED = 2  # the exit code
LINE_EVERY = 15.0  # seconds; a log of hours stays readable
Advance = Callable[[Sequence[Generation]], None]


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


@dataclass
class SampleCounter:
    """Counts samples and measures their rate."""

    total: int
    done: int
    failed: int = 0
    tokens: float = 0.0
    new: int = 0  # of this process: the rate must not count samples of an earlier one

    def __post_init__(self) -> None:
        self.start = time.monotonic()

    def add(self, batch: Sequence[Generation]) -> None:
        """Count a batch."""
        self.done += len(batch)
        self.new += len(batch)
        self.failed += sum(generation.failed is not None for generation in batch)
        self.tokens += sum(generation.tokens or 0.0 for generation in batch)

    def status(self) -> str:
        """Return speed, time left, and the number of failed samples."""
        elapsed = max(time.monotonic() - self.start, 1e-9)  # the first batch may be instant
        left = clock(elapsed / self.new * (self.total - self.done)) if self.new else "-"
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"{self.tokens / elapsed:,.0f} tokens/s, {left} left{failed}"


@dataclass
class PlainProgress:
    """Lines for logs and pipes."""

    write: PrintLine
    every: float = LINE_EVERY

    def message(self, text: str) -> None:
        """Show a message."""
        self.write(printable(text))

    @contextmanager
    def samples(self, total: int, done: int) -> Iterator[Advance]:
        """Write a line at most every few seconds, and at the end."""
        count, last = SampleCounter(total, done), time.monotonic()

        def advance(batch: Sequence[Generation]) -> None:
            nonlocal last
            count.add(batch)
            if count.done == total or time.monotonic() - last >= self.every:
                last = time.monotonic()
                self.write(f"samples {count.done:,}/{total:,}  {count.status()}")

        yield advance


@dataclass
class LiveProgress:
    """A progress bar."""

    console: Console

    def message(self, text: str) -> None:
        """Show a message."""
        self.console.print(Text(printable(text)))

    @contextmanager
    def samples(self, total: int, done: int) -> Iterator[Advance]:
        """Advance the bar with every batch."""
        count = SampleCounter(total, done)
        columns = ("samples", BarColumn(), MofNCompleteColumn(), "{task.fields[status]}")
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task("samples", total=total, completed=done, status="")

            def advance(batch: Sequence[Generation]) -> None:
                count.add(batch)
                bar.update(task, completed=count.done, status=count.status())

            yield advance
