"""Methods reduce to each other where their papers say so, bit for bit, in loss and gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

import trimtab as tt
from helpers.objectives.batches import batch, dtypes, fields, loss_and_gradient, moved, observed, same, seeds

Build = Callable[[], tt.Objective]


def with_segments(tokens: tt.TokenBatch, segment: torch.Tensor) -> tt.TokenBatch:
    return replace(tokens, segment=segment)


PAIRS: dict[str, tuple[Build, Build]] = {
    "STAPO that finds nothing rare is DAPO": (lambda: tt.objective("stapo", tau_p=0.0), lambda: tt.objective("dapo")),
    "MaxRL is GRPO with its advantage and the mean over tokens": (
        lambda: tt.objective("maxrl"),
        lambda: tt.objective("grpo", advantage="mean_normalized", aggregation="token-mean"),
    ),
    "STAPO is DAPO with S2T": (
        lambda: tt.objective("stapo", tau_p=0.2),
        lambda: tt.objective("dapo + s2t", tau_p=0.2),
    ),
    "STARE is DAPO with its rule": (
        lambda: tt.objective("stare", variant="C2"),
        lambda: tt.objective("dapo + stare(variant=C2)"),
    ),
    "STARE with weights of one is DAPO": (
        lambda: tt.objective("stare", variant="C2", boost=1.0, damp=1.0),
        lambda: tt.objective("dapo"),
    ),
    "JustRL is DAPO": (lambda: tt.objective("justrl"), lambda: tt.objective("dapo")),
    "GRPO with DAPO's clip and mean is DAPO": (
        lambda: tt.objective("grpo", clip_high=0.28, dual_clip=10.0, aggregation="token-mean"),
        lambda: tt.objective("dapo"),
    ),
    "20-Entropy is DAPO with its mask": (
        lambda: tt.objective("top_entropy"),
        lambda: tt.objective("dapo", top_entropy=True),
    ),
    "20-Entropy of all tokens is DAPO": (
        lambda: tt.objective("top_entropy", share=1.0),
        lambda: tt.objective("dapo"),
    ),
    "an entropy bonus of nothing is DAPO": (
        lambda: tt.objective("entropy_advantage", coef=0.0),
        lambda: tt.objective("dapo"),
    ),
    "Clip-Cov that finds nothing is PPO with a range of one": (
        lambda: tt.objective("clip_cov", cov_low=1e6, cov_high=1e6),
        lambda: tt.objective("dapo", clip_low=1.0, clip_high=1.0, dual_clip=None),
    ),
    "GMPO without a clip is GSPO without a clip": (
        lambda: tt.objective("gmpo", clip_low=50.0, clip_high=50.0),
        lambda: tt.objective("gspo", clip_low=float("inf"), clip_high=float("inf")),
    ),
    "LUSPO is GSPO with the sum over tokens": (
        lambda: tt.objective("luspo"),
        lambda: tt.objective("gspo", aggregation="seq-mean-token-sum"),
    ),
    "DPPO that masks nothing is CISPO capped from above": (
        lambda: tt.objective("dppo", shift_low=1e9, shift_high=1e9, cap=1.5),
        lambda: tt.objective("cispo", clip_high=0.5, upper_only=True),
    ),
    "VESPO with a flat weight is the policy gradient": (
        lambda: tt.objective("vespo", k_pos=0.0, lambda_pos=0.0, k_neg=0.0, lambda_neg=0.0),
        lambda: tt.objective("reinforce"),
    ),
    "a KL of weight nothing changes nothing": (
        lambda: tt.objective("grpo + kl(coef=0)"),
        lambda: tt.objective("grpo"),
    ),
    "an entropy bonus with coefficient nothing is the method": (
        lambda: tt.objective("sspo + entropy_bonus(coef=0)"),
        lambda: tt.objective("sspo"),
    ),
    "STARE with the critical weight is DAPO with its rule": (
        lambda: tt.objective("stare", boost="critical", variant="C2"),
        lambda: tt.objective("dapo + stare(boost=critical, variant=C2)"),
    ),
    "trim before the first rollout is the method": (
        lambda: tt.objective("gspo + trim(floor=9)"),
        lambda: tt.objective("gspo"),
    ),
    "rules judge tokens by the advantage before the entropy bonus": (
        lambda: tt.objective("grpo + entropy_bonus(coef=2) + s2t(tau_p=0.2) + stare(variant=C2, gate=none)"),
        lambda: tt.objective("grpo + s2t(tau_p=0.2) + stare(variant=C2, gate=none) + entropy_bonus(coef=2)"),
    ),
    "one micro-batch makes the micro scope the mini-batch": (
        lambda: tt.objective("sspo + s2t", tau_p=0.2, scope="micro"),
        lambda: tt.objective("sspo + s2t", tau_p=0.2),
    ),
    "the order of attachments does not matter": (
        lambda: tt.objective("grpo + s2t(tau_p=0.2) + stare(gate=none)"),
        lambda: tt.objective("grpo + stare(gate=none) + s2t(tau_p=0.2)"),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@given(seed=seeds, dtype=dtypes)
@settings(max_examples=40)
def test_methods_reduce_to_each_other(name: str, seed: int, dtype: torch.dtype) -> None:
    one, other = PAIRS[name]
    same(one(), other(), batch(seed, dtype=dtype))


@given(seed=seeds, dtype=dtypes)
@settings(max_examples=40)
def test_stare_behind_a_closed_gate_is_dapo(seed: int, dtype: torch.dtype) -> None:
    tokens = batch(seed, dtype=dtype)
    stare = tt.objective("stare", variant="C4", target=0.0)
    stare.observe(tokens)
    same(stare, tt.objective("dapo"), tokens)


@pytest.mark.parametrize("variant", ["O1", "C1", "C2", "C3"])
@given(seed=seeds, dtype=dtypes)
@settings(max_examples=10)
def test_stare_with_the_critical_weight_behind_a_closed_gate_is_dapo(
    variant: str, seed: int, dtype: torch.dtype
) -> None:
    tokens = batch(seed, dtype=dtype)
    stare = observed(tt.objective("stare", boost="critical", variant=variant, target=0.0), tokens)
    same(stare, tt.objective("dapo"), tokens)


HOSTS = ["dapo", "grpo", "dr_grpo", "gspo", "sspo", "cispo", "gmpo", "vespo", "stapo(tau_p=0.2)", "kl_cov(share=0.2)"]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("band", ["floor=0", "floor=0.001", "floor=0, ceiling=0.6", "floor=0.001, relative=true"])
@given(seed=seeds, dtype=dtypes)
@settings(max_examples=5)
def test_trim_is_the_method_while_the_entropy_is_in_its_band(
    host: str, band: str, seed: int, dtype: torch.dtype
) -> None:
    tokens = batch(seed, dtype=dtype)
    trimmed, alone = observed(tt.objective(f"{host} + trim({band})"), tokens), tt.objective(host)
    plan, expected = trimmed.plan(tokens), alone.plan(tokens)
    assert torch.equal(plan.weight, expected.weight) and torch.equal(plan.reason, expected.reason)
    same(trimmed, alone, tokens)


@pytest.mark.parametrize("host", ["dapo", "sspo", "gmpo"])
@given(seed=seeds, dtype=dtypes)
@settings(max_examples=5)
def test_an_entropy_bonus_above_its_target_is_the_method(host: str, seed: int, dtype: torch.dtype) -> None:
    tokens = batch(seed, dtype=dtype)
    rewarded = observed(tt.objective(f"{host} + entropy_bonus(coef=0.5, target=0.001)"), tokens)
    assert torch.equal(rewarded.plan(tokens).advantage, tokens.advantage)
    same(rewarded, tt.objective(host), tokens)


@pytest.mark.parametrize("host", ["dapo", "gspo", "sspo"])
@pytest.mark.parametrize("rules", [
    ["s2t(tau_p=0.2)"], ["stare(variant=C2, gate=none)"], ["tis", "kl(coef=0.1)"], ["top_entropy(renormalize=true)"],
    ["stare(boost=critical, gate=none)"], ["s2t(tau_p=0.2)", "entropy_bonus(coef=0.3)"],
])  # fmt: skip
@given(seed=seeds, dtype=dtypes)
@settings(max_examples=5)
def test_trim_is_applied_last_wherever_it_is_attached(
    host: str, rules: list[str], seed: int, dtype: torch.dtype
) -> None:
    tokens, trim = batch(seed, dtype=dtype), "trim(floor=9, gain=2)"
    first, last = (
        observed(tt.objective(" + ".join([host, *order])), tokens) for order in ([trim, *rules], [*rules, trim])
    )
    assert torch.equal(first.plan(tokens).weight, last.plan(tokens).weight)
    same(first, last, tokens)


def test_the_critical_weight_follows_from_what_the_other_rules_leave() -> None:
    rules, stare = "s2t(tau_p=0.2) + entropy_bonus(coef=0.3)", "stare(boost=critical, variant=C1, share=0.3, gate=none)"
    weights = []
    for seed in range(20):
        tokens = batch(seed, rows=9)
        before, after = tt.objective(f"dapo + {stare} + {rules}"), tt.objective(f"dapo + {rules} + {stare}")
        same(before, after, tokens)
        weights.append(float(after.plan(tokens).metrics["stare/weight"]))
    assert sum(weight > 1 for weight in weights) > 3, weights


@given(seed=seeds, dtype=dtypes)
@settings(max_examples=40)
def test_sspo_with_one_segment_has_gspos_ratio(seed: int, dtype: torch.dtype) -> None:
    tokens = batch(seed, dtype=dtype)
    one_segment = with_segments(tokens, torch.zeros_like(tokens.sequence))
    sspo = tt.objective("sspo", clip_low=3e-4, clip_high=4e-4, widen_low=1.0, widen_high=1.0)
    same(sspo, tt.objective("gspo"), one_segment)


@pytest.mark.parametrize("clip_scale", ["fixed", "sqrt_length"])
@given(seed=seeds, dtype=dtypes)
@settings(max_examples=20)
def test_sspo_with_one_token_segments_has_the_token_ratio_and_range(
    clip_scale: str, seed: int, dtype: torch.dtype
) -> None:
    tokens = batch(seed, dtype=dtype)
    alone = with_segments(tokens, torch.arange(tokens.tokens))
    sspo = tt.objective("sspo", clip_low=0.2, clip_high=0.28, widen_low=1.0, widen_high=1.0, clip_scale=clip_scale)
    same(sspo, tt.objective("grpo", clip_high=0.28), alone)


@given(seed=seeds, dtype=dtypes)
@settings(max_examples=20)
def test_the_length_of_one_token_segments_changes_no_range(seed: int, dtype: torch.dtype) -> None:
    tokens = batch(seed, dtype=dtype)
    alone = with_segments(tokens, torch.arange(tokens.tokens))
    same(tt.objective("sspo", clip_scale="sqrt_length"), tt.objective("sspo"), alone)


@given(seed=seeds, dtype=dtypes)
@settings(max_examples=40)
def test_gspo_of_one_token_responses_is_grpo(seed: int, dtype: torch.dtype) -> None:
    tokens = batch(seed, columns=1, dtype=dtype)
    same(tt.objective("gspo", clip_low=0.2, clip_high=0.2), tt.objective("grpo"), tokens)


@given(seed=seeds, dtype=dtypes)
@settings(max_examples=40)
def test_dr_grpo_of_equally_long_responses_is_grpo(seed: int, dtype: torch.dtype) -> None:
    padded = fields(seed, dtype=dtype)
    padded["mask"] = torch.ones_like(padded["mask"])
    tokens = tt.TokenBatch.from_padded(**padded)
    same(tt.objective("dr_grpo", length=11), tt.objective("grpo"), tokens)


@given(seed=seeds, dtype=dtypes)
@settings(max_examples=20)
def test_luspo_is_gspo_times_the_length(seed: int, dtype: torch.dtype) -> None:
    padded = fields(seed, columns=8, dtype=dtype)
    padded["mask"] = torch.ones_like(padded["mask"])
    tokens = tt.TokenBatch.from_padded(**padded)
    found = loss_and_gradient(tt.objective("luspo"), tokens, moved(tokens))
    for value, of_gspo in zip(found, loss_and_gradient(tt.objective("gspo"), tokens, moved(tokens)), strict=True):
        torch.testing.assert_close(value, 8 * of_gspo)


@pytest.mark.parametrize("correction", ["tis", "icepop", "mis"])
@given(seed=seeds, dtype=dtypes)
@settings(max_examples=40)
def test_a_perfect_sampler_needs_no_correction(correction: str, seed: int, dtype: torch.dtype) -> None:
    tokens = batch(seed, dtype=dtype)
    perfect = replace(tokens, sampler_logp=tokens.old_logp)
    same(tt.objective(f"sspo + {correction}"), tt.objective("sspo"), perfect)


@pytest.mark.parametrize("name", ["cispo", "dppo", "dppo(divergence=kl)", "vespo"])
@given(seed=seeds, dtype=dtypes)
@settings(max_examples=20)
def test_a_constant_weight_before_the_first_update_is_one(name: str, seed: int, dtype: torch.dtype) -> None:
    tokens = batch(seed, dtype=dtype)
    same(tt.objective(name), tt.objective("reinforce"), tokens, tokens.old_logp.clone().requires_grad_())


@given(seed=seeds, dtype=dtypes)
@settings(max_examples=40)
def test_before_the_first_update_every_ratio_has_grpos_gradient(seed: int, dtype: torch.dtype) -> None:
    tokens = batch(seed, dtype=dtype)
    new = tokens.old_logp.clone().requires_grad_()
    expected = loss_and_gradient(tt.objective("grpo"), tokens, new)[1]
    for name in ("gspo", "sspo", "gmpo"):
        assert torch.equal(loss_and_gradient(tt.objective(name), tokens, new)[1], expected), name
    expected = loss_and_gradient(tt.objective("grpo", aggregation="token-mean"), tokens, new)[1]
    for name in ("cispo", "dppo", "dppo(divergence=kl)", "vespo"):
        assert torch.equal(loss_and_gradient(tt.objective(name), tokens, new)[1], expected), name


@given(seed=seeds)
@settings(max_examples=40)
def test_statistics_of_an_unmoved_policy_are_the_old_ones(seed: int) -> None:
    tokens = batch(seed)
    unmoved = replace(tokens, current_logp=tokens.old_logp)
    new = moved(tokens)
    for name in ("stapo", "stare", "kl_cov"):
        old, current = tt.objective(name), tt.objective(name, token_stats="current")
        mine, yours = loss_and_gradient(old, tokens, new), loss_and_gradient(current, unmoved, new)
        assert all(torch.equal(a, b) for a, b in zip(mine, yours, strict=True)), name
