"""Where a run reports to: a `Reporter`, which shows it to a person, and external loggers of metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from signal import SIGINT, Signals
from typing import Any, Protocol

from trimtab.config import Config
from trimtab.stop_signals import StopRequest
from trimtab.train.run_folder import RunFolder

Log = Callable[[int, Mapping[str, float]], object]
Close = Callable[[], object]


class Reporter(Protocol):
    """Shows the progress of a run."""

    def message(self, text: str) -> None:
        """Show a message."""

    def warm(self, step: int, steps: int, loss: float) -> None:
        """Show a step of the warm start."""

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Show an RL step."""

    def close(self) -> None:
        """End the display."""


def announce_stop(reporter: Reporter) -> Callable[[StopRequest], None]:
    """Return a function that shows that a signal has asked the run to stop."""

    def show(request: StopRequest) -> None:
        if request.number == SIGINT:
            reporter.message("finishing this step; press Ctrl-C again to stop at once")
        else:
            reporter.message(f"{Signals(request.number).name} received: finishing this step, then saving a checkpoint")

    return show


class Loggers:
    """The loggers of `run.loggers`. One that fails is dropped with a warning: `metrics.jsonl` has everything."""

    def __init__(self, config: Config, folder: RunFolder, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self.active: dict[str, tuple[Log, Close]] = {}
        for name in config.run.loggers:
            with self._dropped_on_error(name, "could not be opened and is not used"):
                self.active[name] = _OPENERS[name](config, folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step to every logger."""
        for name, (log, _) in list(self.active.items()):  # a copy, since a failing logger is deleted
            with self._dropped_on_error(name, "failed and is not used any more"):
                log(step, metrics)

    def close(self) -> None:
        """Close every logger."""
        for name, (_, close) in list(self.active.items()):
            with self._dropped_on_error(name, "did not close"):
                close()
        self.active = {}

    @contextmanager
    def _dropped_on_error(self, name: str, problem: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any: these are other people's packages, networks and accounts
            self.active.pop(name, None)
            self.warn(f"warning: the {name} logger {problem}: {error!r:.200}")


def _wandb(config: Config, folder: RunFolder) -> tuple[Log, Close]:
    import wandb  # imported here: only runs that ask for a logger need its package

    run: Any = wandb.init(project="trimtab", name=folder.path.name, config=config.model_dump(), dir=folder.path)
    return (lambda step, metrics: run.log(dict(metrics), step=step)), run.finish


def _trackio(config: Config, folder: RunFolder) -> tuple[Log, Close]:
    import trackio

    trackio.init(project="trimtab", name=folder.path.name, config=config.model_dump())
    return (lambda step, metrics: trackio.log(dict(metrics), step=step)), trackio.finish


def _tensorboard(config: Config, folder: RunFolder) -> tuple[Log, Close]:
    from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard besides torch

    writer = SummaryWriter(folder.path / "tensorboard")

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


_OPENERS = {"wandb": _wandb, "trackio": _trackio, "tensorboard": _tensorboard}
