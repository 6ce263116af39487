"""Whatever a run's folder lacks, or holds that is damaged or foreign, is named on the page; nothing is a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.insight.report_runs import Made, data_of, make_run, metrics_lines
from trimtab.insight.report import write_report
from trimtab.insight.report.run_files import MOST_ALARMS, MOST_METRICS, read_run


def notes_of(run: Path) -> str:
    page = write_report([run]).read_text(encoding="utf-8")
    return " | ".join(data_of(page)["runs"][0]["notes"])


def replace_with(text: str | bytes, name: str) -> Callable[[Path], None]:
    data = text.encode() if isinstance(text, str) else text
    return lambda run: (run / name).write_bytes(data) and None


def gone(name: str) -> Callable[[Path], None]:
    def remove(run: Path) -> None:
        path = run / name
        if path.is_dir():
            for file in sorted(path.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
            path.rmdir()
        else:
            path.unlink()

    return remove


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no records": (gone("tokens"), "holds no records"),
    "an empty folder of records": (
        lambda run: (gone("tokens")(run), (run / "tokens").mkdir(), None)[2],
        "manifest.json",
    ),
    "no manifest": (gone("tokens/manifest.json"), "manifest.json is missing"),
    "a foreign manifest": (replace_with("{}", "tokens/manifest.json"), "manifest.json cannot be read"),
    "no vocabulary": (gone("tokens/vocabulary.parquet"), "vocabulary.parquet"),
    "a damaged vocabulary": (replace_with("PAR1", "tokens/vocabulary.parquet"), "vocabulary.parquet"),
    "no metrics": (gone("metrics.jsonl"), "metrics.jsonl is missing"),
    "empty metrics": (replace_with("", "metrics.jsonl"), "holds no metrics"),
    "metrics that are no JSON": (replace_with("hello\n\x00\xff\n", "metrics.jsonl"), "metrics.jsonl, row 1: not JSON"),
    "metrics without steps": (replace_with('{"a": 1}\n', "metrics.jsonl"), "metrics.jsonl, row 1: `step` is missing"),
    "metrics that are no object": (
        replace_with("\n[1]\n", "metrics.jsonl"),
        "metrics.jsonl, row 2: must be a JSON object",
    ),
    "a step that is no number": (replace_with('{"step": "x"}\n', "metrics.jsonl"), "row 1: `step` is 'x'"),
    "a step that is true": (replace_with('{"step": true}\n', "metrics.jsonl"), "row 1: `step` is True"),
    "a step of 40 digits": (replace_with('{"step": 1' + "0" * 39 + "}\n", "metrics.jsonl"), "row 1: `step` is 1000"),
    "many bad lines": (replace_with("1\n" * 103, "metrics.jsonl"), "metrics.jsonl: 100 more rows are left out"),
    "half a line": (replace_with('{"step": 2, "rew\n{"step": 3}\n', "metrics.jsonl"), "row 1: not JSON"),
    "deep nesting": (replace_with('{"step": 1, "a": ' + "[" * 100_000 + "\n", "metrics.jsonl"), "row 1: not JSON"),
    "a long line": (replace_with('"' + "x" * 3_000_000 + '"\n', "metrics.jsonl"), "row 1: longer than 1048576 bytes"),
    "no configuration": (gone("config.toml"), "config.toml is missing"),
    "a configuration that is no TOML": (replace_with("= = =", "config.toml"), "config.toml is no TOML"),
    "a configuration that is not text": (replace_with(b"\xff\xfe\x00", "config.toml"), "config.toml is no TOML"),
    "foreign alarms": (replace_with("x\n", "alarms.jsonl"), "alarms.jsonl, row 1: not JSON"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_missing_or_damaged_is_named_and_the_rest_is_shown(tmp_path: Path, damage: str) -> None:
    run = make_run(tmp_path / "run", Made(steps=2))
    damage_run, note = DAMAGE[damage]
    damage_run(run)
    assert note in notes_of(run)


def test_a_damaged_step_is_left_out_and_named_while_others_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=3))
    table = run / "tokens" / "step-00000002" / "tokens.parquet"
    table.write_bytes(table.read_bytes()[:-20])
    page = write_report([run]).read_text(encoding="utf-8")
    shown = data_of(page)["runs"][0]
    assert any("step 2 is left out" in note and "damaged" in note for note in shown["notes"])
    assert {entry["step"] for entry in shown["responses"]} == {1, 3}


def test_of_many_damaged_steps_a_few_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=9))
    for step in range(1, 9):
        (run / "tokens" / f"step-{step:08d}" / "responses.parquet").unlink()
    notes = notes_of(run)
    assert "step 5 is left out" in notes and "step 6 is left out" not in notes
    assert "3 more steps are damaged" in notes


def test_a_run_without_metrics_and_records_gives_a_page_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "alarms.jsonl").touch()
    notes = notes_of(tmp_path)
    for note in ("config.toml is missing", "metrics.jsonl is missing", "holds no records"):
        assert note in notes


def test_a_folder_of_runs_is_an_error_that_names_them(tmp_path: Path) -> None:
    make_run(tmp_path / "b", Made(steps=1))
    make_run(tmp_path / "a", Made(steps=1))
    (tmp_path / "logs").mkdir()
    with pytest.raises(ValueError, match=r"is no run: .*; it holds the runs a, b: name one or several of them"):
        write_report([tmp_path])
    assert not (tmp_path / "report.html").exists()


def test_an_empty_folder_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no run: it has none of config.toml, metrics.jsonl, .*tokens$"):
        write_report([tmp_path])


@pytest.mark.parametrize("name", ["file.txt", "nothing"])
def test_what_is_no_folder_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(ValueError, match=name):
        write_report([tmp_path / name])


def test_an_objective_that_this_trimtab_does_not_know_costs_only_its_gradients(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=2, objective={"name": "ppo3"}))
    page = write_report([run]).read_text(encoding="utf-8")
    shown = data_of(page)["runs"][0]
    assert any("ppo3" in note and "gradient norms" in note for note in shown["notes"])
    assert shown["responses"] and shown["token_statistics"]["tokens"] > 0


@pytest.mark.parametrize("missing", ["entropy", "sum_p2", "sum_p2_logp", "new_logp", "clipped"])
def test_a_record_without_an_optional_column_is_shown_without_it(tmp_path: Path, missing: str) -> None:
    run = make_run(tmp_path / "run", Made(steps=2, without=(missing,), objective={"name": "grpo"}))
    page = write_report([run]).read_text(encoding="utf-8")
    shown = data_of(page)["runs"][0]
    assert shown["responses"]
    noted = any("stapo cannot be planned" in note for note in shown["notes"])
    assert noted == (missing == "entropy")  # the only one of them that an objective needs


def test_records_of_the_current_policy_are_judged_by_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=2, optional=("current_logp", "planned_advantage", "penalty")))
    assert data_of(write_report([run]).read_text(encoding="utf-8"))["runs"][0]["responses"]


def test_numbers_that_are_not_finite_and_other_values_are_no_points_of_a_curve(tmp_path: Path) -> None:
    line = '{"step": 1, "a": 1.5, "b": NaN, "c": Infinity, "d": "x", "e": true, "f": null, "g": 1' + "0" * 400 + "}\n"
    (tmp_path / "metrics.jsonl").write_text(line)
    assert {name: curve.values.tolist() for name, curve in read_run(tmp_path).curves.items()} == {"a": [1.5]}


def test_a_step_that_was_run_again_counts_as_it_was_run_last(tmp_path: Path) -> None:
    lines = ['{"step": 2, "a": 1}', '{"step": 3, "a": 2}', '{"step": 2, "a": 7}', '{"step": 1, "a": 5}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    curve = read_run(tmp_path).curves["a"]
    assert curve.steps.tolist() == [1, 2, 3] and curve.values.tolist() == [5, 7, 2]


def test_a_flood_of_metric_names_is_cut_off_and_said(tmp_path: Path) -> None:
    record = {"step": 1} | {f"m{n}": 1.0 for n in range(MOST_METRICS + 50)}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record))
    run = read_run(tmp_path)
    assert len(run.curves) == MOST_METRICS
    assert any("more than" in note and "50" in note for note in run.notes)


def test_alarms_are_read_with_evidence_in_words(tmp_path: Path) -> None:
    evidence = {"entropy": 0.0123456, "window": [1, 2]}
    alarm = {"step": 4, "alarm": "entropy collapse", "message": "it falls", "evidence": evidence, "action": None}
    run = make_run(tmp_path / "run", Made(steps=4, alarms=[alarm]))
    (found,) = read_run(run).alarms
    assert (found.step, found.alarm, found.message, found.action) == (4, "entropy collapse", "it falls", "")
    assert found.evidence == "entropy 0.01235, window [1, 2]"


def test_of_endless_alarms_the_first_are_shown(tmp_path: Path) -> None:
    (tmp_path / "alarms.jsonl").write_text('{"step": 1, "alarm": "x"}\n' * (MOST_ALARMS + 5))
    run = read_run(tmp_path)
    assert len(run.alarms) == MOST_ALARMS
    assert any("only the first" in note for note in run.notes)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("x = 1")
    (tmp_path / "config.toml").chmod(0)
    assert any("config.toml" in note for note in read_run(tmp_path).notes)


def test_the_objective_comes_from_the_configuration_or_else_from_the_records(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(steps=1, config="[objective]\nname = 'gspo'\n"))
    assert read_run(run).label == "gspo"
    (run / "config.toml").unlink()
    assert read_run(run).label == "stapo (tau_p=0.2)"
    (tmp_path / "metrics.jsonl").touch()
    assert read_run(tmp_path).label == "unknown objective"


def test_seed_and_last_step_are_known_where_they_are_written(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", Made(steps=4)))
    assert (run.seed, run.last_step) == (3, 4)
    (tmp_path / "metrics.jsonl").write_text(metrics_lines(9))
    assert (read_run(tmp_path).seed, read_run(tmp_path).last_step) == (None, 9)
