"""Text for people: numbers and curves in few characters, printable text, hints for misspelt names."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.:-=+*#"
NOTHING = "-"


def sparkline(
    values: Sequence[float], width: int, low: float | None = None, high: float | None = None, bars: str = BARS
) -> str:
    """A curve of at most `width` characters between `low` and `high`; gaps where no value is finite."""
    buckets = _buckets(values, width)
    seen = [value for value in buckets if math.isfinite(value)]
    if not seen:
        return ""
    low = min(seen) if low is None else low
    high = max(seen) if high is None else high
    return "".join(_bar(value, low, high, bars) for value in buckets)


def number(value: float | None, digits: int = 3) -> str:
    """A number for people; a dash where there is none."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """A share as a percentage; small ones keep two digits that say something, for one token in ten thousand counts."""
    if share is None or not math.isfinite(share):
        return NOTHING
    value = 100 * share
    if value == 0:
        return "0%"
    digits = max(1, 1 - math.floor(math.log10(abs(value)))) if abs(value) < 1 else 1
    return f"{value:.{min(digits, 6)}f}%"


def clock(seconds: float) -> str:
    """A duration as h:mm:ss or m:ss."""
    if not math.isfinite(seconds):
        return NOTHING
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _buckets(values: Sequence[float], width: int) -> list[float]:
    """At most `width` means of neighbours."""
    if width <= 0 or not values:
        return []
    count = min(width, len(values))
    bounds = [round(len(values) * k / count) for k in range(count + 1)]
    parts = [[v for v in values[a:b] if math.isfinite(v)] for a, b in pairwise(bounds)]
    return [fmean(part) if part else math.nan for part in parts]


def _bar(value: float, low: float, high: float, bars: str) -> str:
    if not math.isfinite(value):
        return " "
    share = (value - low) / (high - low) if high > low else 0.5
    return bars[min(max(int(share * len(bars)), 0), len(bars) - 1)]


def printable(text: str) -> str:
    """The text with every character that could steer a terminal written out; what a model wrote may be inside it."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that does not exist: the nearest that do, else all of them."""
    names = list(known)
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
