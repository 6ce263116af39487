"""The package against a second writing of every method: same loss, same gradient, same verdict on every token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import pytest
import torch

import trimtab as tt
from helpers.objectives import reference
from helpers.objectives.reference import Batch, Token
from helpers.objectives.reference_checks import (
    SEEDS,
    TOLERANCE,
    Options,
    assert_same,
    check,
    having,
    new_logp,
    random_batch,
    reasons,
    token_batch,
)

METHODS: dict[str, list[Options]] = {
    "grpo": [{}, {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 3.0}],
    "dapo": [{}, {"dual_clip": None}, {"dual_clip": 2.0}],
    "dr_grpo": [{}, {"length": 8.0, "dual_clip": 3.0}],
    "gdpo": [{}, {"clip_high": 0.5, "dual_clip": 3.0}],
    "maxrl": [{}, {"clip_low": 0.1, "dual_clip": 3.0}],
    "gspo": [{}, {"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 1.5}],
    "luspo": [{}, {"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 1.5}],
    "cispo": [{}, {"upper_only": True}, {"clip_low": 0.5, "clip_high": 2.0}],
    "sapo": [{}, {"tau_positive": 0.7, "tau_negative": 2.0}],
    "gmpo": [{}, {"clip_low": 0.01, "clip_high": 1.0}],
    "dppo": [
        {},
        {"shift_low": 0.02, "shift_high": 0.01, "cap": 1.5},
        {"divergence": "kl"},
        {"divergence": "kl", "shift_low": 0.01, "shift_high": 0.02, "cap": 1.5},
    ],
    "vespo": [{}, {"k_pos": 0.5, "lambda_pos": 0.1, "k_neg": 1.0, "lambda_neg": 0.0}],
    "top_entropy": [{}, {"renormalize": True}, {"share": 0.5, "dual_clip": 2.0}],
    "justrl": [{}],
    "kl_cov": [{}, {"share": 0.2, "coef": 0.3}, {"share": 1.0}],
    "entropy_advantage": [{}, {"coef": 0.05, "entropy_cap": 0.9}],
    "lp_reg": [{}, {"share": 0.3, "coef": 0.5}, {"share": 1.0, "dual_clip": None}],
    "reinforce": [{}],
    "clip_b": [{}, {"mu": 0.5}, {"mu": 0.0, "clip_high": 0.5}],
    "clip_v": [{}, {"mu": 0.5}, {"mu": 0.2, "phi": "estimated"}],
    "repo_r": [{}, {"strength_min": 0.2, "strength_max": 0.5}],
    "entropic": [{}],
    "entrocraft": [{}],
    "steer": [
        {},
        {"effect": "exact", "weight_low": 0.1, "weight_high": 3.0},
        {"falloff": "exponential"},
        {"falloff": "exponential", "effect": "exact", "weight_low": 0.01, "dual_clip": None},
    ],
    "stapo": [
        {},
        {"tau_p": 0.3},
        {"tau_p": 0.3, "population": "all", "quantile": 0.8},
        {"tau_p": 0.3, "mask": "rare"},
        {"tau_p": 0.3, "mask": "uncertain"},
        {"tau_p": 0.3, "mask": "uncertain", "population": "all", "quantile": 0.5},
        {"tau_p": 0.05, "quantile": 0.5, "dual_clip": None},
    ],
    "stare": [{}, {"variant": "C2", "share": 0.4, "boost": 1.5, "damp": 0.5}],
    "sspo": [
        {},
        {"clip_low": 0.2, "clip_high": 0.28},
        {"widen_low": 1.0, "widen_high": 1.0},
        {"widen_low": 0.1, "widen_high": 3.0, "dual_clip": 1.2},
        {"clip_scale": "sqrt_length", "clip_low": 0.2, "clip_high": 0.28},
        {"clip_scale": "sqrt_length", "clip_low": 0.05, "clip_high": 0.07},
    ],
}
METHOD_CASES = [
    pytest.param(name, options, id=f"{name}-{options}") for name, all_ in METHODS.items() for options in all_
]

ATTACHMENTS: list[tuple[str, Options]] = [
    ("s2t", {"tau_p": 0.3}),
    ("s2t", {"tau_p": 0.3, "population": "all", "quantile": 0.8}),
    ("s2t", {"tau_p": 0.3, "mask": "rare"}),
    ("s2t", {"tau_p": 0.3, "mask": "uncertain"}),
    ("stare", {"variant": "C2"}),
    ("stare", {"boost": "critical"}),
    ("stare", {"boost": "critical", "variant": "C3", "share": 0.3, "damp": 0.5, "gate": "token"}),
    ("entropy_bonus", {"coef": 0.3}),
    ("clip_b", {"mu": 0.5}),
    ("clip_v", {"mu": 0.2}),
    ("steer", {"effect": "exact"}),
    ("top_entropy", {}),
    ("top_entropy", {"share": 0.4, "renormalize": True}),
    ("tis", {}),
    ("icepop", {}),
    ("icepop", {"low": 0.8, "high": 1.3, "renormalize": True}),
    ("mis", {}),
    ("mis", {"geometric": True, "low": 0.9, "high": 1.1, "renormalize": True}),
    ("kl", {}),
    ("kl", {"coef": 0.7}),
    ("kl", {"coef": 0.7, "estimator": "k1"}),
    ("kl", {"coef": 0.7, "estimator": "k2"}),
    ("kl", {"coef": 0.7, "corrected": True}),
    ("kl", {"coef": 0.7, "estimator": "k1", "corrected": True}),
]
ATTACHMENT_CASES = [pytest.param(name, options, id=f"{name}-{options}") for name, options in ATTACHMENTS]
# After a rollout like the batch itself, with a mean entropy of about 0.2 or 1.5.
STEERING: list[tuple[str, Options]] = [
    ("trim", {"floor": 2.5}),
    ("trim", {"floor": 2.5, "gain": 3.0, "max_weight": 1.5}),
    ("trim", {"floor": 2.5, "gain": 0.0, "integral_gain": 0.0}),
    ("trim", {"floor": 0.3, "phi": "estimated"}),
    ("trim", {"floor": 0.0, "ceiling": 0.1}),
    ("stare", {"boost": "critical", "variant": "C1", "share": 0.3}),
    ("entropy_bonus", {"coef": 0.3, "target": 0.3, "rate": 0.1}),
    ("repo_r", {"strength_min": 0.2, "strength_max": 0.3}),
    ("entrocraft", {}),
    ("entrocraft", {"floor": 0.0, "ceiling": 0.1, "renormalize": False}),
]
STEERING_CASES = [pytest.param(name, options, id=f"{name}-{options}") for name, options in STEERING]
HOSTS = ["grpo", "dr_grpo", "gspo", "cispo", "sapo", "dppo", "vespo", "sspo"]
STEERED = list(product([*HOSTS, "dapo", "gmpo", "top_entropy", "stapo"], [False, True]))
# The reference takes their clip off at the new policy, and a coefficient is of the current one.
STEERED += [("kl_cov", False), ("lp_reg", False)]


def test_the_random_batches_reach_every_case() -> None:
    batches = [random_batch(seed) for seed in SEEDS]
    tokens = [token for batch in batches for token in reference.flat(batch)]
    ratios = [(math.exp(token.new - token.old), token.advantage) for token in tokens]
    assert any(not response for batch in batches for response in batch)
    assert any(token.new == token.old for token in tokens)
    assert any(ratio > 1.28 and advantage > 0 for ratio, advantage in ratios)
    assert any(ratio < 0.8 and advantage < 0 for ratio, advantage in ratios)
    assert any(ratio > 10 and advantage < 0 for ratio, advantage in ratios)
    assert {reference.mean_entropy(reference.flat(batch)) < 0.3 for batch in batches} == {True, False}
    assert any("SILENCED" in token.reasons for batch in batches for token in reference.stapo(batch).tokens)


@pytest.mark.parametrize(("method", "options"), METHOD_CASES)
def test_a_method_is_its_formula(method: str, options: Options) -> None:
    for seed in SEEDS:
        check(method, options, {}, random_batch(seed), seed)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("name", "options"), ATTACHMENT_CASES)
def test_an_attachment_does_the_same_on_every_method(host: str, name: str, options: Options) -> None:
    for seed in SEEDS:
        check(host, {}, {name: options}, random_batch(seed), seed)


@pytest.mark.parametrize(("host", "current"), STEERED)
@pytest.mark.parametrize(("name", "options"), STEERING_CASES)
def test_what_steers_the_entropy_does_the_same_on_every_method(
    host: str, current: bool, name: str, options: Options
) -> None:
    for seed in SEEDS:
        batch = random_batch(seed, current=current)
        check(host, {}, {name: options}, batch, seed, rollouts=[batch])


@pytest.mark.parametrize(
    "host", ["grpo", "gspo", "cispo", "dppo", "vespo", "sspo", "kl_cov", "lp_reg", "entropy_advantage"]
)
@pytest.mark.parametrize(
    "attached",
    [
        {"stare": {"variant": "C4", "share": 0.3}, "s2t": {"tau_p": 0.3}, "tis": {}, "kl": {"coef": 0.5}},
        {"top_entropy": {"share": 0.6}, "mis": {"low": 0.1, "high": 10.0}, "kl": {"coef": 0.5}},
        {"icepop": {"renormalize": True}, "top_entropy": {"share": 0.6}, "stare": {"variant": "C1"}},
        {"trim": {"floor": 2.5}, "s2t": {"tau_p": 0.3}, "tis": {}, "kl": {"coef": 0.5}},
        {"trim": {"floor": 0.0, "ceiling": 0.1}, "stare": {"variant": "C2", "gate": "none"}, "icepop": {}},
        {"stare": {"boost": "critical", "variant": "C2", "gate": "none"}, "trim": {"floor": 2.5}, "kl": {"coef": 0.5}},
        {"stare": {"boost": "critical", "gate": "none"}, "s2t": {"tau_p": 0.3}, "tis": {}, "entropy_bonus": {}},
        {"s2t": {"tau_p": 0.3}, "stare": {"gate": "none"}, "entropy_bonus": {"coef": 0.5}, "trim": {"floor": 2.5}},
    ],
)
def test_attachments_work_together(host: str, attached: Mapping[str, Options]) -> None:
    for seed in SEEDS:
        batch = random_batch(seed)
        check(host, {}, attached, batch, seed, rollouts=[batch] if "trim" in attached else [])


@pytest.mark.parametrize("variant", ["O1", "C4"])
def test_stapo_and_stare_work_together(variant: str) -> None:
    for seed in SEEDS:
        check("stapo", {"tau_p": 0.3}, {"stare": {"variant": variant}}, random_batch(seed), seed)


def test_a_method_written_in_one_line_is_the_method_with_its_attachments() -> None:
    objective = tt.objective("gspo + s2t(tau_p=0.3) + stare(variant=C2) + kl(coef=0.2)")
    for seed in SEEDS:
        batch = random_batch(seed)
        also = [reference.s2t(tau_p=0.3), reference.stare_rule(variant="C2"), reference.kl(coef=0.2)]
        assert_same(objective, objective.plan(token_batch(batch)), batch, reference.gspo(batch, also=also), seed)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("method", ["grpo", "dapo", "gspo", "cispo", "sapo", "dppo", "vespo", "stapo", "sspo"])
def test_any_aggregation_leaves_silenced_tokens_and_empty_responses_out(method: str, aggregation: str) -> None:
    silencing = {"tau_p": 0.3, "mask": "rare"}
    options, attached = (silencing, {}) if method == "stapo" else ({}, {"s2t": silencing})
    for seed in SEEDS:
        check(method, {"aggregation": aggregation, **options}, attached, random_batch(seed), seed)


@pytest.mark.parametrize(
    "method",
    ["grpo", "dapo", "gspo", "cispo", "sapo", "gmpo", "dppo", "vespo", "kl_cov", "reinforce", "stapo", "stare", "sspo"],
)
def test_log_ratios_beyond_20_are_clamped(method: str) -> None:
    for seed in SEEDS:
        check(method, {}, {}, random_batch(seed, jump=30.0), seed)


@pytest.mark.parametrize("options", [{"share": 0.01}, {"share": 0.4}, {"share": 1.0, "coef": 0.2}])
def test_lp_reg_holds_tokens_to_the_filtered_policy_and_lets_its_noise_go(options: Options) -> None:
    for seed in SEEDS:
        check("lp_reg", options, {}, random_batch(seed, proxy=True), seed)


@pytest.mark.parametrize("proxy", [-0.5, None])
@pytest.mark.parametrize("new", [-8.0, -1.0])
def test_lp_reg_clips_no_chosen_token_that_is_below_the_proxy(new: float, proxy: float | None) -> None:
    check("lp_reg", {}, {}, [[Token(old=-5.0, new=new, advantage=-1.0, proxy=proxy)]], 0)


def test_lp_reg_is_dapo_for_a_chosen_token_that_has_risen_above_the_proxy() -> None:
    batch = tt.TokenBatch(
        old_logp=torch.tensor([-8.0, -1.0]), advantage=torch.tensor([-1.0, -1.0]), sequence=torch.tensor([0, 0])
    )
    new = torch.tensor([-2.0, -1.0])  # a ratio of exp(6), which dual clip limits to 10
    found = {name: tt.objective(name) for name in ("lp_reg", "dapo")}
    (lp_reg, grad), (dapo, grad_of_dapo) = (each.loss_and_grad(new, each.plan(batch)) for each in found.values())
    assert lp_reg.loss.item() == dapo.loss.item() == 5.5
    assert grad.tolist() == grad_of_dapo.tolist() == [0.0, 0.5]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("stapo", {"tau_p": 0.3}),
        ("stapo", {"tau_p": 0.3, "mask": "uncertain"}),
        ("stare", {"variant": "C2", "share": 0.3}),
        ("stare", {"variant": "C3", "threshold": "probability"}),
        ("kl_cov", {"share": 0.2}),
        ("lp_reg", {"share": 0.3}),
        ("clip_b", {"mu": 0.5}),
        ("clip_v", {"mu": 0.2}),
        ("steer", {}),
        ("steer", {"effect": "exact", "falloff": "exponential"}),
    ],
)
def test_tokens_are_judged_by_the_current_policy_where_it_is_known(method: str, options: Options) -> None:
    for seed in SEEDS:
        check(method, options, {}, random_batch(seed, current=True), seed)


@pytest.mark.parametrize("method", [*METHODS, "clip_cov"])
def test_a_mini_batch_without_tokens_has_no_loss(method: str) -> None:
    objective = tt.objective(method)
    out = objective.loss(new_logp([[], []]), objective.plan(token_batch([[], []])))
    assert out.loss.item() == 0.0


def test_silencing_every_token_leaves_no_loss() -> None:
    batch = [[Token(old=-5.0, new=-4.0, advantage=1.0, entropy=0.1)], [Token(old=-6.0, new=-6.1, advantage=2.0)]]
    check("stapo", {"tau_p": 0.3, "mask": "rare"}, {}, batch, 0)
    check("grpo", {}, {"s2t": {"tau_p": 0.3, "mask": "rare"}}, batch, 0)


def test_a_share_is_taken_of_its_decimal_value() -> None:
    batch = [[Token(old=-1.0, new=-1.0, advantage=1.0, entropy=0.01 * i) for i in range(100)]]
    check("top_entropy", {"share": 0.07, "renormalize": True}, {}, batch, 0)  # 0.07 * 100 > 7 in floating point
    plan = tt.objective("top_entropy", share=0.07).plan(token_batch(batch))
    assert having(plan, "MASKED") == list(range(93))


@pytest.mark.parametrize("method", ["grpo", "dr_grpo"])
def test_group_advantages_are_those_of_the_reference(method: str) -> None:
    rng = np.random.default_rng(0)
    groups = [0, 1, 0, 2, 1, 0, 3, 3, 0, 1]
    rewards = [float(reward) for reward in rng.choice([0.0, 0.5, 1.0], size=6)] + [1.0, 1.0, 0.25, -1.0]
    found = tt.objective(method).advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    expected = reference.group_advantages(rewards, groups, normalized=method == "grpo")
    np.testing.assert_allclose(found.numpy(), expected, rtol=TOLERANCE, atol=TOLERANCE)


# ------------------------------------------------------------------------------------------------- random choices


@pytest.mark.parametrize("method", ["stapo", "grpo"])
@pytest.mark.parametrize("population", ["candidates", "all"])
def test_the_random_mask_silences_as_many_rewarded_tokens_as_are_spurious(method: str, population: str) -> None:
    given = {"tau_p": 0.3, "population": population}
    masked = {**given, "mask": "random"}
    objective = tt.objective("stapo", **masked) if method == "stapo" else tt.objective("grpo", s2t=masked)
    choices = []
    for seed in SEEDS:
        batch = random_batch(seed)
        plan = objective.plan(token_batch(batch))
        silenced = having(plan, "SILENCED")
        spurious = [t for t in reference.stapo(batch, **given).tokens if "SILENCED" in t.reasons]
        tokens = reference.flat(batch)
        assert len(silenced) == len(spurious)
        assert all(tokens[position].advantage > 0 for position in silenced)
        expected = (reference.dapo if method == "stapo" else reference.grpo)(
            batch, also=[reference.silence_these(silenced)]
        )
        assert_same(objective, plan, batch, expected, seed)
        choices.append({tokens[position].old for position in silenced} != {t.old for t in spurious})
    assert any(choices)


@pytest.mark.parametrize("share", [2e-4, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("current", [False, True])
def test_clip_cov_drops_that_many_unclipped_tokens_of_the_band(share: float, current: bool) -> None:
    low, high = 0.2, 2.0
    objective = tt.objective("clip_cov", share=share, cov_low=low, cov_high=high)
    for seed in SEEDS:
        batch = random_batch(seed, current=current)
        plan = objective.plan(token_batch(batch))
        dropped = having(plan, "DROPPED")
        candidates = reference.clip_cov_candidates(batch, low, high)
        assert set(dropped) <= candidates
        assert len(dropped) == min(len(candidates), reference.share_of(share, len(reference.flat(batch))))
        assert_same(objective, plan, batch, reference.clip_cov(batch, dropped), seed)


def test_clip_cov_looks_for_covariances_between_1_and_5_unless_told_otherwise() -> None:
    objective = tt.objective("clip_cov", share=1.0)
    for seed in SEEDS:
        batch = random_batch(seed)
        plan = objective.plan(token_batch(batch))
        assert set(having(plan, "DROPPED")) == reference.clip_cov_candidates(batch, 1.0, 5.0)


# ---------------------------------------------------------------------------------------------- what the plan says


@pytest.mark.parametrize("mask", ["spurious", "rare", "uncertain"])
@pytest.mark.parametrize("population", ["candidates", "all"])
def test_stapo_plans_to_silence_the_tokens_of_the_reference(mask: str, population: str) -> None:
    options = {"tau_p": 0.3, "mask": mask, "population": population}
    silenced = 0
    for seed in SEEDS:
        batch = random_batch(seed)
        plan = tt.objective("stapo", **options).plan(token_batch(batch))
        tokens = reference.stapo(batch, **options).tokens
        assert reasons(plan) == [token.reasons for token in tokens]
        assert plan.weight.tolist() == [token.weight for token in tokens]
        silenced += len(having(plan, "SILENCED"))
    assert silenced > 0


@pytest.mark.parametrize("candidates", [0, 1, 5])
def test_stapo_silences_nothing_among_no_one_or_equally_confident_candidates(candidates: int) -> None:
    rare = [Token(old=-7.0, new=-7.0, advantage=1.0, entropy=0.1) for _ in range(candidates)]
    common = [Token(old=-0.1, new=-0.1, advantage=1.0, entropy=float(i)) for i in range(4)]
    plan = tt.objective("stapo").plan(token_batch([rare, common]))
    assert plan.weight.tolist() == [1.0] * (candidates + 4)
    assert having(plan, "SILENCED") == []


def compare_stare(rollouts: Sequence[Batch], batch: Batch, options: Options, seed: int) -> tt.Plan:
    objective = tt.objective("stare", **options)
    for rollout in rollouts:
        objective.observe(token_batch(rollout))
    plan = objective.plan(token_batch(batch))
    expected = reference.stare(batch, rollouts, **options)
    assert reasons(plan) == [token.reasons for token in expected.tokens]
    np.testing.assert_allclose(plan.weight.numpy(), [t.weight for t in expected.tokens], rtol=1e-14)
    assert_same(objective, plan, batch, expected, seed)
    return plan


@pytest.mark.parametrize("variant", reference.STARE_VARIANTS)
@pytest.mark.parametrize("threshold", ["quantile", "probability"])
@pytest.mark.parametrize("gate", ["batch", "sample", "token", "none"])
def test_stare_weighs_the_tokens_of_its_variant_behind_its_gate(variant: str, threshold: str, gate: str) -> None:
    options = {"variant": variant, "threshold": threshold, "gate": gate}
    weighed = []
    for seed in SEEDS:
        batch = random_batch(seed)
        plan = compare_stare([batch], batch, options, seed)
        weighed.append(bool((plan.weight != 1).any()))
    assert any(weighed)


def rollout_of(entropy: float) -> Batch:
    """Two responses with this token-mean entropy, and another mean of means."""
    high, low = Token(old=-1.0, new=-1.0, advantage=1.0), Token(old=-1.0, new=-1.0, advantage=-1.0)
    high.entropy, low.entropy = entropy + 0.25, entropy - 0.125
    return [[high], [low, low]]


@pytest.mark.parametrize(
    ("entropies", "is_open"),
    [([], True), ([0.25], True), ([0.5], False), ([0.75], False), ([0.25, 0.75], False), ([0.75, 0.25], True)],
)
def test_stares_gate_is_open_while_the_last_rollout_is_strictly_below_target(
    entropies: list[float], is_open: bool
) -> None:
    rollouts = [rollout_of(entropy) for entropy in entropies]
    plan = compare_stare(rollouts, random_batch(1), {"target": 0.5}, 1)
    assert bool((plan.weight == 1.1).any()) == is_open


@pytest.mark.parametrize("entropy", [0.1, 0.9])
def test_a_rollout_without_tokens_leaves_stares_gate_as_it_was(entropy: float) -> None:
    plan = compare_stare([rollout_of(entropy), [[], []]], random_batch(1), {}, 1)
    assert bool((plan.weight != 1).any()) == (entropy < 0.3)


@pytest.mark.parametrize("entropies", [[0.1] * 3, [0.9, 0.1], [0.9] * 15 + [0.1], [0.1] * 60])
def test_stares_adaptive_weights_follow_the_sign_of_the_distance_to_the_target(entropies: list[float]) -> None:
    rollouts = [rollout_of(entropy) for entropy in entropies]
    for variant in ("C2", "C4"):
        compare_stare(rollouts, random_batch(2), {"variant": variant, "adaptive": True}, 2)


@pytest.mark.parametrize("entropies", [[], [0.9, 0.2], [0.2] * 30, [0.2] * 30 + [0.9], [0.9] * 4 + [0.3, 0.1]])
@pytest.mark.parametrize(
    "band",
    [
        {"floor": 0.6},
        {"floor": 0.4, "ceiling": 0.5, "integral_gain": 0.1},
        {"floor": 1.5, "relative": True},
        {"floor": 0.8, "ceiling": 0.9, "fall": 0.3, "fall_steps": 3},
    ],
)
def test_trims_weights_follow_from_all_rollouts_so_far(entropies: list[float], band: Options) -> None:
    rollouts = [[[], []], *(rollout_of(entropy) for entropy in entropies), [[], []]]
    for seed in (1, 2):
        check("dapo", {}, {"trim": band}, random_batch(seed), seed, rollouts)


@pytest.mark.parametrize(
    "widening",
    [
        {},
        {"widen_low": 0.1, "widen_high": 4.0},
        {"widen_low": 1.0, "widen_high": 1.0},
        {"clip_scale": "sqrt_length"},
    ],
)
def test_sspo_plans_the_clip_ranges_of_the_reference(widening: Options) -> None:
    for seed in SEEDS:
        batch = random_batch(seed)
        plan = tt.objective("sspo", **widening).plan(token_batch(batch))
        tokens = reference.sspo(batch, **widening).tokens
        assert reasons(plan) == [token.reasons for token in tokens]
        np.testing.assert_allclose(plan.clip_low.numpy(), [0.02 * t.widening for t in tokens], rtol=1e-12)
        np.testing.assert_allclose(plan.clip_high.numpy(), [0.028 * t.widening for t in tokens], rtol=1e-12)


def test_sspo_shares_a_ratio_within_the_segments_of_the_reference() -> None:
    for seed in SEEDS:
        batch = random_batch(seed)
        plan = tt.objective("sspo").plan(token_batch(batch))
        found = [part for response in batch for part in reference.segments(response)]
        assert plan.segment is not None
        assert plan.segment.tolist() == [number for number, part in enumerate(found) for _ in part]
