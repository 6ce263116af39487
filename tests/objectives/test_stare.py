"""STARE: the four sets, the eight variants, the gate and its alternatives."""

from __future__ import annotations

import math

import pytest
import torch

import trimtab as tt

# Two responses of ten tokens, one rewarded, one punished; the first token of each is the surprising tenth.
LOGP = torch.tensor(([-5.0] + [-0.1] * 9) * 2, dtype=torch.float64)
L_PLUS, L_MINUS = {0}, {10}
U_PLUS, U_MINUS = set(range(1, 10)), set(range(11, 20))


def tokens(entropy: float = 0.1) -> tt.TokenBatch:
    return tt.TokenBatch(
        old_logp=LOGP,
        entropy=torch.full((20,), entropy, dtype=torch.float64),
        advantage=torch.tensor([1.0] * 10 + [-1.0] * 10, dtype=torch.float64),
        sequence=torch.tensor([0] * 10 + [1] * 10),
    )


def where(weight: torch.Tensor, value: float) -> set[int]:
    return set((weight == value).nonzero().squeeze(1).tolist())


@pytest.mark.parametrize(
    ("variant", "boosted", "damped"),
    [
        ("O1", L_PLUS, set()),
        ("O2", set(), U_PLUS),
        ("O3", U_MINUS, set()),
        ("O4", set(), L_MINUS),
        ("C1", L_PLUS | U_MINUS, set()),
        ("C2", L_PLUS, L_MINUS),
        ("C3", U_MINUS, U_PLUS),
        ("C4", set(), U_PLUS | L_MINUS),
    ],
)
def test_the_eight_variants(variant: str, boosted: set[int], damped: set[int]) -> None:
    plan = tt.objective("stare", variant=variant).plan(tokens())
    assert where(plan.weight, 1.1) == boosted
    assert where(plan.weight, 0.9) == damped
    assert where(plan.reason, int(tt.Reason.BOOSTED)) == boosted
    assert where(plan.reason, int(tt.Reason.DAMPED)) == damped


@pytest.mark.parametrize(("n", "count"), [(1, 1), (9, 1), (10, 1), (11, 2), (30, 3), (31, 4)])
def test_the_share_is_rounded_up_and_at_least_one(n: int, count: int) -> None:
    batch = tt.TokenBatch(
        old_logp=-torch.arange(1.0, n + 1),
        advantage=torch.ones(n),
        sequence=torch.zeros(n, dtype=torch.int64),
        entropy=torch.zeros(n),
    )
    plan = tt.objective("stare").plan(batch)
    assert (plan.weight > 1).nonzero().squeeze(1).tolist() == list(range(n - count, n))


def test_the_denominator_is_all_tokens() -> None:
    plan = tt.objective("stare", variant="C1").plan(tokens())
    assert set(plan.scale.tolist()) == {1 / 20}


def test_the_gate_starts_open_and_closes_on_target() -> None:
    stare = tt.objective("stare")
    assert stare.plan(tokens()).metrics["stare/gate_open"] == 1
    for entropy, is_open in [(0.3, False), (0.29, True), (0.31, False)]:  # strictly below 0.3
        stare.observe(tokens(entropy))
        plan = stare.plan(tokens())
        assert plan.metrics["stare/gate_open"] == is_open
        assert bool((plan.weight != 1).any()) == is_open


def test_an_entropy_that_is_not_finite_leaves_the_gate_as_it_was() -> None:
    stare = tt.objective("stare")
    stare.observe(tokens(0.5))
    before = stare.state_dict()
    empty = torch.zeros(0)
    stare.observe(tt.TokenBatch(old_logp=empty, advantage=empty, sequence=empty, entropy=empty))
    assert stare.state_dict() == before
    stare.controllers["stare"].observe(float("nan"))
    assert stare.state_dict() == before


def test_adaptive_weights_follow_the_entropy_within_limits() -> None:
    stare = tt.objective("stare", variant="C2", adaptive=True)
    stare.observe(tokens(0.1))
    state = stare.state_dict()["stare"]
    assert state["boost"] == pytest.approx(1.11)
    assert state["damp"] == pytest.approx(0.89)
    plan = stare.plan(tokens())
    assert plan.weight[0].item() == pytest.approx(1.11)
    assert plan.weight[10].item() == pytest.approx(0.89)
    for _ in range(100):
        stare.observe(tokens(0.1))
    assert stare.state_dict()["stare"]["boost"] == 1.5
    assert stare.state_dict()["stare"]["damp"] == 0.5
    for _ in range(200):
        stare.observe(tokens(0.9))
    assert stare.state_dict()["stare"]["boost"] == 1.0
    assert stare.state_dict()["stare"]["damp"] == 1.0
    stare.observe(tokens(0.3))  # on target: nothing moves
    assert stare.state_dict()["stare"]["boost"] == 1.0


def test_weights_stay_fixed_unless_asked_to_adapt() -> None:
    stare = tt.objective("stare")
    stare.observe(tokens(0.1))
    assert stare.state_dict()["stare"] == {"is_open": 1.0, "boost": 1.1, "damp": 0.9, "entropy": pytest.approx(0.1)}


def test_finer_gates_look_at_tokens_and_responses() -> None:
    mixed = tokens()
    assert mixed.entropy is not None
    mixed.entropy[:10] = 0.9  # the rewarded response is uncertain
    mixed.entropy[11] = 0.9
    token = tt.objective("stare", variant="C1", gate="token").plan(mixed)
    assert where(token.weight, 1.1) == U_MINUS - {11}
    sample = tt.objective("stare", variant="C1", gate="sample").plan(mixed)
    assert where(sample.weight, 1.1) == U_MINUS
    always = tt.objective("stare", variant="C1", gate="none")
    always.observe(tokens(0.9))
    assert where(always.plan(mixed).weight, 1.1) == L_PLUS | U_MINUS


def test_a_fixed_probability_can_tell_surprise() -> None:
    batch = tokens()
    batch.old_logp[3] = math.log(0.05)
    plan = tt.objective("stare", threshold="probability").plan(batch)
    assert where(plan.weight, 1.1) == {0, 3}


def test_state_goes_round() -> None:
    one, other = (tt.objective("stare", adaptive=True) for _ in range(2))
    one.observe(tokens(0.4))
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    for stare in (one, other):
        stare.observe(tokens(0.2))
    assert torch.equal(one.plan(tokens()).weight, other.plan(tokens()).weight)


def test_objectives_do_not_share_a_gate() -> None:
    one, other = tt.objective("stare"), tt.objective("stare")
    one.observe(tokens(0.9))
    assert other.plan(tokens()).metrics["stare/gate_open"] == 1
