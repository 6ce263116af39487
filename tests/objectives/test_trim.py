"""trim: its prediction against a real softmax, its control law, Phi without moments, and where it does nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import trimtab as tt
from helpers.objectives.batches import batch, moved, observed
from trimtab import theory
from trimtab.objectives import Moments
from trimtab.objectives.phi import NEIGHBOURS, batch_phi, estimated_phi

TOKENS, VOCABULARY = 240, 12


def tabular(seed: int = 0, sharpness: float = 2.0) -> tuple[torch.Tensor, torch.Tensor, tt.TokenBatch]:
    """A tabular softmax policy with a row of logits for every token, the tokens drawn from it, and their batch."""
    rng = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(TOKENS, VOCABULARY, generator=rng, dtype=torch.float64)
    token = torch.multinomial(logits.softmax(-1), 1, generator=rng).squeeze(1)
    m = theory.moments(logits, token)
    sequence = torch.arange(TOKENS) // 10
    advantage = torch.randn(TOKENS // 10, generator=rng, dtype=torch.float64)[sequence]
    tokens = tt.TokenBatch(
        old_logp=m.logp, entropy=m.entropy, sum_p2=m.sum_p2, sum_p2_logp=m.sum_p2_logp, advantage=advantage,
        sequence=sequence, segment=torch.arange(TOKENS) // 3,
    )  # fmt: skip
    return logits, token, tokens


def entropy_after(
    logits: torch.Tensor, token: torch.Tensor, objective: tt.Objective, plan: tt.Plan, eta: float
) -> float:
    """The sum of the rows' entropies after a step of gradient descent on the logits."""
    leaf = logits.clone().requires_grad_()
    new_logp = leaf.log_softmax(-1).gather(1, token[:, None]).squeeze(1)
    (gradient,) = torch.autograd.grad(objective.loss(new_logp, plan).loss, leaf)
    return float(torch.distributions.Categorical(logits=logits - eta * gradient).entropy().sum())


def steered(name: str, tokens: tt.TokenBatch) -> tt.Objective:
    """The objective after a rollout with this batch's entropy."""
    objective = tt.objective(name)
    objective.observe(tokens)
    return objective


@pytest.mark.parametrize("method", ["dapo", "grpo", "sspo", "gspo", "stapo(tau_p=0.2)", "cispo", "gmpo", "vespo"])
@pytest.mark.parametrize("floor", [0.1, 9.0])  # above the floor, and far below it
def test_the_predicted_change_is_that_of_a_small_step_on_a_tabular_policy(method: str, floor: float) -> None:
    logits, token, tokens = tabular()
    objective = steered(f"{method} + trim(floor={floor})", tokens)
    plan, eta = objective.plan(tokens), 1e-4
    up, down = (entropy_after(logits, token, objective, plan, sign * eta) for sign in (1, -1))
    assert plan.metrics["trim/predicted_change"].item() == pytest.approx((up - down) / (2 * eta), rel=1e-5)


@pytest.mark.parametrize("variant", ["O1", "O3", "C1", "C2", "C3"])
def test_the_critical_weight_leaves_the_entropy_unchanged_to_second_order(variant: str) -> None:
    logits, token, tokens = tabular()
    # A little more reward for what is probable: DAPO's update then lowers the entropy, and STARE has to balance it.
    tokens.advantage[:] = tokens.advantage.sign() + 0.2 * (tokens.old_logp > -1)
    stare = tt.objective("stare", boost="critical", variant=variant, gate="none", share=0.4)
    plan, dapo = stare.plan(tokens), tt.objective("dapo")
    assert 1 < plan.metrics["stare/weight"] < 10
    before = float(torch.distributions.Categorical(logits=logits).entropy().sum())
    for eta in (1e-2, 1e-3):
        change = entropy_after(logits, token, stare, plan, eta) - before
        unweighted = entropy_after(logits, token, dapo, dapo.plan(tokens), eta) - before
        assert abs(change) < 20 * eta**2
        assert abs(unweighted) > 0.01 * eta


# --- the control law


def dapo_effect(tokens: tt.TokenBatch) -> torch.Tensor:
    """What every token does to the entropy under DAPO on policy, where its coefficient is A / tokens."""
    return -tokens.advantage / tokens.tokens * theory.batch_phi(tokens)


@pytest.mark.parametrize(("band", "asked"), [("floor=9", 1), ("floor=0, ceiling=0.01", -1)])
@pytest.mark.parametrize("gain", [0.1, 0.3, 0.6])
def test_the_update_changes_the_entropy_by_what_the_controller_asks_for(band: str, asked: int, gain: float) -> None:
    _, _, tokens = tabular()
    objective = steered(f"dapo + trim({band}, gain={gain}, integral_gain=0, max_weight=100)", tokens)
    plan, drive = objective.plan(tokens), objective.controllers["trim"].drive  # type: ignore[attr-defined]
    effect, surprising = dapo_effect(tokens), theory.batch_phi(tokens) < 0
    assert drive * asked == pytest.approx(gain, rel=0.2)
    assert plan.metrics["trim/drive"].item() == drive
    assert plan.metrics["trim/saturated"] == 0
    held = effect[surprising].abs().sum() / effect.abs().sum()
    assert plan.metrics["trim/leverage"].item() == pytest.approx(held.item())
    assert plan.metrics["trim/predicted_change"].item() == pytest.approx(drive * effect.abs().sum().item())
    factor = plan.metrics["trim/weight"].item()
    assert (factor - 1) * asked > 0
    expected = torch.where(effect > 0, plan.metrics["trim/weight"], 1 / plan.metrics["trim/weight"])
    torch.testing.assert_close(plan.weight, torch.where(surprising, expected, torch.ones_like(expected)))
    towards = asked * effect > 0
    assert torch.equal((plan.reason & int(tt.Reason.BOOSTED)) != 0, surprising & towards)
    assert torch.equal((plan.reason & int(tt.Reason.DAMPED)) != 0, surprising & ~towards)


@pytest.mark.parametrize("band", ["floor=9", "floor=0, ceiling=0.01"])
def test_a_weight_at_its_limit_is_said_to_be_saturated(band: str) -> None:
    _, _, tokens = tabular()
    plan = steered(f"dapo + trim({band}, gain=10, max_weight=1.25)", tokens).plan(tokens)
    assert set(plan.weight.tolist()) == {1.25, 0.8, 1.0}
    assert plan.metrics["trim/saturated"] == 1


@pytest.mark.parametrize("band", ["floor=9", "floor=0, ceiling=0.01"])
def test_a_largest_weight_of_one_leaves_the_method_as_it_is(band: str) -> None:
    _, _, tokens = tabular()
    plan = steered(f"dapo + trim({band}, gain=10, max_weight=1)", tokens).plan(tokens)
    assert torch.equal(plan.weight, torch.ones_like(plan.weight))
    assert torch.equal(plan.reason, tt.objective("dapo").plan(tokens).reason)


@pytest.mark.parametrize(("band", "sign"), [("floor=9", -1.0), ("floor=0, ceiling=0.01", 1.0)])
def test_an_update_that_does_more_than_is_asked_for_is_left_alone(band: str, sign: float) -> None:
    _, _, tokens = tabular()
    tokens.advantage[:] = sign * theory.batch_phi(tokens).sign() * 10
    tokens.advantage[::9] *= -0.01  # a little the other way
    plan = steered(f"dapo + trim({band}, gain=0.1)", tokens).plan(tokens)
    assert plan.metrics["trim/leverage"] > 0
    assert (
        abs(plan.metrics["trim/predicted_change"]) > abs(plan.metrics["trim/drive"]) * dapo_effect(tokens).abs().sum()
    )
    assert torch.equal(plan.weight, torch.ones_like(plan.weight))


@pytest.mark.parametrize("band", ["floor=9", "floor=0, ceiling=0.01"])
@pytest.mark.parametrize("kind", ["no advantage", "nothing surprising"])
def test_without_surprising_tokens_weights_stay_one_and_metrics_finite(band: str, kind: str) -> None:
    _, _, tokens = tabular()
    expected = theory.batch_phi(tokens) > 0
    tokens.advantage[:] = 0.0 if kind == "no advantage" else torch.where(expected, 1.0, 0.0)
    plan = steered(f"dapo + trim({band})", tokens).plan(tokens)
    assert torch.equal(plan.weight, torch.ones_like(plan.weight))
    assert all(math.isfinite(value) for value in plan.metrics.values())
    assert plan.metrics["trim/leverage"] == 0 and plan.metrics["trim/saturated"] == 0
    assert plan.metrics["trim/weight"] == 1


@pytest.mark.parametrize("rewarded", [True, False])
def test_with_one_kind_of_surprising_tokens_these_alone_steer(rewarded: bool) -> None:
    _, _, tokens = tabular()
    phi = theory.batch_phi(tokens)
    kept = (phi > 0) | (tokens.advantage > 0 if rewarded else tokens.advantage < 0)
    tokens.advantage[~kept] = 0.0
    plan = steered("dapo + trim(floor=9, gain=0.01, max_weight=100)", tokens).plan(tokens)
    changed = plan.weight != 1
    if bool(changed.any()):
        assert bool((phi[changed] < 0).all()) and bool((tokens.advantage[changed] > 0).all()) is rewarded
    assert all(math.isfinite(value) for value in plan.metrics.values())


@pytest.mark.parametrize(
    "name", ["dapo + trim(floor=9)", "dapo + trim(floor=9, phi=estimated)", "sspo + trim(floor=9)"]
)
def test_a_plan_without_tokens_has_finite_metrics(name: str) -> None:
    tokens = batch(0)
    objective = observed(tt.objective(name), tokens)
    plan = objective.plan(tokens.select(0, 0))
    assert plan.tokens == 0
    assert all(math.isfinite(value) for metric, value in plan.metrics.items() if metric.startswith("trim/"))
    assert plan.metrics["trim/weight"] == 1
    stare = tt.objective("stare(boost=critical)").plan(tokens.select(0, 0))
    assert stare.metrics["stare/weight"] == 1


def test_tokens_that_the_clip_has_cut_have_no_effect() -> None:
    tokens = replace(batch(0), old_logp=batch(0).old_logp - 3.0)  # so that a drift of 3 leaves log-probs below 0
    current = tokens.old_logp + torch.where(torch.arange(tokens.tokens) % 2 == 0, 3.0, 0.0) * tokens.advantage.sign()
    drifted = replace(tokens, current_logp=current)
    cut = (current != tokens.old_logp) & (tokens.advantage != 0)
    plan = observed(tt.objective("dapo + trim(floor=9)"), drifted).plan(drifted)
    assert bool(cut.any()) and torch.equal(plan.weight[cut], torch.ones_like(plan.weight[cut]))
    assert bool((plan.weight[~cut] != 1).any())


def test_silenced_tokens_have_no_effect() -> None:
    tokens = batch(0)
    plan = observed(tt.objective("dapo + trim(floor=9) + s2t(tau_p=0.5, mask=rare)"), tokens).plan(tokens)
    silenced = (plan.reason & int(tt.Reason.SILENCED)) != 0
    assert bool(silenced.any()) and not bool(plan.weight[silenced].any())
    assert not bool((plan.reason[silenced] & int(tt.Reason.BOOSTED | tt.Reason.DAMPED)).any())


# --- STARE's critical weight


def test_a_critical_weight_out_of_reach_is_ten() -> None:
    _, _, tokens = tabular()
    tokens.advantage[:] = theory.batch_phi(tokens).sign()  # everything lowers the entropy ...
    tokens.advantage[tokens.old_logp.argmin()] = 1e-4  # ... but for next to nothing
    plan = tt.objective("stare", boost="critical", gate="none", share=0.001).plan(tokens)
    assert plan.metrics["stare/weight"] == 10


def test_tokens_that_cannot_raise_the_entropy_are_not_boosted() -> None:
    _, _, tokens = tabular()
    phi = theory.batch_phi(tokens)
    tokens.advantage[:] = torch.where(phi > 0, 1.0, -1.0)  # no rewarded token raises the entropy
    plan = tt.objective("stare", boost="critical", gate="none").plan(tokens)
    assert plan.metrics["stare/weight"] == 1
    assert torch.equal(plan.weight, torch.ones_like(plan.weight))


# --- Phi without moments


def family(tokens: int, seed: int = 0) -> Moments:
    """Tokens sampled from one set of logits at many temperatures: S2 is a smooth function of the entropy."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.linspace(0, 6, 50, dtype=torch.float64)
    logits = logits / (0.3 + 3 * torch.rand(tokens, 1, generator=rng, dtype=torch.float64))
    return theory.moments(logits, torch.multinomial(logits.softmax(-1), 1, generator=rng).squeeze(1))


def test_the_estimate_is_close_to_phi_where_s2_is_a_function_of_the_entropy() -> None:
    m = family(4000)
    exact, estimate = theory.phi(*m), estimated_phi(m.logp, m.entropy)
    assert torch.corrcoef(torch.stack([exact, estimate]))[0, 1] > 0.9
    # What the sampled token contributes is exact: the estimate is off by an S2 that differs between blocks alone.
    own_part_alone = m.logp.exp() * (m.logp + m.entropy)
    assert (estimate - exact).square().mean() < 0.5 * (own_part_alone - exact).square().mean()


@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 127, 128, 200, 640])
def test_the_estimate_sums_to_zero_among_tokens_of_similar_entropy(tokens: int) -> None:
    m = family(tokens)
    estimate = estimated_phi(m.logp, m.entropy)[m.entropy.argsort()]
    blocks = max(1, tokens // NEIGHBOURS)
    rank = torch.arange(tokens) * blocks // tokens
    for block in range(blocks):
        assert NEIGHBOURS <= (rank == block).sum() < 2 * NEIGHBOURS or blocks == 1
        assert estimate[rank == block].sum().item() == pytest.approx(0, abs=1e-12)


def test_the_estimate_of_no_token_is_nothing() -> None:
    assert estimated_phi(torch.zeros(0), torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("host", ["dapo", "sspo"])
def test_without_moments_trim_estimates_phi_as_if_told_to(host: str) -> None:
    for seed in range(5):
        tokens = batch(seed, rows=30)
        bare = replace(tokens, sum_p2=None, sum_p2_logp=None)
        told = observed(tt.objective(f"{host} + trim(floor=9, phi=estimated)"), tokens)
        left = observed(tt.objective(f"{host} + trim(floor=9)"), bare)
        plans = [told.plan(tokens), told.plan(bare), left.plan(bare)]
        assert bool((plans[0].weight != 1).any())
        assert all(torch.equal(plans[0].weight, plan.weight) for plan in plans)
        assert all(torch.equal(plans[0].metrics[name], plan.metrics[name]) for plan in plans for name in plan.metrics)
        new = moved(tokens)
        losses = {told.loss(new, plan).loss.item() for plan in plans}
        assert len(losses) == 1


def test_with_moments_trim_uses_them_unless_told_otherwise() -> None:
    tokens = batch(0, rows=30)
    exact, free, estimated = (
        observed(tt.objective(f"dapo + trim(floor=9{phi})"), tokens).plan(tokens).weight
        for phi in (", phi=exact", "", ", phi=estimated")
    )
    assert torch.equal(exact, free)
    assert not torch.equal(exact, estimated)
    phi = batch_phi(tokens)
    assert torch.equal(exact > 1, (phi < 0) & (-tokens.advantage * phi > 0))


@pytest.mark.parametrize("missing", ["sum_p2", "sum_p2_logp"])
def test_exact_phi_without_moments_is_an_error_that_names_the_field(missing: str) -> None:
    bare = replace(batch(0), **{missing: None})
    objective = tt.objective("dapo + trim(phi=exact)")
    for use in (objective.plan, objective.observe):
        with pytest.raises(ValueError, match=rf"dapo \+ trim reads `{missing}`, which this TokenBatch lacks"):
            use(bare)
