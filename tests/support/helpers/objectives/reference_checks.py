"""The package and the reference on the same random batches: loss, gradient, and the verdict on every token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import trimtab as tt
from helpers.objectives import reference
from helpers.objectives.reference import Batch, Token, Update

SEEDS = range(8)
TOLERANCE = 1e-10
SAME_NAME = ("entropy", "segment", "sum_p2", "sum_p2_logp")
FIELD_OF = {n: n for n in SAME_NAME} | {n: f"{n}_logp" for n in ("sampler", "ref", "proxy", "current")}
CONTROLLED = ("stare", "trim", "entropy_bonus", "repo_r", "entrocraft")

Options = Mapping[str, Any]


def random_batch(
    seed: int, *, proxy: bool = False, current: bool = False, jump: float = 0.0, moments: bool = True
) -> Batch:
    """Responses of 1 to 14 tokens and sometimes none, some without signal, some off-policy by little and some by much.

    `proxy` and `current` give the tokens those log-probabilities; `jump` is added to or taken from some new ones.
    `moments` are any numbers between 0 and 1, and so no distribution's.
    """
    rng, extra = np.random.default_rng(seed), np.random.default_rng(1000 + seed)
    lengths = [1, *rng.integers(1, 15, size=rng.integers(3, 8))]
    if seed % 3 == 0:
        lengths.insert(int(rng.integers(0, len(lengths) + 1)), 0)
    entropy_scale = rng.choice([0.15, 1.0])
    batch: Batch = []
    for length in lengths:
        advantage = float(rng.choice([0.0, 1.0, 1.0, 1.0, 1.0]) * rng.normal(0.0, 1.5))
        drift = rng.choice([2e-4, 0.05, 0.4, 2.5])
        mismatch = rng.choice([0.02, 0.7])
        response = []
        for _ in range(length):
            old = -float(rng.choice([rng.uniform(0.01, 1.5), rng.uniform(1.0, 9.0)]))
            leap = jump * float(rng.choice([-1.0, 0.0, 1.0]))
            response.append(
                Token(
                    old=old,
                    new=old + float(rng.choice([0.0, 1.0, 1.0, 1.0]) * rng.normal(0.0, drift)) + leap,
                    advantage=advantage,
                    entropy=float(rng.gamma(1.5, entropy_scale)),
                    segment=int(rng.integers(0, 2)),
                    sampler=-abs(old + float(rng.normal(0.0, mismatch))),
                    ref=-abs(old + float(rng.normal(0.0, 0.5))),
                    proxy=float(rng.choice([-abs(old + rng.uniform(0.0, 0.5)), -math.inf])) if proxy else None,
                    current=-abs(old + float(rng.normal(0.0, 1.0))) if current else None,
                    sum_p2=extra.uniform() if moments else None,
                    sum_p2_logp=-extra.uniform() if moments else None,
                )
            )
        batch.append(response)
    return batch


def token_batch(batch: Batch) -> tt.TokenBatch:
    """The batch as the package takes it: padded, with holes and with nonsense where no token is."""
    rng = np.random.default_rng(len(reference.flat(batch)))
    columns = max((len(response) for response in batch), default=0) + 3
    mask = np.zeros((len(batch), columns), dtype=bool)
    for row, response in enumerate(batch):
        mask[row, rng.choice(columns, size=len(response), replace=False)] = True

    def padded(name: str) -> torch.Tensor:
        values = np.full(mask.shape, -3.0)
        values[mask] = [getattr(token, name) for token in reference.flat(batch)]
        return torch.from_numpy(values)

    tokens = reference.flat(batch)
    measured = [name for name in FIELD_OF if all(getattr(token, name) is not None for token in tokens)]
    optional = {FIELD_OF[name]: padded(name) for name in measured}
    # A response without tokens is a rollout by itself.
    ids = [response[0].rollout if response else -1 - row for row, response in enumerate(batch)]
    if None not in ids:
        optional["rollout"] = torch.tensor(ids)
    groups = [response[0].group if response else -1 - row for row, response in enumerate(batch)]
    if None not in groups:
        optional["group"] = torch.tensor(groups)
    return tt.TokenBatch.from_padded(
        torch.from_numpy(mask), old_logp=padded("old"), advantage=padded("advantage"), **optional
    )


def new_logp(batch: Batch) -> torch.Tensor:
    return torch.tensor([token.new for token in reference.flat(batch)], dtype=torch.float64, requires_grad=True)


def assert_same(objective: tt.Objective, plan: tt.Plan, batch: Batch, expected: Update, seed: int) -> None:
    """The plan's loss and gradient, whole and in micro-batches, are the reference's."""
    for micro_batches in ([plan], plan.split(2)):
        new = new_logp(batch)
        losses = [objective.loss(new[micro_batch.slice], micro_batch).loss for micro_batch in micro_batches]
        total = torch.stack(losses).sum()
        total.backward()
        assert new.grad is not None
        where = f"seed {seed}, {len(micro_batches)} micro-batch(es)"
        close = {"rtol": TOLERANCE, "atol": TOLERANCE}
        np.testing.assert_allclose(total.item(), expected.loss, err_msg=f"loss, {where}", **close)
        np.testing.assert_allclose(new.grad.numpy(), expected.grad, err_msg=f"gradient, {where}", **close)


def check(
    method: str,
    options: Options,
    attached: Mapping[str, Options],
    batch: Batch,
    seed: int,
    rollouts: Sequence[Batch] = (),
) -> None:
    """A method with attachments, after these rollouts, is the reference's."""
    objective = tt.objective(method, **options, **attached)
    for rollout in rollouts:
        objective.observe(token_batch(rollout))
    seen = {name: {"rollouts": rollouts} for name in CONTROLLED}
    also = [reference.ATTACHMENTS[name](**seen.get(name, {}), **given) for name, given in attached.items()]
    expected = getattr(reference, method)(batch, **options, also=also)
    plan = objective.plan(token_batch(batch))
    np.testing.assert_allclose(plan.weight.numpy(), [token.weight for token in expected.tokens], rtol=1e-9, atol=1e-12)
    assert_same(objective, plan, batch, expected, seed)


def reasons(plan: tt.Plan) -> list[set[str]]:
    return [{str(flag.name) for flag in tt.Reason if flag & code} for code in plan.reason.tolist()]


def having(plan: tt.Plan, name: str) -> list[int]:
    return [position for position, found in enumerate(reasons(plan)) if name in found]
