"""Select tokens by value: quantiles and exact shares, the same tokens on every device."""

from __future__ import annotations

import math

from trimtab.objectives.lazy_torch import Tensor, torch
from trimtab.objectives.splitmix64 import GOLDEN, mix


def quantile(values: Tensor, q: float) -> Tensor:
    """Return the q-quantile by linear interpolation, 0-d; NaN for no values, so that nothing compares below it."""
    n = len(values)
    if n == 0:
        return values.new_full((), math.nan)
    position = q * (n - 1)
    below = min(int(position), n - 1)
    above = min(below + 1, n - 1)
    if values.is_cpu:
        # torch.quantile sorts: 230 ms for a million tokens on one core, where two kthvalues take 40.
        low, high = values.kthvalue(below + 1).values, values.kthvalue(above + 1).values
    else:
        ordered = values.sort().values
        low, high = ordered[below], ordered[above]
    return torch.lerp(low, high, position - below)


def share_count(n: int, share: float) -> int:
    """Return how many tokens a share of `n` is: `ceil(share * n)`, at least one if there is any."""
    # 0.07 * 100 is 7.000000000000001 in floating point: without the slack that would be 8 tokens.
    return min(n, max(1, math.ceil(share * n - 1e-9))) if n else 0


def top_share(values: Tensor, share: float, among: Tensor | None = None) -> Tensor:
    """Return the positions of the `share_count` largest `values`, or of those in the mask `among`."""
    return largest(values, share_count(len(values) if among is None else int(among.sum()), share), among)


def largest(values: Tensor, count: int, among: Tensor | None = None) -> Tensor:
    """Return the positions of the `count` largest `values` (in the mask `among`); of equal ones the first."""
    pool = values if among is None else torch.where(among, values, -torch.inf)
    if not values.is_cpu or count == 0:
        return pool.argsort(descending=True, stable=True)[:count]
    # On one core kthvalue takes 20 to 40 ms for a million tokens and a stable sort 290; topk is no faster, and of equal
    # values it takes any. On a GPU the sort costs no more than the ten small kernels below.
    threshold = pool.kthvalue(len(pool) - count + 1).values
    position = (pool >= threshold).nonzero().squeeze(1)
    if len(position) > count:
        candidates = pool[position]
        ties = candidates == threshold
        wanted = count - (~ties).sum()
        position = position[~ties | (ties.cumsum(0) <= wanted)]
    return position


def random_pick(position: Tensor, count: int, seed: int, logp: Tensor) -> Tensor:
    """Return a random `count` of the given positions (all of them if there are fewer), ascending."""
    # A pure function of the seed, the batch (the bits of its log-probabilities) and the position, not of a generator's
    # state: a plan can be made again from its record, and is the same on any device and any number of processes.
    bits = logp.view(torch.int32 if logp.dtype == torch.float32 else torch.int64)
    score = mix((position + bits.to(torch.int64).sum() * 31 + seed * 0x9E3779B9 + 1) * GOLDEN)
    return position[score.argsort()[:count]].sort().values
