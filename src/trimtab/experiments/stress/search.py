"""Search for the margin of an objective: double the stress until runs break, then bisect; or bisect given values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trimtab.experiments.stress.grid import Axis, as_number
from trimtab.text import shown

FACTOR = 2.0
RESOLUTION = 1.5  # ratio of the weakest stress that breaks and the strongest that does not, at which the search ends


def check_search(axis: Axis) -> None:
    """Refuse an axis with nothing to search, or along which nothing can be doubled."""
    numbers = [as_number(value) for value in axis.values]
    if len(numbers) > 2:
        return
    if len(numbers) != 2 or any(number is None or number <= 0 for number in numbers):
        raise ValueError(
            f"--search along {shown(str(axis))}: give two positive numbers, the weakest stress and the strongest, "
            "for example update.lr=1e-5,1e-3; or three values and more, in the order of rising stress"
        )


def possible_values(axis: Axis) -> list[str]:
    """Return the values that a search may try: the given ones, or those doubled while all survive."""
    if len(axis.values) > 2:
        return list(axis.values)
    tried: dict[str, bool] = {}
    while (value := next_value(axis, tried)) is not None:
        tried[value] = True
    return list(tried)


def next_value(axis: Axis, survived: Mapping[str, bool]) -> str | None:
    """Return the value to try next, given which values an objective has survived; None once the margin is found."""
    if len(axis.values) > 2:
        return _next_listed(axis.values, survived)
    weakest, strongest = (float(value) for value in axis.values)
    rising = weakest < strongest
    known = {float(value): lived for value, lived in survived.items()}
    if weakest not in known:
        return axis.values[0]
    order = sorted(known, reverse=not rising)
    broken = next((value for value in order if not known[value]), None)
    if broken is None:
        if order[-1] == strongest:
            return None
        doubled = order[-1] * (FACTOR if rising else 1 / FACTOR)
        beyond = doubled >= strongest if rising else doubled <= strongest
        return axis.values[1] if beyond else _text(doubled)
    below = order[: order.index(broken)]
    # Whole numbers, such as updates per step, are doubled only: what lies between may not divide what it must.
    whole = all(value.lstrip("-").isdigit() for value in axis.values)
    if not below or whole or max(broken / below[-1], below[-1] / broken) <= RESOLUTION:
        return None
    return _text(math.sqrt(broken * below[-1]))


def _next_listed(values: Sequence[str], survived: Mapping[str, bool]) -> str | None:
    # The weakest stress is always run: the accuracy there is what an objective costs.
    if values[0] not in survived:
        return values[0]
    broken = next((rank for rank, value in enumerate(values) if survived.get(value) is False), len(values))
    safe = max((rank for rank, value in enumerate(values[:broken]) if survived.get(value)), default=-1)
    return values[(safe + broken) // 2] if broken - safe > 1 else None


def _text(value: float) -> str:
    """Return a number in few digits, so that the names of folders stay short."""
    return f"{value:.2g}" if not value.is_integer() else str(int(value))
