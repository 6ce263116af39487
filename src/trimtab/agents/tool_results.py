"""What a call gave, as an outcome and in words for the model."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.agents.types import Outcome
from trimtab.grading import WorkerResult
from trimtab.own_parts import OwnPartError
from trimtab.workers import Result


@dataclass(frozen=True)
class ToolResult:
    """What a call gave: `text` is for the model, `error` (a traceback of the user's code) for the user.

    `gone`: the environment's process has ended with it.
    """

    outcome: Outcome
    text: str
    seconds: float = 0.0
    error: str = ""
    gone: bool = False


def of_program(result: Result, timeout: float) -> ToolResult:
    """Return what a sandboxed program gave, in words for the model."""
    printed = result.stdout.rstrip("\n")
    if result.kind == "refused":
        return ToolResult("bad_arguments", f"Error: {result.error}")
    if result.kind == "ok":
        return ToolResult("ok", printed or "The program printed nothing.")
    error = f"Error: it took more than {timeout:g} s" if result.kind == "timeout" else result.error.rstrip("\n")
    return ToolResult(result.kind, f"{printed}\n{error}" if printed else error)


def of_worker(result: WorkerResult, timeout: float, memory_mb: int) -> ToolResult:
    """Return what a call of the user's code gave, in words for the model."""
    if result.outcome == "done":
        outcome, text = result.value
        return ToolResult(outcome, text or "The tool returned nothing.")
    if result.outcome == "too_costly":
        kinds: dict[str, tuple[Outcome, str]] = {
            "memory": ("memory", f"it wanted more than {memory_mb} MB"),
            "recursion": ("exception", "it recursed too deep"),
            "result": ("output", "it returned too much"),
            "signal": ("killed", "it crashed"),
        }
        kind, words = kinds.get(result.limit, ("timeout", f"it took more than {timeout:g} s"))
        return ToolResult(kind, f"Error: {words}", error=words, gone=result.gone)
    if result.outcome == "not_loaded":
        raise OwnPartError(f"the tools' process cannot load the module: {result.error}")
    if not result.traceback and result.gone:
        return ToolResult("killed", "Error: it crashed", error=result.error, gone=True)
    return ToolResult("exception", f"Error: {result.error}", error=result.traceback or result.error, gone=result.gone)
