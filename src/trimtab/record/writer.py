"""The recorder: takes steps from a run and puts them on the disk, in a thread of its own.

A run never waits for it longer than a queue of two steps, and never fails because of it: a full disk ends the recording
with one warning. A size budget is kept by halving how many steps are recorded, evenly over the run.
"""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimtab.record import layout
from trimtab.record.layout import Manifest, RecordError, StepInfo
from trimtab.record.tables import encode
from trimtab.record.vocabulary import Vocabulary

WAITING = 2  # steps that may wait to be written; more would only hold memory
_TEMPORARY = ".writing-"


@dataclass(frozen=True)
class StepData:
    """A step to be recorded: its tables by column (NumPy arrays or lists), and what is known of it besides."""

    info: StepInfo
    tokens: Mapping[str, Any]
    responses: Mapping[str, Any]


def write_step(folder: Path, data: StepData) -> int:
    """Publish a step's record, whole or not at all; how many bytes it takes."""
    tables = {"tokens.parquet": encode("tokens", data.tokens), "responses.parquet": encode("responses", data.responses)}
    text = layout.step_text(data.info, {name: layout.digest(table) for name, table in tables.items()}).encode()
    final, temporary = layout.step_folder(folder, data.info.step), folder / f"{_TEMPORARY}{data.info.step:08d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, table in tables.items():
        (temporary / name).write_bytes(table)
    (temporary / layout.STEP).write_bytes(text)
    if final.exists():
        _remove(final)
    temporary.rename(final)
    return sum(len(table) for table in tables.values()) + len(text)


def rewind(folder: Path, step: int) -> None:
    """Forget the records after a step (after step 0 everything), and what a killed process left half-written."""
    if not folder.exists():
        return
    if step <= 0:
        shutil.rmtree(folder)
        return
    for path in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for later in layout.recorded_steps(folder):
        if later > step:
            _remove(layout.step_folder(folder, later))


def _remove(path: Path) -> None:
    """Take a step's folder away: from one moment to the next for a reader."""
    gone = path.with_name(f"{_TEMPORARY}gone-{path.name}")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


@dataclass
class Recorder:
    """Records the steps of one run. `warn` is called from the thread that uses the recorder, at most once."""

    folder: Path
    manifest: Manifest
    warn: Callable[[str], None]
    _queue: queue.Queue[Callable[[], None] | None] = field(default_factory=lambda: queue.Queue(WAITING))
    _thread: threading.Thread | None = None
    _sizes: dict[int, int] = field(default_factory=dict)
    _kept: frozenset[int] = frozenset()
    _fault: str = ""
    _told: bool = False

    def start(self, vocabulary: Vocabulary, step: int) -> None:
        """Begin, or go on after `step`: what was recorded later is forgotten."""
        self._do(lambda: self._open(vocabulary, step))

    def wants(self, step: int) -> bool:
        """Whether a step is to be recorded; the first always is."""
        every = self.manifest.settings.every * self.manifest.stride
        return not self._fault and ((step - 1) % every == 0 or step in self._kept)

    def keep(self, steps: Iterable[int]) -> None:
        """Record these steps whatever the stride, and let the size budget take all others first."""
        self._kept = self._kept.union(steps)

    def write(self, step: int, build: Callable[[], StepData]) -> None:
        """Record a step; `build` is called in the recorder's thread and must only read what no longer changes."""
        if self.wants(step):
            self._do(lambda: self._write(step, build))
        self._tell()

    def flush(self) -> None:
        """Wait until everything is written."""
        self._queue.join()
        self._tell()

    def close(self) -> None:
        """Write what is waiting and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._tell()

    def _do(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="trimtab-recorder", daemon=True)
            self._thread.start()
        self._queue.put(job)

    def _work(self) -> None:
        while True:
            job = self._queue.get()
            try:
                if job is not None and not self._fault:
                    job()
            except Exception as error:  # whatever it is, the run is worth more than its record
                self._fault = str(error) if isinstance(error, OSError | RecordError) else repr(error)
            finally:
                self._queue.task_done()
            if job is None:
                return

    def _tell(self) -> None:
        if self._fault and not self._told:
            self._told = True
            self.warn(f"warning: nothing more is recorded under {self.folder}: {self._fault:.500}")

    def _open(self, vocabulary: Vocabulary, step: int) -> None:
        rewind(self.folder, step)
        self.folder.mkdir(parents=True, exist_ok=True)
        table = encode("vocabulary", {"text": vocabulary.text, "special": vocabulary.special})
        self._put(layout.VOCABULARY, table)
        self.manifest = replace(
            self.manifest,
            vocabulary=len(vocabulary),
            vocabulary_sha256=layout.digest(table),
            stride=self._stride_so_far(),
        )
        self._put_manifest()
        self._sizes = {n: layout.size_of([layout.step_folder(self.folder, n)]) for n in self._steps()}
        self._drop_unwanted()

    def _stride_so_far(self) -> int:
        try:
            return layout.read_manifest(self.folder).stride
        except RecordError:
            return 1

    def _steps(self) -> list[int]:
        return layout.recorded_steps(self.folder)

    def _write(self, step: int, build: Callable[[], StepData]) -> None:
        if not self.wants(step):  # thinned since it was put in the queue
            return
        self._sizes[step] = write_step(self.folder, build())
        self._thin()

    def _thin(self) -> None:
        """Halve the records until they fit."""
        limit = self.manifest.settings.max_megabytes * 1e6
        while sum(self._sizes.values()) > limit:
            if len(self._sizes) == 1:
                (step,), (size,) = self._sizes.keys(), self._sizes.values()
                _remove(layout.step_folder(self.folder, step))
                self._sizes = {}
                raise RecordError(
                    f"step {step} alone takes {size / 1e6:.1f} MB, more than record.max_megabytes = {limit / 1e6:g}: "
                    "raise that, or lower record.group_share"
                )
            self.manifest = replace(self.manifest, stride=2 * self.manifest.stride)
            self._put_manifest()  # first, so that a kill in between leaves too many records, which are then dropped
            self._drop_unwanted()
            if self.manifest.stride > max(self._sizes, default=0):  # only those to be kept are left: too many
                self._kept = frozenset()

    def _drop_unwanted(self) -> None:
        for step in [step for step in self._sizes if not self.wants(step)]:
            _remove(layout.step_folder(self.folder, step))
            del self._sizes[step]

    def _put_manifest(self) -> None:
        self._put(layout.MANIFEST, layout.manifest_text(self.manifest).encode())

    def _put(self, name: str, data: bytes | memoryview) -> None:
        temporary = self.folder / f"{_TEMPORARY}{name}"
        temporary.write_bytes(data)
        temporary.replace(self.folder / name)
