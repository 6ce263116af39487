"""Split a list among processes: consecutive items, so that the parts in rank order are the list."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise


def balanced_shares(costs: Sequence[float], size: int) -> list[slice]:
    """Split items into `size` consecutive shares of about equal cost; shares may be empty."""
    ends = list(accumulate(costs))
    total = ends[-1] if ends else 0.0
    # An item belongs to the share in which its middle lies.
    middles = [end - cost / 2 for end, cost in zip(ends, costs, strict=True)]
    bounds = [bisect_left(middles, total * rank / size) for rank in range(size)]
    return [slice(first, last) for first, last in pairwise([*bounds, len(costs)])]
