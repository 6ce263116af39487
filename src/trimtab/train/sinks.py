"""Optional sinks for metrics: wandb, trackio, tensorboard. `metrics.jsonl` is the truth; a sink that dies is let go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trimtab.config import Config
from trimtab.train.run_folder import RunFolder

Log = Callable[[int, Mapping[str, float]], object]


class Sinks:
    """The sinks a recipe asks for."""

    def __init__(self, config: Config, folder: RunFolder, say: Callable[[str], None]) -> None:
        self.say = say
        self.open: dict[str, tuple[Log, Callable[[], object]]] = {}
        for name in config.run.loggers:
            try:
                self.open[name] = _OPENERS[name](config, folder)
            except Exception as error:
                say(f"warning: the {name} sink could not be opened and is left out: {error!r:.200}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's metrics everywhere."""
        for name, (log, _) in list(self.open.items()):
            try:
                log(step, metrics)
            except Exception as error:
                del self.open[name]
                self.say(f"warning: the {name} sink failed and is left out from now on: {error!r:.200}")

    def close(self) -> None:
        """Let every sink finish."""
        for name, (_, close) in self.open.items():
            try:
                close()
            except Exception as error:
                self.say(f"warning: the {name} sink did not close: {error!r:.200}")
        self.open = {}


def _wandb(config: Config, folder: RunFolder) -> tuple[Log, Callable[[], object]]:
    import wandb

    run: Any = wandb.init(project="trimtab", name=folder.path.name, config=config.model_dump(), dir=folder.path)
    return (lambda step, metrics: run.log(dict(metrics), step=step)), run.finish


def _trackio(config: Config, folder: RunFolder) -> tuple[Log, Callable[[], object]]:
    import trackio

    trackio.init(project="trimtab", name=folder.path.name, config=config.model_dump())
    return (lambda step, metrics: trackio.log(dict(metrics), step=step)), trackio.finish


def _tensorboard(config: Config, folder: RunFolder) -> tuple[Log, Callable[[], object]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder.path / "tensorboard")

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


_OPENERS: dict[str, Callable[[Config, RunFolder], tuple[Log, Callable[[], object]]]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "tensorboard": _tensorboard,
}
