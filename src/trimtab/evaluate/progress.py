"""How an evaluation is shown while it goes on: a progress bar in a terminal, else plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich import progress as rich_progress
from rich.console import Console
from rich.text import Text

from trimtab.evaluate.folder import Generation
from trimtab.text import clock, printable

Advance = Callable[[Sequence[Generation]], None]
LINE_EVERY = 15.0  # seconds


class Progress(Protocol):
    """Where an evaluation tells what it does."""

    def message(self, text: str) -> None:
        """Something a person should read."""
        ...

    def samples(self, total: int, done: int) -> AbstractContextManager[Advance]:
        """A context in which batches of samples arrive."""
        ...


@dataclass
class Count:
    """Samples so far, and how fast they come."""

    total: int
    done: int
    failed: int = 0
    tokens: float = 0.0
    new: int = 0

    def __post_init__(self) -> None:
        self.began = time.monotonic()

    def add(self, batch: Sequence[Generation]) -> None:
        """Note a batch."""
        self.done += len(batch)
        self.new += len(batch)
        self.failed += sum(generation.failed is not None for generation in batch)
        self.tokens += sum(generation.tokens or 0.0 for generation in batch)

    def words(self) -> str:
        """Speed, time left, and what failed."""
        gone = max(time.monotonic() - self.began, 1e-9)
        left = clock(gone / self.new * (self.total - self.done)) if self.new else "-"
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"{self.tokens / gone:,.0f} tokens/s, {left} left{failed}"


@dataclass
class PlainProgress:
    """Lines for logs and pipes, one now and then."""

    write: Callable[[str], object]
    every: float = LINE_EVERY

    def message(self, text: str) -> None:
        """Something a person should read."""
        self.write(printable(text))

    @contextmanager
    def samples(self, total: int, done: int) -> Iterator[Advance]:
        """A line at most every few seconds, and at the end."""
        count, said = Count(total, done), time.monotonic()

        def advance(batch: Sequence[Generation]) -> None:
            nonlocal said
            count.add(batch)
            if count.done == total or time.monotonic() - said >= self.every:
                said = time.monotonic()
                self.write(f"samples {count.done:,}/{total:,}  {count.words()}")

        yield advance


@dataclass
class LiveProgress:
    """A progress bar."""

    console: Console

    def message(self, text: str) -> None:
        """Something a person should read."""
        self.console.print(Text(printable(text)))

    @contextmanager
    def samples(self, total: int, done: int) -> Iterator[Advance]:
        """A bar that grows with every batch."""
        count = Count(total, done)
        columns = (
            rich_progress.TextColumn("samples"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[words]}"),
        )
        with rich_progress.Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task("samples", total=total, completed=done, words="")

            def advance(batch: Sequence[Generation]) -> None:
                count.add(batch)
                bar.update(task, completed=count.done, words=count.words())

            yield advance
