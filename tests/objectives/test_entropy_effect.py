"""Clip_B, Clip_V and STEER: what a token does to the entropy, worked by hand and measured on real distributions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import trimtab as tt
from helpers.objectives.batches import batch, loss_and_gradient, moved, same

# p = 1/2 beside an entropy of ln 2 has S = 0; of p = 1/4 with H = 0 and p = 1/8 with H = 1 they are below 0.
LN2 = math.log(2)


def tokens(p: list[float], entropy: list[float], advantage: float | list[float], **fields: object) -> tt.TokenBatch:
    logp = torch.tensor(p, dtype=torch.float64).log()
    return tt.TokenBatch(
        old_logp=logp,
        advantage=torch.as_tensor(advantage, dtype=torch.float64).expand(len(p)),
        sequence=torch.zeros(len(p), dtype=torch.int64),
        entropy=torch.tensor(entropy, dtype=torch.float64),
        **fields,  # type: ignore[arg-type]
    )


def test_clip_b_drops_punished_tokens_far_below_the_mean() -> None:
    """S is 0, 0, 0 and -(ln 4) / 4: the mean is a quarter of the last, which is 1.5 deviations below it."""
    punished = tokens([0.5, 0.5, 0.5, 0.25], [LN2, LN2, LN2, 0.0], -1.0)
    assert tt.objective("clip_b", mu=1.49).plan(punished).weight.tolist() == [1, 1, 1, 0]
    assert tt.objective("clip_b", mu=1.51).plan(punished).weight.tolist() == [1, 1, 1, 1]
    plan = tt.objective("clip_b", mu=1.49).plan(punished)
    assert plan.why(3).startswith("dropped: punished, and surprising beyond")
    assert plan.scale.tolist() == [1 / 4] * 4  # the denominator stays
    rewarded = replace(punished, advantage=torch.ones(4))
    assert tt.objective("clip_b", mu=0.0).plan(rewarded).weight.tolist() == [1, 1, 1, 1]


def test_clip_v_compares_with_what_the_distribution_would_give() -> None:
    """S of the four tokens is 0; of the last the expectation of S is +0.3, so Phi is -0.3, which is two deviations."""
    punished = tokens(
        [0.5] * 4,
        [LN2] * 4,
        -1.0,
        sum_p2=torch.zeros(4, dtype=torch.float64),
        sum_p2_logp=torch.zeros(4, dtype=torch.float64),
    )
    certain = replace(punished, sum_p2=torch.tensor([0.0, 0.0, 0.0, 0.3 / LN2], dtype=torch.float64))
    assert tt.objective("clip_v", mu=1.99).plan(certain).weight.tolist() == [1, 1, 1, 0]
    assert tt.objective("clip_v", mu=2.01).plan(certain).weight.tolist() == [1, 1, 1, 1]
    assert tt.objective("clip_v", mu=0.0, phi="estimated").plan(certain).weight.tolist() == [1, 1, 1, 1]


def distributions(seed: int, count: int = 400, vocabulary: int = 12) -> tuple[tt.TokenBatch, torch.Tensor]:
    """Tokens sampled from random distributions, and these; a third of the tokens is punished."""
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, vocabulary, generator=rng, dtype=torch.float64)
    token = torch.distributions.Categorical(logits=logits).probs.multinomial(1, generator=rng).squeeze(1)
    found = tt.theory.moments(logits, token)
    advantage = torch.where(torch.rand(count, generator=rng) < 0.3, -1.0, 1.0).double()
    made = tt.TokenBatch(
        old_logp=found.logp,
        advantage=advantage,
        sequence=torch.zeros(count, dtype=torch.int64),
        entropy=found.entropy,
        sum_p2=found.sum_p2,
        sum_p2_logp=found.sum_p2_logp,
        token=token,
    )
    return made, logits


def measured_change(made: tt.TokenBatch, logits: torch.Tensor, step: float = 1e-6) -> torch.Tensor:
    """By how much a small step along each token's own gradient changes the entropy of its distribution."""
    assert made.token is not None
    push = -logits.softmax(-1)
    push[torch.arange(len(push)), made.token] += 1
    after = logits + step * made.advantage.unsqueeze(1) * push
    entropies = [torch.distributions.Categorical(logits=each).entropy() for each in (after, logits)]
    return (entropies[0] - entropies[1]) / step


@pytest.mark.parametrize("seed", range(3))
def test_what_clip_v_drops_is_what_lowers_the_entropy_most(seed: int) -> None:
    made, logits = distributions(seed)
    change = measured_change(made, logits)
    dropped = tt.objective("clip_v", mu=1.0).plan(made).weight == 0
    assert dropped.sum() > 3
    assert (change[dropped] < 0).all() and (made.advantage[dropped] < 0).all()
    kept = (made.advantage < 0) & ~dropped
    assert change[dropped].max() < change[kept].min()


@pytest.mark.parametrize("seed", range(3))
def test_steer_orders_tokens_by_how_much_they_change_the_entropy(seed: int) -> None:
    made, logits = distributions(seed)
    order = measured_change(made, logits).abs().argsort()
    exact = tt.objective("steer", effect="exact").plan(made).weight[order]
    assert (exact.diff() <= 1e-6).all()
    assert exact[0].item() == pytest.approx(1.2, abs=1e-3) and exact[-1].item() == pytest.approx(0.8)


def test_steer_falls_linearly_from_the_least_change_to_the_largest() -> None:
    """|O| = |A (1 - p) (ln p + H)| is 0, 1/2 x ln 2 and 2 x 1/2 x ln 2."""
    made = tokens([0.5, 0.5, 0.5], [LN2, 0.0, 0.0], [1.0, 1.0, 2.0])
    assert tt.objective("steer").plan(made).weight.tolist() == pytest.approx([1.2, 1.0, 0.8])
    halved = tt.objective("steer", falloff="exponential", weight_low=0.25).plan(made).weight
    assert halved.tolist() == pytest.approx([1.0, 0.5, 0.25])
    plan = tt.objective("steer").plan(made)
    assert plan.why(0).startswith("boosted: it changes the entropy little")
    assert plan.why(2).startswith("damped: it changes the entropy much")


def test_steer_leaves_tokens_alone_that_change_the_entropy_alike() -> None:
    made = tokens([0.5, 0.5], [0.0, 0.0], [1.0, -1.0])
    for falloff, weight in (("linear", 1.0), ("exponential", 0.8)):
        assert tt.objective("steer", falloff=falloff).plan(made).weight.tolist() == [weight] * 2
    silent = replace(made, advantage=torch.zeros(2))
    assert tt.objective("steer", falloff="exponential").plan(silent).weight.tolist() == [1.0, 1.0]


def test_at_their_limits_they_are_dapo() -> None:
    made = batch(3)
    for name in ("clip_b(mu=100)", "clip_v(mu=100)", "steer(weight_low=1, weight_high=1)"):
        same(tt.objective(name), tt.objective("dapo"), made)
    for rule in ("clip_b", "clip_v", "steer(effect=exact)"):
        mine, yours = (loss_and_gradient(tt.objective(each), made, moved(made)) for each in (rule, f"dapo + {rule}"))
        assert all(torch.equal(a, b) for a, b in zip(mine, yours, strict=True))


def test_the_lower_weight_is_not_above_the_higher() -> None:
    with pytest.raises(ValueError, match=r"option weight_low=2 must be at most weight_high, which is 1\.2"):
        tt.objective("steer", weight_low=2.0)
