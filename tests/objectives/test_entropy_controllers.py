"""REPO-R, EntroPIC and Entrocraft: what their controllers make of entropies, and what follows for tokens, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import trimtab as tt
from helpers.objectives import reference
from helpers.objectives.batches import batch, observed, same
from helpers.objectives.reference_checks import SEEDS, assert_same, random_batch, token_batch


def rollout(entropy: float) -> tt.TokenBatch:
    """One token of this entropy; for NaN a rollout without tokens."""
    values = torch.full((0 if math.isnan(entropy) else 1,), entropy)
    ones = torch.ones_like(values)
    return tt.TokenBatch(old_logp=-ones, advantage=ones, sequence=torch.zeros_like(values).long(), entropy=values)


def after(objective: tt.Objective, entropies: list[float]) -> tt.Objective:
    for entropy in entropies:
        objective.observe(rollout(entropy))
    return objective


def four_tokens() -> tt.TokenBatch:
    """Two responses of two tokens, the first rewarded and the second punished, each with a token of p = 1/e^2 and 1."""
    return tt.TokenBatch(
        old_logp=torch.tensor([-2.0, 0.0, -2.0, 0.0]),
        advantage=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        sequence=torch.tensor([0, 0, 1, 1]),
        entropy=torch.zeros(4),
    )


# --- REPO-R


@pytest.mark.parametrize(
    ("entropies", "strength"),
    [
        ([], 0.1),
        ([0.2], 0.2),
        ([0.2, 0.2], 0.4),
        ([0.2, 0.2, 0.2], 0.5),
        ([0.2, 0.9], 0.1),
        ([0.9], -0.1),
        ([0.9, 0.9, 0.9], -0.4),
        ([0.9, 0.9, 0.2], -0.1),
        ([0.9, 0.2], 0.1),
        ([0.25], 0.1),
        ([math.nan, 0.2], 0.2),
    ],
)
def test_repo_r_doubles_halves_and_turns_its_strength(entropies: list[float], strength: float) -> None:
    objective = tt.objective("repo_r", target=0.25, strength_min=0.1, strength_max=0.5)
    plan = after(objective, entropies).plan(four_tokens())
    assert plan.metrics["repo_r/strength"].item() == pytest.approx(strength)
    # ln p is -2 and 0: rewarded rare tokens get 1 + 2 z, punished ones 1 - 2 z, certain ones 1.
    assert plan.weight.tolist() == pytest.approx([1 + 2 * strength, 1.0, 1 - 2 * strength, 1.0])


def test_repo_r_turns_no_advantage_round() -> None:
    tokens = replace(four_tokens(), old_logp=torch.tensor([-9.0, 0.0, -9.0, 0.0]))
    plan = after(tt.objective("repo_r", strength_min=0.5, strength_max=0.5), [0.1]).plan(tokens)
    assert plan.weight.tolist() == [5.5, 1.0, 0.0, 1.0]
    assert plan.why(0).startswith("boosted: rare, and it moves the entropy towards its target")
    assert plan.why(2).startswith("damped: rare, and it moves the entropy away")


def test_repo_r_moves_the_entropy_to_its_target() -> None:
    """Above 0 its weights raise the predicted change of the entropy, below 0 they lower it."""
    rng = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(500, 8, generator=rng, dtype=torch.float64)
    token = logits.softmax(-1).multinomial(1, generator=rng).squeeze(1)
    found = tt.theory.moments(logits, token)
    advantage = torch.where(torch.rand(500, generator=rng) < 0.5, -1.0, 1.0).double()
    tokens = tt.TokenBatch(
        old_logp=found.logp,
        advantage=advantage,
        sequence=torch.arange(500),
        entropy=found.entropy,
        sum_p2=found.sum_p2,
        sum_p2_logp=found.sum_p2_logp,
    )
    changes = []
    for entropy in (9.0, 0.0):
        objective = after(tt.objective("repo_r", strength_min=0.05, strength_max=0.05), [entropy] * 2)
        changes.append(tt.theory.entropy_change(objective, tokens, objective.plan(tokens)).sum().item())
    plain = tt.theory.entropy_change(tt.objective("dapo"), tokens, tt.objective("dapo").plan(tokens)).sum().item()
    assert changes[0] < plain < changes[1]


# --- EntroPIC


@pytest.mark.parametrize(
    ("entropies", "alpha"),
    [
        ([], 0.0),
        ([0.5], 0.5 * 0.25 + 0.1 * 0.25),
        ([0.5, 0.0], -0.5 * 0.25),
        ([0.0, 0.0], -0.5 * 0.25 - 0.1 * 0.5),
        ([9.0], 1.0),
        ([0.5, math.nan], 0.5 * 0.25 + 0.1 * 0.25),
    ],
)
def test_entropics_coefficient_is_a_pi_controllers(entropies: list[float], alpha: float) -> None:
    objective = after(tt.objective("entropic", target=0.25, gain=0.5, integral_gain=0.1), entropies)
    assert objective.plan(four_tokens()).metrics["entropic/alpha"].item() == pytest.approx(alpha)


def test_entropics_term_is_a_mean_over_the_probable_tokens() -> None:
    """alpha is 0.5: the two certain tokens have a further loss of -0.5 r |A| / 2, the rare ones have none."""
    tokens = four_tokens()
    objective = after(tt.objective("entropic", target=0.5, gain=1.0, integral_gain=0.0), [1.0])
    plan = objective.plan(tokens)
    new = tokens.old_logp + torch.tensor([0.0, -0.1, 0.0, 0.0])
    out, grad_logp = objective.loss_and_grad(new, plan)
    dapo, grad_of_dapo = tt.objective("dapo").loss_and_grad(new, tt.objective("dapo").plan(tokens))
    ratio = math.exp(-0.1)
    assert (out.loss - dapo.loss).item() == pytest.approx(-0.5 * (ratio + 1) / 2)
    assert (grad_logp - grad_of_dapo).tolist() == pytest.approx([0.0, -0.25 * ratio, 0.0, -0.25])
    assert plan.why(1).startswith("probable: it has a term that moves the entropy")
    assert plan.why(0).startswith("kept unchanged")


def test_entropic_before_the_first_rollout_is_dapo() -> None:
    same(tt.objective("entropic"), tt.objective("dapo"), batch(2))
    assert tt.objective("entropic").plan(batch(2)).reason.max() == 0


def test_entropics_mean_leaves_out_what_does_not_count() -> None:
    """Of three certain tokens one is in a group without signal: with count=signal the mean is over the other two."""
    tokens = tt.TokenBatch(
        old_logp=torch.tensor([0.0, 0.0, 0.0]), advantage=torch.tensor([1.0, -1.0, 0.0]), sequence=torch.arange(3),
        entropy=torch.zeros(3), group=torch.tensor([0, 0, 1]),
    )  # fmt: skip
    objective = after(tt.objective("entropic", target=0.5, gain=1.0, integral_gain=0.0, count="signal"), [1.0])
    plan = objective.plan(tokens)
    assert plan.penalty is not None
    assert (plan.penalty * plan.scale).tolist() == pytest.approx([0.25, 0.25, 0.0])


@pytest.mark.parametrize("attached", ["", "s2t(tau_p=0.3)", "icepop(renormalize=true)"])
@pytest.mark.parametrize("current", [False, True])
def test_the_reference_of_entropic_agrees(attached: str, current: bool) -> None:
    rules = {"": [], "s2t(tau_p=0.3)": [reference.s2t(tau_p=0.3)]}
    icepop = [reference.ATTACHMENTS["icepop"](renormalize=True)]
    options = {"target": 0.5, "gain": 0.4, "p_least": 0.3}
    for seed in SEEDS:
        responses = random_batch(seed, current=current)
        objective = tt.objective(f"entropic + {attached}" if attached else "entropic", **options)
        objective.observe(token_batch(responses))
        expected = reference.entropic(responses, rollouts=[responses], also=rules.get(attached, icepop), **options)
        assert_same(objective, objective.plan(token_batch(responses)), responses, expected, seed)


# --- Entrocraft


@pytest.mark.parametrize(
    ("entropies", "kept"),
    [
        ([], [1.0, 1.0]),
        ([0.65], [1.0, 1.0]),
        ([0.5], [0.0, 1.0]),
        ([0.8], [1.0, 0.0]),
        # The band falls by 0.1 per rollout, five times: 0.4 to 0.5 at the third, 0.1 to 0.2 at last.
        ([0.65, 0.65, 0.45], [1.0, 1.0]),
        ([0.65, 0.65, 0.55], [1.0, 0.0]),
        ([0.65] * 20 + [0.15], [1.0, 1.0]),
        ([0.65] * 20 + [0.05], [0.0, 1.0]),
        ([0.5, math.nan], [0.0, 1.0]),
    ],
)
def test_entrocraft_rejects_what_leads_away_from_its_falling_band(entropies: list[float], kept: list[float]) -> None:
    objective = after(tt.objective("entrocraft", fall_steps=5), entropies)
    plan = objective.plan(four_tokens())
    assert plan.weight.tolist() == [kept[0]] * 2 + [kept[1]] * 2
    counted = 2 * sum(kept)
    assert plan.scale.tolist() == pytest.approx([weight / counted for weight in plan.weight.tolist()])


def test_entrocraft_may_count_what_it_rejects() -> None:
    plan = after(tt.objective("entrocraft", renormalize=False), [0.1]).plan(four_tokens())
    assert plan.scale.tolist() == [1 / 4] * 4 and plan.weight.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert plan.why(0).startswith("rejected: its response moves the entropy away from its band")


def test_a_mini_batch_that_is_rejected_as_a_whole_has_loss_zero() -> None:
    tokens = replace(four_tokens(), advantage=torch.ones(4))
    objective = after(tt.objective("entrocraft"), [0.1])
    out, grad_logp = objective.loss_and_grad(tokens.old_logp, objective.plan(tokens))
    assert out.loss.item() == 0 and grad_logp.tolist() == [0.0] * 4


# --- all three


@pytest.mark.parametrize("name", ["repo_r", "entropic", "entrocraft"])
def test_a_run_goes_on_from_its_state(name: str) -> None:
    seen = [0.5, 0.1, 0.9, 0.05]
    whole, first = after(tt.objective(name), seen), after(tt.objective(name), seen[:2])
    second = tt.objective(name)
    second.load_state_dict(first.state_dict())
    assert after(second, seen[2:]).state_dict() == whole.state_dict()
    with pytest.raises(ValueError, match="must be finite numbers"):
        second.load_state_dict({name: dict.fromkeys(whole.state_dict()[name], math.nan)})


def test_they_attach_to_any_method() -> None:
    tokens = batch(4)
    for name in ("repo_r(strength_min=0.1, strength_max=0.5)", "entrocraft(fall_steps=3)"):
        same(*(observed(tt.objective(each), tokens) for each in (name, f"dapo + {name}")), tokens)
