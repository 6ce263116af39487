"""Report an evaluation: tables on the screen, `result.md` with the same, and `result.json` with every metric."""

from __future__ import annotations

import datetime
import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimtab.data import BENCHMARKS, find_benchmark
from trimtab.experiments.evaluate.metrics import BenchmarkMetrics, paired_difference, score_difference
from trimtab.experiments.evaluate.run import EvalResult
from trimtab.experiments.evaluate.settings import EvalSettings, differences
from trimtab.experiments.intervals import LEVEL, Interval, average
from trimtab.files import write_atomically
from trimtab.text import NOTHING, markdown_table, number, printable
from trimtab.trainer.train import versions

# A model's name and a server's messages are untrusted text: everything shown goes through `printable`, and through
# rich's Text instead of markup.

GREEDY_SHARE = 0.9  # of problems whose samples are all equal, from which they do not look sampled

LEGEND = (
    "Means over problems with 95 % intervals by problem: each estimates the mean over the population of problems that "
    "the benchmark's were drawn from. Lengths in tokens, entropy in nats per token."
)


# Published results on these benchmarks. They compare only where model, data and decoding are the same.
JUSTRL = "README of github.com/thunlp/JustRL (arXiv 2512.16649)"
STAPO = "arXiv 2602.15620v4, mean of the six benchmarks, T 1.0, top-p 1.0"
SSPO = "abstract of arXiv 2511.04256v2, mean of its five benchmarks"
STARE = "arXiv 2606.19236, mean of its benchmarks, short CoT"


@dataclass(frozen=True)
class PublishedResult:
    """A row of a paper's table, in percent. `average` is the paper's own, over its own benchmarks."""

    model: str
    source: str
    average: float | None = None
    scores: dict[str, float] = field(default_factory=dict)


def _justrl(model: str, *scores: float) -> PublishedResult:
    """Return a row with the six benchmarks in the README's order, without its average, which is over nine."""
    return PublishedResult(model, JUSTRL, scores=dict(zip(BENCHMARKS, scores, strict=False)))


PUBLISHED = (
    _justrl("DeepSeek-R1-Distill-Qwen-1.5B", 29.90, 22.40, 63.82, 84.90, 34.65, 45.95),
    _justrl("DeepScaleR-1.5B-Preview", 40.21, 28.65, 73.83, 89.30, 39.34, 52.79),
    _justrl("ProRL-V2 1.5B", 51.87, 35.73, 88.75, 92.00, 49.03, 67.84),
    _justrl("JustRL-DeepSeek-1.5B", 52.60, 38.75, 91.02, 91.65, 51.47, 67.99),
    _justrl("OpenMath-Nemotron-1.5B", 58.75, 48.44, 90.55, 92.40, 26.93, 71.70),
    _justrl("QuestA-Nemotron-1.5B", 71.56, 62.08, 93.44, 92.95, 32.08, 72.28),
    _justrl("JustRL-Nemotron-1.5B", 69.69, 62.92, 96.02, 94.15, 30.24, 76.59),
    PublishedResult("Qwen3-1.7B-Base, STAPO", STAPO, 38.18),
    PublishedResult("Qwen3-8B-Base, STAPO", STAPO, 58.76),
    PublishedResult("Qwen3-14B-Base, STAPO", STAPO, 64.38),
    PublishedResult("Qwen3-1.7B-Base, best baseline", STAPO, 33.64),
    PublishedResult("Qwen3-8B-Base, best baseline", STAPO, 57.63),
    PublishedResult("Qwen3-14B-Base, best baseline", STAPO, 60.77),
    PublishedResult("Qwen2.5-Math-1.5B, SSPO", SSPO, 46.72),
    PublishedResult("Qwen2.5-Math-1.5B, GRPO", SSPO, 43.01),
    PublishedResult("Qwen2.5-Math-1.5B, GSPO", SSPO, 44.42),
    PublishedResult("Qwen2.5-Math-7B, STARE O1", STARE, 54.4),
    PublishedResult("Qwen2.5-Math-7B, GRPO with dynamic sampling", STARE, 49.1),
)


@dataclass(frozen=True)
class ReportTable:
    """A table: a title, the column names, and rows of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(result: EvalResult, baseline: EvalResult | None = None, papers: bool = False) -> list[ReportTable]:
    """Return the tables of an evaluation."""
    made = [_score_table(result), _response_table(result)]
    if result.tools:
        made.append(_tool_table(result))
    if baseline is not None:
        made.append(_comparison_table(result, baseline))
    return [*made, _published_table(result)] if papers else made


def notes(result: EvalResult, baseline: EvalResult | None = None) -> list[str]:
    """Return the notes below the tables: what failed, what is missing, what differs."""
    lines = [LEGEND]
    for name, metrics in result.metrics.items():
        lines += _failure_notes(find_benchmark(name).title, metrics)
        lines += _sampling_notes(find_benchmark(name).title, metrics, result.settings)
    if result.rejected_truths:
        lines.append(f"{len(result.rejected_truths)} answers are rejected by the rule {result.settings.rule} itself.")
    if all(metrics.entropy is None for metrics in result.metrics.values()):
        lines.append(
            "There is no entropy: this sampler did not measure it. Surprisal, where shown, is the mean negative "
            "log-probability per token as the sampler reported it."
        )
    if baseline is not None:
        changed = differences(baseline.settings, result.settings)
        changed = [line for line in changed if not line.startswith(("model", "weights"))]  # these are the comparison
        lines += [f"The two were sampled differently: {line}" for line in changed]
        if baseline.settings.rule != result.settings.rule:
            lines.append(f"The two were graded differently: {baseline.settings.rule} -> {result.settings.rule}")
    return lines


def show(console: Console, result: EvalResult, baseline: EvalResult | None = None, papers: bool = False) -> None:
    """Print the tables and notes."""
    for made in tables(result, baseline, papers):
        table = Table(title=Text(printable(made.title)), title_justify="left")
        for position, name in enumerate(made.columns):
            # Only names may wrap: a number broken over two lines is misread.
            table.add_column(name, justify="right" if position else "left", no_wrap=position > 0)
        for row in made.rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        console.print(table)
    for note in notes(result, baseline):
        console.print(Text(printable(note)))


def write(result: EvalResult, baseline: EvalResult | None = None, papers: bool = False) -> None:
    """Write `result.md` and `result.json` beside the generations."""
    parts = []
    for table in tables(result, baseline, papers):
        rows = [[_escaped(cell) for cell in row] for row in table.rows]
        parts += [f"## {_escaped(table.title)}", markdown_table(table.columns, rows)]
    parts += ["\n".join(f"- {printable(note)}" for note in notes(result, baseline))]
    write_atomically(result.folder.path / "result.md", "\n\n".join(parts) + "\n")
    stored = json.dumps(as_json(result, baseline), indent=2, allow_nan=False)
    write_atomically(result.folder.path / "result.json", stored + "\n")


def as_json(result: EvalResult, baseline: EvalResult | None = None) -> dict[str, Any]:
    """Return every metric with the settings, machine and versions that it was measured with."""
    speed = round(result.tokens / result.seconds, 1) if result.new_samples and result.seconds else None
    output = {
        "settings": result.settings.as_json(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "level": LEVEL,
        "metrics": {name: asdict(metrics) for name, metrics in result.metrics.items()},
        "average": _interval_json(_average(result)),
        "rejected_truths": result.rejected_truths,
        **({"tools": {name: asdict(figures) for name, figures in result.tools.items()}} if result.tools else {}),
        "this_process": {
            "samples": result.new_samples,
            "tokens": result.tokens,
            "seconds": round(result.seconds, 3),
            "tokens_per_second": speed,
        },
    }
    if baseline is not None:
        output["against"] = {
            "model": baseline.settings.model,
            "folder": str(baseline.folder.path),
            "scores": {
                name: _interval_json(score_difference(result.samples[name], baseline.samples[name]))
                for name in compare_results(result, baseline)
            },
            "differences": {name: _interval_json(each) for name, each in compare_results(result, baseline).items()},
        }
    return output


def compare_results(result: EvalResult, baseline: EvalResult) -> dict[str, Interval | None]:
    """Return the difference in avg@k, paired by problem, for the benchmarks that both have."""
    both = [name for name in result.metrics if name in baseline.metrics]
    if not both:
        raise ValueError(f"{result.folder.path} and {baseline.folder.path} have no benchmark in common to compare")
    return {name: paired_difference(result.samples[name], baseline.samples[name]) for name in both}


def machine() -> str:
    """Return the GPU's name, or the CPU and its threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def percent(interval: Interval | None, signed: bool = False) -> str:
    """Return a share with its interval, in percent."""
    return _cell(interval, lambda value: f"{100 * value:+.1f}" if signed else f"{100 * value:.1f}")


def _score_table(result: EvalResult) -> ReportTable:
    rows = []
    scored = any(metrics.score is not None for metrics in result.metrics.values())
    for name, metrics in result.metrics.items():
        # pass@k of the largest k only; result.json has the others.
        last = metrics.pass_at[max(metrics.pass_at)] if metrics.pass_at else None
        title = f"{find_benchmark(name).title} ({metrics.problems})"
        rows.append([title, str(metrics.samples), percent(metrics.average), percent(last), percent(metrics.majority)])
        rows[-1] += [_cell(metrics.score, number)] if scored else []
    total = _average(result)
    if total is not None:
        rows.append(["mean of benchmarks", "", percent(total), NOTHING, NOTHING, *([NOTHING] if scored else [])])
    settings = result.settings
    title = f"{settings.model}: temperature {settings.temperature:g}, top-p {settings.top_p:g}, percent"
    columns = ("benchmark (problems)", "k", "avg@k", "pass@k", "maj@k", *(["score"] if scored else []))
    return ReportTable(title, columns, rows)


def _response_table(result: EvalResult) -> ReportTable:
    rows = [
        [
            find_benchmark(name).title,
            _cell(metrics.length, lambda value: f"{value:,.0f}"),
            percent(metrics.truncated),
            percent(metrics.no_answer),
            _cell(metrics.entropy or metrics.surprisal, lambda value: f"{value:.3f}"),
            str(metrics.grader_failures),
            str(metrics.failed_samples),
        ]
        for name, metrics in result.metrics.items()
    ]
    measured = any(metrics.entropy for metrics in result.metrics.values())
    columns = ("benchmark", "tokens", "truncated %", "no answer %", "entropy" if measured else "surprisal")
    return ReportTable("Responses", (*columns, "not graded", "not generated"), rows)


def _tool_table(result: EvalResult) -> ReportTable:
    rows = []
    for name, figures in result.tools.items():
        failed = ", ".join(f"{kind} {count}" for kind, count in figures.outcomes.items() if kind != "ok") or NOTHING
        ok = NOTHING if figures.ok_share is None else f"{100 * figures.ok_share:.1f}"
        numbers = [f"{figures.turns:.2f}", f"{figures.calls:.2f}", ok, f"{100 * figures.answers_with_call_share:.1f}"]
        rows.append([find_benchmark(name).title, *numbers, failed])
    columns = ("benchmark", "messages", "calls", "ok %", "answers with a call %", "calls that failed")
    return ReportTable("Tools, means per response", columns, rows)


def _comparison_table(result: EvalResult, baseline: EvalResult) -> ReportTable:
    rows = []
    for name, difference in compare_results(result, baseline).items():
        ours, theirs = percent(result.metrics[name].average), percent(baseline.metrics[name].average)
        paired = [percent(difference, signed=True), str(difference.problems) if difference else "0"]
        rows.append([find_benchmark(name).title, ours, theirs, *paired, _significance(difference)])
        if scored := score_difference(result.samples[name], baseline.samples[name]):
            both = [_cell(each.metrics[name].score, number) for each in (result, baseline)]
            paired = [_cell(scored, lambda value: f"{value:+.3f}"), str(scored.problems)]
            rows.append([f"{find_benchmark(name).title}, score", *both, *paired, _significance(scored)])
    columns = ("benchmark", "avg@k", "baseline", "difference", "paired problems", "")
    return ReportTable(f"Against {baseline.settings.model}, paired by problem, percentage points", columns, rows)


def _published_table(result: EvalResult) -> ReportTable:
    names = [name for name in BENCHMARKS if name in result.metrics]
    own = [percent(result.metrics[name].average) for name in names]
    rows = [[f"{result.settings.model} (this evaluation)", *own, percent(_average(result)), ""]]
    for line in PUBLISHED:
        scores = [f"{line.scores[name]:.1f}" if name in line.scores else NOTHING for name in names]
        shown = NOTHING if line.average is None else f"{line.average:.1f}"
        rows.append([line.model, *scores, shown, line.source])
    columns = ("as published, percent", *(find_benchmark(name).title for name in names), "mean", "source")
    return ReportTable("Beside published results (which come without intervals)", columns, rows)


def _significance(difference: Interval | None) -> str:
    if difference is None or difference.low is None or difference.high is None:
        return ""
    return "better" if difference.low > 0 else "worse" if difference.high < 0 else "not significant"


def _average(result: EvalResult) -> Interval | None:
    known = [metrics.average for metrics in result.metrics.values() if metrics.average is not None]
    # A mean that left out a benchmark without results would look better or worse than it is.
    return average(known) if len(known) > 1 and len(known) == len(result.metrics) else None


def _failure_notes(title: str, metrics: BenchmarkMetrics) -> list[str]:
    lines = []
    if metrics.failed_samples:
        lines.append(f"{title}: {metrics.failed_samples} samples could not be generated; they are in no mean.")
    if metrics.grader_failures:
        lines.append(f"{title}: {metrics.grader_failures} responses could not be graded; they are in no accuracy.")
    if metrics.problems_without_samples:
        lines.append(f"{title}: {metrics.problems_without_samples} problems have no graded sample and are in no mean.")
    if metrics.average_if_failures_wrong is not None:
        worst = 100 * metrics.average_if_failures_wrong
        lines.append(f"{title}: if all of those were wrong, avg@k would be {worst:.1f} %.")
    return lines


def _sampling_notes(title: str, metrics: BenchmarkMetrics, settings: EvalSettings) -> list[str]:
    """Return a warning where samples do not differ, though they were to be sampled."""
    equal, several = metrics.problems_of_equal_samples, metrics.problems - metrics.problems_without_samples
    if not settings.temperature or metrics.samples < 2 or equal < max(2, GREEDY_SHARE * several):
        return []
    who = "the server answers" if settings.sampler == "endpoint" else "the model answers"
    return [
        f"Warning: {title}: in {equal} of {several} problems all samples are the same text, at temperature "
        f"{settings.temperature:g}: {who} as in greedy decoding (transformers serve does, whatever is asked). "
        "These are not figures of sampling: avg@k, pass@k and maj@k are those of one greedy answer."
    ]


def _cell(interval: Interval | None, write: Callable[[float], str]) -> str:
    if interval is None:
        return NOTHING
    if interval.low is None or interval.high is None:
        return write(interval.mean)
    return f"{write(interval.mean)} [{write(interval.low)}, {write(interval.high)}]"


def _interval_json(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {key: value if value is None or math.isfinite(value) else None for key, value in asdict(interval).items()}


def _escaped(text: str) -> str:
    """Return a text for Markdown, with what a model's name could do to it escaped."""
    return printable(text).replace("<", "&lt;").replace("\n", " ")
