"""`rollout.exact_truncation`: a run is trained on the distribution that top-p and top-k made the sampler draw from."""

from __future__ import annotations

import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from helpers.train.short_runs import RunProcess, contents, differences, recipe, trained
from trimtab.data import Response
from trimtab.insight.replay import replay
from trimtab.record import open_run
from trimtab.trainer.sampling import NativeSampler
from trimtab.trainer.train.build import truncation_note
from trimtab.trainer.train.loop import train_step
from trimtab.trainer.train.rollouts import collect_rollouts, evaluate
from trimtab.trainer.train.scoring import score_rollouts
from trimtab.trainer.train.trainer import RunProgress, Trainer, build_trainer

EXACT = {"rollout.exact_truncation": "true"}
TRUNCATIONS = [{"rollout.top_p": "0.6"}, {"rollout.top_k": "3"}, {"rollout.top_p": "0.9", "rollout.temperature": "0.7"}]
TOOLS = {
    "model.path": '"demo-tools"',
    "task.family": '"product"',
    "task.calls": "1.0",
    "tools.use": '["calculator"]',
    "rollout.max_turns": "2",
    "rollout.max_new_tokens": "24",
    "rollout.max_observation_tokens": "16",
    "reward.overlong_buffer": "24",
    "warm_start.steps": "0",
}


def trainer_of(settings: dict[str, str]) -> Trainer:
    return build_trainer(recipe({"rollout.prompts": "16", "objective.name": "stare", **settings}))


def mismatch(settings: dict[str, str]) -> float:
    with closing(trainer_of(settings)) as trainer:
        batch = score_rollouts(trainer, collect_rollouts(trainer, RunProgress())).batch
    assert batch.sampler_logp is not None
    return float((batch.sampler_logp - batch.old_logp).abs().max())


@pytest.mark.parametrize("settings", [*TRUNCATIONS, TOOLS | {"rollout.top_p": "0.8"}])
def test_sampler_and_trainer_agree_to_rounding_where_they_did_not(settings: dict[str, str]) -> None:
    assert mismatch(settings) > 0.03
    assert mismatch(settings | EXACT) < 1e-5


def test_the_samplers_own_figures_are_those_of_a_scored_run() -> None:
    batches = []
    for which in ("scored", "sampled"):
        trainer = trainer_of({"rollout.top_p": "0.6", **EXACT, "update.old_stats": which})
        batches.append(score_rollouts(trainer, collect_rollouts(trainer, RunProgress())).batch)
    for name in ("old_logp", "entropy", "sum_p2", "sum_p2_logp"):
        one, other = (getattr(batch, name) for batch in batches)
        assert torch.allclose(one, other, atol=2e-5), name


def test_an_entropy_is_that_of_the_kept_tokens() -> None:
    trainer = trainer_of({"rollout.top_k": "3", **EXACT})
    experience = score_rollouts(trainer, collect_rollouts(trainer, RunProgress()))
    assert experience.batch.entropy is not None
    assert float(experience.batch.entropy.max()) <= np.log(3) + 1e-5
    metrics = train_step(trainer, RunProgress()).metrics
    assert 1 <= metrics["sampler/kept_mean"] <= 3 and metrics["policy/entropy"] <= np.log(3)
    assert metrics["sampler/mismatch_max"] < 1e-5
    assert "sampler/kept_mean" not in train_step(trainer_of({"rollout.top_k": "3"}), RunProgress()).metrics


@pytest.mark.parametrize(
    "settings",
    [
        {"update.per_step": "2"},
        {"update.passes": "2", "update.token_stats": "current"},
        {"objective.name": "gspo", "update.per_step": "2"},
        {"objective.name": "dapo + kl(coef=0.1)", "model.reference": "start", "update.per_step": "2"},
        {"objective.name": "dapo + entropy_bonus(coef=0.1, gradient=exact)", "update.measure_every": "1"},
    ],
)
def test_an_update_does_not_depend_on_micro_batches(settings: dict[str, str]) -> None:
    weights = []
    for budget, chunk in ((10_000, 10_000), (32, 3)):
        sizes = {"update.token_budget": str(budget), "update.head_chunk": str(chunk)}
        trainer, progress = trainer_of({"rollout.top_p": "0.6", **EXACT, **settings, **sizes}), RunProgress()
        assert train_step(trainer, progress).metrics["update/skipped"] == 0
        weights.append([p.detach() for p in trainer.policy.model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*weights, strict=True))


def test_without_top_p_and_top_k_it_changes_no_bit(tmp_path: Path) -> None:
    settings = {"run.steps": "2", "run.eval_every": "0", "run.checkpoint_every": "0"}
    for name, exact in (("one", "false"), ("other", "true")):
        trained(tmp_path / name, settings | {"rollout.exact_truncation": exact})
    one, other = (contents(tmp_path / name) for name in ("one", "other"))
    changed = differences(one, other)  # the recipe, and what has a copy or a digest of it
    assert changed and all(name.endswith((".toml", "manifest.json", "state.json")) for name in changed), changed


def test_a_run_that_was_killed_ends_as_one_that_was_not_and_is_replayed(tmp_path: Path) -> None:
    changes = {"rollout.top_p": "0.9", **EXACT, "objective": '"dapo + entropy_bonus(target=9, gradient=exact)"'}
    whole = RunProcess(tmp_path / "whole", changes)
    assert whole.run() == 0, whole.messages
    process = RunProcess(tmp_path / "run", changes, failpoint="update.done:7")
    assert process.run() == -signal.SIGKILL
    assert process.resumed().run() == 0, process.messages
    assert not differences(contents(process.folder), contents(whole.folder))
    table = pq.read_table(next(whole.folder.rglob("tokens.parquet")))
    kept = table["kept"].to_numpy()
    assert (kept >= 1).all() and np.exp(table["entropy"].to_numpy()).max() <= kept.max() + 1e-3
    assert (table["entropy_coef"].to_numpy() > 0).all()
    np.testing.assert_allclose(table["old_logp"].to_numpy(), table["sampler_logp"].to_numpy(), atol=1e-5)
    assert open_run(whole.folder).steps
    assert replay(whole.folder).exact


def test_held_out_problems_are_answered_as_without() -> None:
    assert evaluate(trainer_of({"rollout.top_k": "3", **EXACT})) == evaluate(trainer_of({}))


# --- what cannot do it, and what to know


def test_vllm_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r'rollout.engine = "vllm" does not return: use "native"'):
        recipe({"rollout.engine": "vllm", "rollout.top_p": "0.9", **EXACT})
    recipe({"rollout.engine": "vllm", **EXACT})  # nothing is left out


def test_a_sampler_that_returns_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of({"rollout.top_k": "3", **EXACT})
    sample = trainer.sampler.sample

    def without(*args: Any) -> list[list[Response]]:
        return [[replace(response, kept=None) for response in group] for group in sample(*args)]

    monkeypatch.setattr(trainer.sampler, "sample", without)
    with pytest.raises(ValueError, match=r"exact_truncation = true needs .* the sampler returned a response without"):
        train_step(trainer, RunProgress())


def test_a_run_says_what_its_truncation_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = trainer_of({}).policy

    def note(**settings: str) -> str:
        return truncation_note(policy, recipe({f"rollout.{key}": value for key, value in settings.items()}).rollout)

    assert note() == note(exact_truncation="true") == note(exact_truncation="true", top_p="0.9") == ""
    assert note(top_p="0.9").startswith("rollout.top_p = 0.9: ") and "exact_truncation = true" in note(top_p="0.9")
    assert "rollout.top_k = 3" in note(top_k="3")
    assert "'+ tis'" in note(top_p="0.9", engine="vllm") and "exact" not in note(top_p="0.9", engine="vllm")
    monkeypatch.setattr("trimtab.trainer.train.build._can_page", lambda policy: True)
    assert "slower than the paged sampler" in note(exact_truncation="true", top_p="0.9")
    settings = {"rollout.top_p": "0.9", "run.steps": "1", "run.eval_every": "0", "warm_start.steps": "0"}
    _, log = trained(tmp_path / "run", settings)
    assert log.has("note: rollout.top_p = 0.9: responses are sampled")


def test_where_the_paged_sampler_would_sample_the_native_one_does() -> None:
    trainer = trainer_of({"rollout.top_p": "0.9", **EXACT})
    assert isinstance(trainer.sampler, NativeSampler) and trainer.sampler.with_kept
    assert not trainer_of({"rollout.top_p": "0.9"}).sampler.with_kept  # type: ignore[attr-defined]
