"""The files of the benchmarks: each says when, where, with what and by which command its figures were made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from result_file import CPU, about, added_to, save

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
ON_A_GPU = sorted(path.name for path in RESULTS.glob("*-h200*.json"))
# Measured before the scripts wrote their command down; measured again, a file leaves this list.
WITHOUT_COMMAND = {
    f"{name}-h200.json"
    for name in (
        "evaluate-smollm2", "head", "memory", "mfu", "objectives", "overhead", "sampler", "sampler-agreement",
        "silenced", "stability", "step", "tool-latency",
    )
}  # fmt: skip


@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_figure_of_a_gpu_says_where_it_comes_from(name: str) -> None:
    result = json.loads((RESULTS / name).read_text())
    assert "H200" in json.dumps(result["machine"])
    assert result["what"] and result["date"].startswith("20") and "torch" in result["versions"]
    assert ("command" in result) == (name not in WITHOUT_COMMAND)


def test_a_result_names_the_command_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/head.py", "--out", "a file.json"])
    head = about("a try", CPU, "pytest", "no-such-package")
    assert head["command"] == "python benchmarks/head.py --out 'a file.json'"
    assert head["versions"]["pytest"] == pytest.__version__ and "no-such-package" not in head["versions"]


def test_figures_of_several_calls_name_all_their_commands(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    first = added_to(out, {"command": "one", "date": "2026-01-01"}) | {"speed": 1}
    assert first == {"command": "one", "date": "2026-01-01", "speed": 1}
    save(first, out)
    save(added_to(out, {"command": "two", "date": "2026-01-02"}), out)
    third = added_to(out, {"command": "three", "date": "2026-01-03"})
    assert third == {"command": ["one", "two", "three"], "date": "2026-01-03", "speed": 1}
