"""The pictures of the laboratory: entropy and accuracy by step, and the critical weight by response length."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, linear_regression

import matplotlib as mpl
import torch

import laboratory_pages
from laboratory_pages import BAND, SHOWN, Run
from trimtab.experiments.intervals import mean_limits

mpl.use("svg")
mpl.rcParams.update({"svg.hashsalt": "trimtab", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import LogLocator  # noqa: E402

# Colours that colour-blind readers can tell apart (Okabe and Ito); the dashes help in print.
STYLES = dict(zip(SHOWN, (("#555555", "-."), ("#E69F00", ":"), ("#0072B2", "--"), ("#D55E00", "-")), strict=True))
LEAST_ENTROPY = 0.01  # nats, the lowest end of the picture: the scale is logarithmic
WEIGHTS = ("stare/critical_weight", "stare/weight")  # curves of the critical weight; the first that a run has counts
Curve = Sequence[tuple[int, float]]


def pictures() -> dict[str, str]:
    """Return the pictures whose results are there, by path."""
    made = {}
    if laboratory_pages.shown_rows():
        made["docs/laboratory.svg"] = _svg(course())
    if critical_weights():
        made["docs/theory-length.svg"] = _svg(weight_by_length())
    return made


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    # White behind it, so that it reads on a dark page too.
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    plt.close(figure)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def course() -> Figure:
    """Draw entropy and held-out accuracy by step: mean and 95 % band over the seeds."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.7), layout="constrained")
    for name, seeds in laboratory_pages.shown_rows().items():
        _line(left, [run["curves"]["policy/entropy"] for run in seeds.values()], name)
        _line(right, [run["evaluations"] for run in seeds.values()], name, scale=100.0)
    target = laboratory_pages.target()
    left.axhspan(target * (1 - BAND), target * (1 + BAND), color="0.93", zorder=0)
    left.axhline(target, color="0.3", lw=1, ls=(0, (5, 3)), zorder=1)
    left.annotate(f" target {target:g}", (0, target), xycoords=("axes fraction", "data"), va="bottom", color="0.3")
    left.set_yscale("log")
    left.set_ylim(bottom=max(LEAST_ENTROPY, left.get_ylim()[0]))
    left.set_yticks([tick for tick in (0.01, 0.03, 0.1, 0.3, 1, 3) if left.get_ylim()[0] <= tick <= left.get_ylim()[1]])
    left.minorticks_off()
    left.yaxis.set_major_formatter("{x:g}")
    left.set_title("entropy of the policy (nats)", loc="left", fontsize=11)
    right.set_title("held-out accuracy, greedy (%)", loc="left", fontsize=11)
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_xlim(left=0)
        axes.grid(axis="y", color="0.9", lw=0.6)
        axes.set_axisbelow(True)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=len(SHOWN), frameon=False)
    return figure


def _line(axes: Axes, curves: Sequence[Curve], name: str, scale: float = 1.0) -> None:
    steps, middle, low, high = mean_curve(curves)
    if not steps:
        return
    colour, dashes = STYLES[name]
    axes.plot(steps, [scale * each for each in middle], color=colour, ls=dashes, lw=2, label=SHOWN[name])
    low = [max(each, LEAST_ENTROPY / 10) for each in low]  # a logarithm needs more than 0
    axes.fill_between(
        steps, [scale * each for each in low], [scale * each for each in high], color=colour, alpha=0.15, lw=0
    )


def mean_curve(curves: Sequence[Curve]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return the steps that all curves have, with mean, low and high end of the 95 % interval (Student's t) at each."""
    tables = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    values = [[table[step] for table in tables] for step in steps]
    middle = [fmean(each) for each in values]
    if len(tables) < 2 or not steps:
        return steps, middle, middle, middle
    low, high = mean_limits(torch.tensor(values, dtype=torch.float64))
    return steps, middle, low.tolist(), high.tolist()


def critical_weights(part: str = "length") -> list[tuple[float, float]]:
    """Return (mean response length, mean critical weight - 1) of every run that measured the weight."""
    found = [_critical(run) for seeds in laboratory_pages.runs(part).values() for run in seeds.values()]
    return sorted(pair for pair in found if pair is not None)


def _critical(run: Run) -> tuple[float, float] | None:
    curves: Mapping[str, Curve] = run["curves"]
    name = next((each for each in WEIGHTS if each in curves), None)
    length = laboratory_pages.over_run(run, "response/length_mean")
    if name is None or length is None:
        return None
    above = fmean(value for _, value in curves[name]) - 1
    return (length, above) if above > 0 else None


def exponent(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the slope of ln(W* - 1) over ln(length), by least squares; -1 is what the theory says."""
    x, y = ([math.log(pair[place]) for pair in pairs] for place in (0, 1))
    return linear_regression(x, y).slope if len(set(x)) > 1 else None


def weight_by_length() -> Figure:
    """Draw what the critical weight is above 1 over the length of the responses, beside a line that falls as 1/T."""
    pairs = critical_weights()
    lengths, above = zip(*pairs, strict=True)
    constant = math.exp(fmean(math.log(x * y) for x, y in pairs))  # of the line c / T through the middle of the points
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    ends = [min(lengths), max(lengths)]
    axes.plot(ends, [constant / end for end in ends], color="0.4", lw=1.2, ls="--", label="falls as 1/T")
    axes.scatter(lengths, above, s=22, color="#0072B2", label="measured, one run each", zorder=2)
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set(xlabel="mean length T of the responses (tokens)", ylabel="critical weight - 1")
    axes.legend(frameon=False)
    return figure


def length_text() -> str:
    """The picture of the critical weight and what it shows; for docs/theory.md."""
    pairs, what = critical_weights(), "laboratory-length.json"
    if not pairs:
        return laboratory_pages.not_run("length")
    (short, high), (long, low), slope = pairs[0], pairs[-1], exponent(pairs)
    fitted = (
        "" if slope is None else f" The line of best fit falls as T to the power of {slope:.2f}; the theory says -1."
    )
    return (
        "![The critical weight above 1 over the length of the responses, on logarithmic axes](theory-length.svg)\n\n"
        f"{len(pairs)} runs of `{what}`: the critical weight is {1 + high:.2f} with {short:.0f} tokens per response, "
        f"and {1 + low:.2f} with {long:.0f}.{fitted}"
    )
