"""Scoring: log-probability, entropy and two moments of every sampled token, in fp32.

The head runs on their positions only and in chunks, so the logits of a batch never exist at once; with gradients
each chunk's logits are recomputed in the backward pass. On a GPU scoring uses the fused head.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trimtab.data import KeptTokens
from trimtab.objectives import Moments, moments
from trimtab.trainer.model.kept_rows import KeptRows
from trimtab.trainer.model.lm_head import Head, head_scores
from trimtab.trainer.model.packed import PackedBatch, packed_hidden_states
from trimtab.trainer.model.policy import Policy
from trimtab.trainer.parallel import forget_forwards

SHARED_TOLERANCE = 1e-3  # relative distance of hidden states with and without a shared pass of prompts, in fp32
_TORCH_DTYPES = {"int64": torch.int64, "float32": torch.float32}


@dataclass(frozen=True)
class Transcript:
    """A prompt and its response, as token ids.

    `observed` are [start, end) ranges of the response that the policy did not sample: they are context, as the prompt
    is, and only sampled tokens are scored and trained on. With `kept` they are scored under the distribution over the
    tokens that top-k and top-p kept.
    """

    prompt: Sequence[int]
    response: Sequence[int] | np.ndarray
    observed: tuple[tuple[int, int], ...] = ()
    kept: KeptTokens | None = None

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError("a transcript without a prompt: nothing predicts its response's first token")
        if self.kept is not None and len(self.kept) != self.num_sampled:
            raise ValueError(
                f"a transcript of {self.num_sampled} sampled tokens with kept tokens for {len(self.kept)}: give them "
                "for each"
            )

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)

    @cached_property
    def ids(self) -> np.ndarray:
        """Prompt and response in one array."""
        # Cached: every pass of a step needs them.
        return np.concatenate([self.prompt, self.response], dtype=np.int64)

    @cached_property
    def sampled(self) -> np.ndarray:
        """A mask over the response: which of its tokens the policy sampled."""
        mask = np.ones(len(self.response), dtype=bool)
        for start, end in self.observed:
            mask[start:end] = False
        return mask

    @cached_property
    def sampled_tokens(self) -> np.ndarray:
        """The tokens that the policy sampled, in order."""
        tokens = self.ids[len(self.prompt) :]
        return tokens[self.sampled] if self.observed else tokens

    @property
    def num_sampled(self) -> int:
        """How many tokens the policy sampled."""
        return len(self.response) - sum(end - start for start, end in self.observed)


def micro_batch_sizes(lengths: Sequence[int], token_budget: int, packed: bool = False) -> list[int]:
    """Return the sizes of consecutive micro-batches within the token budget, counting padding unless packed.

    Every micro-batch has one sequence at least, even if that exceeds the budget. Packed micro-batches are as few as the
    budget allows, and as even as eighths of the budget make them.
    """
    if not packed:
        return _padded_sizes(lengths, token_budget)
    ends = list(accumulate(lengths, initial=0))
    # Few, since a small micro-batch takes the host as long as a large one; even, since the allocator reuses blocks of
    # the same size.
    fewest = len(packed_sizes(ends, token_budget))
    choices = (packed_sizes(ends, token_budget * eighths // 8) for eighths in range(1, 9))
    return next(sizes for sizes in choices if len(sizes) == fewest)


def _padded_sizes(lengths: Sequence[int], token_budget: int) -> list[int]:
    sizes, rows, longest = [], 0, 0
    for length in lengths:
        longest = max(longest, length)
        if rows and (rows + 1) * longest > token_budget:
            sizes.append(rows)
            rows, longest = 0, length
        rows += 1
    return [*sizes, rows] if rows else sizes


def packed_sizes(ends: Sequence[int], token_budget: int) -> list[int]:
    """Return the sizes of greedily filled micro-batches; `ends` are the cumulative lengths from 0 on."""
    sizes, first = [], 0
    while first < len(ends) - 1:
        last = max(bisect_right(ends, ends[first] + token_budget) - 1, first + 1)
        sizes.append(last - first)
        first = last
    return sizes


def split_by_token_budget(
    transcripts: Sequence[Transcript], token_budget: int, packed: bool = False
) -> Iterable[Sequence[Transcript]]:
    """Yield the micro-batches of `micro_batch_sizes`."""
    first = 0
    for size in micro_batch_sizes([len(t) for t in transcripts], token_budget, packed):
        yield transcripts[first : first + size]
        first += size


def tool_tokens(transcripts: Sequence[Transcript]) -> np.ndarray:
    """Return how many observed tokens come right before each sampled token of these transcripts."""
    counts = []
    for transcript in transcripts:
        count = np.zeros(transcript.num_sampled, dtype=np.int32)
        before = 0  # observed tokens so far
        for start, end in transcript.observed:
            if start - before < len(count):  # no token is sampled after the last of a response
                count[start - before] += end - start
            before += end - start
        counts.append(count)
    return np.concatenate(counts)


def response_hidden_states(policy: Policy, transcripts: Sequence[Transcript]) -> tuple[Tensor, Tensor]:
    """Return the hidden states that predict each sampled token, and those tokens, both concatenated."""
    if policy.shared_prompts:
        return _shared_hidden_states(policy, transcripts)
    ids = np.concatenate([t.ids for t in transcripts])
    lengths = np.array([len(t) for t in transcripts])
    response_lengths = np.array([len(t.response) for t in transcripts])
    cu_seqlens = np.concatenate([[0], lengths.cumsum()])
    # Indices of the response tokens in `ids`; the hidden state one position before predicts each.
    targets = np.repeat(cu_seqlens[1:] - response_lengths.cumsum(), response_lengths)
    targets += np.arange(response_lengths.sum())
    owner = np.repeat(np.arange(len(lengths)), response_lengths)
    if any(t.observed for t in transcripts):
        sampled = np.concatenate([t.sampled for t in transcripts])
        targets, owner = targets[sampled], owner[sampled]
    if policy.packed:
        positions = np.arange(len(ids)) - np.repeat(cu_seqlens[:-1], lengths)
        flat, position_ids, bounds, before, tokens = to_device(
            policy.device, ids, positions, cu_seqlens, targets - 1, ids[targets]
        )
        batch = PackedBatch(flat, position_ids, bounds.to(torch.int32), int(lengths.max()))
        hidden = packed_hidden_states(policy.backbone, batch)
    else:
        table, real = _padded(ids, lengths, policy.pad_token_id)
        # How far padding of the rows before shifts each response token.
        shift = (np.arange(len(lengths)) * real.shape[1] - cu_seqlens[:-1])[owner]
        rows, mask, before, tokens = to_device(
            policy.device, table, real.astype(np.int64), targets - 1 + shift, ids[targets]
        )
        hidden = policy.hidden_states(rows, mask).flatten(0, 1)
    return hidden.index_select(0, before), tokens


def _shared_hidden_states(policy: Policy, transcripts: Sequence[Transcript]) -> tuple[Tensor, Tensor]:
    """Do what `response_hidden_states` does with one pass for every prompt, by the KV cache of transformers.

    Its keys and values are repeated for its responses, gradients included. The result is that of whole rows up to
    rounding.
    """
    numbers: dict[tuple[int, ...], int] = {}
    owner = torch.tensor([numbers.setdefault(tuple(t.prompt), len(numbers)) for t in transcripts])
    prompts, prompt_mask = _padded_rows([np.array(prompt) for prompt in numbers], policy.pad_token_id)
    responses, real = _padded_rows([t.ids[len(t.prompt) :] for t in transcripts], policy.pad_token_id)
    out = policy.backbone(input_ids=prompts, use_cache=True)
    lengths = prompt_mask.sum(1)
    last = torch.arange(len(prompts)) * prompts.shape[1] + lengths - 1
    hidden = out.last_hidden_state.flatten(0, 1).index_select(0, last[owner])[:, None]
    if responses.shape[1] > 1:  # the last token of a response predicts nothing
        # As `batch_select_indices` does, but by index_select, whose gradient is a plain index_add.
        for layer in out.past_key_values.layers:
            layer.keys, layer.values = layer.keys.index_select(0, owner), layer.values.index_select(0, owner)
        inputs = responses[:, :-1]
        # Prompts are padded on the right: on the left the first queries would have no key, and NaN gradients.
        mask = torch.cat([prompt_mask[owner], torch.ones_like(inputs, dtype=torch.bool)], 1)
        positions = lengths[owner][:, None] + torch.arange(inputs.shape[1])
        cache: dict[str, Any] = {"past_key_values": out.past_key_values, "use_cache": True}
        later = policy.backbone(input_ids=inputs, attention_mask=mask.long(), position_ids=positions, **cache)
        hidden = torch.cat([hidden, later.last_hidden_state], 1)
    sampled = real.clone()
    sampled[real] = torch.from_numpy(np.concatenate([t.sampled for t in transcripts]))
    return hidden.flatten(0, 1).index_select(0, sampled.flatten().nonzero().squeeze(1)), responses[sampled]


def _padded_rows(rows: Sequence[np.ndarray], pad: int) -> tuple[Tensor, Tensor]:
    table, real = _padded(np.concatenate(rows), np.array([len(row) for row in rows]), pad)
    return torch.from_numpy(table), torch.from_numpy(real)


def _padded(values: np.ndarray, lengths: np.ndarray, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values as rows of these lengths, padded on the right, and a mask of what is not padding."""
    real = np.arange(lengths.max()) < lengths[:, None]
    table = np.full(real.shape, pad)
    table[real] = values
    return table, real


def to_device(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Return arrays of one dtype as tensors; to a GPU in one asynchronous copy from pinned memory."""
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    host = torch.empty(sum(array.size for array in arrays), dtype=_TORCH_DTYPES[arrays[0].dtype.name], pin_memory=True)
    np.concatenate([array.ravel() for array in arrays], out=host.numpy())
    copied = host.to(device, non_blocking=True).split([array.size for array in arrays])
    return [flat.view(array.shape) for flat, array in zip(copied, arrays, strict=True)]


def log_probs(policy: Policy, transcripts: Sequence[Transcript], temperature: float, head_chunk: int) -> Tensor:
    """Return differentiable log-probabilities of the sampled tokens of one micro-batch."""
    return _by_chunk(policy, transcripts, temperature, head_chunk, _log_probs_of)


def log_probs_and_entropies(
    policy: Policy, transcripts: Sequence[Transcript], temperature: float, head_chunk: int
) -> tuple[Tensor, Tensor]:
    """Return differentiable log-probabilities of one micro-batch's sampled tokens, and their differentiable entropies.

    An entropy is that of the distribution which the token was scored under.
    """
    logp, entropy = _by_chunk(policy, transcripts, temperature, head_chunk, _log_probs_and_entropies_of).unbind(-1)
    return logp, entropy


def _log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)


def _log_probs_and_entropies_of(logits: Tensor, tokens: Tensor) -> Tensor:
    every = logits.log_softmax(-1)
    p = every.exp()
    # 0 ln 0 is 0, and so is its gradient: before the product, or it would be 0 times infinity.
    entropy = -(p * every.masked_fill(p == 0, 0.0)).sum(-1)
    return torch.stack([every.gather(1, tokens[:, None]).squeeze(1), entropy], -1)


def _by_chunk(
    policy: Policy,
    transcripts: Sequence[Transcript],
    temperature: float,
    head_chunk: int,
    compute: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return what `compute` makes of logits and sampled tokens; each chunk's logits are made again for its gradient."""
    kept = kept_rows(policy, transcripts)

    def of_chunk(hidden: Tensor, tokens: Tensor, first: int) -> Tensor:
        logits = policy.logits(hidden, temperature)
        return compute(logits if kept is None else kept.restricted(logits, first), tokens)

    with policy.autocast():
        hidden, tokens = response_hidden_states(policy, transcripts)
        chunks = enumerate(zip(hidden.split(head_chunk), tokens.split(head_chunk), strict=True))
        return torch.cat([checkpoint(of_chunk, h, t, n * head_chunk, use_reentrant=False) for n, (h, t) in chunks])


def kept_rows(policy: Policy, transcripts: Sequence[Transcript]) -> KeptRows | None:
    """Return the kept tokens of a micro-batch's sampled tokens on the policy's device; None if they have none."""
    return KeptRows.of([transcript.kept for transcript in transcripts], policy.device)


@torch.no_grad()
def score(
    policy: Policy,
    transcripts: Sequence[Transcript],
    temperature: float,
    token_budget: int,
    head_chunk: int,
    fused: bool | None = None,
    passes: int = 0,
) -> Moments:
    """Return log-probability, entropy and moments of every sampled token; `fused=None` fuses the head on a GPU.

    `passes` is the least number of forward passes: as many as any process runs, if they share a sharded policy.
    """
    was_training = policy.model.training
    policy.model.eval()
    head = policy.fused_head(temperature, fused)
    with policy.autocast():
        scored = [
            _score_micro_batch(policy, micro, temperature, head_chunk, head)
            for micro in split_by_token_budget(transcripts, token_budget, policy.packed)
        ]
        for _ in range(passes - len(scored)):
            idle_pass(policy)
    policy.model.train(was_training)
    if policy.sharded:
        forget_forwards(policy.model)
    if not scored:
        return Moments(*torch.zeros(len(Moments._fields), 0, device=policy.device))
    return Moments(*(torch.cat(values) for values in zip(*scored, strict=True)))


def idle_pass(policy: Policy) -> None:
    """Take part in a pass of other processes that share the layers' weights, without anything to compute.

    Where gradients are enabled there is a backward pass too, which adds zero to every gradient.
    """
    some_token = policy.pad_token_id
    with policy.autocast():
        hidden, _ = response_hidden_states(policy, [Transcript([some_token], [some_token])])
    if hidden.requires_grad:
        hidden.backward(torch.zeros_like(hidden))


def _score_micro_batch(
    policy: Policy, transcripts: Sequence[Transcript], temperature: float, head_chunk: int, head: Head | None
) -> Moments:
    hidden, tokens = response_hidden_states(policy, transcripts)
    kept = kept_rows(policy, transcripts)
    if head is not None:
        hidden = hidden.to(head.weight.dtype)  # frees the fp32 hidden states
        return head_scores(hidden, head, tokens, head_chunk, kept)
    chunks = []
    for n, (h, t) in enumerate(zip(hidden.split(head_chunk), tokens.split(head_chunk), strict=True)):
        logits = policy.logits(h, temperature)
        chunks.append(moments(logits if kept is None else kept.restricted(logits, n * head_chunk), t))
    return Moments(*(torch.cat(values) for values in zip(*chunks, strict=True)))


def with_shared_prompts(policy: Policy) -> Policy:
    """Return the policy with shared passes of prompts; ValueError if its model does not support them."""
    shared = replace(policy, shared_prompts=True)
    if reason := _unsupported_reason(policy, shared):
        name = type(policy.causal_lm).__name__
        raise ValueError(f"update.shared_prompts = true does not work with {name} here: {reason}; set it to false")
    return shared


@torch.no_grad()
def _unsupported_reason(policy: Policy, shared: Policy) -> str:
    """Try a shared pass beside whole rows: return why it is not supported, or ""."""
    if policy.device.type != "cpu" or policy.precision != "fp32":
        return "it is for fp32 on a CPU"
    config = policy.causal_lm.config
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "padding between prompt and response would shift its sliding window"
    some = [min(policy.eos_token_ids), policy.pad_token_id]
    transcripts = [Transcript(some * n, some[:m]) for n, m in ((1, 1), (2, 2), (2, 1), (1, 2))]
    policy.model.eval()
    try:
        whole, once = (response_hidden_states(each, transcripts)[0] for each in (policy, shared))
    except Exception as error:  # any model may do anything
        return f"{type(error).__name__}: {error}"
    off = float((whole - once).norm() / whole.norm())
    return "" if off <= SHARED_TOLERANCE else f"its hidden states are {off:.0%} off"
