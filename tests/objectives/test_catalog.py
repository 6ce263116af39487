"""The catalog: names, combinations, words, and what every method owes its user."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import trimtab as tt
from helpers.objectives.batches import EVERY, batch, loss_and_gradient, moved, observed, same
from trimtab.objectives import ATTACHMENTS, METHODS
from trimtab.objectives.methods import compose
from trimtab.objectives.methods.registry import OPTIONS

NAMED = [
    "grpo", "dapo", "dr_grpo", "gspo", "luspo", "cispo", "sapo", "gmpo", "dppo", "vespo", "top_entropy", "justrl",
    "clip_cov", "kl_cov", "entropy_advantage", "lp_reg", "reinforce", "stapo", "stare", "sspo",
]  # fmt: skip


def test_every_method_is_there() -> None:
    # A new one needs no entry here.
    assert METHODS.keys() >= set(NAMED)
    assert ATTACHMENTS.keys() >= {"s2t", "stare", "top_entropy", "tis", "icepop", "mis", "kl", "trim", "entropy_bonus"}


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("sspo + s2t", "sspo", {"s2t": True}),
        ("gspo + stare(variant=C2)", "gspo", {"stare": "C2"}),
        ("gspo + stare(variant=C2, boost=1.3)", "gspo", {"stare": {"variant": "C2", "boost": 1.3}}),
        ("grpo(clip_high=0.3) + kl(coef=0.05)", "grpo", {"clip_high": 0.3, "kl": 0.05}),
        ("stapo(tau_p=0.3)", "stapo", {"tau_p": 0.3}),
        ("dapo + s2t(tau_p=0.3)", "dapo + s2t", {"tau_p": 0.3}),
        ("dapo(dual_clip=none)", "dapo", {"dual_clip": None}),
        ("  grpo+tis( cap = 3 )  ", "grpo", {"tis": 3}),
        ("grpo(aggregation=token-mean)", "grpo", {"aggregation": "token-mean"}),
    ],
)
def test_names_and_keywords_say_the_same(text: str, name: str, options: dict[str, Any]) -> None:
    one, other = tt.objective(text), tt.objective(name, **options)
    assert one.explain() == other.explain()
    same(one, other, batch(0))


def test_an_option_goes_to_the_method_before_its_attachments() -> None:
    objective = tt.objective("top_entropy + stare", share=0.5)
    assert "top 50%" in objective.explain()
    assert "top 10% by surprisal" in objective.explain()


@pytest.mark.parametrize("name", EVERY)
def test_explanations_carry_the_numbers(name: str) -> None:
    objective = tt.objective(name)
    text = objective.explain()
    assert objective.name in text
    for rule in objective.rules:
        assert rule.formula in text
    assert all(field in text for field in objective.needs)


def test_an_explanation_changes_with_its_options() -> None:
    assert "p < 0.004" in tt.objective("stapo", tau_p=0.004).explain()
    assert "0.7, 1.5" in tt.objective("grpo", clip_low=0.3, clip_high=0.5).explain()
    assert "each micro-batch" in tt.objective("grpo", scope="micro").explain()


@pytest.mark.parametrize("name", EVERY)
def test_needs_are_enough(name: str) -> None:
    """A batch with the needed fields alone will do."""
    whole, objective = batch(1), tt.objective(name)
    lean = tt.TokenBatch(
        old_logp=whole.old_logp,
        advantage=whole.advantage,
        sequence=whole.sequence,
        **{field: getattr(whole, field) for field in objective.needs},
    )
    objective.observe(lean)
    loss, gradient = loss_and_gradient(objective, lean, moved(lean))
    assert torch.isfinite(loss)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("name", EVERY)
def test_every_metric_is_in_the_table(name: str) -> None:
    tokens = batch(1)
    objective = observed(tt.objective(name), tokens)
    plan = objective.plan(tokens)
    emitted = plan.metrics | objective.loss(moved(tokens), plan).metrics
    assert set(emitted) <= set(compose.METRICS)
    assert all(value.ndim == 0 for value in emitted.values())


@pytest.mark.parametrize("name", EVERY)
def test_states_are_plain_numbers(name: str) -> None:
    objective = tt.objective(name)
    objective.observe(batch(1))
    state = json.loads(json.dumps(objective.state_dict()))
    fresh = tt.objective(name)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == objective.state_dict()


def test_every_option_has_one_meaning_and_every_meaning_an_option() -> None:
    used = {option for entry in (*METHODS.values(), *ATTACHMENTS.values()) for option in entry.options}
    assert used | {"advantage", "aggregation", "scope", "token_stats", "count"} == set(OPTIONS)


@pytest.mark.parametrize("name", METHODS)
def test_defaults_pass_their_own_checks(name: str) -> None:
    entry = METHODS[name]
    defaults = {key: option.default for key, option in entry.options.items()}
    assert tt.objective(name, **defaults).explain() == tt.objective(name).explain()


def test_every_reason_has_words() -> None:
    for reason in tt.Reason:
        assert tt.reason_words(int(reason))
    both = tt.reason_words(int(tt.Reason.SILENCED | tt.Reason.NARROWED))
    assert "silenced" in both and "narrowed" in both
    assert tt.reason_words(0) == "kept unchanged"


def test_a_plan_says_why() -> None:
    plan = tt.objective("stapo", tau_p=0.2).plan(batch(5, rows=30))
    silenced = int((plan.weight == 0).nonzero()[0])
    assert "silenced" in plan.why(silenced)
    assert "weight 0" in plan.why(silenced)
    kept = int((plan.weight == 1).nonzero()[0])
    assert "ratio within [0.8, 1.28]" in plan.why(kept)


def test_a_token_without_signal_is_told_so() -> None:
    tokens = tt.TokenBatch(old_logp=-torch.ones(2), advantage=torch.tensor([0.0, 1.0]), sequence=torch.tensor([0, 1]))
    assert tt.objective("grpo").plan(tokens).reason.tolist() == [int(tt.Reason.NO_SIGNAL), 0]
