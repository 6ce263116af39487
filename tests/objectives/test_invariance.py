"""An update does not depend on how the mini-batch is cut, padded or shared among processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

import trimtab as tt
from helpers.objectives.batches import EVERY, batch, fields, loss_and_gradient, moved, observed, seeds
from helpers.thorough import slow_but

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
EXACT = {"rtol": 0.0, "atol": 0.0}
PER_TOKEN = ("advantage", "weight", "scale", "clip_low", "clip_high", "reason")


@pytest.mark.parametrize("name", EVERY)
@given(seed=seeds, size=st.integers(1, 7))
@settings(max_examples=12)
def test_parts_add_up(name: str, seed: int, size: int) -> None:
    tokens = batch(seed)
    objective = observed(tt.objective(name), tokens)
    new, plan = moved(tokens), objective.plan(tokens)
    whole = objective.loss(new, plan)
    outs = [objective.loss(new[micro_batch.slice], micro_batch) for micro_batch in plan.split(size)]
    total = torch.stack([out.loss for out in outs]).sum()
    torch.testing.assert_close(total, whole.loss, **TIGHT)
    (expected,) = torch.autograd.grad(whole.loss, new)
    (summed,) = torch.autograd.grad(total, new)
    torch.testing.assert_close(summed, expected, **TIGHT)
    merged = tt.merge_metrics([out.metrics for out in outs])
    assert merged.keys() == whole.metrics.keys()
    for metric, value in whole.metrics.items():
        torch.testing.assert_close(merged[metric], value, **TIGHT)


@given(seed=seeds, cut=st.integers(0, 6))
@settings(max_examples=20)
def test_parts_may_have_any_sizes_and_be_empty(seed: int, cut: int) -> None:
    tokens, objective = batch(seed), tt.objective("sspo + s2t(tau_p=0.2)")
    new, plan = moved(tokens), objective.plan(tokens)
    micro_batches = plan.split([cut, 0, 6 - cut])
    assert [micro_batch.responses for micro_batch in micro_batches] == [cut, 0, 6 - cut]
    assert [micro_batch.tokens for micro_batch in micro_batches][1] == 0
    total = torch.stack(
        [objective.loss(new[micro_batch.slice], micro_batch).loss for micro_batch in micro_batches]
    ).sum()
    torch.testing.assert_close(total, objective.loss(new, plan).loss, **TIGHT)


def test_a_part_can_be_split_again() -> None:
    tokens, objective = batch(3), tt.objective("sspo")
    new, plan = moved(tokens), objective.plan(tokens)
    leaves = [leaf for micro_batch in plan.split(4) for leaf in micro_batch.split(1)]
    assert [leaf.slice.start for leaf in leaves] == tokens.offsets[:-1]
    total = torch.stack([objective.loss(new[leaf.slice], leaf).loss for leaf in leaves]).sum()
    torch.testing.assert_close(total, objective.loss(new, plan).loss, **TIGHT)


@pytest.mark.parametrize("name", EVERY)
def test_padding_changes_nothing(name: str) -> None:
    padded = fields(5)
    wide = dict(padded)
    for key, value in padded.items():
        if value.ndim == 2:
            junk = torch.full((len(value), 3), 1, dtype=value.dtype) * (
                0 if value.dtype == torch.bool else float("nan")
            )
            junk = junk.to(value.dtype) if value.is_floating_point() else torch.zeros_like(junk, dtype=value.dtype)
            wide[key] = torch.cat([junk, value, junk], dim=1)
    tight, loose = tt.TokenBatch.from_padded(**padded), tt.TokenBatch.from_padded(**wide)
    objective, new = observed(tt.objective(name), tight), moved(tight)
    mine, yours = loss_and_gradient(objective, tight, new), loss_and_gradient(objective, loose, new)
    assert all(torch.equal(a, b) for a, b in zip(mine, yours, strict=True))


@given(seed=seeds)
@settings(max_examples=20)
def test_unpack_is_the_inverse_of_pack(seed: int) -> None:
    padded = fields(seed)
    tokens = tt.TokenBatch.from_padded(**padded)
    back = tokens.unpack(tokens.pack(padded["entropy"]), fill=-1.0)
    assert torch.equal(back, padded["entropy"].where(padded["mask"], -1.0))
    loose = padded["old_logp"].clone().requires_grad_()
    tokens.pack(loose).sum().backward()
    assert torch.equal(loose.grad, padded["mask"].to(loose.dtype))


def test_a_batch_without_padding_unpacks_from_the_left() -> None:
    tokens = tt.TokenBatch(
        old_logp=torch.tensor([-1.0, -2.0, -3.0]), advantage=torch.zeros(3), sequence=torch.tensor([0, 0, 2])
    )
    assert tokens.unpack(tokens.old_logp).tolist() == [[-1.0, -2.0], [0.0, 0.0], [-3.0, 0.0]]
    assert torch.equal(tokens.pack(tokens.unpack(tokens.old_logp)), tokens.old_logp)


def test_the_micro_scope_plans_every_part_by_itself() -> None:
    tokens = batch(11)
    micro = tt.objective("stapo", tau_p=0.2, scope="micro")
    micro_batches = micro.plan(tokens).split(3)
    alone = tt.objective("stapo", tau_p=0.2)
    for micro_batch, (first, last) in zip(micro_batches, [(0, 3), (3, 6)], strict=True):
        expected = alone.plan(tokens.select(first, last))
        assert torch.equal(micro_batch.weight, expected.weight)
        assert torch.equal(micro_batch.scale, expected.scale * 0.5)  # each has half of the responses
        assert micro_batch.slice == slice(tokens.offsets[first], tokens.offsets[last])


def test_the_micro_scope_depends_on_the_parts_and_the_minibatch_scope_does_not() -> None:
    tokens = batch(2, rows=8, columns=30)
    new = moved(tokens)

    def losses(scope: str) -> list[float]:
        objective = tt.objective("kl_cov", share=0.1, scope=scope)
        plan = objective.plan(tokens)
        return [sum(objective.loss(new[p.slice], p).loss.item() for p in plan.split(size)) for size in (1, 2, 8)]

    assert max(losses("minibatch")) - min(losses("minibatch")) < 1e-12
    assert max(losses("micro")) - min(losses("micro")) > 1e-3


def run_rank(rank: int, world: int, folder: str) -> None:
    """One process of a group: its share of the responses, the plan and the gradient of every method."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet{world}", rank=rank, world_size=world
    )
    torch.set_num_threads(1)
    whole, comm = batch(7, rows=9), tt.ProcessGroup()
    new = moved(whole).detach()
    bounds = [round(9 * r / world) for r in range(world + 1)]
    mine = whole.select(bounds[rank], bounds[rank + 1])
    new = new[whole.offsets[bounds[rank]] : whole.offsets[bounds[rank + 1]]].clone().requires_grad_()
    results = {}
    for name in EVERY:
        objective = tt.objective(name)
        objective.observe(mine, comm)
        plan = objective.plan(mine, comm)
        loss = objective.loss(new, plan).loss
        (gradient,) = torch.autograd.grad(loss, new)
        results[name] = {field: getattr(plan, field).clone() for field in PER_TOKEN}
        results[name] |= {"loss": loss.detach(), "gradient": gradient, "metrics": plan.metrics}
        results[name] |= {"state": objective.state_dict()}
    torch.save(results, f"{folder}/{world}-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world", slow_but([2], [1, 2, 4]))
def test_any_number_of_processes_makes_the_same_plan(world: int, tmp_path: Path) -> None:
    mp.spawn(run_rank, args=(world, str(tmp_path)), nprocs=world)
    shares = [torch.load(tmp_path / f"{world}-{rank}.pt") for rank in range(world)]
    tokens = batch(7, rows=9)
    for name in EVERY:
        objective = tt.objective(name)
        objective.observe(tokens)
        plan, new = objective.plan(tokens), moved(tokens)
        loss = objective.loss(new, plan).loss
        (gradient,) = torch.autograd.grad(loss, new)
        for field in PER_TOKEN:
            gathered = torch.cat([share[name][field] for share in shares])
            # trim's weights follow the mean entropy of the rollout, which ranks add up in another order.
            close = TIGHT if "trim" in name and field == "weight" else EXACT
            torch.testing.assert_close(gathered, getattr(plan, field), **close, msg=f"{name}: {field}")
        summed = torch.stack([share[name]["loss"] for share in shares]).sum()
        torch.testing.assert_close(summed, loss.detach(), **TIGHT)
        torch.testing.assert_close(torch.cat([share[name]["gradient"] for share in shares]), gradient, **TIGHT)
        for share in shares:
            torch.testing.assert_close(share[name]["metrics"], plan.metrics, equal_nan=True, **TIGHT)
            torch.testing.assert_close(share[name]["state"], objective.state_dict(), **TIGHT)


class OneOfTwo:
    """A communicator whose other rank is empty-handed or different, as a careless caller's might be."""

    def __init__(self, change: float) -> None:
        self.change = change

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        other = tensor.clone()
        if tensor.ndim == 1 and len(tensor) == 4:
            other[0] += 1
            other[1] += int(self.change)
        return [tensor, other]


def test_ranks_with_different_fields_are_told_so() -> None:
    with pytest.raises(ValueError, match="different fields"):
        tt.objective("grpo").plan(batch(0), OneOfTwo(change=1))


def test_a_rank_may_hold_responses_without_tokens() -> None:
    tokens, empty = batch(0), torch.zeros(0, dtype=torch.float64)
    nothing = tt.TokenBatch(old_logp=empty, advantage=empty, sequence=empty, entropy=empty, responses=3)

    class OtherIsEmpty:
        """Rank 0 is asked, rank 1 holds three responses that have no tokens."""

        def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
            header = tensor.dtype == torch.int64 and tensor.shape == (4,)
            other = torch.tensor([1, int(tensor[1]), 0, nothing.responses]) if header else torch.zeros_like(tensor)
            return [tensor, other]

    plan = tt.objective("stapo").plan(tokens, OtherIsEmpty())
    alone = tt.objective("stapo").plan(tokens)
    assert plan.responses == tokens.responses
    assert torch.equal(plan.scale, alone.scale)
    assert [micro_batch.tokens for micro_batch in plan.split(2)] == [
        micro_batch.tokens for micro_batch in alone.split(2)
    ]


def test_a_communicator_may_stack_or_concatenate() -> None:
    class Stacking(OneOfTwo):
        def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.stack(super().all_gather(tensor))

    class Concatenating(OneOfTwo):
        def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.cat(super().all_gather(tensor))

    plans = [tt.objective("dapo").plan(batch(0), comm(0)) for comm in (OneOfTwo, Stacking, Concatenating)]
    assert torch.equal(plans[0].scale, plans[1].scale)
    assert torch.equal(plans[0].scale, plans[2].scale)
    alone = tt.objective("dapo").plan(batch(0))
    torch.testing.assert_close(plans[0].scale[0] * 2, alone.scale[0])
