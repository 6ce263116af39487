"""The figures of docs/gpu.md: tables show what was measured, aims are held against it, and what is absent is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gpu_tables

ABOUT = {"machine": "a GPU", "date": "2026-01-02", "versions": {"python": "3.12", "torch": "2.11"}}


def prose(lines: list[str]) -> str:
    """What is said beside the tables."""
    return " ".join(line for line in lines if line and not line.startswith("|"))


def cells(lines: list[str], first: str) -> list[str]:
    """The row of a table that starts so."""
    (row,) = [line for line in lines if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def head_result(**ours: float) -> dict[str, Any]:
    trimtab = {"to_floor": 1.104, "gigabytes": 0.68, **ours}
    shape = {
        "trimtab": trimtab,
        "torch, full logits": {"to_floor": 1.83, "gigabytes": 14.3},
        "Liger": {"error": "IndexError"},
        "trimtab, scoring": {"to_one_gemm": 1.2},
    }
    return {**ABOUT, "8192 x 2048": shape, "8192 x 4096": shape | {"trimtab": {"to_floor": 1.1, "gigabytes": 0.7}}}


def test_an_outcome_names_what_is_reached_before_what_is_missed() -> None:
    figures = [("this", "1", False), ("that", "2", True), ("the rest", "3", True)]
    assert gpu_tables.outcome(figures) == "reached: that (2), the rest (3); missed: this (1)"
    assert gpu_tables.outcome(figures[:1]) == "missed: this (1)"


def test_the_head_is_held_against_its_aim_before_rounding() -> None:
    made = gpu_tables.head(head_result())
    assert cells(made, "trimtab") == ["1.10, +0.7 GB", "1.10, +0.7 GB"]
    assert cells(made, "Liger") == ["failed", "failed"]
    assert "reached: 8192 x 4096 (1.100); missed: 8192 x 2048 (1.104)" in prose(made)
    assert "pause" not in "".join(made)


def test_a_head_that_was_timed_after_pauses_shows_both() -> None:
    made = gpu_tables.head(head_result(to_floor_rested=1.07))
    assert cells(made, "trimtab, each run after a pause") == ["1.07", ""]
    assert made.index(next(line for line in made if "after a pause" in line)) == 3, "below ours"
    assert "After a pause, reached: 8192 x 2048 (1.070)." in prose(made)


@pytest.mark.parametrize(
    ("hidden", "weight", "says"),
    [(0.003, 0.004, "Both gradients are"), (0.003, 0.02, "One of our two gradients is"), (0.01, 0.01, "Neither")],
)
def test_which_head_is_nearer_to_fp64_is_read_off_the_figures(hidden: float, weight: float, says: str) -> None:
    full = {"loss": 0.007, "hidden": 0.01, "weight": 0.01}
    distances = {"trimtab": {"loss": 0.001, "hidden": hidden, "weight": weight}, "torch, full logits": full}
    made = gpu_tables.head(head_result() | {"distance_to_fp64": distances})
    assert says in prose(made)
    assert cells(made[len(gpu_tables.head(head_result())) :], "torch, full logits") == ["0.70%", "1.00%", "1.00%"]


def test_the_samplers_aim_is_for_plain_sampling() -> None:
    ways = {
        "trimtab, a prompt for each": {"tokens_per_second": 299_999},
        "trimtab, 8 samples of a prompt": {"tokens_per_second": 300_000},
        "trimtab, top-p 0.9 and top-k 50": {"tokens_per_second": 7},
        "transformers generate": {"tokens_per_second": 400_000},
        "transformers generate_batch": {"error": "no"},
    }
    made = gpu_tables.sampler({**ABOUT, "135M Llama": ways})
    assert cells(made, "trimtab, top-p 0.9 and top-k 50") == ["7"]
    assert prose(made).endswith("reached: 8 samples of a prompt (300,000); missed: a prompt for each (299,999).")
    assert "generate_batch" not in "".join(made)
    assert gpu_tables.sampler(ABOUT) == []


def test_the_limit_is_shown_for_every_shape_and_left_out_where_none_was_measured() -> None:
    row = {"new_tokens": {"mean": 1011.6, "longest": 4096}, "seconds": 40.04, "tokens_per_second": 12_345}
    row |= {"share_of_limit": 0.613, "share_of_limit_with_products": 0.7}
    result = {**ABOUT, "copy_bytes_per_second": 4.2e12, "Qwen3-8B shape, 512 sequences, up to 4096": row}
    made = gpu_tables.limit(result)
    assert cells(made, "Qwen3-8B, 512 sequences, up to 4096") == ["1,012", "12,345", "40.0", "61%", "70%"]
    assert "4.20 TB/s" in prose(made) and "Graphs were made in the call that was timed" in prose(made)
    row["first_seconds"] = 47.24
    assert "up to 7.2 s longer, do not count" in prose(gpu_tables.limit(result))
    assert gpu_tables.limit({**ABOUT, "copy_bytes_per_second": 4.2e12}) == []


def test_agreement_is_read_in_both_of_its_forms() -> None:
    row = {"tokens": 78_870, "mean": 0.0306, "largest": 0.437, "mean_entropy": 2.19}
    old = gpu_tables.agreement({**ABOUT, gpu_tables.AGREEMENT: row})
    new = gpu_tables.agreement({**ABOUT, gpu_tables.AGREEMENT: {"bf16, trimtab": row, "fp32, trimtab": row}})
    assert cells(old, "bf16, trimtab") == cells(new, "fp32, trimtab") == ["78,870", "0.031", "0.44", "2.2"]
    assert len(new) == len(old) + 1
    assert gpu_tables.agreement(ABOUT) == []


def step_way(seconds: float, steps: int) -> dict[str, Any]:
    return {"seconds": seconds, "steps": steps, "where": {"sample": {"ms": 1000 * seconds}}}


def test_a_step_beside_trl_says_how_many_steps_count() -> None:
    free = {"trimtab": step_way(1.5, 7), "trl": step_way(15, 1), "times_faster": {"step": 10.0}}
    fixed = {"trimtab": step_way(2, 7), "trl": step_way(15, 2), "times_faster": {"step": 7.5}}
    made = gpu_tables.step({**ABOUT, "free": free, "fixed": fixed})
    assert "reached: responses end by themselves (10.00); missed: every response has 256 tokens (7.50)." in prose(made)
    assert "at least: ours 7, TRL's 1." in prose(made)
    assert cells(made, "sample") == ["1,500", "15,000"]
    assert gpu_tables.step({**ABOUT, "free": {"trimtab": step_way(1, 1), "trl": {"error": "no"}}}) == []


def overhead_result() -> dict[str, Any]:
    shares = {"grpo": 0.0, "grpo again": 0.05, "stapo": 0.0104, "stare": -0.002, "sspo": 0.01}
    added = {name: {"ms_added": 1e3 * s, "ms_added_spread": 2.0, "share_of_step": s} for name, s in shares.items()}
    made = {"added": added, "whole_step_seconds": 1.0, "sampling_seconds": 0.4, "tokens": 99_132, "rounds": 7}
    return {**ABOUT, "objectives": made | {"groups_mixed_share": 0.08}}


def test_objectives_are_held_against_their_aim_and_the_noise_is_not() -> None:
    made = gpu_tables.overhead(overhead_result())
    assert cells(made, "STAPO") == ["+10.4", "2.0", "+1.04%"]
    assert cells(made, gpu_tables.NOISE) == ["+50.0", "2.0", "+5.00%"]
    assert "at most 1%; reached: STARE (-0.20%), SSPO (1.00%); missed: STAPO (1.04%)." in prose(made)
    assert "recorder" not in "".join(made), "it was not measured"


def test_the_recorder_has_an_aim_of_its_own() -> None:
    recorder = {
        "ms_added": 31.0,
        "ms_added_spread": 3.0,
        "share_of_step": 0.031,
        "steps": 18,
        "kilobytes_per_step": 900,
    }
    made = gpu_tables.overhead(overhead_result() | {"recorder": recorder})
    assert cells(made, "the recorder") == ["+31.0", "3.0", "+3.10%"]
    assert "at most 3%; missed: the recorder (3.10%)." in prose(made)
    assert "18 pairs of steps, 900 kB each" in prose(made)


def mfu_row(tokens: int) -> dict[str, Any]:
    row: dict[str, Any] = {"response": 1024, "budget": 8704, "tokens": tokens}
    for what in ("update", "score"):
        row |= {f"{what}_tflops": 401.2, f"{what}_share_of_peak": 0.4057, f"{what}_share_of_gemm": 0.55}
    return row


def test_arithmetic_shows_shares_and_what_did_not_fit() -> None:
    rows = [mfu_row(8704), {"response": 4096, "budget": 34_816, "error": "out of memory"}]
    line = {"exponent": 0.99, "largest_deviation": 0.012}
    growth = {"rows": [mfu_row(8704), mfu_row(69_632), rows[1]], "update_line": line, "score_line": line}
    result = {**ABOUT, "peak_tflops_data_sheet": 989.0, "measured_gemm_tflops": 730.4, "share_of_peak": rows}
    made = gpu_tables.mfu(result)
    assert cells(made, "1,024") == ["8,704", "401", "40.6%", "55.0%", "401", "40.6%", "55.0%"]
    assert cells(made, "4,096") == ["34,816", "out of memory", "", "", "out of memory", "", ""]
    assert "989 TFLOP/s by the data sheet; a large GEMM: 730" in prose(made)
    grown = prose(gpu_tables.mfu(result | {"growth": growth}))
    assert "From 8,704 to 69,632 tokens the cost of an update grows with tokens^0.99, at most 1.2% off a line" in grown
    assert "grows" not in prose(made)
    assert gpu_tables.mfu(ABOUT) == []


def memory_row(name: str, peak: float, **phases: float) -> dict[str, Any]:
    ratios = dict.fromkeys(gpu_tables.PHASES, 1.0) | phases | {"peak": peak}
    estimated = {"peak": peak * 10e9, "worst_phase": "update"}
    return {
        "setting": {"name": name},
        "estimated": estimated,
        "measured": {"peaks": {"update": 10e9}},
        "ratios": ratios,
    }


def test_an_estimate_is_judged_by_its_farthest_peak() -> None:
    made = gpu_tables.memory({**ABOUT, "settings": [memory_row("small", 1.01), memory_row("large", 0.8, update=0.8)]})
    assert cells(made, "large") == ["8.0", "10.0", "0.80", "1.00", "1.00", "0.80", "1.00"]
    assert prose(made) == "Target: a peak within 15%; missed: the farthest is 20.0% off (large)."


def test_a_phase_that_is_off_is_named_where_the_peak_is_right() -> None:
    made = gpu_tables.memory({**ABOUT, "settings": [memory_row("LoRA", 1.0, sampling=1.296)]})
    assert "reached: the farthest is 0.0% off (LoRA)." in prose(made)
    assert "sampling of LoRA (1.30), though its peak, in the update, is within (1.00)." in prose(made)


def test_a_setting_that_failed_is_in_the_table() -> None:
    failed = {"setting": {"name": "huge"}, "estimated": {}, "measured": {"error": "out of memory"}}
    made = gpu_tables.memory({**ABOUT, "settings": [memory_row("small", 1.0), failed]})
    assert cells(made, "huge")[0] == "failed"
    assert gpu_tables.memory({**ABOUT, "settings": [failed]}) == []


def test_a_part_comes_from_the_first_file_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tables, "RESULTS", tmp_path)
    make = gpu_tables.part("speed", lambda result: result.get("lines", []), "new.json", "old.json")
    assert make() == "Not measured yet; `benchmarks/speed.py` does it."
    (tmp_path / "old.json").write_text(json.dumps({**ABOUT, "lines": ["old"]}))
    (tmp_path / "new.json").write_text(json.dumps(ABOUT))
    assert make() == "old\n\na GPU, torch 2.11; by `benchmarks/speed.py`, 2026-01-02."
    (tmp_path / "new.json").write_text(json.dumps({**ABOUT, "lines": ["new"]}))
    assert make().startswith("new\n")


def test_every_part_has_its_place_on_the_page() -> None:
    page = (Path(gpu_tables.__file__).parent.parent / "docs/gpu.md").read_text()
    for name in gpu_tables.PARTS:
        assert page.count(f"<!-- {name}: made by") == 1


def latency_row(delay: float, of_the_first: float) -> dict[str, float]:
    times = {"time/rollout": 1.5, "time/update": 0.25, "time/tools_wait_share": 0.0165}
    return {"delay_seconds": delay, "tokens_per_second": 10942.8, "of_the_first": of_the_first, **times}


def test_a_slow_tool_is_held_against_an_instant_one() -> None:
    rows = [latency_row(0.0, 1.0), latency_row(0.05, 0.81), latency_row(0.5, 0.79)]
    made = gpu_tables.latency({**ABOUT, "rows": rows})
    assert cells(made, "50 ms") == ["10,943", "81.0%", "1.75", "1.7%"]
    assert "reached: 50 ms (81.0%); missed: 500 ms (79.0%)" in prose(made)
