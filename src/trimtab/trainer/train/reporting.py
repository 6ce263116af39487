"""Where a run reports to: a `Reporter`, which shows it to a person, and external loggers."""

from __future__ import annotations

import html
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from signal import SIGINT, Signals
from textwrap import indent
from typing import Any, Protocol

from trimtab.text import install_command, printable, shorten
from trimtab.trainer.config import Config
from trimtab.trainer.train.alarm_actions import Alarm
from trimtab.trainer.train.run_folder import RunFolder

LONGEST_TEXT = 4_000  # characters of a prompt, response or alarm


@dataclass(frozen=True)
class SampleText:
    """A response of a step as text, for people."""

    prompt: str
    response: str
    answer: str
    verdict: str
    reward: float


class Reporter:
    """Shows the progress of a run. This one shows nothing: it is that of every process but rank 0."""

    def message(self, text: str) -> None:
        """Show a message."""

    def warm(self, step: int, steps: int, loss: float) -> None:
        """Show a step of the warm start."""

    def step(self, step: int, steps: int, metrics: Mapping[str, float], samples: Sequence[SampleText] = ()) -> None:
        """Show an RL step, and perhaps one of its samples."""

    def close(self) -> None:
        """End the display."""


def announce_stop(reporter: Reporter) -> Callable[[int], None]:
    """Return a function that shows that a signal has asked the run to stop."""

    def show(number: int) -> None:
        if number == SIGINT:
            reporter.message("finishing this step; press Ctrl-C again to stop at once")
        else:
            reporter.message(f"{Signals(number).name} received: finishing this step, then saving a checkpoint")

    return show


class Logger(Protocol):
    """One external logger of a run."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""

    def samples(self, step: int, samples: Sequence[SampleText]) -> None:
        """Log some responses of a step."""

    def alarm(self, alarm: Alarm) -> None:
        """Log an alarm."""

    def close(self) -> None:
        """Send what is left."""


class Loggers:
    """The loggers of `run.loggers`; one that cannot be opened raises ValueError.

    One that fails later is dropped with a warning: the run's own files have everything. One that cannot log a sample or
    an alarm still gets metrics.
    """

    def __init__(self, config: Config, folder: RunFolder, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self.every = config.run.log_samples
        self.active: dict[str, Logger] = {}
        self._without: set[tuple[str, str]] = set()  # logger, and what it failed to log
        for name in config.run.loggers:
            try:
                self.active[name] = _LOGGERS[name](config, folder)
            except Exception as error:  # as below; hours of a run should not go unlogged because of a warning
                self.close()
                raise ValueError(f"run.loggers: {name} cannot be opened: {_advice(name, error)}") from error

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleText] = ()) -> None:
        """Send the metrics of a step to every logger, and its samples if they are due."""
        for name, logger in list(self.active.items()):  # a copy, since a failing logger is deleted
            with self._dropped_on_error(name, "failed and is not used any more"):
                logger.metrics(step, metrics)
        if samples and self.every and step % self.every == 0:
            self._send("samples", lambda logger: logger.samples(step, samples))

    def alarm(self, alarm: Alarm) -> None:
        """Send an alarm to every logger."""
        self._send("alarms", lambda logger: logger.alarm(alarm))

    def close(self) -> None:
        """Close every logger."""
        for name, logger in list(self.active.items()):
            with self._dropped_on_error(name, "did not close"):
                logger.close()
        self.active = {}

    def _send(self, what: str, send: Callable[[Logger], None]) -> None:
        for name, logger in self.active.items():
            if (name, what) in self._without:
                continue
            try:
                send(logger)
            except Exception as error:  # as below
                self._without.add((name, what))
                self.warn(f"warning: the {name} logger gets no more {what}: {error!r:.200}")

    @contextmanager
    def _dropped_on_error(self, name: str, problem: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any: these are other people's packages, networks and accounts
            self.active.pop(name, None)
            self.warn(f"warning: the {name} logger {problem}: {error!r:.200}")


def _advice(name: str, error: Exception) -> str:
    """Say what is wrong with a logger, and what to do."""
    if isinstance(error, ModuleNotFoundError):
        return f"it needs a package: {install_command(extra=name)}, or leave {name} out of run.loggers"
    remedy = 'run `wandb login`, set run.wandb_mode = "offline", or ' if name == "wandb" else ""
    return f"{printable(str(error)).strip() or repr(error):.300}. To go on: {remedy}leave {name} out of run.loggers"


COLUMNS = tuple(field.name for field in fields(SampleText))


def _rows(samples: Sequence[SampleText]) -> list[list[Any]]:
    """Return samples as rows of text without control characters, and of bounded length."""
    shown = [[getattr(sample, name) for name in COLUMNS] for sample in samples]
    return [
        [shorten(printable(value), LONGEST_TEXT) if isinstance(value, str) else value for value in row] for row in shown
    ]


class _Wandb:
    def __init__(self, config: Config, folder: RunFolder) -> None:
        import wandb  # imported here: only runs that ask for a logger need its package

        self.wandb: Any = wandb
        run = config.run
        chosen = {"group": run.wandb_group, "tags": run.wandb_tags, "mode": run.wandb_mode}
        self.run = wandb.init(
            project=run.logger_project,
            name=run.logger_name or folder.path.name,
            config=config.model_dump(),
            dir=folder.path,
            # What is not set is left to wandb's own environment variables.
            **{key: value for key, value in chosen.items() if value},
        )

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def samples(self, step: int, samples: Sequence[SampleText]) -> None:
        self.run.log({"samples": self.wandb.Table(columns=list(COLUMNS), data=_rows(samples))}, step=step)

    def alarm(self, alarm: Alarm) -> None:
        self.run.alert(title=f"{alarm.alarm} at step {alarm.step}", text=_alarm_text(alarm))

    def close(self) -> None:
        self.run.finish()


class _Trackio:
    def __init__(self, config: Config, folder: RunFolder) -> None:
        import trackio

        self.trackio: Any = trackio
        name = config.run.logger_name or folder.path.name
        trackio.init(project=config.run.logger_project, name=name, config=config.model_dump())

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.trackio.log(dict(metrics), step=step)

    def samples(self, step: int, samples: Sequence[SampleText]) -> None:
        self._table("samples", step, [dict(zip(COLUMNS, row, strict=True)) for row in _rows(samples)])

    def alarm(self, alarm: Alarm) -> None:
        self._table("alarms", alarm.step, [{"alarm": alarm.alarm, "text": _alarm_text(alarm)}])

    def close(self) -> None:
        self.trackio.finish()

    def _table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        # A dependency of trackio's; its tables take the names of their columns from nothing else.
        pandas = importlib.import_module("pandas")

        # Cells are rendered as Markdown with HTML, and a model's text may be any.
        rows = [{k: html.escape(v) if isinstance(v, str) else v for k, v in row.items()} for row in rows]
        self.trackio.log({name: self.trackio.Table(dataframe=pandas.DataFrame(rows))}, step=step)


class _Tensorboard:
    def __init__(self, config: Config, folder: RunFolder) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard besides torch

        self.writer: Any = SummaryWriter(folder.path / "tensorboard")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def samples(self, step: int, samples: Sequence[SampleText]) -> None:
        texts = [
            "\n".join(f"{name}: {value}" for name, value in zip(COLUMNS, row, strict=True)) for row in _rows(samples)
        ]
        self.writer.add_text("samples", "\n\n---\n\n".join(map(_code_block, texts)), step)

    def alarm(self, alarm: Alarm) -> None:
        self.writer.add_text(f"alarms/{alarm.alarm}", _code_block(_alarm_text(alarm)), alarm.step)

    def close(self) -> None:
        self.writer.close()


def _code_block(text: str) -> str:
    """Return Markdown that shows a text as it is: a model may have written anything."""
    return indent(text, "    ", lambda line: True)


def _alarm_text(alarm: Alarm) -> str:
    return shorten(printable(f"{alarm.message}. {alarm.suggestion}"), LONGEST_TEXT)


_LOGGERS: dict[str, Callable[[Config, RunFolder], Logger]] = {
    "wandb": _Wandb,
    "trackio": _Trackio,
    "tensorboard": _Tensorboard,
}
