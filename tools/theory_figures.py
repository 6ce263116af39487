"""Draws the figures of docs/theory.md with the library's own functions.

`python tools/theory_figures.py docs`
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import torch

from trimtab import theory

mpl.use("svg")
mpl.rcParams.update({"svg.hashsalt": "trimtab", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

VOCABULARY = 1000


def tokens(count: int) -> theory.Moments:
    """Return the moments of tokens of random distributions, from flat to confident."""
    torch.manual_seed(0)
    sharpness = torch.linspace(0.5, 12, count, dtype=torch.float64)[:, None]
    logits = sharpness * torch.randn(count, VOCABULARY, dtype=torch.float64)
    # Half of the tokens are sampled, the others any: sampling alone would hardly show an improbable one.
    sampled = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
    token = torch.where(torch.arange(count) % 2 == 0, sampled, logits.topk(30).indices[:, torch.randint(30, (1,))[0]])
    return theory.moments(logits, token)


def gradient_figure() -> Figure:
    """Draw the squared gradient norm over probability, coloured by entropy."""
    found = tokens(600)
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    points = axes.scatter(
        found.logp.exp(), theory.gradient_norm_squared(found.logp, found.sum_p2), c=found.entropy, s=9, cmap="viridis"
    )
    axes.set(xlabel="probability p of the sampled token", ylabel="squared gradient norm, w = 1", xlim=(-0.02, 1.02))
    axes.annotate("spurious if rewarded", (0.02, 1.9), (0.25, 1.75), arrowprops={"arrowstyle": "->"})
    figure.colorbar(points, label="entropy H (nats)")
    return figure


def entropy_figure() -> Figure:
    """Draw the predicted entropy change over surprisal for one distribution, with the critical surprisal."""
    torch.manual_seed(1)
    logits = 2 * torch.randn(VOCABULARY, dtype=torch.float64)
    order = logits.argsort(descending=True)
    found = theory.moments(logits.expand(VOCABULARY, -1), order)
    change = -theory.phi(*found)
    critical = theory.critical_surprisal(found.entropy, found.sum_p2, found.sum_p2_logp)[0]
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for sign, label, color in ((1, "rewarded (A = 1)", "tab:blue"), (-1, "punished (A = -1)", "tab:red")):
        axes.plot(-found.logp, sign * change, lw=2, color=color, label=label)
    axes.axhline(0, color="0.6", lw=0.8)
    axes.axvline(float(critical), color="0.3", lw=1, ls="--", label="critical surprisal")
    axes.axvline(float(found.entropy[0]), color="0.3", lw=1, ls=":", label="entropy")
    axes.set(xlabel="surprisal -ln p of the token (nats)", ylabel="predicted entropy change", xlim=(None, 11))
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    for name, draw in (("theory-gradient.svg", gradient_figure), ("theory-entropy.svg", entropy_figure)):
        draw().savefig(Path(sys.argv[1]) / name, metadata={"Date": None}, facecolor="white")
