"""Between TRL's padded tensors and trimtab's batches.

TRL holds the responses of a process as a table of (responses, positions) tensors, which it shuffles and cuts into
micro-batches. Whatever a plan reads is a column of that table, so it stays with its response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.objectives import Objective, TokenBatch, segment_ids

Table = Mapping[str, Any]

# Ours among TRL's columns.
ENTROPY, SEGMENT, REWARD, ROW = "trimtab_entropy", "trimtab_segment", "trimtab_reward", "trimtab_row"
PLAN = "trimtab_plan"

# The inputs of a forward pass besides the tokens, for models that see images.
_SEEN = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


@dataclass(frozen=True)
class Ranks:
    """All processes of an accelerator, as planning wants them."""

    accelerator: Any

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, one after another."""
        gathered: Tensor = self.accelerator.gather(tensor.contiguous())
        return gathered


def trained(table: Table) -> Tensor:
    """True where the policy sampled the token: neither padding nor what a tool or an environment said."""
    mask: Tensor = table["completion_mask"].bool()
    return mask & table["tool_mask"].bool() if table.get("tool_mask") is not None else mask


def forward_inputs(table: Table) -> dict[str, Any]:
    """What TRL's forward pass over the responses of a table takes."""
    return {
        "input_ids": torch.cat([table["prompt_ids"], table["completion_ids"]], dim=1),
        "attention_mask": torch.cat([table["prompt_mask"], table["completion_mask"]], dim=1),
        "logits_to_keep": table["completion_ids"].size(1),
        **{name: table[name] for name in _SEEN if table.get(name) is not None},
    }


def segments(table: Table, tokenizer: Any) -> Tensor:
    """The subsentence of every trained token; 0 elsewhere."""
    mask = trained(table)
    rows = torch.arange(len(mask), device=mask.device).unsqueeze(1).expand_as(mask)
    ids = segment_ids(table["completion_ids"][mask].cpu(), tokenizer, sequence=rows[mask].cpu())
    return torch.zeros_like(table["completion_ids"]).masked_scatter(mask, ids.to(mask.device))


def token_batch(tables: Sequence[Table], objective: Objective, now: tuple[Tensor, Tensor] | None = None) -> TokenBatch:
    """The tokens of some micro-batches as one batch; `now` is what the current policy gives them, and its entropy."""

    def joined(name: str) -> Tensor:
        return torch.cat([table[name] for table in tables])

    needs = objective.needs
    old = joined("old_per_token_logps")
    fields: dict[str, Tensor | None] = {
        "token": joined("completion_ids"),
        "segment": joined(SEGMENT) if "segment" in needs else None,
        "ref_logp": joined("ref_per_token_logps") if "ref_logp" in needs else None,
    }
    if "sampling_per_token_logps" in tables[0]:
        drawn = joined("sampling_per_token_logps")
        fields["sampler_logp"] = torch.where(drawn.isnan(), old, drawn)  # vLLM gives none for some: no correction there
    if now is not None:
        fields["current_logp"], fields["entropy"] = now
    else:
        fields["entropy"] = joined(ENTROPY)
        fields["current_logp"] = old if "current_logp" in needs else None  # no update yet: they are the same
    return TokenBatch.from_padded(
        torch.cat([trained(table) for table in tables]),
        old_logp=old,
        advantage=joined("advantages"),
        reward=joined(REWARD).nan_to_num(),
        **fields,
    )


def advantages(objective: Objective, reward: Tensor, samples: int) -> Tensor:
    """The objective's advantages of the rewards of all processes, `samples` neighbours to a prompt.

    A reward of NaN is that of a response which no function could grade: it has no part in its group's baseline and
    teaches nothing, and neither does a response that has nobody left to be compared with.
    """
    group = torch.arange(len(reward), device=reward.device) // samples
    graded = ~reward.isnan()
    alone = torch.zeros_like(group).index_add_(0, group, graded.long())[group] == 1
    out = torch.zeros_like(reward)
    out[graded] = objective.advantages(reward[graded], group[graded])
    return out.masked_fill(alone & graded, 0.0) if samples > 1 else out
