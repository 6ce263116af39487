"""What an objective asks of a GPU beyond plain GRPO: a few operations per update, and no GEMM.

Small operations are as slow as their launch, so their number is what counts, and a CPU can count them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trimtab as tt
from trimtab.policy import Policy, Transcript, UpdateOptions, load_policy, update
from trimtab.policy.forward_backward import forward_backward

RESPONSES, LENGTH, CHUNK = 16, 8, 32
CHUNKS = RESPONSES * LENGTH // CHUNK


class Launches(TorchDispatchMode):
    """Counts operations, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are summed as a GPU sums them."""
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=3)


def lines() -> list[Transcript]:
    drawn = torch.randint(2, 17, (RESPONSES, LENGTH + 1), generator=torch.Generator().manual_seed(0)).tolist()
    return [Transcript(line[:1], line[1:]) for line in drawn]


def tokens() -> tt.TokenBatch:
    sequence = torch.arange(RESPONSES).repeat_interleave(LENGTH)
    draw = torch.rand(2, len(sequence), generator=torch.Generator().manual_seed(1))
    return tt.TokenBatch(
        old_logp=-8 * draw[0],
        entropy=draw[1],
        advantage=torch.linspace(-1, 1, RESPONSES)[sequence],
        sequence=sequence,
        segment=torch.arange(len(sequence)) // 3,
    )


def launched(policy: Policy, objective: tt.Objective, chunk: int = CHUNK) -> Counter[str]:
    """The operations of one part with a fused head."""
    plan = objective.plan(tokens())
    policy.model.zero_grad()
    with Launches() as launches:
        forward_backward(policy, objective, plan, lines(), 1.0, chunk, policy.fused_head(1.0, True))
    return launches.seen


@pytest.mark.parametrize("name", ["stapo", "stare"])
def test_stapo_and_stare_train_with_the_operations_of_grpo(policy: Policy, name: str) -> None:
    assert launched(policy, tt.objective(name)) == launched(policy, tt.objective("grpo"))


@pytest.mark.parametrize("name", ["sspo", "gspo"])
def test_a_shared_ratio_adds_no_gemm_and_hardly_an_operation(policy: Policy, name: str) -> None:
    mine, plain = launched(policy, tt.objective(name)), launched(policy, tt.objective("grpo"))
    assert mine["mm"] == plain["mm"] and mine["addmm"] == plain["addmm"]
    assert mine.total() - plain.total() <= CHUNKS


def test_a_response_longer_than_a_chunk_takes_the_fourth_gemm(policy: Policy) -> None:
    mine = launched(policy, tt.objective("sspo"), LENGTH - 1)
    plain = launched(policy, tt.objective("grpo"), LENGTH - 1)
    more = -(-RESPONSES * LENGTH // (LENGTH - 1))
    assert mine["mm"] == plain["mm"] + more


@pytest.mark.parametrize("name", ["grpo", "stapo", "stare", "sspo"])
def test_a_loss_and_its_gradient_are_few_operations(name: str) -> None:
    objective = tt.objective(name)
    plan = objective.plan(tokens())
    leaf = plan.old_logp.clone().requires_grad_()
    with Launches() as launches:
        torch.autograd.grad(objective.loss(leaf, plan).loss, leaf)
    assert launches.seen.total() <= 34


@pytest.mark.parametrize(("name", "most"), [("stapo", 12), ("stare", 16), ("sspo", 36)])
def test_a_plan_adds_a_few_operations_to_that_of_grpo(name: str, most: int) -> None:
    counts = []
    for objective in (tt.objective(name), tt.objective("grpo")):
        batch = tokens()
        with Launches() as launches:
            objective.plan(batch)
        counts.append(launches.seen.total())
    assert counts[0] - counts[1] <= most


@pytest.mark.parametrize("name", ["grpo", "sspo", "sapo", "gmpo"])
def test_the_metrics_of_chunks_are_those_of_the_part(policy: Policy, name: str) -> None:
    objective = tt.objective(name)
    plan = objective.plan(tokens())
    found = []
    for chunk in (CHUNK, 10_000):
        out, logp = forward_backward(policy, objective, plan, lines(), 1.0, chunk, policy.fused_head(1.0, True))
        right = objective.loss(logp, plan)
        assert (out.clipped is None) == (right.clipped is None)
        assert out.clipped is None or torch.equal(out.clipped, right.clipped)
        assert out.metrics.keys() == right.metrics.keys()
        for key, value in right.metrics.items():
            torch.testing.assert_close(out.metrics[key], value, msg=key)
        found.append(out.metrics)
    assert found[0]["update/ratio_max"] > found[0]["update/ratio_min"]


@pytest.mark.parametrize("seed", range(3))
def test_an_approximate_kl_of_next_to_nothing_is_no_rounding_error(seed: int) -> None:
    """In fp32 a sum of ratios near 1 has lost what the KL is made of; a sum of small terms has not."""
    draw = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(seed))
    old, new = -draw[0].abs(), -draw[0].abs() + 1e-3 * draw[1]
    batch = tt.TokenBatch(old_logp=old, advantage=torch.ones_like(old), sequence=torch.zeros(len(old)))
    log_rho = new.double() - old.double()
    objective = tt.objective("grpo")
    found = objective.loss(new, objective.plan(batch)).metrics["update/approx_kl"].item()
    assert found == pytest.approx((log_rho.exp() - 1 - log_rho).mean().item(), rel=0.01)


def test_an_update_reports_the_metrics_of_all_its_parts(policy: Policy) -> None:
    objective, optimizer = tt.objective("sspo"), torch.optim.SGD(policy.model.parameters(), lr=0.0)
    plan = objective.plan(tokens())
    result = update(policy, optimizer, objective, plan, lines(), UpdateOptions(50, 20, 1.0, 1e9, fused_head=True))
    assert result.new_logp is not None and len(result.micro_batch_sizes) > 2
    for key, value in objective.loss(result.new_logp, plan).metrics.items():
        assert result.metrics[key] == pytest.approx(value.item(), rel=1e-5), key
