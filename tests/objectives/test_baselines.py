"""Baselines and corrections: worked numbers, one method at a time."""

from __future__ import annotations

import math

import pytest
import torch

import trimtab as tt
from helpers.objectives.batches import batch, moved


def tokens(ratio: list[float], advantage: float | list[float], **fields: object) -> tuple[tt.TokenBatch, torch.Tensor]:
    """One response whose tokens have the given ratios to the old policy."""
    n = len(ratio)
    old = torch.full((n,), math.log(0.1), dtype=torch.float64)
    adv = torch.as_tensor(advantage, dtype=torch.float64).expand(n)
    packed = tt.TokenBatch(old_logp=old, advantage=adv, sequence=torch.zeros(n, dtype=torch.int64), **fields)
    return packed, (old + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_()


def run(
    name: str, case: tuple[tt.TokenBatch, torch.Tensor], **options: object
) -> tuple[float, list[float], dict[str, float]]:
    objective = tt.objective(name, **options)
    packed, new = case
    out = objective.loss(new, objective.plan(packed))
    (gradient,) = torch.autograd.grad(out.loss, new)
    return out.loss.item(), gradient.tolist(), {key: value.item() for key, value in out.metrics.items()}


def test_maxrl_raises_a_rare_right_answer_by_its_rarity() -> None:
    maxrl = tt.objective("maxrl")
    advantage = maxrl.advantages(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 0]))
    old = torch.full((3,), -1.0)
    packed = tt.TokenBatch(old_logp=old, advantage=advantage, sequence=torch.arange(3))
    _, grad_logp = maxrl.loss_and_grad(old, maxrl.plan(packed))
    assert grad_logp.tolist() == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


def test_ppo_clips_on_the_side_that_the_advantage_pushes_to() -> None:
    loss, gradient, metrics = run("dapo", tokens([0.5, 1.0, 2.0], 1.0))
    assert loss == pytest.approx(-(0.5 + 1.0 + 1.28) / 3)
    assert gradient == pytest.approx([-0.5 / 3, -1 / 3, 0])
    assert metrics["update/clip_share"] == pytest.approx(1 / 3)
    loss, gradient, _ = run("dapo", tokens([0.5, 1.0, 2.0], -1.0))
    assert loss == pytest.approx((0.8 + 1.0 + 2.0) / 3)
    assert gradient == pytest.approx([0, 1 / 3, 2 / 3])


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "gmpo", "cispo", "dppo", "sspo"])
def test_no_token_without_advantage_counts_as_clipped(name: str) -> None:
    segment = {"segment": torch.zeros(4, dtype=torch.int64), "entropy": torch.ones(4)} if name == "sspo" else {}
    far = [0.01, 0.01, 0.02, 0.01]  # beyond every clip, and DPPO's mask for a token with A <= 0
    options = {"shift_low": 0.01} if name == "dppo" else {}
    _, gradient, metrics = run(name, tokens(far, 0.0, **segment), **options)
    assert (gradient, metrics["update/clip_share"]) == ([0.0] * 4, 0.0)
    _, _, metrics = run(name, tokens(far, -1.0, **segment), **options)
    assert metrics["update/clip_share"] > 0, "the test needs tokens that a clip would cut"


def test_the_dual_clip_limits_punishment() -> None:
    loss, gradient, _ = run("dapo", tokens([20.0], -1.0))
    assert (loss, gradient) == (pytest.approx(10.0), [0.0])
    loss, gradient, _ = run("grpo", tokens([20.0], -1.0))
    assert (loss, gradient) == (pytest.approx(20.0), pytest.approx([20.0]))


def test_cispo_caps_the_weight_and_drops_no_token() -> None:
    _, gradient, metrics = run("cispo", tokens([0.5, 1.0, 2.0], 1.0))
    assert gradient == pytest.approx([-0.8 / 3, -1 / 3, -1.28 / 3])
    assert metrics["update/clip_share"] == pytest.approx(2 / 3)
    _, gradient, _ = run("cispo", tokens([0.5, 1.0, 2.0], 1.0), upper_only=True)
    assert gradient == pytest.approx([-0.5 / 3, -1 / 3, -1.28 / 3])


def test_sapo_is_a_soft_gate() -> None:
    loss, _, _ = run("sapo", tokens([2.0], 1.0))
    assert loss == pytest.approx(-4 / (1 + math.exp(-1)))
    loss, _, _ = run("sapo", tokens([2.0], -1.0))
    assert loss == pytest.approx(4 / 1.05 / (1 + math.exp(-1.05)))
    _, gradient, _ = run("sapo", tokens([1.0], 3.0))
    assert gradient == pytest.approx([-3.0])  # at ratio 1 the slope is the policy gradient's


def test_gmpo_clips_tokens_before_the_geometric_mean() -> None:
    case = tokens([math.exp(0.9), math.exp(-0.9)], 1.0)
    loss, gradient, metrics = run("gmpo", case)
    assert loss == pytest.approx(-math.exp((0.4 - 0.9) / 2))
    assert gradient == pytest.approx([0.0, -math.exp(-0.25) / 2])
    assert metrics["update/clip_share"] == pytest.approx(0.5)


def test_dr_grpo_divides_by_a_constant() -> None:
    loss, _, _ = run("dr_grpo", tokens([1.0] * 6, 1.0), length=100)
    assert loss == pytest.approx(-6 / 100)
    assert tt.objective("dr_grpo").advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])).tolist() == [0.5, -0.5]


def test_20_entropy_keeps_the_uncertain_fifth() -> None:
    entropy = torch.arange(10, dtype=torch.float64)
    case = tokens([1.0] * 10, 1.0, entropy=entropy)
    loss, gradient, _ = run("top_entropy", case)
    assert loss == pytest.approx(-0.2)
    assert [g != 0 for g in gradient] == [False] * 8 + [True] * 2
    loss, _, _ = run("top_entropy", case, renormalize=True)
    assert loss == pytest.approx(-1.0)


def test_kl_cov_penalises_the_most_covariant_token() -> None:
    case = tokens([1.0, 1.0, 3.0], [-1.0, 0.0, 2.0], current_logp=torch.tensor([-1.0, -1.0, -0.1], dtype=torch.float64))
    plan = tt.objective("kl_cov").plan(case[0])
    assert plan.penalty is not None
    assert plan.penalty.tolist() == [0.0, 0.0, 1.0]
    loss, _, _ = run("kl_cov", case)
    assert loss == pytest.approx((1.0 - 2 * 3.0 + math.log(3.0)) / 3)


def test_clip_cov_drops_only_unclipped_tokens_in_the_band() -> None:
    packed = batch(1, rows=40, columns=40)
    logp, advantage = packed.old_logp, packed.advantage
    cov = (advantage - advantage.mean()) * (logp - logp.mean())
    plan = tt.objective("clip_cov", share=0.01).plan(packed)
    dropped = plan.weight == 0
    assert dropped.sum() == math.ceil(0.01 * packed.tokens)
    assert ((cov[dropped] > 1) & (cov[dropped] < 5)).all()
    other = tt.objective("clip_cov", share=0.01, seed=1).plan(packed)
    assert not torch.equal(plan.weight, other.weight)


def test_lp_reg_holds_improbable_punished_tokens_to_the_proxy() -> None:
    proxy = torch.tensor([math.log(0.2)] * 2, dtype=torch.float64)
    packed, new = tokens([1.0, 1.0], [-1.0, 1.0], proxy_logp=proxy)
    loss, gradient, _ = run("lp_reg", (packed, new))
    d = math.log(2)  # the proxy thinks the token twice as likely
    assert loss == pytest.approx((1.0 + math.exp(d) - d - 1 - 1.0) / 2)
    assert gradient[0] == pytest.approx((1.0 + 1 - math.exp(d)) / 2)  # pulled back up


def test_the_entropy_advantage_never_turns_the_sign() -> None:
    entropy = torch.tensor([0.1, 100.0, 100.0, 1.0], dtype=torch.float64)
    packed, _ = tokens([1.0] * 4, [1.0, 1.0, -1.0, 0.0], entropy=entropy)
    plan = tt.objective("entropy_advantage").plan(packed)
    assert plan.advantage.tolist() == pytest.approx([1.04, 1.5, -0.5, 0.0])


def test_corrections_weigh_by_the_samplers_mismatch() -> None:
    w = torch.tensor([0.4, 1.5, 3.0, 8.0], dtype=torch.float64)
    packed, _ = tokens([1.0] * 4, 1.0)
    mismatched = tt.TokenBatch(
        old_logp=packed.old_logp,
        advantage=packed.advantage,
        sequence=torch.tensor([0, 1, 2, 3]),
        sampler_logp=packed.old_logp - w.log(),
    )
    assert tt.objective("grpo + tis").plan(mismatched).weight.tolist() == pytest.approx([0.4, 1.5, 2.0, 2.0])
    assert tt.objective("grpo + icepop").plan(mismatched).weight.tolist() == pytest.approx([0.0, 1.5, 3.0, 0.0])
    assert tt.objective("grpo + mis").plan(mismatched).weight.tolist() == [0.0, 1.0, 0.0, 0.0]
    renormalised = tt.objective("dapo + mis(renormalize=true)").plan(mismatched)
    assert renormalised.scale.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_mis_judges_a_response_by_the_product_or_the_mean() -> None:
    packed, _ = tokens([1.0] * 3, 1.0)
    drifted = tt.TokenBatch(
        old_logp=packed.old_logp,
        advantage=packed.advantage,
        sequence=packed.sequence,
        sampler_logp=packed.old_logp - math.log(1.5),
    )
    assert tt.objective("dapo + mis").plan(drifted).weight.tolist() == [0.0] * 3  # 1.5^3 > 2
    assert tt.objective("dapo + mis(geometric=true)").plan(drifted).weight.tolist() == [1.0] * 3


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) + 0.5 - 1)])
def test_the_reference_kl_has_three_estimates(estimator: str, expected: float) -> None:
    old = torch.full((1,), -1.0, dtype=torch.float64)
    packed = tt.TokenBatch(
        old_logp=old, advantage=torch.zeros(1), sequence=torch.zeros(1), ref_logp=torch.tensor([-1.5])
    )
    loss, _, _ = run("grpo", (packed, old.clone().requires_grad_()), kl={"coef": 2.0, "estimator": estimator})
    assert loss == pytest.approx(2 * expected)


def test_the_corrected_kl_is_weighted_by_the_ratio() -> None:
    packed, new = tokens([2.0], 0.0, ref_logp=torch.tensor([math.log(0.05)]))
    d = math.log(0.05 / 0.2)
    k3 = math.exp(d) - d - 1
    loss, gradient, _ = run("grpo", (packed, new), kl={"coef": 0.5, "corrected": True})
    assert loss == pytest.approx(0.5 * 2 * k3)
    assert gradient == pytest.approx([0.5 * 2 * (k3 + 1 - math.exp(d))])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_corrected_kl_is_unbiased_in_value_and_gradient(estimator: str) -> None:
    """Over all tokens of a vocabulary, weighted by the policy they would be sampled from."""
    rng = torch.Generator().manual_seed(0)
    old, ref = torch.randn(2, 7, generator=rng, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(7, generator=rng, dtype=torch.float64, requires_grad=True)
    new = logits.log_softmax(-1)
    batch_ = tt.TokenBatch(old_logp=old, advantage=torch.zeros(7), sequence=torch.arange(7), ref_logp=ref)
    objective = tt.objective("grpo", kl={"coef": 1.0, "estimator": estimator, "corrected": True})
    plan, (penalty,) = objective.plan(batch_), objective.penalties
    expected = (new.exp() * (new - ref)).sum()
    found = (old.exp() * penalty.terms(new, plan)).sum()
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_luspo_does_not_divide_by_the_length() -> None:
    loss, gradient, _ = run("luspo", tokens([1.0001] * 6, 1.0))
    assert loss == pytest.approx(-6 * 1.0001)
    assert gradient == pytest.approx([-1.0001] * 6)
    loss, gradient, metrics = run("luspo", tokens([1.0, 1.1], 1.0))
    assert (loss, gradient) == (pytest.approx(-2 * 1.0004), [0.0, 0.0])
    assert metrics["update/clip_share"] == 1


def test_aggregations() -> None:
    sequence = torch.tensor([0, 0, 0, 1])
    packed = tt.TokenBatch(old_logp=torch.zeros(4), advantage=torch.ones(4), sequence=sequence)
    scales = {
        "token-mean": [0.25] * 4,
        "seq-mean-token-mean": [1 / 6] * 3 + [0.5],
        "seq-mean-token-sum": [0.5] * 4,
    }
    for aggregation, scale in scales.items():
        plan = tt.objective("grpo", aggregation=aggregation).plan(packed)
        assert plan.scale.tolist() == pytest.approx(scale), aggregation


def test_a_constant_length_may_be_a_fraction() -> None:
    packed = tt.TokenBatch(old_logp=torch.zeros(1), advantage=torch.ones(1), sequence=torch.zeros(1).long())
    assert tt.objective("dr_grpo", length=17.5).plan(packed).scale.item() == pytest.approx(1 / 17.5)


def test_all_methods_measure_the_same_move_of_the_policy() -> None:
    """Also those that share a ratio or clip it before the mean: the alarm `ratio` reads one limit for all."""
    packed = tt.TokenBatch(
        old_logp=torch.tensor([-3.0, -1.0]), advantage=torch.ones(2), sequence=torch.zeros(2).long(),
        segment=torch.zeros(2).long(), entropy=torch.ones(2),
    )  # fmt: skip
    expected = sum(math.expm1(moved) - moved for moved in (2.5, 0.9)) / 2
    for name in ("grpo", "gspo", "gmpo", "sspo", "vespo"):
        objective = tt.objective(name)
        found = objective.loss(torch.tensor([-0.5, -0.1]), objective.plan(packed)).metrics["update/approx_kl"]
        assert found.item() == pytest.approx(expected), name


def test_the_smallest_move_of_the_policy_has_its_right_size() -> None:
    """Plain r - 1 - ln r has no correct digits here, and may be negative."""
    packed = tt.TokenBatch(old_logp=torch.zeros(1), advantage=torch.ones(1), sequence=torch.zeros(1).long())
    objective = tt.objective("grpo")
    found = objective.loss(torch.tensor([-1e-3]), objective.plan(packed)).metrics["update/approx_kl"]
    assert found.item() == pytest.approx(5e-7, rel=1e-3)


@pytest.mark.parametrize("variant", ["C1", "C4"])
def test_shares_of_a_mini_batch_without_tokens_are_zero(variant: str) -> None:
    none = torch.zeros(0)
    packed = tt.TokenBatch(old_logp=none, advantage=none, sequence=none.long(), entropy=none, responses=2)
    metrics = tt.objective("stare", variant=variant).plan(packed).metrics
    assert all(value == 0 for name, value in metrics.items() if name.endswith("_share")), metrics


def test_metrics_of_an_unmoved_policy() -> None:
    packed = batch(0)
    objective = tt.objective("grpo")
    metrics = objective.loss(packed.old_logp, objective.plan(packed)).metrics
    assert metrics["update/ratio_mean"].item() == pytest.approx(1)
    assert metrics["update/approx_kl"].item() == pytest.approx(0, abs=1e-15)
    assert metrics["update/ratio_max"] == metrics["update/ratio_min"] == 1
    far = objective.loss(moved(packed, by=1.0), objective.plan(packed)).metrics
    assert far["update/approx_kl"] > 0.1
