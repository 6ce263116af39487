"""The examples of docs/tools-engines.md: an environment of the user's own, and how it is named in TRL and in verl."""

from __future__ import annotations

import re
from pathlib import Path

_TEXT = (Path(__file__).parents[4] / "docs" / "tools-engines.md").read_text(encoding="utf-8")


def _block(before: str, language: str) -> str:
    found = re.search(rf"{before}\n```{language}\n(.*?)```", _TEXT, re.DOTALL)
    assert found, f"no {language} after {before!r}"
    return found[1]


ENVIRONMENT = _block("as in `notebook.py`:\n", "python")
IN_TRL = _block("<!-- trl -->", "python")
IN_VERL = _block("<!-- verl -->", "bash").split()
