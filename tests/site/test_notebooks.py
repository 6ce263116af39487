"""The notebooks run from top to bottom, and the outputs that the site shows are those of the cells it shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.site.building import ROOT
from helpers.thorough import slow_but

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize(
    "path", slow_but([ROOT / "docs/notebooks/own-loop.ipynb"], NOTEBOOKS), ids=lambda path: path.stem
)
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_text(path.read_text())
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/notebooks.py"), str(copy)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")},
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    ran, kept = code_cells(copy), code_cells(path)
    for new, old in zip(ran, kept, strict=True):
        shown = "".join("".join(output.get("text", "")) for output in new["outputs"])
        # A command of the shell that fails raises nothing.
        assert not re.search(r"Traceback|^trimtab: |No such|not found", shown, re.MULTILINE), shown
        # Numbers may differ between machines; what kinds of output a cell has may not.
        assert [output["output_type"] for output in new["outputs"]] == [each["output_type"] for each in old["outputs"]]


def test_there_are_three_and_each_was_run_in_order() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first-run", "own-loop", "replay"]
    for path in NOTEBOOKS:
        cells = code_cells(path)
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), f"run {path.name} again"
        assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])


def test_a_page_shows_what_the_cells_printed_and_drew(site: Path) -> None:
    page = (site / "notebooks/first-run.html").read_text()
    assert "data:image/png;base64," in page
    assert "reward_hacking" in page
