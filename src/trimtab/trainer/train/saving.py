"""Save a run's checkpoints: make room on a full disk, and know how far back a resume would go."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from trimtab.text import PrintLine
from trimtab.trainer.train import checkpoints, warm_cache

MOST_FAILED = 3  # checkpoints in a row that may fail
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class CheckpointSaver:
    """Saves the checkpoints that a run can be resumed from. `saved` is the step of the newest one."""

    folder: Path
    message: PrintLine
    may_go_on: bool  # after `MOST_FAILED` failures
    saved: int | None = None
    failed: int = 0  # in a row
    error: str = ""  # of the last failure

    def save(self, step: int, write: Callable[[], None]) -> bool:
        """Call `write`, which saves a step; return whether it is saved."""
        try:
            self.make_room_for(write)
        except (checkpoints.CheckpointError, OSError) as error:
            self._note(str(error))
            return False
        if self.failed:
            self.message(f"the checkpoint of step {step} is written: a resume would go on from it")
        self.saved, self.failed, self.error = step, 0, ""
        return True

    def make_room_for(self, write: Callable[[], None]) -> None:
        """Call `write`; if the disk is full, remove what can be spared and call it again."""
        while True:
            try:
                return write()
            except (checkpoints.CheckpointError, OSError, SafetensorError) as error:
                # Of a warm start in the cache only time is lost.
                made = is_full(error) and (warm_cache.make_room(self.folder) or checkpoints.make_room(self.folder))
                if not made:
                    raise
                self.message(f"the disk is full: removed {made}; trying again")

    @property
    def must_stop(self) -> bool:
        """Whether too many checkpoints in a row have failed for the run to go on."""
        return self.failed >= MOST_FAILED and not self.may_go_on

    @property
    def way_back(self) -> str:
        """Where a resume would start."""
        return "from the beginning, for nothing is saved" if self.saved is None else f"from step {self.saved}"

    def _note(self, error: str) -> None:
        self.failed += 1
        self.error = error
        if self.failed > 1:  # said already, and it may happen at every step
            return
        more = f"stops if {MOST_FAILED - 1} more fail in a row (run.on_failed_checkpoint)"
        then = "goes on without checkpoints until one can be written" if self.may_go_on else more
        self.message(f"warning: {error}. A resume would start {self.way_back}; the run {then}")


def is_full(error: BaseException | None) -> bool:
    """Return whether a file could not be written because its disk or the user's share of it is full."""
    while error is not None:
        # safetensors names the number of the system's error only in its text.
        if getattr(error, "errno", None) in FULL or any(f"os error {number})" in str(error) for number in FULL):
            return True
        error = error.__cause__
    return False
