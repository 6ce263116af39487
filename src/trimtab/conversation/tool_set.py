"""The tools of a run, by name, and the processes that they run in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.tasks import Problem


class ToolSet:
    """The tools that conversations may call. It lives as long as the trainer; `close` ends its processes.

    `use` names them: `python`, `python_session`, `calculator`, or a function `python:MODULE:NAME`. `environment` names
    a class of the user's own, whose public methods are tools too. At most `workers` calls run at once.
    """

    def __init__(
        self,
        use: Sequence[str] = (),
        *,
        environment: str | None = None,
        workers: int = 4,
        memory_mb: int = 2048,
        sandbox_level: str = "full",
    ) -> None:
        raise NotImplementedError

    def schemas(self, problem: Problem | None = None) -> list[dict[str, Any]]:
        """Return the JSON schemas for the chat template's `tools=`; a problem may allow some only (extra["tools"])."""
        raise NotImplementedError

    def close(self) -> None:
        """End all processes."""
        raise NotImplementedError
