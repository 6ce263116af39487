"""Convert between TRL's padded batches and `TokenBatch`.

TRL holds the responses of a process as a dict of (responses, positions) tensors, which it shuffles and splits into
micro-batches. Everything a plan reads is a key of that dict, so it stays with its response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.engines import common
from trimtab.objectives import Objective, TokenBatch

PaddedBatch = Mapping[str, Any]  # TRL's inputs: (responses, positions) tensors by name

# Keys that trimtab adds to TRL's batches. TRL shuffles all tensors of a batch alike, so they stay aligned.
ENTROPY, SEGMENT, REWARD = "trimtab_entropy", "trimtab_segment", "trimtab_reward"
REWARDS = "trimtab_rewards"  # (responses, reward functions); NaN if a function did not grade
RESPONSE_INDEX = "trimtab_response_index"  # in the rollout batch of all processes
PLAN = "trimtab_plan"  # the plan of a micro-batch

# Inputs of a forward pass besides the tokens, for vision-language models.
_VISION_INPUTS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


@dataclass(frozen=True)
class AcceleratorComm:
    """The processes of an accelerator as the `Comm` of a plan."""

    accelerator: Any

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the tensors of all ranks."""
        gathered: Tensor = self.accelerator.gather(tensor.contiguous())
        return gathered


def sampled_mask(batch: PaddedBatch) -> Tensor:
    """Return a mask of the tokens that the policy sampled: no padding, no output of a tool or an environment."""
    mask: Tensor = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if batch.get("tool_mask") is not None else mask


def forward_inputs(batch: PaddedBatch) -> dict[str, Any]:
    """Return the arguments of TRL's forward pass over a batch."""
    return {
        "input_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        "attention_mask": torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        "logits_to_keep": batch["completion_ids"].size(1),
        **{name: batch[name] for name in _VISION_INPUTS if batch.get(name) is not None},
    }


def segments(batch: PaddedBatch, tokenizer: Any) -> Tensor:
    """Return the subsentence of every sampled token; 0 elsewhere. The output of a tool ends one."""
    mask = sampled_mask(batch)
    # On the host: segments are found from the bytes of tokens.
    ids = common.segments_by_turn(batch["completion_ids"][mask].cpu(), *sampled_positions(batch), tokenizer)
    return torch.zeros_like(batch["completion_ids"]).masked_scatter(mask, ids.to(mask.device))


def sampled_positions(batch: PaddedBatch) -> tuple[Tensor, Tensor]:
    """Return where the sampled tokens are in the padded batch, counted through its rows, and their rows."""
    mask = sampled_mask(batch).cpu()
    position = mask.flatten().nonzero().squeeze(1)
    return position, position // max(mask.shape[1], 1)


def token_batch(
    batches: Sequence[PaddedBatch], objective: Objective, current: tuple[Tensor, Tensor] | None = None
) -> TokenBatch:
    """Join micro-batches to one `TokenBatch`; `current` is log-probability and entropy under the current policy."""

    def joined(name: str) -> Tensor:
        return torch.cat([batch[name] for batch in batches])

    needs = objective.needs
    old = joined("old_per_token_logps")
    fields: dict[str, Tensor | None] = {
        "token": joined("completion_ids"),
        "segment": joined(SEGMENT) if SEGMENT in batches[0] else None,
        "ref_logp": joined("ref_per_token_logps") if "ref_logp" in needs else None,
    }
    if "sampling_per_token_logps" in batches[0]:
        sampler = joined("sampling_per_token_logps")
        # vLLM returns no log-probability for some tokens; with the old one in its place they are not corrected.
        fields["sampler_logp"] = torch.where(sampler.isnan(), old, sampler)
    if current is not None:
        fields["current_logp"], fields["entropy"] = current
    else:
        fields["entropy"] = joined(ENTROPY)
        fields["current_logp"] = old if "current_logp" in needs else None  # equal before the first update
    return TokenBatch.from_padded(
        torch.cat([sampled_mask(batch) for batch in batches]),
        old_logp=old,
        advantage=joined("advantages"),
        reward=joined(REWARD).nan_to_num(),  # a batch must be finite; such responses have advantage 0
        **fields,
    )


def advantages(
    objective: Objective, reward: Tensor, samples: int, rewards: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return the objective's advantages for the rewards of all processes, `samples` consecutive ones per prompt.

    A reward is NaN if no reward function graded the response: it is left out of its group's baseline and gets
    advantage 0, and so does the only graded response of a group. An objective with `separate_rewards` takes `rewards`
    instead, (responses, reward functions), with their weights; a function that did not grade a response gives it 0.
    """
    group = torch.arange(len(reward), device=reward.device) // samples
    graded = ~reward.isnan()
    # With one graded response in a group there is nothing to compare it with.
    alone = torch.zeros_like(group).index_add_(0, group, graded.long())[group] == 1
    out = torch.zeros_like(reward)
    if objective.separate_rewards and rewards is not None:
        out[graded] = objective.advantages(rewards[graded].nan_to_num(), group[graded], weights=weights).to(out.dtype)
    else:
        out[graded] = objective.advantages(reward[graded], group[graded])
    return out.masked_fill(alone & graded, 0.0) if samples > 1 else out
