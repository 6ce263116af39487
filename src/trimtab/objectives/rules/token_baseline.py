"""The optimal token baseline: what an advantage is measured against differs from token to token of a response."""

from __future__ import annotations

from typing import Literal

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.plan import Reason
from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.token_batch import TokenBatch

Ended = Literal["left_out", "kept"]


def token_baseline(ended: Ended = "left_out") -> TokenRule:
    """Measure the advantage of each token against a baseline of its own.

    The baseline is the mean of the group's advantages, weighted by the squared gradient norms of each response up to
    the token. What becomes of responses that have ended before it is our reading. ended=left_out ignores them,
    as verl does. ended=kept counts them with the weight of their last token. Where no other response is as long, the
    advantage stays as it is. A branch of a rollout counts as a response that starts where the branch does.
    """

    def apply(builder: PlanBuilder) -> None:
        baseline = _baselines(builder.batch, _energy(builder), ended).to(builder.advantage.dtype)
        # A shift of all rewards of a group shifts its baseline as much: the advantages are as good as the rewards.
        builder.advantage = builder.advantage - baseline
        builder.mark_all(baseline != 0, Reason.RESHAPED)

    others = "that have a token t" if ended == "left_out" else "(after its end a response keeps its last A and W)"
    formula = "A' = A - B_t, B_t = sum A W_t / sum W_t over the responses of the group "
    formula += f"{others}; W_t = sum over j <= t of 1 - 2 p_j + sum p^2"
    words = {Reason.RESHAPED: "advantage measured against a baseline of its own"}
    return TokenRule("token_baseline", formula, apply, frozenset({"group", "sum_p2"}), reason_words=words)


def _energy(builder: PlanBuilder) -> Tensor:
    """Return W of every token, in float64."""
    batch = builder.batch
    assert batch.sum_p2 is not None
    # Of a nearly certain token the difference may round below 0.
    squared = (1 - 2 * builder.logp.exp() + batch.sum_p2).clamp(min=0).to(torch.float64)
    before = torch.cat([squared.new_zeros(1), squared.cumsum(0)])
    return before[1:] - before[batch.starts][batch.sequence]


def _baselines(batch: TokenBatch, weight: Tensor, ended: Ended) -> Tensor:
    """Return B of every token; 0 where its response is the only one, and where no response has any weight."""
    assert batch.group is not None
    names, group = batch.group.unique(return_inverse=True)
    columns = int(batch.lengths.max()) + 1 if batch.tokens else 1
    position = torch.arange(batch.tokens, device=group.device) - batch.starts[batch.sequence]
    cell = group[batch.sequence] * columns + position
    values = torch.stack([weight, weight * batch.advantage, torch.ones_like(weight)])
    sums = weight.new_zeros(3, len(names) * columns).index_add_(1, cell, values)
    if ended == "kept":
        last = (batch.starts + batch.lengths - 1)[batch.lengths > 0]
        after = weight.new_zeros(3, len(names) * columns).index_add_(1, cell[last] + 1, values[:, last])
        sums += after.reshape(3, -1, columns).cumsum(2).reshape(3, -1)
    total, product, responses = sums[:, cell]
    return torch.where((responses > 1) & (total > 0), product / total, 0.0)
