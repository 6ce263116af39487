"""The LM head: from hidden states to log-probabilities, entropies and moments, and to gradients.

Full logits never exist: rows go through in chunks. Scoring takes one GEMM and one pass over each chunk of logits.
Training forms gradients in the forward pass: a plan fixes everything about a token but its log-probability, so
d loss / d log-prob of a chunk is known as soon as its log-probabilities are, and no logits are computed twice: 3 GEMMs,
or 2 if the head is frozen.

These functions know tensors, not models, and other trainers can use them as they are.
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
from trimtab.trainer.model.kept_rows import KeptRows

CHUNK = 2560  # rows of logits at one time, at most: 780 MB of bf16 at a vocabulary of 152k
TILE = 64  # rows of a GEMM tile
WIDE_ROWS = 256  # rows of logits in fp32 at one time, where plain torch forms a gradient that no kernel does

# From the log-probabilities of the rows in a slice to the loss of these rows and its gradient, d loss / d log-prob.
LossFn = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Head:
    """The LM head as tensors: `weight` (vocabulary, width), and if the model has them, bias and soft cap."""

    weight: Tensor
    bias: Tensor | None = None
    soft_cap: float | None = None
    temperature: float = 1.0

    def logits(self, hidden: Tensor, buffer: Tensor) -> Tensor:
        """Write the logits of a chunk into the first rows of a buffer: with bias, before soft cap and temperature."""
        out = buffer[: len(hidden)]
        if self.bias is None:
            return torch.mm(hidden, self.weight.T, out=out)
        return torch.addmm(self.bias, hidden, self.weight.T, out=out)

    def buffer(self, rows: int) -> Tensor:
        """Allocate a buffer for the logits of so many rows."""
        return self.weight.new_empty(rows, len(self.weight))


@dataclass(frozen=True)
class HeadGradients:
    """The loss, ln p of every row's token, and the gradients; `weight` and `bias` are None for a frozen head.

    `entropy` is that of every row, where its gradient was asked for.
    """

    loss: Tensor
    logp: Tensor
    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None
    entropy: Tensor | None = None


@torch.no_grad()
def head_scores(
    hidden: Tensor, head: Head, tokens: Tensor, chunk: int = CHUNK, kept: KeptRows | None = None
) -> Moments:
    """Return ln p of each row's token, and entropy, sum p^2, sum p^2 ln p of its distribution, in fp32.

    With `kept` the distribution is the one over the kept tokens of each row.
    """
    hidden, tokens = hidden.contiguous(), tokens.contiguous()  # kernels assume contiguous rows
    sizes = even_sizes(len(tokens), chunk) or [0]
    buffer, chunks = head.buffer(max(sizes)), []
    for first, h, t in zip(accumulate(sizes, initial=0), hidden.split(sizes), tokens.split(sizes), strict=False):
        logits = _chunk_logits(head, h, buffer, kept, first)
        chunks.append(softmax_moments(logits, t, target_logits(logits, h, head, t), head, kept is not None))
    return Moments(*torch.cat(chunks, dim=1).unbind())


@torch.no_grad()
def head_gradients(
    hidden: Tensor,
    head: Head,
    tokens: Tensor,
    loss_fn: LossFn,
    sizes: Sequence[int] | None = None,
    *,
    frozen: bool = False,
    weight_grad: Tensor | None = None,
    bias_grad: Tensor | None = None,
    kept: KeptRows | None = None,
    entropy_grad: Tensor | None = None,
) -> HeadGradients:
    """Return the loss and its gradients by hidden states, head weight and bias, computed chunk by chunk.

    `sizes` are the rows of each chunk (whole responses if their tokens share a ratio), even ones by default. Gradients
    of weight and bias are added to `weight_grad` and `bias_grad` if given (a parameter's `.grad`). With `kept` the
    distribution is the one over the kept tokens of each row. `entropy_grad` is d loss / d entropy of every row, whose
    gradient is then formed too; the returned loss is that of `loss_fn`, without a term of the entropy.
    """
    sizes = even_sizes(len(tokens)) if sizes is None else sizes
    _check_fit(hidden, head, tokens, sizes)
    hidden, tokens = hidden.contiguous(), tokens.contiguous()  # kernels assume contiguous rows
    d_hidden = torch.empty_like(hidden)
    if not frozen and head.bias is not None and bias_grad is None:
        bias_grad = torch.zeros_like(head.bias)
    losses, logps, entropies, buffer = [], [], [], head.buffer(max(sizes, default=0))
    for first, last in pairwise(accumulate(sizes, initial=0)):
        chunk = slice(first, last)
        # Overwritten by their gradient, which is not yet multiplied by the coefficients.
        logits = d_logits = _chunk_logits(head, hidden[chunk], buffer, kept, first)
        target = target_logits(logits, hidden[chunk], head, tokens[chunk])
        if entropy_grad is not None:
            logp, entropy, *_ = softmax_moments(logits, tokens[chunk], target, head, kept is not None)
            loss, grad_logp = loss_fn(logp, chunk)
            known = tokens[chunk], target, logp, entropy, grad_logp.to(logp.dtype), entropy_grad[chunk].to(logp.dtype)
            coefficient = _write_grad(logits, head, *known) / head.temperature
            product = d_logits @ head.weight
            entropies.append(entropy)
        else:
            logp, factor = logp_and_grad(logits, tokens[chunk], target, head, kept is not None)
            ready = torch.cuda.current_stream(hidden.device).record_event() if hidden.is_cuda else None
            product = d_logits @ head.weight
            with _side_stream_after(ready, hidden.device):  # a loss is many small operations: they run beside the GEMM
                loss, grad_logp = loss_fn(logp, chunk)
                coefficient = grad_logp.to(logp.dtype) * (factor / head.temperature)
        # Coefficients multiply the narrow side (width, not vocabulary), so that one kernel serves every objective.
        scale_rows(product, coefficient, d_hidden[chunk])
        if not frozen:
            weight_grad = _add_weight_grad(weight_grad, d_logits, hidden[chunk], coefficient, scratch=product)
            if bias_grad is not None:
                bias_grad += (coefficient @ d_logits.to(coefficient.dtype)).to(bias_grad.dtype)
        losses.append(loss)
        logps.append(logp)
    whole = torch.cat(logps) if logps else torch.empty(0, device=hidden.device)
    total = torch.stack(losses).sum() if losses else torch.zeros((), device=hidden.device)
    if weight_grad is None and not frozen:
        weight_grad = torch.zeros_like(head.weight)
    return HeadGradients(total, whole, d_hidden, weight_grad, bias_grad, torch.cat(entropies) if entropies else None)


def _check_fit(hidden: Tensor, head: Head, tokens: Tensor, sizes: Sequence[int]) -> None:
    if hidden.dtype != head.weight.dtype:
        raise ValueError(f"hidden states are {hidden.dtype}, the head is {head.weight.dtype}: bring them to one type")
    if sum(sizes) != len(tokens):
        raise ValueError(f"the chunks hold {sum(sizes)} rows, but there are {len(tokens)} tokens")


def even_sizes(rows: int, most: int = CHUNK) -> list[int]:
    """Return chunk sizes of at most `most` rows, as few and as even as whole tiles allow."""
    # Few, since every chunk reads the whole head weight.
    chunks = max(1, math.ceil(rows / most))
    each = min(math.ceil(rows / chunks / TILE) * TILE, most)
    return [min(each, rows - first) for first in range(0, rows, max(1, each))]


@contextmanager
def _side_stream_after(ready: torch.cuda.Event | None, device: torch.device) -> Iterator[None]:
    """Launch on a side stream, which waits for `ready` only; the main stream then waits for it. No-op without event."""
    # No record_stream is needed: each stream waits for the other before it reuses memory.
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
    # One per device, since the allocator keeps memory apart by stream. High priority, so that its small kernels do not
    # queue behind the GEMM.
    return torch.cuda.Stream(device, priority=-1)


def target_logits(logits: Tensor, hidden: Tensor, head: Head, tokens: Tensor) -> Tensor:
    """Return the logit of each row's token in fp32, recomputed if the logits are in half precision."""
    # Rounded to half precision it would be the log-probability's error.
    if logits.dtype in (torch.float32, torch.float64):
        return logits.gather(1, tokens[:, None]).squeeze(1)
    kernels = _kernels_for(hidden)
    if kernels is not None and head.weight.stride(1) == 1:
        target: Tensor = kernels.target_logits(hidden, head.weight, tokens)
    else:
        target = (hidden.float() * head.weight[tokens].float()).sum(-1)
    return target if head.bias is None else target + head.bias[tokens]


def softmax_moments(logits: Tensor, tokens: Tensor, target: Tensor, head: Head, restricted: bool = False) -> Tensor:
    """Return ln p, entropy, sum p^2 and sum p^2 ln p of every row, (4, rows); `restricted`: some logits are -inf."""
    # The kernels' soft cap makes -inf finite.
    kernels = None if restricted and head.soft_cap else _kernels_for(logits)
    run: Callable[..., Tensor] = _torch_softmax_moments if kernels is None else kernels.softmax_moments
    return run(logits, tokens, target, head.temperature, head.soft_cap, write_grad=False)


def logp_and_grad(
    logits: Tensor, tokens: Tensor, target: Tensor, head: Head, restricted: bool = False
) -> tuple[Tensor, Tensor]:
    """Return ln p of each row's token and a factor; logits times factor become d ln p / d logits * temperature."""
    # The kernels' soft cap makes -inf finite.
    kernels = None if restricted and head.soft_cap else _kernels_for(logits)
    if kernels is not None:
        logp, factor = kernels.logp_and_grad(logits, tokens, target, head.temperature, head.soft_cap)
        return logp, factor
    logp = _torch_softmax_moments(logits, tokens, target, head.temperature, head.soft_cap, write_grad=True)[0]
    return logp, torch.ones_like(logp)


def scale_rows(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """Write out = x * factor[:, None], rounded once."""
    kernels = _kernels_for(x)
    return torch.mul(x, factor[:, None], out=out) if kernels is None else kernels.scale_rows(x, factor, out)


def _kernels_for(x: Tensor) -> Any:
    return softmax_kernels() if x.is_cuda and x.dtype != torch.float64 else None


def _chunk_logits(head: Head, hidden: Tensor, buffer: Tensor, kept: KeptRows | None, first: int) -> Tensor:
    """Write the logits of a chunk whose first row is `first`; with `kept` all others are -inf."""
    logits = head.logits(hidden, buffer)
    if kept is not None:
        kept.restrict(logits, first)
    return logits


@cache
def softmax_kernels() -> Any:
    """Return the Triton kernels, or None if Triton is missing or they compute something else here."""
    try:
        from trimtab.trainer.model.kernels import softmax as kernels
    except ModuleNotFoundError:
        return None
    reason = kernels_unsupported_reason(kernels)
    if reason:
        warnings.warn(f"the LM head runs without its kernels, which is slower: {reason}", stacklevel=2)
    return None if reason else kernels


def kernels_unsupported_reason(kernels: Any) -> str:
    """Try the kernels on a few rows beside plain torch: return why they must not be used, or ""."""
    logits = torch.linspace(-9, 9, 3 * 9001, device="cuda").sin().view(3, -1) * 9
    tokens = torch.tensor([0, 4500, 9000], device="cuda")
    grad, expected_grad = logits.clone(), logits.clone()
    try:
        products = kernels.target_logits(logits, logits, tokens.new_tensor([2, 1, 0]))
        target = logits.gather(1, tokens[:, None]).squeeze(1) + 0.1
        scores = kernels.softmax_moments(logits, tokens, target, 0.7, None, write_grad=False)
        logp, factor = kernels.logp_and_grad(grad, tokens, target, 0.7, None)
        expected = _torch_softmax_moments(expected_grad, tokens, target, 0.7, None, write_grad=True)
        pairs = {
            "products": (products, (logits * logits.flip(0)).sum(-1)),
            "scores": (scores, expected),
            "log-probabilities": (logp, expected[0]),
            "gradients": (kernels.scale_rows(grad, factor, torch.empty_like(grad)), expected_grad),
        }
        wrong = [name for name, (one, other) in pairs.items() if not torch.allclose(one, other, rtol=1e-3, atol=1e-5)]
    except Exception as error:  # a version of Triton, or a GPU, that does not support them
        return f"{type(error).__name__}: {error}"
    return f"their {' and '.join(wrong)} are wrong" if wrong else ""


def _torch_softmax_moments(
    logits: Tensor, tokens: Tensor, target: Tensor, temperature: float, soft_cap: float | None, *, write_grad: bool
) -> Tensor:
    """Do what the kernel `softmax_moments` does, in plain torch."""
    scaled, slope = _scaled_logits(logits, tokens, target, temperature, soft_cap)
    numbers = torch.stack(moments(scaled, tokens))
    if write_grad:
        grad = scaled.softmax(-1).neg_()
        grad.scatter_add_(1, tokens[:, None], torch.ones_like(scaled[:, :1]))
        logits.copy_(grad if slope is None else grad.mul_(slope))
    return numbers


def _scaled_logits(
    logits: Tensor, tokens: Tensor, target: Tensor, temperature: float, soft_cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return logits after soft cap and temperature, and the slope of the soft cap at each; -inf stays -inf."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    wide = wide.scatter(1, tokens[:, None], target[:, None])
    if not soft_cap:
        return wide / temperature, None
    capped = torch.tanh(wide / soft_cap) * soft_cap
    return capped.masked_fill(wide == -torch.inf, -torch.inf) / temperature, 1 - (capped / soft_cap) ** 2


def _write_grad(
    logits: Tensor,
    head: Head,
    tokens: Tensor,
    target: Tensor,
    logp: Tensor,
    entropy: Tensor,
    by_logp: Tensor,
    by_entropy: Tensor,
) -> Tensor:
    """Overwrite logits with a loss's gradient by them, up to a factor for each row, which is returned.

    `by_logp` and `by_entropy` are the loss's derivatives by ln p and entropy of each row. d ln p_k / d logits is
    1[k] - p, and d H / d logits is -p (ln p + H).
    """
    factor = torch.maximum(by_logp.abs(), by_entropy.abs())
    unit = torch.where(factor == 0, 1.0, factor)  # in half precision the small coefficients of a mean would be lost
    columns = (tokens, target, logp, entropy, by_logp / unit, by_entropy / unit)
    for rows, token, *numbers in zip(*(column.split(WIDE_ROWS) for column in (logits, *columns)), strict=True):
        z, ln_p, h, a, b = (number[:, None] for number in numbers)
        scaled, slope = _scaled_logits(rows, token, z.squeeze(1), head.temperature, head.soft_cap)
        log_p = scaled.sub_(scaled.gather(1, token[:, None]) - ln_p)
        p = log_p.exp()
        # 0 ln 0 is 0: also for a token that was not kept, whose ln p is -inf.
        spread = log_p.add_(h).masked_fill_(p == 0, 0.0)
        grad = spread.mul_(b).add_(a).mul_(p).neg_().scatter_add_(1, token[:, None], a)
        rows.copy_(grad if slope is None else grad.mul_(slope))
    return factor


def _add_weight_grad(
    total: Tensor | None, d_logits: Tensor, hidden: Tensor, coefficient: Tensor, scratch: Tensor
) -> Tensor:
    """Return total + d_logits^T (coefficient * hidden), in place if there is a total; `scratch` is like `hidden`."""
    # fp16 would lose the small coefficients of a mean over many tokens: the largest is 1 until the GEMM is done.
    unit = coefficient.abs().amax().clamp(min=1e-30) if hidden.dtype == torch.float16 and len(coefficient) else None
    scaled = scale_rows(hidden, coefficient if unit is None else coefficient / unit, scratch)
    if unit is None and total is not None and total.dtype == d_logits.dtype:
        return total.addmm_(d_logits.T, scaled)
    if unit is None and total is not None and d_logits.is_cuda and total.dtype == torch.float32:
        # Accumulate in fp32: a bf16 product would be rounded before it is added.
        return torch.addmm(total, d_logits.T, scaled, out_dtype=torch.float32, out=total)
    product = d_logits.T @ scaled
    if unit is not None:
        product = product * unit if total is None else product.to(total.dtype) * unit
    return product if total is None else total.add_(product)
