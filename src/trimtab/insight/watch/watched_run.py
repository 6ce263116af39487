"""A run's folder that is looked at again and again: what is new in it, and whether the run goes on.

Files are read from where the last look ended. Nothing outside the folder is read, also not through links.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.files import is_locked, seen_locked
from trimtab.insight.report.curve_store import CurveStore, MetricCurve
from trimtab.insight.report.run_files import (
    MOST_ALARMS,
    AlarmRecord,
    RunFiles,
    alarm_record,
    made_inside_an_engine,
    metric_notes,
    read_config,
)
from trimtab.record import (
    CollapseDetector,
    GrowingLines,
    RecordError,
    Records,
    is_finite_number,
    open_run,
)
from trimtab.trainer.config import list_checkpoints

MOST_VALUES = 8_000_000  # of all metrics of a run: 100 MB; beyond, the long curves are thinned in memory
KEPT_LINES = 500  # of the metrics, for pages that lack only these
INDEXED = 256  # lines from one known place of metrics.jsonl to the next
GROWING_SECONDS = 60.0  # a run that no lock is seen of goes on if it has written so recently
LISTING_SHARE = 0.002  # of the time, at most, that listing the recorded steps may take
OUTSIDE = "it is a link that leads out of the run, and is not followed"


class Listing(NamedTuple):
    """When the recorded steps were listed, the CPU seconds it took, and the time of the folder then.

    `settled`: the time was the same at the listing before.
    """

    when: float
    seconds: float
    changed: int
    settled: bool


NEVER_LISTED = Listing(0.0, 0.0, -1, False)


class WatchedRun:
    """A run, as far as its files have been read. `lock` is held while they are read or the curves are used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = path.resolve()
        self.name = self.root.name or str(self.root)
        self.lock = threading.RLock()
        self._metrics = GrowingLines(path / "metrics.jsonl")
        self._alarms = GrowingLines(path / "alarms.jsonl")
        self._nonfinite = GrowingLines(path / "nonfinite.jsonl")
        self._records: Records | None = None
        self._records_mark: object = None
        self._steps: list[int] = []
        self._listed = NEVER_LISTED
        self._config: tuple[object, dict[str, Any], str, list[str]] = (None, {}, "", [])
        self._lock_seen = False
        self._last_line = -float("inf")  # when one came while it was watched
        self.alarms: list[AlarmRecord] = []
        self.skipped_updates = 0
        self.looks = 0
        self.judged: tuple[tuple[int, int], tuple[str, str]] | None = None  # at which line, and kind and words
        self._start_over()

    def _start_over(self) -> None:
        self.generation = self._metrics.generation
        self.curves = CurveStore(most_values=MOST_VALUES)
        self.recent: deque[dict[str, float]] = deque(maxlen=KEPT_LINES)
        self.lines = 0
        self.last_step = 0
        self.collapse = CollapseDetector()
        self.had_mixed = False  # whether rewards have ever differed within a group
        self.idle_steps = 0  # in a row, in which they have not
        self._index: list[tuple[int, int]] = []

    def poll(self) -> None:
        """Read what is new."""
        with self.lock:
            self._read_metrics()
            self._read_alarms()
            self._list_steps()
            self.looks += 1

    def _read_metrics(self) -> None:
        rows = self._metrics.read()
        first = next(rows, None)
        if self._metrics.generation != self.generation:
            self._start_over()
        for place, row in chain([] if first is None else [first], rows):
            if self.lines % INDEXED == 0:
                self._index.append((row["step"], place))
            record = {name: value for name, value in row.items() if is_finite_number(value)}
            self.curves.add(record)
            self.recent.append(record)
            self.collapse.add(record)
            self.lines += 1
            self.last_step = max(self.last_step, record["step"])
            if "groups/mixed_share" in record:
                self.idle_steps = 0 if record["groups/mixed_share"] > 0 else self.idle_steps + 1
                self.had_mixed = self.had_mixed or record["groups/mixed_share"] > 0
            if self.looks:
                self._last_line = time.monotonic()

    def _read_alarms(self) -> None:
        before = self._alarms.generation
        rows = [row for _, row in self._alarms.read()]
        if self._alarms.generation != before:
            self.alarms = []
        self.alarms += [alarm_record(row) for row in rows[: MOST_ALARMS - len(self.alarms)]]
        before = self._nonfinite.generation
        count = sum(1 for _ in self._nonfinite.read())
        self.skipped_updates = count + (self.skipped_updates if self._nonfinite.generation == before else 0)

    def _list_steps(self) -> None:
        """List the recorded steps if there are new ones, and not too often: of 20,000 this takes 30 ms."""
        listed, now, records = self._listed, time.monotonic(), self.records
        if records is None:
            self._steps, self._listed = [], NEVER_LISTED
            return
        try:
            changed = records.folder.stat().st_mtime_ns
        except OSError:
            return
        # Files count time in ticks of some milliseconds: what comes in the tick of the last listing does not change the
        # folder's time. So it is listed once more after its time has stopped changing.
        same = changed == listed.changed
        if not (same and listed.settled) and now - listed.when > listed.seconds / LISTING_SHARE:
            began = time.thread_time()
            self._steps = records.steps
            self._listed = Listing(now, time.thread_time() - began, changed, same)

    @property
    def steps(self) -> list[int]:
        """The recorded steps, at the last look."""
        return self._steps

    @property
    def records(self) -> Records | None:
        """The records of the run; None if there are none, or if they cannot be read."""
        try:
            return self.open_records()
        except RecordError:
            return None

    def open_records(self) -> Records:
        """Return the records; a manifest that was written anew is read anew."""
        with self.lock:
            manifest = self.inside("tokens", "manifest.json")
            try:
                found = manifest.stat()
                mark = (found.st_ino, found.st_size, found.st_mtime_ns)
            except OSError:
                mark = None
            if self._records is None or mark != self._records_mark:
                for name in ("tokens", "vocabulary.parquet"):
                    self.inside("tokens", *([] if name == "tokens" else [name]))
                fresh = open_run(self.path)
                old = self._records
                if old is not None and old.manifest.vocabulary_sha256 == fresh.manifest.vocabulary_sha256:
                    fresh.__dict__.update({k: v for k, v in old.__dict__.items() if k == "vocabulary"})
                self._records, self._records_mark = fresh, mark
                self._listed = NEVER_LISTED
            return self._records

    def inside(self, *names: str) -> Path:
        """Return a path below the run; RecordError if a link there leads out of the run."""
        path = self.path.joinpath(*names)
        if not path.resolve().is_relative_to(self.root):
            raise RecordError(f"{path}: {OUTSIDE}")
        return path

    def nearest_step(self, step: int) -> int:
        """Return the recorded step that is nearest, after a check that all of its files are in the run."""
        if not self._steps:
            raise RecordError("no step is recorded")
        place = bisect_left(self._steps, step)
        number = min(self._steps[max(place - 1, 0) : place + 1], key=lambda each: abs(each - step))
        self.check_step(number)
        return number

    def check_step(self, number: int) -> None:
        """Raise RecordError if a file of a recorded step is a link out of the run."""
        folder = f"step-{number:08d}"
        for name in ("tokens.parquet", "responses.parquet", "step.json"):
            self.inside("tokens", folder, name)

    def files(self) -> RunFiles:
        """Return the run as the report reads one; its curves grow with the run."""
        with self.lock:
            notes: list[str] = []
            config, text = self.config()
            notes += self._config[3]
            for file in (self._metrics, self._alarms):
                notes += [file.problem] * bool(file.problem)
                notes += [f"{file.path.name}: {file.bad} rows are no metrics or alarms of a step and left out"] * bool(
                    file.bad
                )
            notes += metric_notes(self.curves) if self.lines else []
            records = None
            try:
                records = self.open_records()
            except RecordError as error:
                notes.append(f"tokens: {error}. Without records there is no microscope.")
            return RunFiles(
                self.name, config, text, self.curves, list(self.alarms), self.skipped_updates, records, notes
            )

    def config(self) -> tuple[dict[str, Any], str]:
        """Return the configuration as a table and as text; empty if there is none."""
        try:
            path = self.inside("config.toml")
            found = path.stat()
            mark: object = (found.st_ino, found.st_size, found.st_mtime_ns)
        except (OSError, RecordError) as error:
            problem = [str(error)] if isinstance(error, RecordError) else []
            if not problem and not made_inside_an_engine(self.path):
                problem = ["config.toml is missing"]
            self._config = (None, {}, "", problem)
            return {}, ""
        if mark != self._config[0]:
            notes: list[str] = []
            table, text = read_config(path, notes)
            self._config = (mark, table, text, notes)
        return self._config[1], self._config[2]

    def planned_steps(self) -> int | None:
        """Return how many steps the run is to take, if its configuration says so."""
        section = self.config()[0].get("run")
        steps = section.get("steps") if isinstance(section, dict) else None
        return steps if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0 else None

    def cut(self, first: int, last: int) -> Mapping[str, MetricCurve]:
        """Return all values of the metrics from one step to another, from the file if they are not in memory."""
        with self.lock:
            if not self.curves.thinned:
                return {name: _part(curve, first, last) for name, curve in self.curves.items()}
            place = bisect_left(self._index, (first, -1))
            store = CurveStore(most_values=MOST_VALUES)
            for row in self._metrics.lines_from(self._index[max(place - 1, 0)][1] if self._index else 0):
                if row["step"] > last:
                    break
                if row["step"] >= first:
                    store.add(row)
            return store

    def state(self) -> str:
        """Return `loading`, `running`, `finished`, `stopped`, `failed`, or `quiet` if it cannot be known."""
        held = seen_locked(self.path)
        if held is None:
            try:
                held = is_locked(self.path)
            except OSError:
                held = False
        self._lock_seen = self._lock_seen or held
        if held:
            return "running" if self.lines else "loading"
        planned = self.planned_steps()
        if planned is not None and self.last_step >= planned and (self.path / "model").is_dir():
            return "finished"
        # A run of TRL or verl locks nothing, and of one on another machine the lock cannot be seen.
        if not self._lock_seen and time.monotonic() - self._last_line < GROWING_SECONDS:
            return "running"
        if planned is None:
            return "quiet" if self.lines else "loading"
        saved = [path.name for path in list_checkpoints(self.path / "checkpoints")]
        if not self.lines and not saved:
            return "failed" if self._lock_seen else "loading"
        return "stopped" if f"step-{self.last_step:08d}" in saved else "failed"


def _part(curve: MetricCurve, first: int, last: int) -> MetricCurve:
    low, high = curve.steps.searchsorted([first, last + 1]).tolist()
    return MetricCurve(curve.steps[low:high], curve.values[low:high])
