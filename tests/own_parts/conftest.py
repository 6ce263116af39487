"""A user's folder outside of the package, with files of the user's own."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trimtab import own_parts

WriteFile = Callable[[str, str], Path]


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteFile]:
    """Write files to a folder that is the current one; afterwards the process has forgotten their modules."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    state = own_parts._registered, own_parts._loaded
    for kept in (*state, own_parts._folders):
        kept.clear()

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        return path

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
    for kept in (*state, own_parts._folders):
        kept.clear()
