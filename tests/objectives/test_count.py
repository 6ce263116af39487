"""count=signal: groups whose advantages are all zero are in no mean and have no penalty."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trimtab as tt
from helpers.objectives import reference
from helpers.objectives.batches import EVERY, batch, loss_and_gradient, moved, observed, same, seeds
from helpers.objectives.reference_checks import assert_same, random_batch, token_batch
from helpers.parallel.thread_ranks import on_ranks, thread_worlds

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
PER_TOKEN = ("advantage", "weight", "scale", "clip_low", "clip_high", "reason")
# Their rules choose among the tokens with an advantage, or choose each token by itself.
BY_THEMSELVES = [
    "grpo", "dapo", "dr_grpo", "gspo", "luspo", "cispo", "sapo", "gmpo", "dppo", "vespo", "reinforce", "lp_reg",
    "stapo(tau_p=0.2)", "stare(variant=C2, gate=none)", "dapo + kl(coef=0.5)", "gspo + entropy_bonus(coef=0.5) + tis",
    "dapo + trim(floor=9, gain=2)", "grpo + icepop(renormalize=true) + s2t(tau_p=0.3)",
]  # fmt: skip


def two_groups(group: list[int] | None) -> tt.TokenBatch:
    """Group 7 has responses of 1 and 3 tokens and advantages 1 and 0, group 9 two of 2 tokens without signal."""
    return tt.TokenBatch(
        old_logp=-torch.ones(8),
        advantage=torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0]),
        sequence=torch.tensor([0, 1, 1, 1, 2, 2, 3, 3]),
        ref_logp=-torch.full((8,), 2.0),
        entropy=torch.zeros(8),
        group=None if group is None else torch.tensor(group),
    )


def with_silent_groups(seed: int, rows: int = 8) -> tt.TokenBatch:
    """Four groups of two responses, of which the second and the last have no signal; some zeros elsewhere."""
    tokens = batch(seed, rows=rows)
    assert tokens.group is not None
    silent = (tokens.group % 2 == 1) | (torch.arange(rows) == 4)
    return replace(tokens, advantage=tokens.advantage * ~silent[tokens.sequence], group=tokens.group * 10**9 - 5)


@pytest.mark.parametrize(
    ("aggregation", "scale"),
    [
        ("token-mean", [1 / 4] * 4 + [0.0] * 4),
        ("seq-mean-token-mean", [1 / 2, 1 / 6, 1 / 6, 1 / 6] + [0.0] * 4),
        ("seq-mean-token-sum", [1 / 2] * 4 + [0.0] * 4),
    ],
)
def test_a_group_counts_if_one_of_its_responses_has_an_advantage(aggregation: str, scale: list[float]) -> None:
    objective = tt.objective("grpo", count="signal", aggregation=aggregation)
    plan = objective.plan(two_groups([7, 7, 9, 9]))
    torch.testing.assert_close(plan.scale, torch.tensor(scale))
    assert plan.metrics["tokens/without_signal_share"] == 0.5
    assert plan.why(7).startswith("advantage is zero: nothing to learn from it; not counted if")


def test_rollouts_of_groups_without_signal_are_not_counted() -> None:
    tokens = replace(two_groups([7, 7, 9, 9]), rollout=torch.tensor([1, 1, 2, 3]))
    plan = tt.objective("grpo", count="signal").plan(tokens)
    torch.testing.assert_close(plan.scale, torch.tensor([1 / 4] * 4 + [0.0] * 4))


def test_without_groups_each_response_decides_for_itself() -> None:
    plan = tt.objective("dapo", count="signal").plan(two_groups(None))
    assert plan.scale.tolist() == [1.0] + [0.0] * 7


def test_groups_without_signal_have_neither_penalty_nor_bonus() -> None:
    """On policy k3 is exp(-1) and an entropy bonus of 1 shifts A by 1, on the four tokens of the first group alone."""
    tokens = two_groups([7, 7, 9, 9])
    objective = tt.objective("dapo + kl(coef=1) + entropy_bonus(coef=1)", count="signal")
    out, grad_logp = objective.loss_and_grad(tokens.old_logp, objective.plan(tokens))
    k3 = float(np.exp(-1))
    assert out.loss.item() == pytest.approx(k3 - (2 + 3 * 1) / 4)
    slope = 1 - k3  # of k3 at a difference of 1
    expected = [(slope - 2) / 4] + [(slope - 1) / 4] * 3 + [0.0] * 4
    assert grad_logp.tolist() == pytest.approx(expected)


def test_all_is_the_default() -> None:
    for name in EVERY:
        assert tt.objective(name).count == "all"
    assert "tokens/without_signal_share" not in tt.objective("dapo").plan(with_silent_groups(0)).metrics


@pytest.mark.parametrize("name", EVERY)
@given(seed=seeds)
@settings(max_examples=5)
def test_where_every_group_has_signal_it_makes_no_difference(name: str, seed: int) -> None:
    tokens = batch(seed)
    same(*(observed(tt.objective(name, count=count), tokens) for count in ("signal", "all")), tokens)


@pytest.mark.parametrize("name", BY_THEMSELVES)
@given(seed=seeds)
@settings(max_examples=10)
def test_it_is_the_update_of_the_groups_with_signal_alone(name: str, seed: int) -> None:
    whole = with_silent_groups(seed)
    kept = torch.tensor([0, 1, 4, 5])
    padded = {key: whole.unpack(value) for key, value in dict(vars(whole)).items() if _per_token(value, whole)}
    mask = whole.unpack(torch.ones(whole.tokens)) > 0
    alone = tt.TokenBatch.from_padded(mask[kept], **{key: value[kept] for key, value in padded.items()})
    new = moved(whole)
    mine = loss_and_gradient(observed(tt.objective(name, count="signal"), whole), whole, new)
    new_alone = alone.pack(whole.unpack(new.detach())[kept]).requires_grad_()
    theirs = loss_and_gradient(observed(tt.objective(name), alone), alone, new_alone)
    torch.testing.assert_close(mine[0], theirs[0], **TIGHT)
    torch.testing.assert_close(whole.unpack(mine[1])[kept], alone.unpack(theirs[1]), **TIGHT)
    assert whole.unpack(mine[1])[[2, 3, 6, 7]].abs().sum() == 0


def _per_token(value: object, tokens: tt.TokenBatch) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and len(value) == tokens.tokens


@pytest.mark.parametrize("name", EVERY)
def test_a_mini_batch_in_which_no_group_has_signal_has_loss_zero(name: str) -> None:
    tokens = batch(3)
    tokens = replace(tokens, advantage=torch.zeros_like(tokens.advantage))
    objective = observed(tt.objective(name, count="signal"), tokens)
    plan = objective.plan(tokens)
    for part in [plan, *plan.split(2)]:
        out, grad_logp = objective.loss_and_grad(moved(tokens)[part.slice], part)
        assert out.loss.item() == 0
        assert grad_logp.abs().sum() == 0
        assert not any(bool(value.isnan()) for value in (plan.metrics | out.metrics).values())


@pytest.mark.parametrize("name", EVERY)
@given(seed=seeds, size=st.integers(1, 9))
@settings(max_examples=5)
def test_micro_batches_add_up(name: str, seed: int, size: int) -> None:
    tokens = with_silent_groups(seed)
    objective, new = observed(tt.objective(name, count="signal"), tokens), moved(tokens)
    plan = objective.plan(tokens)
    parts = [objective.loss(new[part.slice], part).loss for part in plan.split(size)]
    torch.testing.assert_close(torch.stack(parts).sum(), objective.loss(new, plan).loss, **TIGHT)


class Ranks:
    """A communicator over ranks that are threads."""

    def __init__(self, world: object) -> None:
        self.world = world

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.world.gather(tensor)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("name", ["grpo", "dapo + kl", "gspo", "stapo(tau_p=0.2)", "top_entropy(renormalize=true)"])
@pytest.mark.parametrize("cuts", [[(0, 3), (3, 4), (4, 8)], [(0, 2), (2, 2), (2, 8)], [(0, 1), (1, 5), (5, 8)]])
def test_ranks_that_share_a_group_plan_as_one_process(name: str, cuts: list[tuple[int, int]]) -> None:
    tokens, objective = with_silent_groups(5), tt.objective(name, count="signal")
    worlds = thread_worlds(3)
    plans = on_ranks(worlds, lambda rank: objective.plan(tokens.select(*cuts[rank]), Ranks(worlds[rank])))
    alone = objective.plan(tokens)
    for field in PER_TOKEN:
        assert torch.equal(torch.cat([getattr(plan, field) for plan in plans]), getattr(alone, field))
    assert all(plan.metrics.keys() == alone.metrics.keys() for plan in plans)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("method", ["grpo", "dapo", "gspo", "stapo", "sspo"])
@pytest.mark.parametrize("grouped", [True, False])
def test_the_reference_agrees(method: str, aggregation: str, grouped: bool) -> None:
    options = {"aggregation": aggregation} | ({"tau_p": 0.3} if method == "stapo" else {})
    for seed in range(6):
        responses = random_batch(seed)
        rng = np.random.default_rng(seed)
        for number, response in enumerate(responses):
            silent = rng.uniform() < 0.5
            for token in response:
                token.advantage *= not silent
                token.group = number // 2 if grouped else None
        also = [reference.groups_with_signal, reference.kl(coef=0.7)]
        expected = getattr(reference, method)(responses, **options, also=also)
        objective = tt.objective(f"{method} + kl(coef=0.7)", count="signal", **options)
        assert_same(objective, objective.plan(token_batch(responses)), responses, expected, seed)


def test_another_word_than_all_and_signal_is_refused() -> None:
    with pytest.raises(ValueError, match="option count='some' must be one of all, signal"):
        tt.objective("dapo", count="some")
