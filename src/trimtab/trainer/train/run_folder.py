"""The folder of a run, as a run writes it and as others read it.

It holds `config.toml` (resolved), `metrics.jsonl`, `tokens/` (records), `checkpoints/` and `model/`.
There are also `nonfinite.jsonl` if an update was not finite (which value, in which responses), `rule_errors.jsonl` if
a rule failed, `rule_output.txt` for what users' rules print, `alarms.jsonl` if an alarm was raised, `alarms/` if one
asked for a checkpoint, and `best/` with `run.keep_best`.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tomli_w

from trimtab import failpoints
from trimtab.files import (
    append_json_lines,
    is_locked,
    locked,
    remove_unfinished,
    require_empty,
    sync,
    write_atomically,
    write_json_lines,
)
from trimtab.record import (
    RECORDS_FOLDER,
    Collapse,
    Records,
    find_collapse,
    iter_step_lines,
    last_step,
    open_run,
    read_metrics,
)
from trimtab.text import PrintLine, command, shown
from trimtab.trainer.config import BEST, Config, list_checkpoints, load, load_stored
from trimtab.trainer.model import Policy
from trimtab.trainer.train import checkpoints
from trimtab.trainer.train.build import INPUTS, open_policy

# Keys that may change when a run is resumed: how long it lasts, what stops it, what it saves, how its weights are
# split, and (with a warning) the threads and the device it runs on. In the form of pydantic's `exclude`; True: all keys
# of a section.
CHANGEABLE_ON_RESUME: dict[str, Any] = {
    "run": {
        "steps", "checkpoint_every", "keep_checkpoints", "on_failed_checkpoint", "keep_best", "early_stop", "loggers",
        "logger_project", "logger_name", "wandb_group", "wandb_tags", "wandb_mode", "log_samples", "report", "patience",
        "python_path", "threads", "device",
    },
    "model": {"shard"},
    "agent": {"concurrency"},
    "update": {"on_nonfinite"},
    "rollout": {"kv_cache_memory", "vllm_gpu_memory_utilization", "vllm_options"},
    "record": True,
    "alarms": True,
}  # fmt: skip
LOGGER_FOLDERS = ("tensorboard", "wandb")  # which loggers make in the folder of a run
MODEL_FILE = re.compile(  # one of those that a trained model and its tokenizer are saved in
    r"(?:adapter_)?model(?:-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|(?:adapter_|generation_)?config\.json"
    r"|(?:tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json|chat_template\.jinja"
    r"|(?:tokenizer|spiece|sentencepiece\.bpe)\.model|README\.md|merges\.txt|vocab\.txt"
)
MOST_SETTINGS_SHOWN = 5  # in a command: a recipe that differs in more is better named than spelt out
State = Literal["running", "finished", "stopped", "collapsed", "failed"]


class RunFolder:
    """The files of a run."""

    # Outside `locked` nobody asks.
    _is_there: Callable[[], bool] = staticmethod(lambda: True)
    _created = False  # by this process

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.inputs = path / INPUTS
        self.checkpoints = path / "checkpoints"
        self.alarm_checkpoints = path / "alarms"  # the checkpoints that alarms asked for
        self.best = path / BEST  # the checkpoint with the best held-out score
        self.model = path / "model"  # of a finished run
        self.reference = path / "reference"  # the weights that the run started from, for a KL penalty
        self.metrics = path / "metrics.jsonl"  # a line per step
        self.nonfinite = path / "nonfinite.jsonl"  # a line per update that was skipped because it was not finite
        self.rule_errors = path / "rule_errors.jsonl"  # a line per step and kind of error of a grading rule
        self.rule_output = path / "rule_output.txt"  # what users' rules and tools print
        self.alarms = path / "alarms.jsonl"  # a line per alarm
        self.json_lines = (self.metrics, self.nonfinite, self.rule_errors, self.alarms)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes."""
        with locked(self.path) as self._is_there:
            yield

    def problem(self) -> str:
        """Say what is wrong if the folder was removed, moved, replaced or emptied since it was locked; else nothing."""
        if not self._is_there():
            return f"the folder {self.path} was removed or moved during the run; nothing more can be written to it"
        if not self.config.exists():  # without it the run could not be resumed
            return f"{self.config} was removed during the run; nothing more is written"
        return ""

    def create(self, config: Config) -> None:
        """Start a run; a folder that already holds one is an error."""
        if self.config.exists():
            raise ValueError(
                f"{self.path} already holds a run: choose another --out, or go on with it: "
                + command("train", "--resume", self.path)
            )
        require_empty(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(config)
        self._created = True

    def discard(self) -> None:
        """Remove what `create` made of a run that failed before its first step: the same command can be used again."""
        if not self._created or not self._is_there():
            return
        # By name: the folder was empty, but somebody may have put files there since.
        for path in (self.config, self.inputs, self.rule_output, *self.json_lines):
            path.unlink(missing_ok=True)
        for folder in (self.reference, *(self.path / name for name in LOGGER_FOLDERS)):
            shutil.rmtree(folder, ignore_errors=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def remove_weights(self) -> None:
        """Remove the weights of a run that is not to go on; what somebody has put beside them stays."""
        for folder in (self.checkpoints, self.alarm_checkpoints, self.best, self.reference):
            remove_unfinished(folder)
            for path in list_checkpoints(folder):
                checkpoints.remove(path)
            with suppress(OSError):  # it holds something else
                folder.rmdir()
        with suppress(OSError):
            if all(MODEL_FILE.fullmatch(file.name) for file in self.model.iterdir()):
                shutil.rmtree(self.model)

    def check_recipe(self, config: Config) -> None:
        """Raise if there is no run to resume, or if the recipe would change its results."""
        if not self.config.exists():
            raise ValueError(f"{self.path} holds no run to resume")
        # A resumed run removes later steps and older checkpoints: never those of the folder that a link leads to.
        records = self.path / RECORDS_FOLDER
        for folder in (records, self.checkpoints, self.alarm_checkpoints, self.best, self.reference, self.model):
            if folder.is_symlink():
                raise ValueError(f"{folder} is a link, and a run removes files there: put the folder in its place")
        for file in (self.rule_output, *self.json_lines):
            if file.is_symlink():
                raise ValueError(f"{file} is a link, and a run writes there: put the file in its place")
        changes = config_changes(load(self.config), config)
        if changes:
            lines = "".join(f"\n  {line}" for line in changes)
            raise ValueError(
                f"{self.path} was run with another recipe; these keys differ:{lines}\n"
                f"To go on from its weights with other settings, start a new run: {start_command(self.path, config)}"
            )

    def require_own(self) -> None:
        """Raise if a folder without a checkpoint is not that of a run: its files would be taken for those of one."""
        if self.inputs.exists():
            return
        # A run that was killed at its start has left its recipe, and nothing else.
        require_empty(self.path, [self.config.name])
        if self.config.read_text(encoding="utf-8") != resolved_toml(load(self.config)):
            again = command("train", self.config, "--out", "FOLDER")
            raise ValueError(f"{self.path} holds a recipe, but no run to resume. To train it: {again}")

    def write_config(self, config: Config) -> None:
        """Store the configuration; of a resumed run, keys such as run.steps may have changed."""
        write_atomically(self.config, resolved_toml(config))

    def write_inputs(self, inputs: Mapping[str, str]) -> None:
        """Store the hashes of the run's data and models."""
        write_atomically(self.inputs, json.dumps(dict(inputs), indent=1, sort_keys=True) + "\n")

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Append the metrics of a step, without those that are NaN or infinite."""
        # JSON has no NaN; readers take a missing metric as missing.
        self.append(self.metrics, {name: value for name, value in record.items() if math.isfinite(value)})

    def append(self, file: Path, record: dict[str, Any]) -> None:
        """Append a line to one of the JSON-lines files."""
        append_json_lines(file, record)
        failpoints.failpoint(f"{file.stem}.written")

    def sync(self) -> None:
        """Wait until the JSON lines are on the disk: a checkpoint that survives a power cut must have its metrics."""
        for path in self.json_lines:
            if path.exists():
                sync(path)

    def rewind(self, step: int, warn: PrintLine) -> None:
        """Remove JSON lines of later steps, a last line that was cut off and, with a warning, lines without a step."""
        for path in self.json_lines:
            if path.exists():
                kept = [record for record in iter_step_lines(path, warn) if record["step"] <= step]
                # An empty file would differ from that of a run that never wrote one.
                if kept:
                    write_json_lines(path, kept)
                else:
                    path.unlink()
        failpoints.failpoint("run.rewound")

    def records(self, warn: PrintLine = lambda problem: None) -> list[dict[str, float]]:
        """Return the metrics of every step; `warn` gets the lines that hold none."""
        return read_metrics(self.metrics, warn)


def resolved_toml(config: Config) -> str:
    """Return the whole configuration as TOML, without the keys that are not set."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def config_fingerprint(config: Config) -> dict[str, Any]:
    """Return the keys that determine a run's results; two runs with equal fingerprints are the same run."""
    # JSON mode turns tuples into lists, as the fingerprint in a checkpoint's state.json has them.
    table = config.model_dump(mode="json", exclude=CHANGEABLE_ON_RESUME)
    # `run.steps` may change on resume, but not the schedule that it ends: unless update.decay_steps says otherwise.
    table["update"]["decay_steps"] = config.decay_steps
    return {f"{section}.{key}": value for section, values in table.items() for key, value in values.items()}


def start_command(run: Path, config: Config) -> str:
    """Return the command that starts a run of another configuration from a run's newest checkpoint."""
    old, new = config_fingerprint(load(run / "config.toml")), config_fingerprint(config)
    keys = sorted(key for key in new if old.get(key) != new[key])
    words = ["train", "--from", str(run)]
    for key in keys if len(keys) <= MOST_SETTINGS_SHOWN else []:
        words += ["--set", f"{key}={'none' if new[key] is None else json.dumps(new[key], ensure_ascii=False)}"]
    if len(keys) > MOST_SETTINGS_SHOWN:
        words.insert(1, "RECIPE")
    return command(*words)


def config_changes(before: Config, now: Config) -> list[str]:
    """Return `key: before -> now` for every key whose change makes it another run."""
    old, new = config_fingerprint(before), config_fingerprint(now)
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys]


@dataclass
class MetricsLog:
    """Append metrics to a run's file; what a full disk refuses is written with a later step's."""

    folder: RunFolder
    unwritten: list[dict[str, Any]] = field(default_factory=list)

    def append(self, record: dict[str, Any]) -> str:
        """Append a record; return what is wrong if it cannot be written now."""
        self.unwritten.append(record)
        try:
            self.flush()
        except OSError as error:
            return f"metrics of {len(self.unwritten)} step(s) are not written yet: {error}"
        return ""

    def flush(self) -> None:
        """Write what is not written yet."""
        while self.unwritten:
            self.folder.append_metrics(self.unwritten[0])
            del self.unwritten[0]


@dataclass(frozen=True)
class SavedRun:
    """A run in its folder. What changes while it runs (state, metrics, alarms) is read anew every time.

    ```python
    run = tt.load_run("runs/demo-dapo+trim-1")
    run.state, run.step                      # ("finished", 300)
    run.metrics[-1]["eval/accuracy"]
    steps, entropy = run.curve("policy/entropy")
    ```
    """

    path: Path

    @cached_property
    def config(self) -> Config:
        """The recipe with all settings."""
        return load_stored(self._files.config)

    @property
    def step(self) -> int:
        """The last step that is in the metrics, 0 before the first."""
        return last_step(self._files.metrics)

    @property
    def state(self) -> State:
        """How far the run has come.

        `stopped` runs have saved their last step and can go on from it; `failed` ones ended without saving it.
        """
        if is_locked(self.path):
            return "running"
        if self.collapse is not None:
            return "collapsed"
        # The model is written after the last step.
        if self.step >= self.config.run.steps and self._files.model.is_dir():
            return "finished"
        saved = [int(path.name.removeprefix("step-")) for path in list_checkpoints(self._files.checkpoints)]
        return "stopped" if self.step in saved else "failed"

    @property
    def collapse(self) -> Collapse | None:
        """Since when the run has collapsed, and why; None if it has not."""
        return find_collapse(self.metrics)

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of every step, each with its `step`; docs/metrics.md explains them."""
        return read_metrics(self._files.metrics, warnings.warn)

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a metric was measured, and its values, as a plot takes them."""
        records = self.metrics
        found = [(int(record["step"]), record[metric]) for record in records if metric in record]
        if not found:
            known = sorted({name for record in records for name in record} - {"step"})
            raise ValueError(f"{self.path} has no metric {shown(metric)}; it has {', '.join(known) or 'none'}")
        return [step for step, _ in found], [value for _, value in found]

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """The alarms of the run: step, name, message, evidence and what to try."""
        return list(iter_step_lines(self._files.alarms, warnings.warn))

    @property
    def records(self) -> Records:
        """Every response, token by token: docs/record.md."""
        return open_run(self.path)

    @property
    def model(self) -> Any:
        """The trained model, as one of transformers: the finished one, or that of the newest checkpoint."""
        return self._policy.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self._policy.tokenizer

    @cached_property
    def _policy(self) -> Policy:
        policy = open_policy(str(self.path.absolute()))  # absolute: a folder `demo` is not the model `demo`
        policy.model.eval()
        return policy

    @property
    def _files(self) -> RunFolder:
        return RunFolder(self.path)


def load_run(path: str | Path) -> SavedRun:
    """Open the folder of a run, which may still be going on."""
    folder = Path(path)
    if not (folder / "config.toml").is_file():
        raise ValueError(f"{shown(str(path), 300)} holds no run: a run is a folder with config.toml")
    return SavedRun(folder)
