"""Show the progress of an evaluation: a bar in a terminal, else plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.text import Text

from trimtab.experiments.evaluate.folder import Generation
from trimtab.text import clock, printable

Advance = Callable[[Sequence[Generation]], None]
MessageLog = Callable[[str], object]
LINE_EVERY = 15.0  # seconds; a log of hours stays readable


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

    write: MessageLog
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


EvalProgress = PlainProgress | LiveProgress
