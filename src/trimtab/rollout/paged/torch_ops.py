"""The parts of a decoding step in plain torch: what the kernels are tested against, and what runs on a CPU.

The arithmetic is that of the training forward under autocast: linear maps in the compute type, everything between them
in fp32, the residual stream in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from trimtab.rollout import sampling
from trimtab.rollout.paged.decode_state import HOME, KEY, LIMIT, LIVE, MADE, PAGE, POSITION, TOKEN, State
from trimtab.rollout.types import SamplingOptions


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """x += delta, and out = RMSNorm(x) weight."""
    if delta is not None:
        x += delta
    out.copy_(rms_norm(x, weight, eps))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, rounded to x's type before the weight as transformers does."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def gated(gate_up: Tensor, out: Tensor) -> None:
    """silu(gate) x up."""
    gate, up = gate_up.chunk(2, -1)
    torch.mul(silu(gate), up, out=out)


def rotated(x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys (rows, heads, D), normed where the family does so, turned to their positions."""
    if norm is not None:
        x = rms_norm(x, norm, eps)
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return x.float() * cos[:, None] + turned * sin[:, None]


def place(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    turns: tuple[Tensor, Tensor],
    cache: Tensor,
    position: Tensor,
    page: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a prefix, turned to their positions; keys and values go into their pages too.

    A token whose page is -1 goes nowhere.
    """
    q, k, v = _turned(qkv, norms, eps, (turns[0][position], turns[1][position]), cache)
    somewhere = page >= 0
    where = page[somewhere], slice(None), position[somewhere] % PAGE
    cache[0][where], cache[1][where] = k[somewhere], v[somewhere]
    return q, k, v


def _turned(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    turns: tuple[Tensor, Tensor],
    cache: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    kv, d = cache.shape[2], cache.shape[4]
    q, k, v = qkv.view(len(qkv), -1, d).tensor_split([-2 * kv, -kv], 1)
    q_norm, k_norm = norms if norms is not None else (None, None)
    return rotated(q, q_norm, eps, *turns).to(qkv.dtype), rotated(k, k_norm, eps, *turns).to(qkv.dtype), v


def copy_pages(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy whole pages in all layers."""
    for layer in cache:
        layer[:, target] = layer[:, source]


def attend(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    turns: tuple[Tensor, Tensor],
    cache: Tensor,
    state: State,
    out: Tensor,
) -> None:
    """Attention of every live row's token over its pages; its own key and value are written there first.

    `cache` is one layer's (2, pages, kv heads, PAGE, D), `turns` the cosines and sines of all positions,
    the same for both halves of a head.
    """
    rows, kv, d = len(qkv), cache.shape[2], cache.shape[4]
    position, live = state.numbers[POSITION, :rows], state.numbers[LIVE, :rows].bool()
    q, k, v = _turned(qkv, norms, eps, (turns[0][position], turns[1][position]), cache)
    table = state.pages[:rows].long()
    own = table.gather(1, (position // PAGE)[:, None]).squeeze(1)
    cache[0][own[live], :, (position % PAGE)[live]] = k[live]
    cache[1][own[live], :, (position % PAGE)[live]] = v[live]
    seen = torch.arange(table.shape[1] * PAGE, device=qkv.device) <= position[:, None]
    keys, values = (part[table].transpose(1, 2).reshape(rows, kv, -1, d) for part in cache)
    keys, values = (part.masked_fill(~seen[:, None, :, None], 0) for part in (keys, values))  # the rest may be anything
    answer = scaled_dot_product_attention(q[:, :, None], keys, values, seen[:, None, None], enable_gqa=True)
    out.copy_(answer.reshape(rows, -1))


def draw(logits: Tensor, state: State, greedy: bool) -> None:
    """A token for every live row: written to its home, and into its row as the next to be read."""
    numbers = state.numbers[:, : len(logits)]
    live = numbers[LIVE].bool()
    temperature, top_p, top_k = state.sampling.tolist()
    options = SamplingOptions(1, 1, 0.0 if greedy else temperature, top_p, int(top_k))
    token, logp = sampling.sample_tokens(logits, numbers[KEY], numbers[MADE], options)
    home, made = numbers[HOME][live], numbers[MADE][live]
    state.tokens[home, made] = token[live].int()
    state.logps[home, made] = logp[live]
    numbers[TOKEN] = torch.where(live, token, numbers[TOKEN])
    numbers[POSITION] += live
    numbers[MADE] += live
    numbers[LIVE] *= ~torch.isin(token, state.ends) & (numbers[MADE] < numbers[LIMIT])
