"""Replay results: counted by hand, compared with the theory, swept, and with notes on their limits."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.record.made_records import made_run, made_step, record
from trimtab.insight.replay import replay
from trimtab.insight.replay.batches import recorded_mini_batch
from trimtab.insight.replay.replay import (
    GradientMass,
    ObjectiveStats,
    Replayer,
    TokenOverlap,
    add_up,
    make_variants,
    parse_sweep,
)
from trimtab.insight.replay.tables import to_json
from trimtab.objectives import METHODS, objective, option_names, theory
from trimtab.record import RecordError, RecordSettings, RecordWarning, StepData, open_run
from trimtab.record.layout import RECORDS_FOLDER, step_folder


def with_tokens(data: StepData, **columns: Any) -> StepData:
    """A made step with some of its columns set."""
    tokens = dict(data.tokens)
    for name, values in columns.items():
        tokens[name] = np.array(values, tokens[name].dtype)
    return replace(data, tokens=tokens)


def spurious_step(step: int = 1) -> StepData:
    """Eight tokens of four responses; STAPO (quantile 1) silences the second, whose probability is e^-7."""
    return with_tokens(
        made_step(step, [2, 2, 2, 2], updates=1),
        old_logp=[-1, -7, -1, -7.5, -1, -7, -1, -1],
        new_logp=[-1, -7, -0.5, -7.5, -1, -7, -3, -1],
        entropy=[1, 0.5, 1, 2.0, 1, 0.1, 1, 1],
        advantage=[1, 1, 1, 1, -1, -1, -1, -1],
        sum_p2=[0.5] * 8,
        sum_p2_logp=[-0.4] * 8,
    )


@pytest.fixture
def spurious(tmp_path: Path) -> Path:
    record(tmp_path, [spurious_step()])
    return tmp_path


# --- by hand


def test_what_each_objective_silences_and_clips_is_counted(spurious: Path) -> None:
    result = replay(spurious, ["stapo", "dapo", "grpo"])
    stapo, dapo, grpo = result.stats
    assert {name: mass.tokens for name, mass in stapo.reasons.items()} == {"silenced": 1, "clipped": 2}
    assert {name: mass.tokens for name, mass in dapo.reasons.items()} == {"clipped": 2}
    assert (stapo.touched, dapo.touched, grpo.touched) == (3, 2, 2)
    assert stapo.share("silenced") == 1 / 8 and math.isclose(stapo.share("clipped"), 2 / 8)
    assert stapo.share("boosted") == 0.0
    assert result.objectives == ("stapo", "dapo", "grpo") and result.recorded == "dapo"


def test_gradient_mass_is_the_exact_norm_of_every_tokens_gradient(spurious: Path) -> None:
    (stapo,) = replay(spurious, ["stapo"]).stats
    data = spurious_step().tokens
    p = np.exp(data["old_logp"].astype(float))
    norm = np.sqrt(1 - 2 * p + data["sum_p2"])
    before = np.abs(data["advantage"]) * norm / 8
    assert stapo.total.before == pytest.approx(before.sum(), rel=1e-6)
    assert stapo.reasons["silenced"].before == pytest.approx(before[1], rel=1e-6)
    assert stapo.mass("silenced") == pytest.approx(before[1] / before.sum(), rel=1e-6)
    assert stapo.mass_after("silenced") == 0.0, "a silenced token has no gradient"
    assert stapo.mass("clipped") == pytest.approx(before[[2, 6]].sum() / before.sum(), rel=1e-6)
    kept = np.abs(data["advantage"]) * norm / 7  # the mean is over the seven tokens that count
    kept[[1, 2, 6]] = 0.0
    assert stapo.total.after == pytest.approx(kept.sum(), rel=1e-5)


def test_the_predicted_entropy_change_is_that_of_the_theory(spurious: Path) -> None:
    found = replay(spurious, ["stapo", "sspo + s2t", "gspo"]).stats
    (update,) = open_run(spurious).step(1).updates
    new = torch.from_numpy(update.column("new_logp").copy())
    for name, stats in zip(("stapo", "sspo + s2t", "gspo"), found, strict=True):
        built = objective(name)
        batch = recorded_mini_batch(update, built.needs).batch
        wanted = theory.entropy_change(built, batch, built.plan(batch), new).sum()
        assert stats.entropy_change == pytest.approx(float(wanted), rel=1e-5, abs=1e-8)
        assert stats.updates == 1


def test_overlap_is_counted_by_token_and_by_reason(spurious: Path) -> None:
    (pair,) = replay(spurious, ["stapo", "dapo"]).overlaps
    assert pair == TokenOverlap(0, 1, both=2, either=3, agreed=2)
    assert pair.jaccard == pytest.approx(2 / 3) and pair.agreement == 1.0


def test_tokens_touched_for_other_reasons_do_not_agree(spurious: Path) -> None:
    names = ["dapo + s2t", "stare(gate=none,share=1.0,boost=1.5)"]
    (pair,) = replay(spurious, names).overlaps
    boosted = 4  # all tokens with a positive advantage
    assert pair.both == 3, "the silenced one, and two that are clipped, of which one is boosted too"
    assert pair.either == boosted + 1 and pair.agreed == 1
    assert pair.agreement == pytest.approx(1 / 3)


def test_an_objective_against_itself_overlaps_wholly(tmp_path: Path) -> None:
    made_run(tmp_path, 2)
    (pair,) = replay(tmp_path, ["dapo", "justrl"]).overlaps
    assert pair.jaccard == 1.0 and pair.agreement == 1.0


def test_without_touched_tokens_the_overlap_is_nan() -> None:
    assert math.isnan(TokenOverlap(0, 1).jaccard) and math.isnan(TokenOverlap(0, 1).agreement)
    assert math.isnan(ObjectiveStats().share("silenced")) and math.isnan(ObjectiveStats().entropy_change_per_update)


def test_what_happens_in_a_step_is_the_sum_of_its_updates_and_a_run_that_of_its_steps(tmp_path: Path) -> None:
    made_run(tmp_path, 4)
    result = replay(tmp_path, ["stapo(tau_p=0.2)", "gspo", "sspo"])
    assert [step.step for step in result.steps] == [1, 2, 3, 4]
    assert (result.stats, result.overlaps) == add_up(((step.stats, step.overlaps) for step in result.steps), 3)
    assert all(step.stats[0].updates == 2 and step.stats[0].tokens == 10 for step in result.steps)
    assert result.stats[0].tokens == 40
    assert [(pair.first, pair.second) for pair in result.overlaps] == [(0, 1), (0, 2), (1, 2)]


def test_stats_add_up() -> None:
    one = ObjectiveStats(1, 4, 2, GradientMass(4, 2.0, 1.0), -0.5, {"silenced": GradientMass(1, 0.5, 0.0)})
    other = ObjectiveStats(1, 6, 1, GradientMass(6, 3.0, 3.0), 0.1, {"clipped": GradientMass(1, 1.0, 0.0)})
    total = one + other
    assert (total.tokens, total.touched, total.updates) == (10, 3, 2)
    assert total.entropy_change_per_update == pytest.approx(-0.2)
    assert total.reasons == {"silenced": GradientMass(1, 0.5, 0.0), "clipped": GradientMass(1, 1.0, 0.0)}
    assert total.mass("silenced") == pytest.approx(0.1)


def test_the_plan_is_over_the_recorded_mini_batch_not_the_step(tmp_path: Path) -> None:
    data = made_step(1, [40] * 8, updates=2)
    record(tmp_path, [data])
    (whole,) = replay(tmp_path, ["top_entropy(share=0.1)"]).stats
    entropy, kept = data.tokens["entropy"], 0
    for part in np.split(entropy, 2):
        kept += math.ceil(0.1 * len(part))
    assert whole.tokens - whole.reasons["masked"].tokens == kept


# --- which objectives


@pytest.mark.parametrize("name", [name for name in METHODS if name != "gdpo"])
def test_every_method_can_be_replayed(name: str, tmp_path: Path) -> None:
    record(tmp_path, [made_step(1, [30] * 8, optional=("ref_logp",))])
    (stats,) = replay(tmp_path, [name]).stats
    assert stats.tokens == 240 and math.isfinite(stats.total.after)
    assert math.isfinite(stats.entropy_change)


def test_gdpo_of_several_rewards_is_not_replayed_as_if_they_were_one(tmp_path: Path) -> None:
    record(tmp_path, [made_step(1, [30] * 8, optional=("ref_logp",))])  # and two rewards
    with pytest.raises(RecordError, match="gdpo normalises each of several rewards by itself"):
        replay(tmp_path, ["gdpo"])
    record(tmp_path / "one", [made_step(1, [30] * 8)])
    assert replay(tmp_path / "one", ["gdpo"]).stats[0].tokens == 240


@pytest.mark.parametrize("name", ["s2t", "stare", "top_entropy", "tis", "icepop", "mis", "kl", "token_baseline"])
def test_every_attachment_can_be_replayed(name: str, tmp_path: Path) -> None:
    record(tmp_path, [made_step(1, [30] * 8, optional=("ref_logp",))])
    assert replay(tmp_path, [f"dapo + {name}"]).stats[0].tokens == 240


def test_without_a_name_it_is_the_recorded_one(tmp_path: Path) -> None:
    made_run(tmp_path, 1, objective={"name": "stapo", "tau_p": 0.2})
    assert replay(tmp_path).objectives == ("recorded (stapo)",)
    assert replay(tmp_path).stats == replay(tmp_path, ["stapo(tau_p=0.2)"]).stats


def test_an_objective_named_twice_is_replayed_once(tmp_path: Path) -> None:
    made_run(tmp_path, 1)
    assert replay(tmp_path, ["dapo", "dapo"]).objectives == ("dapo",)


def test_a_recorded_objective_that_no_longer_exists_is_an_error(tmp_path: Path) -> None:
    made_run(tmp_path, 1, objective={"name": "colour"})
    with pytest.raises(RecordError, match=r"the recorded objective cannot be built .*colour"):
        replay(tmp_path)
    assert replay(tmp_path, ["dapo"]).stats[0].tokens == 10


def test_an_unknown_objective_names_the_nearest(tmp_path: Path) -> None:
    made_run(tmp_path, 1)
    with pytest.raises(ValueError, match="did you mean stapo"):
        replay(tmp_path, ["stapoo"])


def test_a_field_that_was_not_recorded_is_named_with_the_objective(tmp_path: Path) -> None:
    made_run(tmp_path, 1)
    with pytest.raises(RecordError, match=r"grpo \+ kl reads `ref_logp`, which step 1 of .* lacks"):
        replay(tmp_path, ["grpo + kl"])


def test_statistics_of_the_current_policy_need_a_record_of_them(tmp_path: Path) -> None:
    made_run(tmp_path / "old", 1)
    with pytest.raises(RecordError, match="reads `current_logp`"):
        replay(tmp_path / "old", ["stapo(token_stats=current)"])
    record(tmp_path / "current", [made_step(1, optional=("current_logp",))])
    assert replay(tmp_path / "current", ["stapo(token_stats=current)"]).stats[0].tokens == 10


# --- sweeps


def test_a_sweep_replays_every_value_under_each_objective_that_has_the_option(tmp_path: Path) -> None:
    made_run(tmp_path, 2)
    result = replay(tmp_path, ["stapo", "gspo", "sspo + s2t"], sweep={"tau_p": [0.0, 0.5]})
    assert result.objectives == (
        "stapo tau_p=0.0",
        "stapo tau_p=0.5",
        "gspo",
        "sspo + s2t tau_p=0.0",
        "sspo + s2t tau_p=0.5",
    )
    shares = [stats.share("silenced") for stats in result.stats]
    assert shares[0] == shares[2] == shares[3] == 0.0 and shares[1] == shares[4] > 0


def test_two_sweeps_are_combined(tmp_path: Path) -> None:
    made_run(tmp_path, 1)
    result = replay(tmp_path, ["stapo"], sweep={"tau_p": [0.1, 0.5], "quantile": [0.25, 0.75]})
    assert len(result.objectives) == 4 and result.objectives[1] == "stapo tau_p=0.1 quantile=0.75"


def test_the_recorded_objective_can_be_swept(tmp_path: Path) -> None:
    made_run(tmp_path, 1, objective={"name": "stapo", "tau_p": 0.2, "quantile": 1.0})
    result = replay(tmp_path, ["recorded"], sweep={"tau_p": [0.2, 0.9]})
    assert result.objectives == ("recorded tau_p=0.2 (stapo)", "recorded tau_p=0.9 (stapo)")
    assert result.stats[0] == replay(tmp_path).stats[0]


def test_an_option_that_no_objective_has_is_an_error(tmp_path: Path) -> None:
    made_run(tmp_path, 1)
    with pytest.raises(ValueError, match="--sweep tau_p: none of grpo, gspo has an option of that name"):
        replay(tmp_path, ["grpo", "gspo"], sweep={"tau_p": [0.1]})


def test_a_value_that_makes_no_sense_is_an_error(tmp_path: Path) -> None:
    made_run(tmp_path, 1)
    with pytest.raises(ValueError, match="tau_p=7 must be between 0 and 1"):
        replay(tmp_path, ["stapo"], sweep={"tau_p": [7]})


def test_options_belong_to_the_method_the_attachments_and_all() -> None:
    assert "tau_p" in option_names("stapo") & option_names("sspo + s2t(quantile=0.5)") - option_names("grpo")
    assert "aggregation" in option_names("grpo")


def test_a_sweep_is_read_from_the_command_line() -> None:
    read = parse_sweep(["tau_p=0.0005,0.002", "variant=O1, C2", "adaptive=true", "seed=3"])
    assert read == {"tau_p": [0.0005, 0.002], "variant": ["O1", "C2"], "adaptive": [True], "seed": [3]}


@pytest.mark.parametrize("setting", ["tau_p", "=1", "tau_p=", "tau_p=1,,2", "tau-p=1"])
def test_a_sweep_that_cannot_be_read_is_an_error(setting: str) -> None:
    with pytest.raises(ValueError, match=r"write option=value,value"):
        parse_sweep([setting])


# --- limits of a record


def test_a_share_of_a_step_is_replayed_and_noted(tmp_path: Path) -> None:
    record(tmp_path, [made_step(1, sampled=16), made_step(2)], settings=RecordSettings(group_share=0.25))
    result = replay(tmp_path, ["stapo"])
    assert [step.exact for step in result.steps] == [False, True] and not result.exact
    assert any("1 of 2 steps were planned over the recorded share of the mini-batch" in note for note in result.notes)


def test_a_whole_record_has_no_notes(tmp_path: Path) -> None:
    made_run(tmp_path, 2)
    result = replay(tmp_path, ["stapo", "stare"])
    assert result.exact and result.notes == ()


def test_a_gate_that_did_not_see_every_step_is_noted(tmp_path: Path) -> None:
    record(tmp_path, [made_step(step) for step in range(1, 8)], settings=RecordSettings(every=3))
    assert "one step in 3 is recorded" in replay(tmp_path, ["stare(adaptive=true)"]).notes[0]
    assert replay(tmp_path, ["dapo"]).notes == ()


def test_a_record_of_a_gpu_is_noted(tmp_path: Path) -> None:
    data = made_step(1)
    record(tmp_path, [replace(data, info=replace(data.info, device="cuda", threads=64))])
    result = replay(tmp_path, ["sspo"])
    assert "recorded on a GPU" in result.notes[0]


def test_without_new_log_probabilities_nothing_is_clipped(tmp_path: Path) -> None:
    data = made_step(1)
    tokens = {name: values for name, values in data.tokens.items() if name not in {"new_logp", "clipped"}}
    record(tmp_path, [replace(data, tokens=tokens)])
    result = replay(tmp_path, ["dapo"])
    assert "clipped" not in result.stats[0].reasons
    assert any("no new log-probabilities" in note for note in result.notes)


def test_without_moments_masses_are_unknown_rather_than_wrong(tmp_path: Path) -> None:
    data = made_step(1)
    record(tmp_path, [replace(data, tokens={n: v for n, v in data.tokens.items() if not n.startswith("sum_")})])
    (stats,) = replay(tmp_path, ["stapo"]).stats
    assert math.isnan(stats.total.before) and math.isnan(stats.entropy_change)
    assert stats.tokens == 10


def test_without_segments_they_are_made_from_the_recorded_pieces(tmp_path: Path) -> None:
    data = with_tokens(made_step(1, [6, 6], updates=1), token=[1, 4, 3, 2, 4, 0] * 2)
    without = {name: values for name, values in data.tokens.items() if name != "segment"}
    record(tmp_path, [replace(data, tokens=without)])
    (update,) = open_run(tmp_path).step(1).updates
    batch = recorded_mini_batch(update, {"segment"}).batch
    assert batch.segment is not None and batch.segment.tolist() == [0, 0, 1, 1, 1, 1] * 2
    assert replay(tmp_path, ["sspo"]).stats[0].tokens == 12


def test_an_update_that_was_not_finite_is_judged_by_what_is_known(tmp_path: Path) -> None:
    data = made_step(1)
    data.tokens["new_logp"][2] = np.nan
    updates = [replace(data.info.updates[0], taken=False), data.info.updates[1]]
    record(tmp_path, [replace(data, info=replace(data.info, updates=updates))])
    (stats,) = replay(tmp_path, ["dapo"]).stats
    assert math.isfinite(stats.total.after)


def test_a_damaged_step_is_left_out_with_a_warning(tmp_path: Path) -> None:
    made_run(tmp_path, 3)
    (step_folder(tmp_path / RECORDS_FOLDER, 2) / "tokens.parquet").write_bytes(b"PAR1")
    with pytest.warns(RecordWarning, match="step 2 is left out"):
        result = replay(tmp_path, ["stapo"])
    assert [step.step for step in result.steps] == [1, 3]


def test_a_damaged_step_before_the_first_is_warned_of_where_a_gate_needs_it(tmp_path: Path) -> None:
    made_run(tmp_path, 3)
    (step_folder(tmp_path / RECORDS_FOLDER, 1) / "step.json").write_text("{}")
    with pytest.warns(RecordWarning, match="step 1 is left out"):
        replay(tmp_path, ["stare"], first=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay(tmp_path, ["dapo"], first=3)


# --- steps and memory


def test_only_the_steps_asked_for_are_replayed(tmp_path: Path) -> None:
    made_run(tmp_path, 6)
    assert [step.step for step in replay(tmp_path, ["dapo"], first=2, last=4).steps] == [2, 3, 4]
    with pytest.raises(RecordError, match=r"none of the steps asked for is recorded \(it has 1 to 6\)"):
        replay(tmp_path, ["dapo"], first=7)


def test_a_gate_has_seen_the_steps_before_the_first(tmp_path: Path) -> None:
    made_run(tmp_path, 6)
    gate = "stare(adaptive=true,target=9)"
    whole, part = replay(tmp_path, [gate]), replay(tmp_path, [gate], first=4)
    assert whole.steps[3:] == part.steps


@pytest.mark.parametrize("name", ["stare(adaptive=true,target=9)", "dapo + trim(floor=9)", "dapo + trim(floor=0.1)"])
def test_controllers_with_memory_see_the_steps_that_are_not_replayed(tmp_path: Path, name: str) -> None:
    made_run(tmp_path, 7)
    whole, part = replay(tmp_path, [name]), replay(tmp_path, [name], first=2, every=3)
    assert [step.step for step in part.steps] == [2, 5]
    assert part.steps == (whole.steps[1], whole.steps[4])


def test_the_mean_weight_of_boosted_and_damped_tokens_is_known(tmp_path: Path) -> None:
    made_run(tmp_path, 3)
    stare, trim = replay(tmp_path, ["stare(boost=1.3,gate=none)", "dapo + trim(floor=9)"]).stats
    assert stare.weight("boosted") == pytest.approx(1.3)
    assert 1 < trim.weight("boosted") <= 10 and 0.1 <= trim.weight("damped") < 1
    assert math.isnan(stare.weight("damped"))
    dapo = replay(tmp_path, ["dapo"]).stats[0]
    assert trim.entropy_change_per_update > dapo.entropy_change_per_update
    reasons = to_json(replay(tmp_path, ["stare(boost=1.3,gate=none)"]))["summary"]["stare(boost=1.3,gate=none)"][
        "reasons"
    ]
    assert reasons["boosted"]["weight"] == pytest.approx(1.3)


def test_steps_can_be_had_one_by_one(tmp_path: Path) -> None:
    made_run(tmp_path, 3)
    records = open_run(tmp_path)
    replayer = Replayer(records, make_variants(records, ["stapo"], {}))
    assert replayer.add(next(iter(records))).step == 1
    replayed: list[int] = []
    replay(tmp_path, ["stapo"], on_step=lambda step: replayed.append(step.step))
    assert replayed == [1, 2, 3]


def test_memory_stays_bounded_however_long_the_run(tmp_path: Path) -> None:
    steps, size = 30, [500] * 100
    data = made_step(1, size)
    record(tmp_path, [replace(data, info=replace(data.info, step=step)) for step in range(1, steps + 1)])
    held: list[int] = []
    replay(tmp_path, ["stapo", "stare", "sspo", "gspo"], on_step=lambda step: held.append(resident()))
    one_step = 50_000 * 16 * 4
    assert max(held) - max(held[:6]) < 8 * one_step, "thirty steps take no more than a few"


def resident() -> int:
    """Bytes of memory this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


# --- for programs


def test_json_has_everything_and_no_nan(tmp_path: Path) -> None:
    made_run(tmp_path, 2)
    result = replay(tmp_path, ["stapo(tau_p=0.2)", "reinforce"])
    table = json.loads(json.dumps(to_json(result), allow_nan=False))
    assert table["objectives"] == ["stapo(tau_p=0.2)", "reinforce"]
    assert len(table["steps"]) == 2 and table["exact"] is True
    assert table["summary"]["stapo(tau_p=0.2)"]["reasons"]["silenced"]["share"] > 0
    assert table["stats"][0]["tokens"] == 20
    assert table["agreement"][0]["objectives"] == table["objectives"]
    assert table["agreement"][0]["jaccard"] == 0.0 and table["agreement"][0]["agreement"] is None
