"""Integers that look random, as a pure function of integers: the root of every choice that must be made again."""

from __future__ import annotations

from torch import Tensor

GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed number


def mix(state: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on int64."""
    state = (state ^ logical_shift(state, 30)) * -0x40A7B892E31B1A47
    state = (state ^ logical_shift(state, 27)) * -0x6B2FB644ECCEEE15
    return state ^ logical_shift(state, 31)


def logical_shift(x: Tensor, bits: int) -> Tensor:
    """Right shift that brings in zeros: torch shifts signed integers arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
