"""What an evaluation says: a table on the screen, `result.md` with the same, and `result.json` with every figure."""

from __future__ import annotations

import datetime
import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import trimtab
from trimtab.evaluate.figures import Figures, paired_difference
from trimtab.evaluate.intervals import LEVEL, Interval, average
from trimtab.evaluate.papers import PRINTED
from trimtab.evaluate.run import Evaluated
from trimtab.evaluate.settings import differences
from trimtab.files import write_atomically
from trimtab.tasks import BENCHMARKS
from trimtab.text import printable

NOTHING = "-"
LEGEND = (
    "Means over questions with 95 % intervals by question: each estimates the mean over the population of questions "
    "that the benchmark's were drawn from. Lengths in tokens, entropy in nats per token."
)


@dataclass(frozen=True)
class Page:
    """A table: a title, the head, and rows of text."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def pages(ours: Evaluated, theirs: Evaluated | None = None, papers: bool = False) -> list[Page]:
    """The tables of an evaluation."""
    made = [_scores(ours), _responses(ours)]
    if theirs is not None:
        made.append(_comparison(ours, theirs))
    return [*made, _papers(ours)] if papers else made


def notes(ours: Evaluated, theirs: Evaluated | None = None) -> list[str]:
    """What must be said beside the tables: what failed, what is missing, what differs."""
    said = [LEGEND]
    for name, found in ours.figures.items():
        said += _troubles(BENCHMARKS[name].title, found)
    if ours.unreadable:
        said.append(f"{len(ours.unreadable)} answers are not accepted by the rule {ours.settings.rule} itself.")
    if all(found.entropy is None for found in ours.figures.values()):
        said.append(
            "There is no entropy: this sampler did not measure it. Surprisal, where shown, is the mean negative "
            "log-probability per token as the sampler reported it."
        )
    if theirs is not None:
        differ = [
            line for line in differences(theirs.settings, ours.settings) if not line.startswith(("model", "weights"))
        ]
        said += [f"The two were sampled differently: {line}" for line in differ]
        if theirs.settings.rule != ours.settings.rule:
            said.append(f"The two were graded differently: {theirs.settings.rule} -> {ours.settings.rule}")
    return said


def show(console: Console, ours: Evaluated, theirs: Evaluated | None = None, papers: bool = False) -> None:
    """Print the tables."""
    for page in pages(ours, theirs, papers):
        table = Table(title=Text(printable(page.title)), title_justify="left")
        for number, name in enumerate(page.head):
            table.add_column(name, justify="right" if number else "left", no_wrap=number > 0)
        for row in page.rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        console.print(table)
    for note in notes(ours, theirs):
        console.print(Text(printable(note)))


def write(ours: Evaluated, theirs: Evaluated | None = None, papers: bool = False) -> None:
    """Keep the result beside the generations."""
    text = "\n".join(_markdown(page) for page in pages(ours, theirs, papers))
    text += "\n" + "\n".join(f"- {printable(note)}" for note in notes(ours, theirs)) + "\n"
    write_atomically(ours.folder.path / "result.md", text)
    write_atomically(ours.folder.result, json.dumps(as_json(ours, theirs), indent=2, allow_nan=False) + "\n")


def as_json(ours: Evaluated, theirs: Evaluated | None = None) -> dict[str, Any]:
    """Every figure, and all that made it."""
    result = {
        "settings": ours.settings.as_json(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "level": LEVEL,
        "figures": {name: found.as_json() for name, found in ours.figures.items()},
        "average": _plain(_average(ours)),
        "unreadable_answers": ours.unreadable,
        "this_process": {
            "samples": ours.drawn,
            "tokens": ours.tokens,
            "seconds": round(ours.seconds, 3),
            "tokens_per_second": round(ours.tokens / ours.seconds, 1) if ours.drawn and ours.seconds else None,
        },
    }
    if theirs is not None:
        pairs = {name: _plain(interval) for name, interval in compared(ours, theirs).items()}
        result["against"] = {"model": theirs.settings.model, "folder": str(theirs.folder.path), "differences": pairs}
    return result


def compared(ours: Evaluated, theirs: Evaluated) -> dict[str, Interval | None]:
    """Ours minus theirs in avg@k, paired by question, for the benchmarks that both have."""
    both = [name for name in ours.figures if name in theirs.figures]
    if not both:
        raise ValueError(f"{ours.folder.path} and {theirs.folder.path} have no benchmark in common: nothing to compare")
    return {name: paired_difference(ours.samples[name], theirs.samples[name]) for name in both}


def machine() -> str:
    """What it ran on."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Of what shapes the numbers."""
    import transformers

    known = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return known | {"transformers": transformers.__version__, "trimtab": trimtab.__version__}


def share(interval: Interval | None, signed: bool = False) -> str:
    """A share with its interval, in percent."""
    return _cell(interval, lambda value: f"{100 * value:+.1f}" if signed else f"{100 * value:.1f}")


def _scores(ours: Evaluated) -> Page:
    rows = []
    for name, found in ours.figures.items():
        last = found.pass_at[max(found.pass_at)] if found.pass_at else None
        title = f"{BENCHMARKS[name].title} ({found.questions})"
        rows.append([title, str(found.samples), share(found.average), share(last), share(found.majority)])
    total = _average(ours)
    if total is not None:
        rows.append(["mean of benchmarks", "", share(total), NOTHING, NOTHING])
    title = f"{ours.settings.model}: temperature {ours.settings.temperature:g}, top-p {ours.settings.top_p:g}, percent"
    return Page(title, ("benchmark (questions)", "k", "avg@k", "pass@k", "maj@k"), rows)


def _responses(ours: Evaluated) -> Page:
    rows = []
    for name, found in ours.figures.items():
        nats = found.entropy or found.surprisal
        rows.append(
            [
                BENCHMARKS[name].title,
                _cell(found.length, lambda value: f"{value:,.0f}"),
                share(found.truncated),
                share(found.no_answer),
                _cell(nats, lambda value: f"{value:.3f}"),
                str(found.grader_failures),
                str(found.failed_samples),
            ]
        )
    measured = any(found.entropy for found in ours.figures.values())
    head = ("benchmark", "tokens", "truncated %", "no answer %", "entropy" if measured else "surprisal")
    return Page("Responses", (*head, "not graded", "not drawn"), rows)


def _comparison(ours: Evaluated, theirs: Evaluated) -> Page:
    rows = []
    for name, found in compared(ours, theirs).items():
        verdict = "" if found is None or found.low is None or found.high is None else _verdict(found.low, found.high)
        mine, other = ours.figures[name], theirs.figures[name]
        paired = str(found.questions) if found else "0"
        title = BENCHMARKS[name].title
        rows.append([title, share(mine.average), share(other.average), share(found, signed=True), paired, verdict])
    head = ("benchmark", "avg@k", "theirs", "difference", "paired questions", "")
    return Page(f"Against {theirs.settings.model}, paired by question, points of percent", head, rows)


def _papers(ours: Evaluated) -> Page:
    names = [name for name in BENCHMARKS if name in ours.figures]
    own = [share(ours.figures[name].average) for name in names]
    rows = [[f"{ours.settings.model} (ours)", *own, share(_average(ours)), ""]]
    for line in PRINTED:
        scores = [f"{line.scores[name]:.1f}" if name in line.scores else NOTHING for name in names]
        shown = NOTHING if line.average is None else f"{line.average:.1f}"
        rows.append([line.model, *scores, shown, line.source])
    head = ("as printed, percent", *(BENCHMARKS[name].title for name in names), "mean", "source")
    return Page("Beside what papers print (no intervals are printed there)", head, rows)


def _verdict(low: float, high: float) -> str:
    return "better" if low > 0 else "worse" if high < 0 else "not told apart"


def _average(ours: Evaluated) -> Interval | None:
    parts = [found.average for found in ours.figures.values() if found.average is not None]
    return average(parts) if len(parts) > 1 and len(parts) == len(ours.figures) else None


def _troubles(title: str, found: Figures) -> list[str]:
    said = []
    if found.failed_samples:
        said.append(f"{title}: {found.failed_samples} samples could not be drawn; they are in no mean.")
    if found.grader_failures:
        said.append(f"{title}: {found.grader_failures} responses could not be graded; they are in no accuracy.")
    if found.questions_without_samples:
        said.append(f"{title}: {found.questions_without_samples} questions have no graded sample; they are in no mean.")
    if found.average_if_failures_wrong is not None:
        said.append(
            f"{title}: if all of those were wrong, avg@k would be {100 * found.average_if_failures_wrong:.1f} %."
        )
    return said


def _cell(interval: Interval | None, write: Callable[[float], str]) -> str:
    if interval is None:
        return NOTHING
    if interval.low is None or interval.high is None:
        return write(interval.mean)
    return f"{write(interval.mean)} [{write(interval.low)}, {write(interval.high)}]"


def _plain(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {key: value if value is None or math.isfinite(value) else None for key, value in asdict(interval).items()}


def _markdown(page: Page) -> str:
    """A table in Markdown; what a model's name could do to it is written out."""
    lines = [f"## {_escaped(page.title)}", "", f"| {' | '.join(page.head)} |", "|---" * len(page.head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(_escaped, row))} |" for row in page.rows), ""])


def _escaped(text: str) -> str:
    return printable(text).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
