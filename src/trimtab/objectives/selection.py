"""Which tokens: order statistics, quantiles and exact shares in linear time, the same on every device.

A full sort of a million tokens costs more than the rest of a plan. Floats are ordered like their bits, so counting the
upper sixteen bits finds the bucket that holds a rank, and only that bucket is looked at closely.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BUCKETS = 1 << 16


def kth_largest(values: Tensor, k: int, among: Tensor | None = None) -> Tensor:
    """The k-th largest (k from 1) of `values`, or of those in the mask `among`, as a 0-d tensor."""
    bucket = _bucket(values)
    if among is not None:
        bucket = bucket * among  # the others sink to the lowest bucket, which no sane float is in
    above = torch.bincount(bucket, minlength=_BUCKETS).flip(0).cumsum(0)
    place = int(torch.searchsorted(above, k))
    higher = int(above[place - 1]) if place else 0
    inside = values[bucket == _BUCKETS - 1 - place]
    return inside.kthvalue(len(inside) - (k - higher) + 1).values


def quantile(values: Tensor, q: float) -> Tensor:
    """The q-quantile by linear interpolation, as a 0-d tensor; NaN for no values (nothing compares below it)."""
    n = len(values)
    if n == 0:
        return values.new_full((), math.nan)
    position = q * (n - 1)
    below = min(int(position), n - 1)
    low = kth_largest(values, n - below)
    if below + 1 >= n:
        return low
    high = kth_largest(values, n - below - 1)
    return torch.lerp(low, high, position - below)


def share_count(n: int, share: float) -> int:
    """How many tokens a share of `n` is: `ceil(share * n)`, at least one where there is any."""
    return min(n, max(1, math.ceil(share * n - 1e-9))) if n else 0


def top_share(values: Tensor, share: float, among: Tensor | None = None) -> Tensor:
    """A mask of the `share_count` largest `values`, or of those in the mask `among`; of equal ones the first."""
    count = share_count(len(values) if among is None else int(among.sum()), share)
    if count == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    threshold = kth_largest(values, count, among)
    chosen, ties = values > threshold, values == threshold
    if among is not None:
        chosen, ties = chosen & among, ties & among
    left, tied = torch.stack([count - chosen.sum(), ties.sum()]).tolist()
    return chosen | (ties if tied == left else ties & (ties.cumsum(0) <= left))


def random_pick(among: Tensor, count: int, seed: int, logp: Tensor) -> Tensor:
    """A mask of `count` random tokens of `among` (all of them, where there are fewer).

    The choice is a pure function of the seed, the batch (its log-probabilities) and the position, so a plan can be made
    again from its record, and is the same on any device and any number of processes.
    """
    position = among.nonzero().squeeze(1)
    bits = logp.view(torch.int32 if logp.dtype == torch.float32 else torch.int64)
    score = _mix(position + bits.to(torch.int64).sum() * 31 + seed * 0x9E3779B9)
    chosen = torch.zeros_like(among)
    chosen[position[score.argsort()[:count]]] = True
    return chosen


def _mix(state: Tensor) -> Tensor:
    """Integers that look random: the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    state = (state + 1) * -0x61C8864680B583EB
    state = (state ^ _shift(state, 30)) * -0x40A7B892E31B1A47
    state = (state ^ _shift(state, 27)) * -0x6B2FB644ECCEEE15
    return state ^ _shift(state, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch shifts signed integers arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _bucket(values: Tensor) -> Tensor:
    """The upper sixteen bits of each float as an integer that orders like the float."""
    bits = values.view(torch.int32) if values.dtype == torch.float32 else values.view(torch.int64)
    width = bits.element_size() * 8
    upper = bits >> (width - 16)  # sign, exponent and first digits, as a signed number
    return (upper ^ ((upper >> 15) & 0x7FFF)) + (_BUCKETS >> 1)
