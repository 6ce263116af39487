"""splitmix64 on int64 tensors: counter-based random numbers, for choices that must be reproducible."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed integer


def mix(state: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    state = (state ^ logical_shift(state, 30)) * -0x40A7B892E31B1A47
    state = (state ^ logical_shift(state, 27)) * -0x6B2FB644ECCEEE15
    return state ^ logical_shift(state, 31)


def logical_shift(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch shifts signed integers arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
