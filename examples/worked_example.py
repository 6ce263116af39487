"""One mini-batch under STAPO, token by token: what the plan decides and why, and the gradient of the loss.

Two responses to one prompt; the first is right. It contains a token that the policy gave almost no probability although
its entropy was low: rare, confident, rewarded. STAPO silences it.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

import trimtab as tt

TOKENS = [["7", " x", " 6", " =", " banana", " 42", " ."], ["7", " x", " 6", " =", " 48", " ."]]
PROBABILITY = [[0.9, 0.95, 0.9, 0.99, 0.0004, 0.6, 0.001], [0.9, 0.95, 0.9, 0.99, 0.2, 0.9]]
ENTROPY = [[0.3, 0.2, 0.3, 0.05, 0.08, 0.9, 1.6], [0.3, 0.2, 0.3, 0.05, 0.9, 0.4]]


def main() -> None:
    """Print plan, loss and gradient of one mini-batch."""
    reward, group = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    stapo = tt.objective("stapo")
    batch = tt.TokenBatch(
        old_logp=torch.tensor([p for response in PROBABILITY for p in response]).log(),
        entropy=torch.tensor([h for response in ENTROPY for h in response]),
        sequence=torch.tensor([i for i, response in enumerate(TOKENS) for _ in response]),
        advantage=stapo.advantages(reward, group).repeat_interleave(torch.tensor([len(r) for r in TOKENS])),
        group=group,
        reward=reward,
    )
    plan = stapo.plan(batch)
    new_logp = batch.old_logp.clone().requires_grad_()
    out = stapo.loss(new_logp, plan)
    out.loss.backward()

    console = Console(width=120)
    console.print(stapo.explain(), highlight=False)
    table = Table(
        "response",
        "token",
        "p",
        "H",
        "advantage",
        "-d loss / d ln p",
        "why",
        title="\nEvery token",
        title_justify="left",
    )
    assert new_logp.grad is not None and batch.entropy is not None
    for t, token in enumerate(token for response in TOKENS for token in response):
        table.add_row(
            str(int(batch.sequence[t])),
            repr(token),
            f"{float(batch.old_logp[t].exp()):.4f}",
            f"{float(batch.entropy[t]):.2f}",
            f"{float(plan.advantage[t]):+.2f}",
            f"{-float(new_logp.grad[t]):+.4f}",
            tt.reason_words(int(plan.reason[t])),
        )
    console.print(table)
    console.print({name: round(float(value), 4) for name, value in (plan.metrics | out.metrics).items()})


if __name__ == "__main__":
    main()
