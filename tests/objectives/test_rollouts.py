"""Branches of an agent's rollout: many of them weigh as much as one response, in advantages and in every mean."""

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
from helpers.objectives.reference_checks import check, random_batch
from helpers.parallel.thread_ranks import on_ranks, thread_worlds
from trimtab.objectives.advantages import compute_advantages

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
# Their ratio is a token's own, so that cutting a response changes nothing of it.
TOKEN_RATIOS = ("grpo", "dapo", "dr_grpo", "cispo", "sapo", "dppo", "stapo(tau_p=0.2)", "stare(gate=none)", "reinforce")


def made(lengths: list[int], rollout: list[int], reward: list[float], group: list[int] | None = None) -> tt.TokenBatch:
    """A batch on policy: responses of these lengths, with the mean-centred advantage of their rollouts."""
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    groups = [0] * len(lengths) if group is None else group
    advantage = compute_advantages("group_centered", reward, groups, rollout)
    zeros = torch.zeros(len(sequence))
    return tt.TokenBatch(
        old_logp=zeros - 1,
        advantage=advantage[sequence],
        sequence=sequence,
        entropy=zeros + 0.1,
        segment=zeros,
        sampler_logp=zeros - 1,
        group=torch.tensor(groups),
        reward=torch.tensor(reward),
        rollout=torch.tensor(rollout),
    )


# Rollout 7 has responses of 2, 1 and 1 tokens and reward 1; rollout 3 is one response of 4 tokens and has reward 0.
LENGTHS, ROLLOUT, REWARD = [2, 4, 1, 1], [7, 3, 7, 7], [1.0, 0.0, 1.0, 1.0]


def test_advantages_compare_rollouts_and_not_branches() -> None:
    assert compute_advantages("group_centered", REWARD, [0] * 4, ROLLOUT).tolist() == [0.5, -0.5, 0.5, 0.5]
    assert compute_advantages("leave_one_out", REWARD, [0] * 4, ROLLOUT).tolist() == [1.0, -1.0, 1.0, 1.0]
    expected = 0.5 / (0.5**0.5 + 1e-6)
    normalized = compute_advantages("group_normalized", REWARD, [0] * 4, ROLLOUT)
    torch.testing.assert_close(normalized, torch.tensor([expected, -expected, expected, expected]))
    # Over responses the mean reward would be 3/4.
    assert compute_advantages("group_centered", REWARD, [0] * 4).tolist() == [0.25, -0.75, 0.25, 0.25]


@pytest.mark.parametrize(
    ("aggregation", "of_many", "of_one"),
    [
        ("token-mean", [1 / 8] * 4, [1 / 8] * 4),
        ("seq-mean-token-mean", [1 / 2 / 4] * 4, [1 / 2 / 4] * 4),
        ("seq-mean-token-sum", [1 / 2] * 4, [1 / 2] * 4),
    ],
)
@pytest.mark.parametrize("method", ["grpo", "dapo", "gspo", "sspo", "stapo", "stare"])
def test_a_rollout_of_three_branches_weighs_as_the_one_beside_it(
    method: str, aggregation: str, of_many: list[float], of_one: list[float]
) -> None:
    objective = tt.objective(method, aggregation=aggregation)
    tokens = made(LENGTHS, ROLLOUT, REWARD)
    plan = objective.plan(tokens)
    torch.testing.assert_close(plan.scale, torch.tensor([*of_many[:2], *of_one, *of_many[2:]]))
    assert float((plan.scale * plan.advantage).sum()) == pytest.approx(0, abs=1e-7)


def test_dr_grpo_divides_by_the_rollouts_and_its_length() -> None:
    plan = tt.objective("dr_grpo", length=10.0).plan(made(LENGTHS, ROLLOUT, REWARD))
    torch.testing.assert_close(plan.scale, torch.full((8,), 1 / 2 / 10))


@pytest.mark.parametrize("method", ["grpo", "gspo", "sspo"])
def test_forty_branches_weigh_as_one_response(method: str) -> None:
    tokens = made([3] * 40 + [5], [0] * 40 + [1], [1.0] * 40 + [0.0])
    plan = tt.objective(method).plan(tokens)
    assert float(plan.scale[:120].sum()) == pytest.approx(0.5)
    assert float(plan.scale[120:].sum()) == pytest.approx(0.5)
    without = tt.objective(method).plan(replace(tokens, rollout=None))
    assert float(without.scale[:120].sum()) == pytest.approx(40 / 41)


def test_silenced_tokens_leave_the_mean_of_their_rollout() -> None:
    """STAPO: the two tokens of rollout 7 that count share its weight; a rollout of which none counts has none."""
    tokens = made(LENGTHS, ROLLOUT, REWARD)
    tokens.old_logp[torch.tensor([0, 6])] = -9.0  # rare, and confident beside the entropy of two others
    tokens.entropy[torch.tensor([1, 7])] = 5.0
    mean = tt.objective("stapo", tau_p=0.5, quantile=0.75, aggregation="seq-mean-token-mean")
    plan = mean.plan(tokens)
    assert [int(plan.reason[n]) & tt.Reason.SILENCED > 0 for n in range(8)] == [
        True, False, False, False, False, False, True, False,
    ]  # fmt: skip
    torch.testing.assert_close(plan.scale, torch.tensor([0, 1 / 4, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 0, 1 / 4]))
    all_rare = tt.objective("stapo", tau_p=0.5, mask="rare", aggregation="seq-mean-token-mean")
    tokens.old_logp[torch.tensor([1, 7])] = -9.0
    torch.testing.assert_close(all_rare.plan(tokens).scale, torch.tensor([0, 0, 1 / 4, 1 / 4, 1 / 4, 1 / 4, 0, 0]))


def test_gspo_has_a_ratio_for_each_branch() -> None:
    tokens = made([2, 1], [0, 0], [1.0, 1.0])
    objective = tt.objective("gspo", clip_low=1.0, clip_high=9.0)
    new = tokens.old_logp + torch.tensor([0.1, 0.3, 0.5])
    out = objective.loss(new, objective.plan(tokens))
    torch.testing.assert_close(out.ratio, torch.tensor([0.2, 0.2, 0.5]).exp())


def test_a_branch_with_a_reward_of_its_own_has_what_its_rollout_would_have() -> None:
    """Means are 0.5, 0 and 1. With reward 1 the first rollout would be 1/3 above the mean, with 0 as much below."""
    reward, rollout = [1.0, 0.0, 0.0, 1.0], [4, 4, 5, 6]
    centered = compute_advantages("group_centered", reward, [0] * 4, rollout)
    torch.testing.assert_close(centered, torch.tensor([1 / 3, -1 / 3, -0.5, 0.5]))
    assert compute_advantages("leave_one_out", reward, [0] * 4, rollout).tolist() == [0.5, -0.5, -0.75, 0.75]
    # The deviation too is that of the group with the branch's reward: of 1, 0, 1 it is sqrt(1/3).
    normalized = compute_advantages("group_normalized", reward, [0] * 4, rollout)
    each = 1 / 3 / ((1 / 3) ** 0.5 + 1e-6)
    torch.testing.assert_close(normalized, torch.tensor([each, -each, -0.5 / 0.500001, 0.5 / 0.500001]))


def test_advantages_of_a_users_own_are_of_rollouts() -> None:
    seen: list[list[float]] = []

    def minus_the_best(reward: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        seen.append(reward.tolist())
        return reward - reward.max()

    tt.register(minus_the_best)
    objective = tt.objective("grpo", advantage="python:minus_the_best")
    seen.clear()
    found = objective.advantages([1.0, 0.0, 0.0, 3.0], [0, 0, 0, 0], [4, 4, 5, 6])
    assert seen == [[0.5, 0.0, 3.0], [1.0, 0.0, 3.0], [0.0, 0.0, 3.0]]
    assert found.tolist() == [-2.0, -3.0, -3.0, 0.0]


@given(value=st.floats(-1e3, 1e3, width=32), branches=st.integers(1, 50))
def test_equal_rewards_of_branches_are_no_noise(value: float, branches: int) -> None:
    reward, rollout = [value] * (branches + 1), [0] * branches + [1]
    for name in ("group_normalized", "group_centered", "leave_one_out", "mean_normalized"):
        assert compute_advantages(name, reward, [0] * (branches + 1), rollout).abs().max() == 0


@pytest.mark.parametrize("name", EVERY)
@given(seed=seeds, ids=st.permutations(range(6)))
@settings(max_examples=6)
def test_rollouts_of_one_branch_change_no_bit(name: str, seed: int, ids: list[int]) -> None:
    tokens = batch(seed)
    assert tokens.group is not None and tokens.reward is not None
    objective = observed(tt.objective(name), tokens)
    alike = replace(tokens, rollout=torch.tensor(ids) * 10**12 - 5)
    new = moved(tokens)
    mine, other = (loss_and_gradient(objective, each, new) for each in (tokens, alike))
    assert torch.equal(mine[0], other[0])
    assert torch.equal(mine[1], other[1])
    reward = moved(tokens).detach()[:6].exp()
    plain = objective.advantages(reward, tokens.group)
    assert torch.equal(objective.advantages(reward, tokens.group, alike.rollout), plain)


@pytest.mark.parametrize("name", TOKEN_RATIOS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(seed=seeds, cut=st.integers(1, 10))
@settings(max_examples=6)
def test_cutting_a_response_into_branches_changes_nothing(name: str, aggregation: str, seed: int, cut: int) -> None:
    """With the ratios of tokens: the branches are then as good as the response that they were."""
    whole = batch(seed)
    position = torch.cat([torch.arange(length) for length in whole.lengths.tolist()])
    branch = whole.sequence * 2 + (position >= cut)
    of_branch = torch.arange(12) // 2
    assert whole.group is not None and whole.reward is not None
    parts = replace(
        whole,
        sequence=branch,
        rollout=of_branch,
        group=whole.group[of_branch],
        reward=whole.reward[of_branch],
        responses=12,
        layout=None,
    )
    objective, new = observed(tt.objective(name, aggregation=aggregation), whole), moved(whole)
    mine, other = (loss_and_gradient(objective, each, new) for each in (whole, parts))
    torch.testing.assert_close(mine, other, **TIGHT)


def branched(seed: int, rows: int = 8) -> tt.TokenBatch:
    """Responses of rollouts of one to four branches, which lie anywhere among each other."""
    tokens = batch(seed, rows=rows)
    rng = torch.Generator().manual_seed(seed)
    rollout = torch.randint(0, 4, (rows,), generator=rng)
    return replace(tokens, rollout=rollout + 100, group=rollout // 2)


@pytest.mark.parametrize("name", EVERY)
@given(seed=seeds, size=st.integers(1, 9))
@settings(max_examples=4)
def test_micro_batches_add_up_also_where_they_part_branches(name: str, seed: int, size: int) -> None:
    tokens = branched(seed)
    objective = observed(tt.objective(name), tokens)
    new, plan = moved(tokens), objective.plan(tokens)
    whole = objective.loss(new, plan).loss
    total = torch.stack([objective.loss(new[part.slice], part).loss for part in plan.split(size)]).sum()
    torch.testing.assert_close(total, whole, **TIGHT)


class Ranks:
    """A communicator over ranks that are threads."""

    def __init__(self, world: object) -> None:
        self.world = world

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.world.gather(tensor)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "sspo", "stapo(tau_p=0.2)", "stare(gate=none)", "dr_grpo"])
@given(seed=seeds, bounds=st.lists(st.integers(0, 8), min_size=2, max_size=2))
@settings(max_examples=8)
def test_ranks_that_share_a_rollout_plan_as_one_process(name: str, seed: int, bounds: list[int]) -> None:
    tokens, objective = branched(seed), tt.objective(name)
    first, last = sorted(bounds)
    cuts = [(0, first), (first, last), (last, 8)]
    worlds = thread_worlds(3)
    plans = on_ranks(worlds, lambda rank: objective.plan(tokens.select(*cuts[rank]), Ranks(worlds[rank])))
    alone = objective.plan(tokens)
    for field in ("advantage", "weight", "scale", "clip_low", "clip_high", "reason"):
        assert torch.equal(torch.cat([getattr(plan, field) for plan in plans]), getattr(alone, field))


def test_ranks_that_number_their_rollouts_each_from_zero_are_told_so() -> None:
    one, two = made([2, 2], [0, 1], [1.0, 0.0], [0, 0]), made([2, 2], [0, 1], [1.0, 0.0], [1, 1])
    worlds = thread_worlds(2)
    with pytest.raises(ValueError, match="responses 0 and 2 have the same rollout 0, but the groups 0 and 1"):
        on_ranks(worlds, lambda rank: tt.objective("grpo").plan([one, two][rank], Ranks(worlds[rank])))


def test_ranks_of_which_one_has_no_rollouts_are_told_so() -> None:
    tokens = made(LENGTHS, ROLLOUT, REWARD)
    worlds = thread_worlds(2)
    batches = [tokens, replace(tokens, rollout=None)]
    with pytest.raises(ValueError, match="different fields"):
        on_ranks(worlds, lambda rank: tt.objective("grpo").plan(batches[rank], Ranks(worlds[rank])))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("method", ["grpo", "dapo", "gspo", "sspo", "stapo", "cispo"])
@pytest.mark.parametrize("seed", range(4))
def test_the_reference_agrees(method: str, aggregation: str, seed: int) -> None:
    responses = random_batch(seed)
    rng = np.random.default_rng(seed)
    for response in responses:
        rollout = int(rng.integers(0, 3))
        for token in response:
            token.rollout = rollout
    assert len(reference.flat(responses)) > 0
    options = {"aggregation": aggregation} | ({"tau_p": 0.3} if method == "stapo" else {})
    check(method, options, {}, responses, seed)
    if method == "grpo":
        check(method, options, {"stare": {"variant": "C2"}, "kl": {"coef": 0.7}}, responses, seed)


def test_a_selection_keeps_the_rollouts_of_its_responses() -> None:
    chosen = made(LENGTHS, ROLLOUT, REWARD).select(1, 3)
    assert chosen.rollout is not None
    assert chosen.rollout.tolist() == [3, 7]
    padded = tt.TokenBatch.from_padded(
        torch.ones(2, 3), old_logp=torch.zeros(2, 3), advantage=torch.zeros(2), rollout=torch.tensor([5, 5])
    )
    assert padded.rollout_numbers.tolist() == [0, 0]


def test_a_rollout_in_two_groups_is_refused() -> None:
    words = "responses 0 and 2 have the same rollout 7, but the groups 4 and 5"
    with pytest.raises(ValueError, match=words):
        compute_advantages("group_centered", REWARD, [4, 4, 5, 5], ROLLOUT)
    with pytest.raises(ValueError, match=words):
        replace(made(LENGTHS, ROLLOUT, REWARD), group=torch.tensor([4, 4, 5, 5]))


def test_one_id_for_each_response_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"`rollout` has shape \(2,\), but there are 4 responses"):
        replace(made(LENGTHS, ROLLOUT, REWARD), rollout=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"rollout has shape \(2,\), but there are 4 responses"):
        compute_advantages("group_centered", REWARD, [0] * 4, [0, 1])


def test_the_micro_scope_is_refused_in_words() -> None:
    objective = tt.objective("grpo", scope="micro")
    with pytest.raises(ValueError, match="scope='micro', but the TokenBatch has rollouts"):
        objective.plan(made(LENGTHS, ROLLOUT, REWARD))


def test_closed_gates_and_masks_that_silence_nothing_are_dapo_with_branches_too() -> None:
    tokens = branched(3)
    same(tt.objective("stapo", tau_p=0.0), tt.objective("dapo"), tokens)
    closed = tt.objective("stare", target=1e-9)
    closed.observe(tokens)
    same(closed, tt.objective("dapo"), tokens)
