"""TRL's trainer with all real but generation and the model: its rollouts are made up, its log-probabilities known.

So the whole way from TRL's rollout batch to the loss of a micro-batch (its shuffling, splitting and buffering, and
our planning) is walked with tokens that the test knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from helpers.objectives.batches import fields
from trimtab.engines.trl import TrimtabTrainer
from trimtab.objectives import Objective, TokenBatch

PROMPT = 3  # positions of a prompt; the first holds the response's number


class KnownModel(nn.Module):
    """Gives each response the log-probabilities it is told: `old` without gradients, `new` with them."""

    def __init__(self, old: Tensor, new: Tensor, entropy: Tensor) -> None:
        super().__init__()
        self.old, self.entropy = old, entropy
        self.new = nn.Parameter(new)
        self.passes: list[str] = []
        self.is_gradient_checkpointing = False

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        rows = input_ids[:, 0]
        kind = "new" if torch.is_grad_enabled() else "old"
        self.passes.append(kind)
        nothing = self.old.new_zeros(len(rows), PROMPT - 1)
        logps = getattr(self, kind)[rows]
        return SimpleNamespace(
            log_probs=torch.cat([nothing, logps], 1), entropy=torch.cat([nothing, self.entropy[rows]], 1), aux_loss=None
        )


@dataclass(frozen=True)
class Rollout:
    """A made-up rollout batch: padded fields as for `TokenBatch.from_padded`, and where a tool spoke."""

    padded: dict[str, Any]
    completion_mask: Tensor
    tool_mask: Tensor | None
    samples: int

    @property
    def rows(self) -> int:
        return len(self.completion_mask)

    def table(self) -> dict[str, Any]:
        """What TRL's `_generate_and_score_completions` gives."""
        numbers = torch.arange(self.rows).unsqueeze(1).expand(self.rows, PROMPT)
        given = {
            "prompt_ids": numbers.clone(),
            "prompt_mask": torch.ones_like(numbers),
            "completion_ids": self.padded["token"],
            "completion_mask": self.completion_mask.long(),
            "advantages": torch.zeros(self.rows),
            "num_items_in_batch": self.completion_mask.sum(),
            "sampling_per_token_logps": self.padded["sampler_logp"],
            "ref_per_token_logps": self.padded["ref_logp"],
        }
        return given if self.tool_mask is None else {**given, "tool_mask": self.tool_mask.long()}

    def batch(self, objective: Objective, order: list[int]) -> TokenBatch:
        """The core's batch of the same responses, in an order."""
        absent = ("proxy_logp", "advantage", "sum_p2", "sum_p2_logp")  # TRL does not have them
        rows = {name: value[order] for name, value in self.padded.items() if name not in absent}
        group = torch.arange(self.rows) // self.samples
        advantage = objective.advantages(self.padded["reward"], group)[order]
        return TokenBatch.from_padded(**{**rows, "group": group[order]}, advantage=advantage)


def rollout(seed: int, rows: int, samples: int, columns: int) -> Rollout:
    """A random rollout batch; in every other one a tool speaks in between."""
    padded = fields(seed, rows=rows, columns=columns, dtype=torch.float32)
    rng = torch.Generator().manual_seed(seed + 1)
    mask = padded["mask"]
    tool = None
    if seed % 2:
        tool = torch.rand(rows, columns, generator=rng) < 0.8
        padded["mask"] = mask & tool
    return Rollout(padded, mask, tool, samples)


def install(trainer: TrimtabTrainer, made: Rollout, model: KnownModel, monkeypatch: Any) -> None:
    """Let TRL's generation give this rollout, and its model be this one."""
    from trl import GRPOTrainer

    def generate(self: Any, inputs: Any) -> dict[str, Any]:
        self._calculate_rewards([], [], [], [])
        self._logs["advantages"].extend([0.0] * made.rows)
        return made.table()

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", generate)
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda *_: made.padded["reward"].unsqueeze(1))
    monkeypatch.setattr("trimtab.engines.trl.padded.segments", lambda table, _: made.padded["segment"])
    trainer.model = model
    trainer._step, trainer._buffered_inputs, trainer._plans = 0, None, {}
    trainer.num_generations = made.samples
