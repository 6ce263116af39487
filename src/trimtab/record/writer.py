"""Write steps to disk in a thread of its own.

Training waits for the writer only while a queue of two steps is full, and never fails because of it: a full disk ends
the recording with one warning. The size budget is kept by halving how many steps are recorded, evenly over the run.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimtab.files import new_folder, remove_files, remove_unfinished, write_atomically
from trimtab.record import layout
from trimtab.record.layout import Manifest, RecordError, StepInfo, encode
from trimtab.record.schema import Vocabulary

QUEUE_SIZE = 2  # steps that may wait to be written; each holds its columns in memory


@dataclass(frozen=True)
class StepData:
    """The tables of a step by column (NumPy arrays or lists), and its facts."""

    info: StepInfo
    tokens: Mapping[str, Any]
    responses: Mapping[str, Any]


def encode_step(data: StepData) -> dict[str, memoryview | bytes]:
    """Return the files of a step's record by name."""
    tables = {"tokens.parquet": encode("tokens", data.tokens), "responses.parquet": encode("responses", data.responses)}
    text = layout.step_text(data.info, {name: layout.digest(table) for name, table in tables.items()})
    return {**tables, layout.STEP: text.encode()}


def write_step(folder: Path, step: int, files: Mapping[str, memoryview | bytes]) -> int:
    """Publish a step's record atomically and return what it takes on the disk."""
    final = layout.step_folder(folder, step)
    # Not durable: records are not worth waiting for the disk, and the digests tell of a file that a power cut damaged.
    # Not tidy: `rewind` was, and reading the names of a hundred thousand steps takes longer than writing one.
    with new_folder(final, tidy=False) as temporary:
        for name, data in files.items():
            (temporary / name).write_bytes(data)
    return step_size(final)


def step_size(folder: Path) -> int:
    """Return what the folder of a step takes on the disk: its files and itself."""
    return sum(map(layout.disk_use, (folder, *folder.iterdir())))


def rewind(folder: Path, step: int) -> None:
    """Delete the records after a step (after step 0 all), and what a killed process left half-written.

    Other files, which somebody has put there, stay.
    """
    if not folder.exists():
        return
    remove_unfinished(folder)
    for later in layout.recorded_steps(folder):
        if later > step:
            remove_files(layout.step_folder(folder, later), layout.STEP_FILES)
    if step <= 0:  # a run from the beginning: the stride and the vocabulary are not its own either
        for name in (layout.MANIFEST, layout.VOCABULARY):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # it holds something else, which is not of the records
            folder.rmdir()


@dataclass
class RecordWriter:
    """Write the records of one run. `warn` is called from the thread that uses the writer, at most once."""

    folder: Path
    manifest: Manifest
    vocabulary: Vocabulary
    warn: Callable[[str], None]
    _queue: queue.Queue[Callable[[], None] | None] = field(default_factory=lambda: queue.Queue(QUEUE_SIZE))
    _thread: threading.Thread | None = None
    _sizes: dict[int, int] = field(default_factory=dict)
    _kept: frozenset[int] = frozenset()
    _error: str = ""
    _warned: bool = False

    def start(self, step: int) -> None:
        """Start a record, or continue one after `step`; what was recorded later is deleted."""
        self._enqueue(lambda: self._open(step))

    def wants(self, step: int) -> bool:
        """Return whether a step is to be recorded; the first always is."""
        every = self.manifest.settings.every * self.manifest.stride
        # Counted from the first step, so that the steps of a doubled stride are among those of the old one.
        return not self._error and ((step - 1) % every == 0 or step in self._kept)

    def keep(self, steps: Iterable[int]) -> None:
        """Record these steps whatever the stride; the size budget drops all others first."""
        self._kept = self._kept.union(steps)

    def write(self, step: int, build: Callable[[], StepData]) -> None:
        """Queue a step; `build` runs in the writer's thread, on data that nobody changes any more."""
        if self.wants(step):
            self._enqueue(lambda: self._write(step, build))
        self._warn_once()

    def flush(self) -> None:
        """Wait until everything queued is on disk."""
        self._queue.join()
        self._warn_once()

    def close(self) -> None:
        """Write what is queued and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._warn_once()

    def _enqueue(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            # A daemon: a run that ends with an error does not wait for the disk.
            self._thread = threading.Thread(target=self._work, name="trimtab-recorder", daemon=True)
            self._thread.start()
        self._queue.put(job)  # waits while the queue is full, which bounds the memory of steps not yet written

    def _work(self) -> None:
        while True:
            job = self._queue.get()
            try:
                # After an error jobs are still taken from the queue, else `flush` and `put` would wait for ever.
                if job is not None and not self._error:
                    job()
            except Exception as error:  # of any kind: the run is worth more than its record
                self._error = str(error) if isinstance(error, OSError | RecordError) else repr(error)
            finally:
                self._queue.task_done()
            if job is None:
                return

    def _warn_once(self) -> None:
        if self._error and not self._warned:
            self._warned = True
            self.warn(f"warning: nothing more is recorded under {self.folder}: {self._error:.500}")

    def _open(self, step: int) -> None:
        rewind(self.folder, step)
        self.folder.mkdir(parents=True, exist_ok=True)
        table = encode("vocabulary", {"text": self.vocabulary.text, "special": self.vocabulary.special})
        write_atomically(self.folder / layout.VOCABULARY, table)
        try:
            stride = layout.read_manifest(self.folder).stride
        except RecordError:
            stride = 1
        self._update_manifest(vocabulary=len(self.vocabulary), vocabulary_sha256=layout.digest(table), stride=stride)
        # What an earlier process recorded counts towards the size limit.
        recorded = layout.recorded_steps(self.folder)
        self._sizes = {n: step_size(layout.step_folder(self.folder, n)) for n in recorded}
        self._drop_unwanted()

    def _write(self, step: int, build: Callable[[], StepData]) -> None:
        if not self.wants(step):  # the stride has grown since the step was queued
            return
        files = encode_step(build())
        # Room is made before anything is written, so that the records never take more than they may.
        self._sizes[step] = layout.BLOCK + sum(layout.on_disk(len(data)) for data in files.values())
        self._thin()
        if step in self._sizes:
            self._sizes[step] = write_step(self.folder, step, files)
            self._thin()  # a file system may give more than whole blocks

    def _thin(self) -> None:
        """Double the stride and drop steps until the records fit the size budget."""
        limit = self.manifest.settings.max_megabytes * 1e6
        while sum(self._sizes.values()) + (rest := self._rest()) > limit:
            if len(self._sizes) == 1:
                step, size = self._sizes.popitem()
                self._remove(step)
                raise RecordError(
                    f"step {step} alone takes {size / 1e6:.3g} MB beside {rest / 1e6:.3g} MB for the vocabulary, more "
                    f"than record.max_megabytes = {limit / 1e6:g}: raise that, or lower record.group_share"
                )
            # The manifest first: a kill in between leaves too many records, which the next start drops.
            self._update_manifest(stride=2 * self.manifest.stride)
            self._drop_unwanted()
            # Only steps that `keep` protects are left, and they are too many: give up protecting them.
            if self.manifest.stride > max(self._sizes, default=0):
                self._kept = frozenset()

    def _drop_unwanted(self) -> None:
        for step in [step for step in self._sizes if not self.wants(step)]:
            self._remove(step)
            del self._sizes[step]

    def _remove(self, step: int) -> None:
        folder = layout.step_folder(self.folder, step)
        if folder.exists():  # the step that room is made for is not written yet
            remove_files(folder, layout.STEP_FILES)

    def _rest(self) -> int:
        """Return what the records take on the disk besides their steps."""
        # The manifest twice: while it is written again there are two.
        names = (layout.VOCABULARY, layout.MANIFEST, layout.MANIFEST)
        return sum(map(layout.disk_use, (self.folder, *(self.folder / name for name in names))))

    def _update_manifest(self, **changes: Any) -> None:
        self.manifest = replace(self.manifest, **changes)
        write_atomically(self.folder / layout.MANIFEST, layout.manifest_text(self.manifest))
