"""Which tokens: quantiles and exact shares, the same tokens on every device.

On a CPU a full sort of a million tokens costs more than the rest of a plan. Floats are ordered like their bits, so
counting the upper bits finds the bucket that holds a rank, and only that bucket is looked at closely: linear time. On a
GPU a sort takes as long as ten small kernels, and is the quickest way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trimtab.splitmix64 import GOLDEN, mix

_BUCKETS = 1 << 15
_FEW = 1 << 14  # values that are sorted before they are counted
_SAMPLED = 16  # of so many values a sample takes one


def quantile(values: Tensor, q: float) -> Tensor:
    """The q-quantile by linear interpolation, as a 0-d tensor; NaN for no values (nothing compares below it)."""
    n = len(values)
    if n == 0:
        return values.new_full((), math.nan)
    position = q * (n - 1)
    below = min(int(position), n - 1)
    if values.is_cpu and n > _FEW:  # the values from rank `below` up hold both neighbours of the quantile
        upper = values[largest(values, n - below)].topk(min(2, n - below), largest=False, sorted=True).values
        return torch.lerp(upper[0], upper[-1], position - below)
    ordered = values.sort().values
    return torch.lerp(ordered[below], ordered[min(below + 1, n - 1)], position - below)


def share_count(n: int, share: float) -> int:
    """How many tokens a share of `n` is: `ceil(share * n)`, at least one where there is any."""
    return min(n, max(1, math.ceil(share * n - 1e-9))) if n else 0


def top_share(values: Tensor, share: float, among: Tensor | None = None) -> Tensor:
    """The positions of the `share_count` largest `values`, or of those in the mask `among`."""
    return largest(values, share_count(len(values) if among is None else int(among.sum()), share), among)


def largest(values: Tensor, count: int, among: Tensor | None = None) -> Tensor:
    """The positions of the `count` largest `values` (in the mask `among`); of equal ones the first."""
    if values.is_cpu:
        return _largest_by_counting(values, count, among)
    pool = values if among is None else torch.where(among, values, -torch.inf)
    return pool.argsort(descending=True, stable=True)[:count]


def _largest_by_counting(values: Tensor, count: int, among: Tensor | None) -> Tensor:
    if count == 0:
        return torch.zeros(0, dtype=torch.int64)
    if count * 4 < len(values) and len(values) > _FEW * _SAMPLED:
        position = _surely_enough(values, count, among)
        if len(position) >= count:
            return position[_largest_by_counting(values[position], count, None)]
    bucket = _bucket(values)
    if among is not None:
        bucket *= among  # the others sink to the lowest bucket
    above = torch.bincount(bucket, minlength=_BUCKETS).flip(0).cumsum(0)
    lowest = _BUCKETS - 1 - int(torch.searchsorted(above, count))
    chosen = bucket >= lowest
    if lowest == 0 and among is not None:
        chosen &= among
    position = chosen.nonzero().squeeze(1)
    candidates = values[position]
    extra = len(position) - count
    if extra:  # the last bucket holds more than are wanted: leave out the least of it, of equals the last
        threshold = candidates.kthvalue(extra + 1).values
        ties = candidates == threshold
        wanted = count - (candidates > threshold).sum()
        position = position[(candidates > threshold) | (ties & (ties.cumsum(0) <= wanted))]
    return position


def _surely_enough(values: Tensor, count: int, among: Tensor | None) -> Tensor:
    """Positions that almost always hold the `count` largest and few others: those above a mark that a sample sets."""
    sample = values[::_SAMPLED] if among is None else values[::_SAMPLED][among[::_SAMPLED]]
    rank = len(sample) - int(count / _SAMPLED * 1.2) - 64
    mark = sample.kthvalue(rank).values if rank > 0 else values.new_full((), -math.inf)
    chosen = values >= mark
    return (chosen if among is None else chosen & among).nonzero().squeeze(1)


def random_pick(position: Tensor, count: int, seed: int, logp: Tensor) -> Tensor:
    """A random `count` of the given positions (all of them, where there are fewer), ascending.

    The choice is a pure function of the seed, the batch (its log-probabilities) and the position, so a plan can be made
    again from its record, and is the same on any device and any number of processes.
    """
    bits = logp.view(torch.int32 if logp.dtype == torch.float32 else torch.int64)
    score = mix((position + bits.to(torch.int64).sum() * 31 + seed * 0x9E3779B9 + 1) * GOLDEN)
    return position[score.argsort()[:count]].sort().values


def _bucket(values: Tensor) -> Tensor:
    """The upper bits of each float as a number that never falls where the float rises; 0 for all negative ones."""
    bits = values.view(torch.int32) if values.dtype == torch.float32 else values.view(torch.int64)
    return (bits >> (bits.element_size() * 8 - 16)).clamp_(min=0)
