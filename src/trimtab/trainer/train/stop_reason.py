"""Why a run ended, and the error that ends it before its last step."""

from __future__ import annotations

from enum import StrEnum

# Exit codes: 2 as for a wrong command line; 3 is a run that ended early with a checkpoint. A run that a signal ends at
# once has the code that shells report for it, 130 for Ctrl-C. 5 is a run whose last checkpoint could not be written.
INVALID, STOPPED, UNSAVED = 2, 3, 5


class StopReason(StrEnum):
    """Why a run ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    NO_SIGNAL = "no learning signal"
    NO_BETTER = "no better held-out score"
    NONFINITE = "not finite"
    NOT_SAVED = "not saved"
    FOLDER_GONE = "folder gone"
    ALARM = "alarm"
    RULES = "rules failed"


class RunStoppedError(RuntimeError):
    """A run ended before its last step; the message is a diagnosis."""

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
