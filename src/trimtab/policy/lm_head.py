"""The vocabulary head: from hidden states to log-probabilities, entropies and moments, and to gradients.

Full logits never exist: rows go through in chunks. Scoring is one GEMM and one pass over each chunk. Training forms
gradients in the forward pass: a plan fixes everything about a token but its log-probability, so the derivative of the
loss by a chunk's log-probabilities is known as soon as they are, and nothing is computed a second time: 3 GEMMs, or 2
where the head is frozen. The coefficient multiplies the narrow side (hidden states), so the wide side is softmax alone,
not even normalised, and one kernel serves every objective.

The function stands alone: it knows tensors, not models, and other trainers can use it as it is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from trimtab.objectives import Moments, moments

CHUNK = 2560  # rows of logits at one time, at most: 780 MB of bf16 at 152k tokens
TILE = 64  # rows that a GPU's GEMM takes together

# Given the log-probabilities of rows `first` to `last`: the loss on them and its derivative by each of them.
LossOf = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits: `weight` (vocabulary, width) and, where the model has them, the rest."""

    weight: Tensor
    bias: Tensor | None = None
    soft_cap: float | None = None
    temperature: float = 1.0

    def logits(self, hidden: Tensor, buffer: Tensor) -> Tensor:
        """Raw logits of a chunk, in the first rows of a buffer: bias included, before soft cap and temperature."""
        out = buffer[: len(hidden)]
        if self.bias is None:
            return torch.mm(hidden, self.weight.T, out=out)
        return torch.addmm(self.bias, hidden, self.weight.T, out=out)

    def buffer(self, rows: int) -> Tensor:
        """Room for the logits of so many rows."""
        return self.weight.new_empty(rows, len(self.weight))


@dataclass(frozen=True)
class HeadGradients:
    """The loss, ln p of every row's token, and the gradients; `weight` and `bias` are None for a frozen head."""

    loss: Tensor
    logp: Tensor
    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None


@torch.no_grad()
def head_scores(hidden: Tensor, head: Head, tokens: Tensor, chunk: int = CHUNK) -> Moments:
    """ln p of each row's token, and entropy, sum p^2, sum p^2 ln p of its distribution, in fp32."""
    hidden, tokens = hidden.contiguous(), tokens.contiguous()  # kernels read them in a row
    sizes = even_sizes(len(tokens), chunk) or [0]
    buffer, pieces = head.buffer(max(sizes)), []
    for h, t in zip(hidden.split(sizes), tokens.split(sizes), strict=True):
        logits = head.logits(h, buffer)
        pieces.append(softmax_part(logits, t, target_logits(logits, h, head, t), head))
    return Moments(*torch.cat(pieces, dim=1).unbind())


@torch.no_grad()
def head_gradients(
    hidden: Tensor,
    head: Head,
    tokens: Tensor,
    loss_of: LossOf,
    sizes: Sequence[int] | None = None,
    *,
    frozen: bool = False,
    weight_grad: Tensor | None = None,
    bias_grad: Tensor | None = None,
) -> HeadGradients:
    """The loss and its gradients by hidden states, head weight and bias, chunk by chunk.

    `sizes` are the rows of each chunk in turn: where tokens share a ratio, whole responses; by default even ones.
    Gradients of weight and bias are added to `weight_grad` and `bias_grad` where given (an optimizer's `.grad`).
    """
    if hidden.dtype != head.weight.dtype:
        raise ValueError(f"hidden states are {hidden.dtype}, the head is {head.weight.dtype}: bring them to one type")
    rows = len(tokens)
    sizes = even_sizes(rows) if sizes is None else sizes
    if sum(sizes) != rows:
        raise ValueError(f"the chunks hold {sum(sizes)} rows, but there are {rows} tokens")
    hidden, tokens = hidden.contiguous(), tokens.contiguous()  # kernels read them in a row
    d_hidden = torch.empty_like(hidden)
    if not frozen and head.bias is not None and bias_grad is None:
        bias_grad = torch.zeros_like(head.bias)
    losses, scored, buffer = [], [], head.buffer(max(sizes, default=0))
    for first, last in pairwise(accumulate(sizes, initial=0)):
        here = slice(first, last)
        wide = head.logits(hidden[here], buffer)
        own = target_logits(wide, hidden[here], head, tokens[here])
        logp, factor = slope_part(wide, tokens[here], own, head)
        ready = torch.cuda.current_stream(hidden.device).record_event() if hidden.is_cuda else None
        product = wide @ head.weight
        with _beside(hidden.device, ready):  # a loss is many small operations, and needs nothing of the product
            loss, slope = loss_of(logp, here)
            slope = slope.to(logp.dtype) * (factor / head.temperature)
        scale_rows(product, slope, d_hidden[here])
        if not frozen:
            # fp16 would lose the small coefficients of a mean over many tokens: the largest is 1 until the GEMM is done
            unit = slope.abs().amax().clamp(min=1e-30) if hidden.dtype == torch.float16 and len(slope) else None
            narrow = scale_rows(hidden[here], slope if unit is None else slope / unit, product)
            weight_grad = _add_product(weight_grad, wide, narrow, unit)
            if bias_grad is not None:
                bias_grad += (slope @ wide.to(slope.dtype)).to(bias_grad.dtype)
        losses.append(loss)
        scored.append(logp)
    whole = torch.cat(scored) if scored else torch.empty(0, device=hidden.device)
    total = torch.stack(losses).sum() if losses else torch.zeros((), device=hidden.device)
    if weight_grad is None and not frozen:
        weight_grad = torch.zeros_like(head.weight)
    return HeadGradients(total, whole, d_hidden, weight_grad, bias_grad)


def even_sizes(rows: int, most: int = CHUNK) -> list[int]:
    """Chunks of at most `most` rows, as few and as even as whole tiles allow: each reads the whole head."""
    chunks = max(1, math.ceil(rows / most))
    each = min(math.ceil(rows / chunks / TILE) * TILE, most)
    return [min(each, rows - first) for first in range(0, rows, max(1, each))]


@contextmanager
def _beside(device: torch.device, ready: torch.cuda.Event | None) -> Iterator[None]:
    """What is launched in here runs beside what was launched after `ready`; what follows waits for both.

    Memory of either stream can be given back freely: each waits for the other before it takes any again.
    """
    if ready is None:
        yield
        return
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_event(ready)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        main.wait_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: an allocator keeps memory apart by stream. It goes first wherever there is room."""
    return torch.cuda.Stream(device, priority=-1)


def target_logits(logits: Tensor, hidden: Tensor, head: Head, tokens: Tensor) -> Tensor:
    """The logit of each row's token in fp32: rounded like the others' it would be the log-probability's error."""
    if logits.dtype in (torch.float32, torch.float64):
        return logits.gather(1, tokens[:, None]).squeeze(1)
    kernels = _kernels_for(hidden)
    if kernels is not None and head.weight.stride(1) == 1:
        own: Tensor = kernels.target_logits(hidden, head.weight, tokens)
    else:
        own = (hidden.float() * head.weight[tokens].float()).sum(-1)
    return own if head.bias is None else own + head.bias[tokens]


def softmax_part(logits: Tensor, tokens: Tensor, own: Tensor, head: Head) -> Tensor:
    """The four numbers of every row, (4, rows)."""
    kernels = _kernels_for(logits)
    if kernels is not None:
        numbers: Tensor = kernels.softmax_part(logits, tokens, own, head.temperature, head.soft_cap, write=False)
        return numbers
    return _softmax_part(logits, tokens, own, head.temperature, head.soft_cap, write=False)


def slope_part(logits: Tensor, tokens: Tensor, own: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """ln p of each row's token, and a factor; the logits become what times it is d ln p / d logits x temperature."""
    kernels = _kernels_for(logits)
    if kernels is not None:
        logp, factor = kernels.slope_part(logits, tokens, own, head.temperature, head.soft_cap)
        return logp, factor
    logp = _softmax_part(logits, tokens, own, head.temperature, head.soft_cap, write=True)[0]
    return logp, torch.ones_like(logp)


def scale_rows(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """out = x times a factor for each row, rounded once."""
    kernels = _kernels_for(x)
    if kernels is not None:
        scaled: Tensor = kernels.scale_rows(x, factor, out)
        return scaled
    return torch.mul(x, factor[:, None], out=out)


def _kernels_for(x: Tensor) -> Any:
    return fused() if x.is_cuda and x.dtype != torch.float64 else None


@cache
def fused() -> Any:
    """The Triton kernels, where Triton is installed and they do what they should."""
    try:
        from trimtab.policy.kernels import softmax as kernels
    except ModuleNotFoundError:
        return None
    reason = _fault(kernels)
    if reason:
        warnings.warn(f"the head runs without its kernels, which is slower: {reason}", stacklevel=2)
    return None if reason else kernels


def _fault(kernels: Any) -> str:
    """What is wrong with the kernels here, on a few rows beside their plain twin; nothing where nothing is."""
    logits = torch.linspace(-9, 9, 3 * 9001, device="cuda").sin().view(3, -1) * 9
    tokens = torch.tensor([0, 4500, 9000], device="cuda")
    mine, plain = logits.clone(), logits.clone()
    try:
        products = kernels.target_logits(logits, logits, tokens.new_tensor([2, 1, 0]))
        own = logits.gather(1, tokens[:, None]).squeeze(1) + 0.1
        scores = kernels.softmax_part(logits, tokens, own, 0.7, None, write=False)
        logp, factor = kernels.slope_part(mine, tokens, own, 0.7, None)
        right = _softmax_part(plain, tokens, own, 0.7, None, write=True)
        pairs = {
            "products": (products, (logits * logits.flip(0)).sum(-1)),
            "scores": (scores, right),
            "log-probabilities": (logp, right[0]),
            "slopes": (kernels.scale_rows(mine, factor, torch.empty_like(mine)), plain),
        }
        wrong = [name for name, (one, other) in pairs.items() if not torch.allclose(one, other, rtol=1e-3, atol=1e-5)]
    except Exception as error:  # another Triton, another GPU
        return f"{type(error).__name__}: {error}"
    return f"their {' and '.join(wrong)} are wrong" if wrong else ""


def _softmax_part(
    logits: Tensor, tokens: Tensor, own: Tensor, temperature: float, soft_cap: float | None, write: bool
) -> Tensor:
    """The kernel in plain torch."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    capped = wide.scatter(1, tokens[:, None], own[:, None])
    if soft_cap:
        capped = torch.tanh(capped / soft_cap) * soft_cap
    scaled = capped / temperature
    numbers = torch.stack(moments(scaled, tokens))
    if write:
        slope = scaled.softmax(-1).neg_()
        slope.scatter_add_(1, tokens[:, None], torch.ones_like(scaled[:, :1]))
        if soft_cap:
            slope *= 1 - (capped / soft_cap) ** 2
        logits.copy_(slope)
    return numbers


def _add_product(total: Tensor | None, wide: Tensor, narrow: Tensor, unit: Tensor | None) -> Tensor:
    """total + unit x wide^T narrow, in place where there is a total, and summed in fp32 where that is fp32."""
    if unit is None and total is not None and total.dtype == wide.dtype:
        return total.addmm_(wide.T, narrow)
    if unit is None and total is not None and wide.is_cuda and total.dtype == torch.float32:
        return torch.addmm(total, wide.T, narrow, out_dtype=torch.float32, out=total)
    product = wide.T @ narrow
    if unit is not None:
        product = product * unit if total is None else product.to(total.dtype) * unit
    return product if total is None else total.add_(product)
