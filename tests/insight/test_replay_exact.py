"""Replaying the objective that was recorded gives its recorded plan again, bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.insight.exact_plans import assert_plans_come_again
from helpers.thorough import slow_but
from helpers.train.short_runs import RunProcess, trained
from trimtab.insight.replay import replay
from trimtab.insight.replay.batches import (
    recorded_mini_batch,
    with_advantages_of,
)
from trimtab.insight.replay.replay import make_variants
from trimtab.objectives import segment_ids
from trimtab.record import open_run

# Small vocabularies know no rare tokens by the papers' measure: thresholds here are such that rules find some.
SHORT = {"run.steps": "3", "run.eval_every": "0", "run.checkpoint_every": "0", "update.token_budget": "40"}
TARGET = "target=2.79"  # between the entropies of the steps, so that the gate opens and closes

OBJECTIVES = {
    "stapo": {"objective.tau_p": "0.2"},
    "stapo + stare(adaptive=true)": {"objective.tau_p": "0.2"},
    f"stare(variant=C2,{TARGET})": {},
    "sspo": {},
    "sspo + s2t": {"objective.tau_p": "0.2"},
    "grpo": {},
    "dr_grpo": {},
    "gspo": {},
    "gmpo": {},
    "cispo": {},
    "sapo": {},
    "top_entropy": {"objective.renormalize": "true"},
    "clip_cov": {"objective.share": "0.1", "objective.cov_low": "0.0"},
    "kl_cov": {"objective.share": "0.1"},
    "lp_reg": {"objective.share": "0.1"},
    "entropy_advantage": {},
    "dapo + tis": {},
    "dapo + icepop(renormalize=true)": {},
    "grpo + kl": {"model.reference": '"start"'},
    "grpo + kl(corrected=true)": {"model.reference": '"start"'},
    "gspo + s2t + stare(gate=none)": {"objective.tau_p": "0.2"},
    "sspo(clip_scale=sqrt_length) + stare(gate=none)": {},
    "dppo + s2t": {"objective.tau_p": "0.2"},
    "dppo(divergence=kl,shift_low=0.01,shift_high=0.01) + stare(gate=none)": {},
    "vespo + s2t": {"objective.tau_p": "0.2"},
    "luspo + stare(gate=none)": {},
    "dapo + trim(floor=2.79)": {},
    "stapo + trim(floor=1.0,ceiling=2.79)": {"objective.tau_p": "0.2"},
    "stare(boost=critical,gate=none)": {},
    "dapo + entropy_bonus(target=2.79)": {},
    "stapo + entropy_bonus(gradient=exact)": {"objective.tau_p": "0.2"},
}
# At least one for each kind of plan: silenced, boosted, by segment, by sequence, with a reference, with more columns.
ALWAYS = (
    *("stapo", "stapo + stare(adaptive=true)", "sspo + s2t", "grpo", "gspo", "clip_cov", "lp_reg", "dapo + tis"),
    *("grpo + kl", "luspo + stare(gate=none)", "entropy_advantage", "top_entropy"),
    *("dapo + trim(floor=2.79)", "stare(boost=critical,gate=none)", "stapo + entropy_bonus(gradient=exact)"),
)
VARIATIONS = {
    "four updates a step": {"objective": '"stapo(tau_p=0.2)"', "update.per_step": "4"},
    "two passes": {"objective": '"stapo(tau_p=0.2) + stare"', "update.passes": "2"},
    "two passes with the current policy's statistics": {
        "objective": '"stapo(tau_p=0.2)"',
        "update.passes": "2",
        "update.token_stats": "current",
    },
    "flipped verdicts": {"objective": '"sspo"', "reward.noise": "0.5"},
    "the current policy's statistics": {"objective": '"stapo(tau_p=0.2) + stare"', "update.token_stats": "current"},
    "quantiles by micro-batch": {"objective": '"stapo(tau_p=0.2,scope=micro)"', "update.token_budget": "24"},
    "no dual clip": {"objective": '"dapo"', "objective.dual_clip": "none"},
    "dynamic sampling": {"objective": '"sspo"', "rollout.dynamic_sampling": "true"},
    "exact truncation": {
        "objective": '"stapo(tau_p=0.2) + entropy_bonus(gradient=exact)"',
        "rollout.top_p": "0.9",
        "rollout.exact_truncation": "true",
    },
    "another aggregation": {"objective": '"stapo(tau_p=0.2,aggregation=seq-mean-token-sum)"'},
    "a response limit that cuts": {"objective": '"sspo"', "rollout.max_new_tokens": "2", "reward.overlong_buffer": "1"},
}


@pytest.mark.parametrize("name", slow_but(ALWAYS, OBJECTIVES))
def test_a_recorded_plan_is_made_again_bit_for_bit(name: str, tmp_path: Path) -> None:
    trained(tmp_path / "run", {**SHORT, "objective": f'"{name}"', **OBJECTIVES[name]})
    seen = assert_plans_come_again(open_run(tmp_path / "run"))
    rules_nothing = {"grpo", "dr_grpo", "gspo", "gmpo", "cispo", "sapo", "grpo + kl", "grpo + kl(corrected=true)"}
    assert any(code & ~1 for code in seen) or name in rules_nothing, f"the rules did something: {seen}"


@pytest.mark.parametrize("name", VARIATIONS)
def test_so_it_is_with(name: str, tmp_path: Path) -> None:
    trained(tmp_path / "run", {**SHORT, **VARIATIONS[name]})
    records = open_run(tmp_path / "run")
    assert records.steps == [1, 2, 3]
    assert_plans_come_again(records)
    updates = [len(step.updates) for step in records]
    assert updates == ([4] * 3 if name.startswith("four") else updates)
    if name == "quantiles by micro-batch":
        assert all(len(update.info.micro_batches) > 1 for step in records for update in step.updates)


def test_so_it_is_where_a_gate_opens_and_closes(tmp_path: Path) -> None:
    trained(tmp_path / "run", {**SHORT, "run.steps": "6", "objective": '"stare(target=2.74,adaptive=true)"'})
    records = open_run(tmp_path / "run")
    gates = [step.info.controllers["stare"] for step in records]
    assert {gate["is_open"] for gate in gates} == {0.0, 1.0}, "the test needs both"
    assert len({gate["boost"] for gate in gates}) > 1
    assert_plans_come_again(records)


def test_so_it_is_after_a_kill_and_a_resume(tmp_path: Path) -> None:
    process = RunProcess(tmp_path / "run", failpoint="update.done:7")
    assert process.run() == -signal.SIGKILL
    assert process.resumed().run() == 0, process.messages
    records = open_run(process.folder)
    assert records.steps == [1, 2, 3, 4, 5, 6]
    assert_plans_come_again(records)


def test_so_it_is_where_an_update_was_not_finite(tmp_path: Path) -> None:
    process = RunProcess(tmp_path / "run", SHORT, nan_update=(2, 1))
    assert process.run() == 0, process.messages
    records = open_run(process.folder)
    assert not records.step(2).updates[0].info.taken
    assert_plans_come_again(records)


def test_so_it_is_on_two_threads(tmp_path: Path) -> None:
    changes = {"objective": '"sspo"', "run.threads": "2", "run.steps": "1", "warm_start.steps": "0"}
    trained(tmp_path / "run", {**SHORT, **changes})
    torch.set_num_threads(1)
    records = open_run(tmp_path / "run")
    assert records.step(1).info.threads == 2
    assert_plans_come_again(records)
    assert torch.get_num_threads() == 1


# --- the whole way round


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    changes = {**SHORT, "run.steps": "6", "objective": '"stare(target=2.74)"'}
    trained(folder, changes)
    return folder


def test_a_replay_of_the_recorded_objective_counts_what_was_recorded(recorded: Path) -> None:
    result = replay(recorded)
    for step, found in zip(open_run(recorded), result.steps, strict=True):
        (stats,) = found.stats
        reason = step.tokens["reason"]
        counts = {name: mass.tokens for name, mass in stats.reasons.items()}
        assert counts.get("boosted", 0) == np.count_nonzero(reason & 4)
        assert counts.get("no_signal", 0) == np.count_nonzero(reason & 1)
        assert counts.get("clipped", 0) == np.count_nonzero(step.tokens["clipped"])
        assert stats.tokens == len(reason) and found.exact


def test_the_recorded_objective_by_its_own_name_is_the_recorded_one(recorded: Path) -> None:
    """Its gate observes every step from the first on."""
    one, other = replay(recorded, ["recorded", "stare(target=2.74)"]).stats
    assert one == other
    one, other = replay(recorded, ["recorded", "stare(target=2.74)"], first=4, last=5).stats
    assert one == other


def test_segments_made_from_recorded_pieces_are_the_tokenizers(recorded: Path) -> None:
    records = open_run(recorded)
    from trimtab.trainer.model.loading import demo_tokenizer

    for step in records:
        for update in step.updates:
            batch = recorded_mini_batch(update, {"segment"}).batch
            ids = torch.from_numpy(update.column("token").astype(np.int64))
            wanted = segment_ids(ids, demo_tokenizer(), sequence=batch.sequence)
            assert batch.segment is not None and torch.equal(batch.segment, wanted)
            made = segment_ids(ids, records.vocabulary.text_bytes, sequence=batch.sequence)
            assert torch.equal(made, wanted)


def test_another_objective_gets_the_advantages_it_is_defined_with(recorded: Path) -> None:
    records = open_run(recorded)
    (variant,) = make_variants(records, ["dr_grpo"], {})
    for update in records.step(1).updates:
        batch = with_advantages_of(recorded_mini_batch(update).batch, variant.objective, update)
        assert batch.reward is not None and batch.group is not None
        wanted = variant.objective.advantages(batch.reward, batch.group)[batch.sequence]
        assert torch.equal(batch.advantage, wanted)
        assert not torch.equal(batch.advantage, recorded_mini_batch(update).batch.advantage)
