"""STAPO: which tokens are spurious, and what happens to the rest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import trimtab as tt
from helpers.objectives.batches import batch, moved


def one_response(p: list[float], entropy: list[float], advantage: float = 1.0) -> tt.TokenBatch:
    n = len(p)
    return tt.TokenBatch(
        old_logp=torch.tensor(p, dtype=torch.float64).log(),
        entropy=torch.tensor(entropy, dtype=torch.float64),
        advantage=torch.full((n,), advantage, dtype=torch.float64),
        sequence=torch.zeros(n, dtype=torch.int64),
    )


def silenced(tokens: tt.TokenBatch, **options: object) -> list[int]:
    plan = tt.objective("stapo", **options).plan(tokens)
    assert torch.equal(plan.weight == 0, (plan.reason & tt.Reason.SILENCED) != 0)
    return (plan.weight == 0).nonzero().squeeze(1).tolist()


RARE, COMMON = 0.001, 0.5


def test_rare_confident_rewarded_tokens_are_silenced() -> None:
    # The quantile 0.75 of (0.1, 0.2, 0.3, 0.4, 0.5) is 0.4: strictly below it are the first three.
    tokens = one_response([RARE] * 5 + [COMMON], [0.1, 0.2, 0.3, 0.4, 0.5, 0.0])
    assert silenced(tokens) == [0, 1, 2]


def test_the_quantile_interpolates_linearly() -> None:
    tokens = one_response([RARE] * 4, [0.1, 0.2, 0.3, 0.4])
    plan = tt.objective("stapo").plan(tokens)
    assert plan.metrics["s2t/entropy_threshold"].item() == pytest.approx(0.325)
    assert silenced(tokens) == [0, 1, 2]


def test_thresholds_are_strict() -> None:
    assert silenced(one_response([0.002, RARE, RARE], [0.0, 0.1, 0.2])) == [1]
    assert silenced(one_response([RARE, RARE], [0.3, 0.3])) == []


@pytest.mark.parametrize("p", [[], [COMMON, COMMON], [RARE]])
def test_none_or_one_candidate_silences_nothing(p: list[float]) -> None:
    assert silenced(one_response(p, [0.1] * len(p))) == []


@pytest.mark.parametrize("advantage", [0.0, -1.0])
def test_tokens_without_a_reward_are_never_silenced(advantage: float) -> None:
    assert silenced(one_response([RARE] * 3, [0.1, 0.2, 0.3], advantage)) == []


def test_population_all_takes_the_quantile_over_every_token() -> None:
    tokens = one_response([RARE, RARE, COMMON, COMMON], [0.1, 0.2, 0.9, 0.9])
    assert silenced(tokens, population="all", quantile=0.8) == [0, 1]


def test_the_ablations_silence_other_tokens() -> None:
    tokens = one_response([RARE] * 4 + [COMMON] * 16, [0.1, 0.2, 0.3, 0.4] + [0.2] * 16)
    assert silenced(tokens, mask="rare") == [0, 1, 2, 3]
    assert silenced(tokens, mask="uncertain") == [3]
    draws = [silenced(tokens, mask="random", seed=seed) for seed in range(50)]
    assert {len(draw) for draw in draws} == {3}
    assert {token for draw in draws for token in draw} == set(range(20))


def test_a_random_choice_can_be_made_again() -> None:
    tokens = batch(3, rows=20)
    plans = [tt.objective("stapo", tau_p=0.3, mask="random").plan(tokens) for _ in range(2)]
    assert torch.equal(plans[0].weight, plans[1].weight)


def test_silenced_tokens_leave_numerator_and_denominator() -> None:
    tokens = one_response([RARE] * 4 + [COMMON] * 2, [0.1, 0.2, 0.3, 0.4, 0.0, 0.0])
    objective, new = tt.objective("stapo"), tokens.old_logp.clone().requires_grad_()
    out = objective.loss(new, objective.plan(tokens))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-1.0)  # three kept tokens, each -A
    torch.testing.assert_close(new.grad, torch.tensor([0, 0, 0, -1, -1, -1], dtype=torch.float64) / 3)


def test_renormalising_respects_means_over_responses() -> None:
    tokens = tt.TokenBatch(
        old_logp=torch.tensor([RARE, RARE, COMMON, COMMON], dtype=torch.float64).log(),
        entropy=torch.tensor([0.1, 0.2, 0.3, 0.3], dtype=torch.float64),
        advantage=torch.ones(4, dtype=torch.float64),
        sequence=torch.tensor([0, 0, 0, 1]),
    )
    plan = tt.objective("grpo + s2t").plan(tokens)
    assert plan.scale.tolist() == [0.0, 0.25, 0.25, 0.5]


def test_the_current_policy_judges_where_it_is_given() -> None:
    tokens = one_response([COMMON] * 3, [0.1, 0.2, 0.3])
    assert silenced(tokens) == []
    current = replace(tokens, current_logp=torch.full((3,), math.log(RARE), dtype=torch.float64))
    assert silenced(current) == [0, 1]


def test_of_tokens_drawn_from_real_softmaxes_few_are_spurious() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(20_000, 200, generator=rng)
    logp = logits.log_softmax(-1)
    drawn = torch.multinomial(logp.exp(), 10, replacement=True, generator=rng)
    tokens = tt.TokenBatch(
        old_logp=logp.gather(1, drawn).reshape(-1),
        entropy=-(logp.exp() * logp).sum(-1).repeat_interleave(10),
        advantage=torch.ones(200_000),
        sequence=torch.arange(200_000) // 1000,
    )
    share = tt.objective("stapo").plan(tokens).metrics["tokens/silenced_share"]
    assert 1e-4 < share < 0.05


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("spurious", "silenced: rare, confident and rewarded"),
        ("rare", "silenced: rare and rewarded, whatever its entropy"),
        ("uncertain", "silenced: rare, uncertain and rewarded"),
        ("random", "silenced: picked at random from the rewarded tokens"),
    ],
)
def test_each_mask_explains_its_own_choice(mask: str, words: str) -> None:
    tokens = one_response([RARE] * 4 + [COMMON] * 2, [0.1, 0.2, 0.3, 0.4, 0.0, 0.0])
    objective = tt.objective("dapo + s2t", mask=mask)
    plan = objective.plan(tokens)
    first = int((plan.weight == 0).nonzero()[0])
    assert plan.why(first).startswith(f"{words} (advantage")
    assert plan.split(1)[0].why(first) == plan.why(first)
    assert objective.reason_words[tt.Reason.SILENCED] == words


def test_metrics_count_the_silenced() -> None:
    tokens = batch(5, rows=30)
    objective = tt.objective("stapo", tau_p=0.2)
    plan = objective.plan(tokens)
    share = (plan.weight == 0).double().mean()
    assert plan.metrics["tokens/silenced_share"].item() == pytest.approx(share.item())
    assert share > 0
    assert objective.loss(moved(tokens), plan).metrics["update/clip_share"] > 0
