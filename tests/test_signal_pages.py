"""The table of docs/more-signal.md compares runs at equal numbers of responses and at equal CPU time."""

from __future__ import annotations

from typing import Any

import pytest

import signal_pages

COUNT = "run.steps=800 objective.count=signal"
GATE = "run.steps=400 curriculum.gates=['mixed']"


def run(variant: str, seed: int, accuracy: float, per_step: int, cpu: float | None) -> dict[str, Any]:
    """Make a run whose accuracy rises linearly over its evaluations at steps 0, 50 and 100."""
    evaluations = [[50 * n, round(accuracy * n / 2, 6)] for n in range(3)]
    return {
        "objective": "dapo", "variant": variant, "seed": seed, "evaluations": evaluations,
        "responses": [50 * n * per_step for n in range(3)], "curves": {"groups/mixed_share": [[100, 0.5]]},
        **({} if cpu is None else {"cpu_seconds": cpu}),
    }  # fmt: skip


def test_accuracy_is_taken_where_the_budget_was_spent() -> None:
    made = run(COUNT, 0, 0.4, 10, 20.0)
    assert signal_pages.accuracy_at(made, made["responses"], 250) == pytest.approx(0.1)
    assert signal_pages.accuracy_at(made, made["responses"], 1000) == pytest.approx(0.4)
    assert signal_pages.accuracy_at(made, made["responses"], 1001) is None
    assert signal_pages.cpu_spent(made) == [0.0, 10.0, 20.0]
    assert signal_pages.accuracy_at(made, signal_pages.cpu_spent(made), 5.0) == pytest.approx(0.1)


def test_rows_compare_at_equal_responses_and_equal_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run("run.steps=800", seed, 0.4, 10, 20.0) for seed in (0, 1)]
    runs += [run(GATE, seed, 0.6, 40, 40.0) for seed in (0, 1)]  # four times as many responses, twice the time
    runs += [run(COUNT, seed, 0.5, 10, None) for seed in (0, 1)]
    made = {"runs": dict(enumerate(runs)), "recipe": "countdown", "versions": {"torch": "2"}, "date": "today"}
    monkeypatch.setattr(signal_pages, "result", lambda part: made)
    lines = [line.split("|")[1:-1] for line in signal_pages.table().splitlines() if line.startswith("| ")]
    body = [cells for cells in lines if cells[1].strip() == "2"]
    assert [cells[0].strip() for cells in body] == [signal_pages.WORDS[name] for name in ("", COUNT[14:], GATE[14:])]
    plain, count, gate = ([cell.strip() for cell in cells[1:]] for cells in body)
    assert (plain[2], plain[4], plain[6]) == ("40.0%", "40.0%", "20.00")
    assert (gate[2], gate[4], gate[6]) == ("15.0%", "30.0%", "10.00")
    assert gate[3].startswith("-25.0") and gate[5].startswith("-10.0")
    assert count[2] == "50.0%" and count[3].startswith("+10.0") and count[6] == plain[3]


def test_every_variant_of_the_laboratory_has_words() -> None:
    laboratory = pytest.importorskip("laboratory")
    variants = laboratory.PARTS[signal_pages.PART].variants
    assert {signal_pages.without_steps(variant) for variant in variants} == {*signal_pages.WORDS}
