"""The table and the picture of docs/tools.md show the runs that are there."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tool_pages

RUN = {
    "machine": "a GPU",
    "date": "2026-01-02",
    "versions": {"python": "3.12", "torch": "2.11"},
    "rl_seconds": 57.1,
    "curves": {
        "eval/accuracy": [[0, 0.0], [3, 0.996], [30, 1.0]],
        "conversation/called_share": [[1, 0.18], [30, 0.998]],
        "response/length_mean": [[1, 196.2], [30, 38.8]],
    },
}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tool_pages, "RESULTS", tmp_path)
    return tmp_path


def test_every_seed_has_a_row_and_a_line_in_each_panel(results: Path) -> None:
    for name in tool_pages.SEEDS[:2]:
        (results / name).write_text(json.dumps(RUN))
    table = tool_pages.learned()
    assert "| 1 | 0.0% | 99.6% | 100.0% | 18.0%, 99.8% | 196, 39 | 57 |" in table
    assert "a GPU, torch 2.11; by `benchmarks/smollm2_rl.py`, 2026-01-02." in table
    picture = ElementTree.fromstring(tool_pages.curves())
    lines = [node for node in picture.iter("{http://www.w3.org/2000/svg}path") if node.get("fill") == "none"]
    assert len(lines) == 2 * len(tool_pages.PANELS)
    # The first point lies at the left edge and at the bottom, the last at the right edge and at the top.
    left, bottom = tool_pages.LEFT, tool_pages.TOP + tool_pages.HEIGHT
    right, top = tool_pages.LEFT + tool_pages.WIDTH, tool_pages.TOP
    path = lines[0].attrib["d"]
    assert path.startswith(f"M{left}.0 {bottom}.0L") and path.endswith(f"L{right}.0 {top}.0")


def test_without_results_the_page_says_how_to_get_them(results: Path) -> None:
    assert tool_pages.learned() == "Not measured yet; `benchmarks/smollm2_rl.py` does it."
    ElementTree.fromstring(tool_pages.curves())
