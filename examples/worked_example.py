"""One mini-batch under STAPO, token by token: what the plan decides, why, and what the loss then does.

Two answers to one question; the first is right. It contains a token that the policy thought nearly impossible although
it was sure of what comes next: rare, confident, rewarded. STAPO silences it.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

import trimtab as tt

WORDS = [["7", " x", " 6", " =", " banana", " 42", " ."], ["7", " x", " 6", " =", " 48", " ."]]
PROBABILITY = [[0.9, 0.95, 0.9, 0.99, 0.0004, 0.6, 0.001], [0.9, 0.95, 0.9, 0.99, 0.2, 0.9]]
ENTROPY = [[0.3, 0.2, 0.3, 0.05, 0.08, 0.9, 1.6], [0.3, 0.2, 0.3, 0.05, 0.9, 0.4]]


def main() -> None:
    """Plan, loss and gradient of one mini-batch."""
    reward, group = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    stapo = tt.objective("stapo")
    batch = tt.TokenBatch(
        old_logp=torch.tensor([p for answer in PROBABILITY for p in answer]).log(),
        entropy=torch.tensor([h for answer in ENTROPY for h in answer]),
        sequence=torch.tensor([i for i, answer in enumerate(WORDS) for _ in answer]),
        advantage=stapo.advantages(reward, group).repeat_interleave(torch.tensor([len(a) for a in WORDS])),
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
        "answer", "token", "p", "H", "advantage", "push on ln p", "why", title="\nEvery token", title_justify="left"
    )
    assert new_logp.grad is not None and batch.entropy is not None
    for t, word in enumerate(w for answer in WORDS for w in answer):
        table.add_row(
            str(int(batch.sequence[t])),
            repr(word),
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
