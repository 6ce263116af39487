"""Why a run ended, and the error that ends it before its last step."""

from __future__ import annotations

from enum import StrEnum


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
