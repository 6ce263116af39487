"""The laboratory's tables say what the runs did, with whatever runs there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import laboratory_pages as pages
from laboratory_pages import Row
from trimtab.experiments.intervals import SeedDifference

# A machine with a GPU may lack matplotlib.
pictures = pytest.importorskip("laboratory_pictures", exc_type=ImportError)

ROOT = Path(__file__).parent.parent
HEAD = {
    "what": "made up",
    "recipe": "countdown",
    "settings": ["run.steps=10"],
    "machine": "a CPU",
    "date": "2026-01-02",
    "versions": {"torch": "2.11"},
}


def made_run(objective: str, seed: int, greedy: float, entropy: list[float], **rest: Any) -> dict[str, Any]:
    curves = {"policy/entropy": [[step, value] for step, value in enumerate(entropy)], **rest.pop("curves", {})}
    run = {"objective": objective, "seed": seed, "greedy": greedy, "sampled": greedy / 2, "pass@8": greedy + 0.25}
    run |= {"seconds": 10.0, "collapse": None, "evaluations": [[0, 0.0], [9, greedy]], "curves": curves, "fit": None}
    return run | rest


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    return tmp_path


def write(folder: Path, part: str, *runs: dict[str, Any]) -> None:
    text = json.dumps(HEAD | {"runs": {str(number): run for number, run in enumerate(runs)}})
    (folder / f"laboratory-{part}.json").write_text(text)


def by_seed(*greedy: float | None) -> dict[int, dict[str, Any]]:
    return {seed: made_run("a", seed, value, []) for seed, value in enumerate(greedy) if value is not None}


def test_the_paired_interval_is_the_one_worked_out_by_hand() -> None:
    # Differences 0.1, 0.2, 0.3, 0.2, 0.2: mean 0.2, deviation sqrt(0.02 / 4) = 0.070711, over sqrt(5) 0.031623.
    # Student's t with 4 degrees of freedom has 2.776445 as its 97.5 % quantile, so the half-width is 0.087799.
    found = pages.paired(by_seed(0.4, 0.5, 0.6, 0.5, 0.5), by_seed(0.3, 0.3, 0.3, 0.3, 0.3))
    assert found == pytest.approx(SeedDifference(0.2, 0.112201, 0.287799, 5, 5, 0), abs=1e-6)
    assert found is not None and found.clear
    assert pages.points(found) == "+20.0 [+11.2, +28.8]"


def test_seeds_without_a_partner_are_left_out_and_counted() -> None:
    # Differences 0.1 and -0.02: mean 0.04, deviation 0.12 / sqrt(2), half-width 12.7062 * 0.06 = 0.762372.
    found = pages.paired(by_seed(0.4, None, 0.28, 0.9), by_seed(0.3, 0.3, 0.3))
    assert found == pytest.approx(SeedDifference(0.04, -0.722372, 0.802372, 2, 1, 2), abs=1e-6)
    assert found is not None and not found.clear


def test_one_pair_has_no_interval_and_none_no_difference() -> None:
    assert pages.points(pages.paired(by_seed(0.4), by_seed(0.3))) == "+10.0"
    assert pages.paired(by_seed(0.4), {1: made_run("b", 1, 0.3, [])}) is None
    assert pages.points(None) == "-"


def test_the_value_at_the_end_is_the_mean_over_the_last_tenth() -> None:
    assert pages.at_end(made_run("a", 0, 0.0, [1.0] * 18 + [0.2, 0.4]), "policy/entropy") == pytest.approx(0.3)
    assert pages.at_end(made_run("a", 0, 0.0, [1.0, 0.5]), "policy/entropy") == 0.5
    assert pages.at_end(made_run("a", 0, 0.0, []), "policy/entropy") is None


def test_the_band_is_counted_from_where_the_entropy_first_fell_to_it() -> None:
    # Around 0.3: 0.24 to 0.36. Two of the four points since 0.35 are in it.
    assert pages.in_band(made_run("dapo", 0, 0.0, [2.0, 1.0, 0.35, 0.25, 0.2, 0.1])) == 0.5
    assert pages.in_band(made_run("dapo", 0, 0.0, [2.0, 1.0])) is None
    # trim logs its target, step by step.
    falling = {"trim/target": [[0, 1.0], [1, 0.5], [2, 0.25]]}
    assert pages.in_band(made_run("dapo + trim", 0, 0.0, [1.0, 0.5, 0.5], curves=falling)) == pytest.approx(2 / 3)


def test_a_run_is_held_to_its_own_target_or_else_to_that_of_trim(results: Path) -> None:
    write(
        results,
        "expression",
        made_run("dapo", 0, 0.0, [0.2]),
        made_run("stare", 0, 0.0, [0.2]),
        made_run("stare(target=0.5)", 0, 0.0, [0.2]),
        made_run("stare", 0, 0.0, [0.2], variant="objective.target=0.4"),
        made_run("dapo + trim(floor=0.2)", 0, 0.0, [0.2], curves={"trim/target": [[0, 0.2]]}),
    )
    found = {row.label: seeds[0]["target"] for row, seeds in pages.runs("expression").items()}
    assert list(found.values()) == [0.2, 0.3, 0.5, 0.4, 0.2]
    assert pages.named(pages.runs("expression"), "dapo + trim") == Row("dapo + trim(floor=0.2)")
    assert pages.named(pages.runs("expression"), "gspo") is None
    critical = Row("stare(boost=critical, target=0.2)")
    assert pages.named({critical: {}}, "stare(boost=critical)") == critical
    assert "`dapo + trim` 0.200 nats (100.0% of steps in band)" in pages.entropies()


def test_a_run_is_lost_when_it_collapses_or_its_entropy_is_gone() -> None:
    assert pages.lost_at(made_run("a", 0, 0.0, [1.0, 0.049, 0.01])) == 1
    assert pages.lost_at(made_run("a", 0, 0.0, [1.0, 0.5, 0.01], collapse=1)) == 1
    assert pages.lost_at(made_run("a", 0, 0.0, [1.0, 0.06])) is None


def test_tables_have_a_row_for_each_objective_beside_the_reference(results: Path) -> None:
    control = {"trim/weight": [[0, 1.0], [1, 1.5]], "trim/saturated": [[0, 0.0], [1, 1.0]]}
    fit = {"gain": 12.0, "r2": 0.25}
    write(
        results,
        "expression",
        *(made_run("dapo", seed, 0.3, [1.0, 0.04]) for seed in range(3)),
        *(made_run("dapo + trim", s, 0.4 + 0.1 * s, [1.0, 0.3], curves=control, fit=fit) for s in range(2)),
    )
    assert pages.accuracy_table("expression").splitlines()[2:] == [
        "| `dapo` | 3 | 30.0% | 15.0% | 55.0% | - | - | - |",
        # Differences 0.1 and 0.2: half-width 12.7062 * 0.05.
        "| `dapo + trim` | 2 | 45.0% | 22.5% | 70.0% | +15.0 [-48.5, +78.5] | 2 of 2 (1 left out) "
        "| +15.0 [-48.5, +78.5] |",
    ]
    assert pages.entropy_table("expression").splitlines()[2:] == [
        "| `dapo` | 0.040 | 0% | - | 1 (3 of 3) | 10 |",
        "| `dapo + trim` | 0.300 | 100.0% | - | - | 10 |",
    ]
    assert pages.control_table("expression").splitlines()[2:] == [
        "| `dapo + trim` | 0.300 | 100.0% | 1.50 | - | - | 50.0% | 12 | 0.25 |"
    ]
    assert "Recipe `countdown`, `run.steps=10`; a CPU, torch 2.11; 2026-01-02." in pages.section("expression")
    said = "`dapo + trim` ends at 45.0%, `dapo` at 30.0%: no clear difference, +15.0 [-48.5, +78.5] points over 2 seeds"
    assert f"- {said}, 2 of them with this sign." in pages.findings()
    assert pages.fact("expression", "dapo + trim", "difference") == "+15.0 [-48.5, +78.5] points"


def test_variants_are_compared_with_the_reference_under_the_same_settings(results: Path) -> None:
    runs = [
        made_run(name, 0, greedy, [1.0], variant=f"update.per_step={count}")
        for name, greedy, count in (("dapo", 0.3, 16), ("gspo", 0.4, 16), ("dapo", 0.2, 8), ("gspo", 0.1, 8))
    ]
    write(results, "off-policy", *runs)
    assert [line.split(" | ")[0::5] for line in pages.accuracy_table("off-policy").splitlines()[2:]] == [
        ["| `dapo`, `update.per_step=8`", "-"],
        ["| `gspo`, `update.per_step=8`", "-10.0"],
        ["| `dapo`, `update.per_step=16`", "-"],
        ["| `gspo`, `update.per_step=16`", "+10.0"],
    ]


def test_ablations_are_compared_with_trim_as_it_is_also_from_the_first_part(results: Path) -> None:
    ablated = made_run("dapo + trim", 0, 0.2, [1.0], variant="objective.trim.gain=0")
    write(results, "ablations", ablated)
    assert Row("dapo + trim") not in pages.runs("ablations")
    write(results, "expression", made_run("dapo + trim", 0, 0.5, [1.0]), made_run("dapo", 0, 0.1, [1.0]))
    rows = pages.accuracy_table("ablations").splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| `dapo + trim`", "| `dapo + trim`, `objective.trim.gain=0`"]
    assert "| -30.0 | 1 of 1 |" in rows[1]


def test_parts_that_the_page_does_not_name_have_a_section_too(results: Path) -> None:
    write(results, "steps", made_run("dapo", 0, 0.3, [1.0]))
    assert pages.others() == ""
    write(results, "laws", made_run("dapo", 0, 0.3, [1.0]))
    assert pages.others().startswith("### Made up\n\n| objective | seeds |")


def test_without_results_pages_say_so_and_there_are_no_pictures(results: Path) -> None:
    nothing = "Not run yet; `benchmarks/laboratory.py expression` does it."
    assert {pages.section("expression"), pages.findings(), pages.control()} == {nothing}
    assert pages.fact("expression", "dapo", "greedy") == "(not run yet)"
    assert pages.picture() == nothing and "docs/study.svg" in pages.readme()
    assert pictures.pictures() == {}
    write(results, "expression")  # a file without runs
    assert pages.section("expression") == nothing


def test_no_line_of_a_page_begins_with_the_mark_of_a_figure() -> None:
    # Markdown takes such a line for HTML, and ends the list or paragraph that it is in.
    for page in (ROOT / "docs").glob("*.md"):
        assert re.findall(r"^\s*<!-- = .*", page.read_text(), re.MULTILINE) == [], page.name


def test_the_picture_is_made_from_the_runs_that_are_there_and_always_the_same(results: Path) -> None:
    write(results, "expression", *(made_run("dapo", seed, 0.3, [1.0, 0.1 + seed]) for seed in range(2)))
    made = pictures.pictures()
    assert list(made) == ["docs/laboratory.svg"] and made == pictures.pictures()
    ElementTree.fromstring(made["docs/laboratory.svg"])
    assert "(laboratory.svg)" in pages.picture() and "DAPO at 0.600 nats and 30.0%." in pages.picture()
    assert "(docs/laboratory.svg)" in pages.readme()


def test_the_band_of_the_picture_is_that_of_the_mean() -> None:
    steps, middle, low, high = pictures.mean_curve([[(1, 0.1), (2, 0.3)], [(1, 0.2), (2, 0.3), (3, 1.0)]])
    assert steps == [1, 2]
    assert middle == pytest.approx([0.15, 0.3])
    assert low == pytest.approx([0.15 - 0.635310, 0.3], abs=1e-6)  # 12.7062 * 0.05
    assert high == pytest.approx([0.15 + 0.635310, 0.3], abs=1e-6)


def test_the_critical_weight_is_drawn_over_the_length_of_the_responses(results: Path) -> None:
    assert "Not run yet" in pictures.length_text()
    for_length = [
        made_run("stare(boost=critical)", 0, 0.3, [1.0], variant=f"v={length}", curves={
            "stare/critical_weight": [[0, 1 + 6 / length]], "response/length_mean": [[0, length]]})
        for length in (6, 12, 24)
    ]  # fmt: skip
    write(results, "length", *for_length, made_run("dapo", 0, 0.3, [1.0]))
    assert pictures.critical_weights() == [(6, 1.0), (12, 0.5), (24, 0.25)]
    assert pictures.exponent(pictures.critical_weights()) == pytest.approx(-1.0)
    assert "2.00 with 6 tokens per response, and 1.25 with 24." in pictures.length_text()
    ElementTree.fromstring(pictures.pictures()["docs/theory-length.svg"])
    assert pictures.exponent([(6, 1.0)]) is None
