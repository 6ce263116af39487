"""The loss that verl's engine calls is the core's to the last bit, value and gradient, for every method it can feed."""

from __future__ import annotations

from helpers.thorough import THOROUGH

import helpers.engines.verl_quiet  # noqa: F401  # isort: skip

import pickle
from collections.abc import Iterator

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import prepare_micro_batches

from helpers.engines.verl_batches import as_minibatch, core_batch, new_log_probs, random_batch, with_plan
from trimtab.engines.verl.planning import PlannedLoss, minibatch_rows
from trimtab.objectives import METHODS, Objective
from trimtab.trainer.config import build_objective

METHODS_HERE = [name for name in METHODS if name != "otb"]  # which reads sum p^2, and verl has none
METHODS_HERE += ["grpo + kl", "stapo + tis", "dapo + icepop", "dapo + mis", "sspo + s2t", "gspo + stare"]
# The entropies of these batches are at most 2, and one rollout is observed before they are planned.
METHODS_HERE += [
    "dapo + trim(floor=9, gain=2)",
    "sspo + trim(floor=0, ceiling=0.1) + kl",
    "stare(boost=critical, share=0.3)",
]
METHODS_HERE += ["grpo + entropy_bonus(coef=0.1)"]
MISSION = ("stapo", "stare", "sspo", "grpo")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Nothing here is large enough for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def objective_named(name: str) -> tuple[dict[str, object], Objective]:
    """A method with thresholds at which these small batches have something to decide."""
    table: dict[str, object] = {"name": name}
    if "stapo" in name or "s2t" in name:
        table["tau_p"] = 0.3
    if "stare" in name:
        table["target"] = 5.0
    if name in ("clip_cov", "kl_cov", "lp_reg"):
        table["share"] = 0.2
    return table, build_objective(table)


def engine_loss(loss: PlannedLoss, part: object, flat: torch.Tensor) -> tuple[torch.Tensor, dict[str, object]]:
    """What the engine does with a micro-batch: its forward pass is `flat`."""
    output = torch.nested.nested_tensor_from_jagged(flat, part["input_ids"].offsets())  # type: ignore[index]
    return loss(model_output={"log_probs": output}, data=part, dp_group=None)


def response_tokens(part: object, flat: torch.Tensor) -> torch.Tensor:
    """The sampled tokens of a flat pass, row by row."""
    found = []
    ends = part["input_ids"].offsets()[1:].tolist()  # type: ignore[index]
    for end, mask in zip(ends, part["response_mask"].unbind(), strict=True):  # type: ignore[index]
        found.append(flat[end - len(mask) - 1 : end - 1][mask.bool()])
    return torch.cat(found)


@pytest.mark.parametrize("name", METHODS_HERE)
def test_the_same_tokens_give_the_same_loss_and_gradient_to_the_last_bit(name: str) -> None:
    decided = 0
    for seed in range(50 if THOROUGH else 20 if name in MISSION else 10):
        table, objective = objective_named(name)
        _, core = objective_named(name)
        minibatch = (8, 8, 8, 8, 4)[seed % 5]
        data = with_plan(objective, random_batch(seed), minibatch)
        core.load_state_dict(objective.state_dict())
        for rows in minibatch_rows(8, minibatch, 1):
            part = as_minibatch(data, rows)
            flat = new_log_probs(part, seed)
            loss, metrics = engine_loss(PlannedLoss(table), part, flat)
            (gradient,) = torch.autograd.grad(loss, flat)

            plan = core.plan(core_batch(core, data, rows))
            leaf = response_tokens(part, flat).detach().requires_grad_()
            ours = core.loss(leaf, plan)
            (wanted,) = torch.autograd.grad(ours.loss, leaf)
            assert torch.equal(loss, ours.loss)
            assert torch.equal(response_tokens(part, gradient), wanted)
            assert gradient.count_nonzero() == wanted.count_nonzero()
            for key, value in ours.metrics.items():
                assert metrics[f"trimtab/{key}"].aggregate() == float(value)  # type: ignore[attr-defined]
            decided += int((plan.reason != 0).sum())
    assert decided, "no batch gave the method anything to decide"


@pytest.mark.parametrize("name", ["stapo", "stare", "sspo", "gspo", "grpo + kl", "kl_cov"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_micro_batches_of_any_size_and_order_leave_the_gradient_as_it_is(name: str, ranks: int) -> None:
    pieces = 0
    for seed in range(10 if THOROUGH else 2):
        table, objective = objective_named(name)
        _, core = objective_named(name)
        data = with_plan(objective, random_batch(seed, responses=16), 8, ranks)
        core.load_state_dict(objective.state_dict())
        for rows in minibatch_rows(16, 8, ranks):
            whole = as_minibatch(data, rows, ranks)
            flat = new_log_probs(whole, seed)
            plan = core.plan(core_batch(core, data, rows))
            wanted = core.loss_and_grad(response_tokens(whole, flat), plan)[1] * ranks
            share = len(rows) // ranks
            found: dict[int, torch.Tensor] = {}
            for rank in range(ranks):
                mine = list(range(rank * share, (rank + 1) * share))
                tokens = int(whole["loss_mask"].values().sum())
                part = as_minibatch(whole, mine, ranks, tokens)
                tu.assign_non_tensor(part, use_dynamic_bsz=True, max_token_len_per_gpu=30)
                micro, order = prepare_micro_batches(part, dp_group=None, same_micro_num_in_dp=False)
                pieces += len(micro)
                for piece, numbers in zip(micro, order, strict=True):
                    ends = [0, *whole["input_ids"].offsets()[1:].tolist()]
                    cut = torch.cat([flat[ends[mine[n]] : ends[mine[n] + 1]] for n in numbers]).detach()
                    cut.requires_grad_()
                    loss, _ = engine_loss(PlannedLoss(table), piece, cut)
                    (gradient,) = torch.autograd.grad(loss, cut)
                    sizes = [int(mask.sum()) for mask in piece["response_mask"].unbind()]
                    for n, values in zip(numbers, response_tokens(piece, gradient).split(sizes), strict=True):
                        found[mine[n]] = values
            # A mean over a segment may differ in its last bit with the number of segments beside it; all else is equal.
            slack = 0.0 if core.ratio.level == "token" else 1e-6
            torch.testing.assert_close(torch.cat([found[n] for n in range(len(rows))]), wanted, rtol=slack, atol=0.0)
    assert pieces > 4 * ranks * (10 if THOROUGH else 2)


@pytest.mark.parametrize("host", ["grpo", "sspo", "stapo"])
def test_an_entropy_bonus_with_its_own_gradient_reaches_the_engines_entropies(host: str) -> None:
    for seed in range(5):
        table, objective = objective_named(f"{host} + entropy_bonus(coef=0.1, gradient=exact)")
        data = with_plan(objective, random_batch(seed), 8)
        part = as_minibatch(data, range(8))
        flat = new_log_probs(part, seed)
        entropy = torch.rand(len(flat), generator=torch.Generator().manual_seed(seed)).requires_grad_()
        ends = part["input_ids"].offsets()
        given = {"log_probs": flat, "entropy": entropy}
        output = {name: torch.nested.nested_tensor_from_jagged(value, ends) for name, value in given.items()}
        loss, _ = PlannedLoss(table)(model_output=output, data=part, dp_group=None)
        found = torch.autograd.grad(loss, [flat, entropy])
        leaves = [response_tokens(part, value).detach().requires_grad_() for value in (flat, entropy)]
        ours = objective.loss(leaves[0], objective.plan(core_batch(objective, data, range(8))), leaves[1])
        assert torch.equal(loss, ours.loss)
        for mine, theirs in zip(found, torch.autograd.grad(ours.loss, leaves), strict=True):
            assert theirs.any() and torch.equal(response_tokens(part, mine), theirs)
            assert mine.count_nonzero() == theirs.count_nonzero()
        with pytest.raises(ValueError, match="a term of the entropy, and it is not given"):
            engine_loss(PlannedLoss(table), part, flat)


def test_the_loss_is_pickled_as_plain_values() -> None:
    table, objective = objective_named("stapo")
    data = with_plan(objective, random_batch(3), 8)
    part = as_minibatch(data, range(8))
    flat = new_log_probs(part, 3)
    sent = pickle.loads(pickle.dumps(PlannedLoss(table)))
    assert torch.equal(engine_loss(sent, part, flat)[0], engine_loss(PlannedLoss(table), part, flat)[0])


def test_autocast_around_the_loss_has_no_effect() -> None:
    table, objective = objective_named("sspo")
    data = with_plan(objective, random_batch(4), 8)
    part = as_minibatch(data, range(8))
    flat = new_log_probs(part, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = engine_loss(PlannedLoss(table), part, flat)[0]
    assert torch.equal(under, engine_loss(PlannedLoss(table), part, flat)[0])


def test_a_micro_batch_without_a_sampled_token_has_no_loss_and_all_metrics() -> None:
    table, objective = objective_named("sspo")
    data = with_plan(objective, random_batch(0), 8)
    assert not data["response_mask"].unbind()[0].any()
    part = as_minibatch(data, [0], tokens=int(data["loss_mask"].values().sum()))
    flat = new_log_probs(part, 0)
    loss, metrics = engine_loss(PlannedLoss(table), part, flat)
    assert float(loss.detach()) == 0 and not torch.autograd.grad(loss, flat)[0].any()
    assert metrics["trimtab/update/ratio_max"].aggregate() == 1.0  # type: ignore[attr-defined]


def test_data_without_a_plan_stop_the_run() -> None:
    part = as_minibatch(random_batch(1), range(8))
    with pytest.raises(RuntimeError, match=r"hold no plan.*trainer_mode=trimtab"):
        engine_loss(PlannedLoss({"name": "stapo"}), part, new_log_probs(part, 1))


def test_a_lost_column_stops_the_run() -> None:
    table, objective = objective_named("stapo")
    part = as_minibatch(with_plan(objective, random_batch(2), 8), range(8))
    del part["trimtab_weight"]
    with pytest.raises(RuntimeError, match="columns weight of the plan did not reach"):
        engine_loss(PlannedLoss(table), part, new_log_probs(part, 2))


@pytest.mark.parametrize("rows", [[0, 1, 4, 5], [0, 1]])
def test_mini_batches_that_were_not_planned_stop_the_run(rows: list[int]) -> None:
    table, objective = objective_named("stapo")
    part = as_minibatch(with_plan(objective, random_batch(2), 4), rows)
    with pytest.raises(RuntimeError, match="other mini-batches than were planned"):
        engine_loss(PlannedLoss(table), part, new_log_probs(part, 2))
