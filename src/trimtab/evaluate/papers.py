"""What papers print for these benchmarks, each number with its source: to stand beside our own, not to be compared
without a look at model, data and decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.tasks import BENCHMARKS

JUSTRL = "README of github.com/thunlp/JustRL (arXiv 2512.16649)"
STAPO = "arXiv 2602.15620v4, mean of the six benchmarks, T 1.0, top-p 1.0"
SSPO = "abstract of arXiv 2511.04256v2, mean of its five benchmarks"
STARE = "arXiv 2606.19236, mean of its benchmarks, short CoT"


@dataclass(frozen=True)
class Printed:
    """A line of a paper's table, in percent. `average` is the paper's own, over its own benchmarks."""

    model: str
    source: str
    average: float | None = None
    scores: dict[str, float] = field(default_factory=dict)


def _justrl(model: str, *scores: float) -> Printed:
    """A line with the six benchmarks in the README's order; its own average is over nine."""
    return Printed(model, JUSTRL, scores=dict(zip(BENCHMARKS, scores, strict=False)))


PRINTED = (
    _justrl("DeepSeek-R1-Distill-Qwen-1.5B", 29.90, 22.40, 63.82, 84.90, 34.65, 45.95),
    _justrl("DeepScaleR-1.5B-Preview", 40.21, 28.65, 73.83, 89.30, 39.34, 52.79),
    _justrl("ProRL-V2 1.5B", 51.87, 35.73, 88.75, 92.00, 49.03, 67.84),
    _justrl("JustRL-DeepSeek-1.5B", 52.60, 38.75, 91.02, 91.65, 51.47, 67.99),
    _justrl("OpenMath-Nemotron-1.5B", 58.75, 48.44, 90.55, 92.40, 26.93, 71.70),
    _justrl("QuestA-Nemotron-1.5B", 71.56, 62.08, 93.44, 92.95, 32.08, 72.28),
    _justrl("JustRL-Nemotron-1.5B", 69.69, 62.92, 96.02, 94.15, 30.24, 76.59),
    Printed("Qwen3-1.7B-Base, STAPO", STAPO, 38.18),
    Printed("Qwen3-8B-Base, STAPO", STAPO, 58.76),
    Printed("Qwen3-14B-Base, STAPO", STAPO, 64.38),
    Printed("Qwen3-1.7B-Base, best baseline", STAPO, 33.64),
    Printed("Qwen3-8B-Base, best baseline", STAPO, 57.63),
    Printed("Qwen3-14B-Base, best baseline", STAPO, 60.77),
    Printed("Qwen2.5-Math-1.5B, SSPO", SSPO, 46.72),
    Printed("Qwen2.5-Math-1.5B, GRPO", SSPO, 43.01),
    Printed("Qwen2.5-Math-1.5B, GSPO", SSPO, 44.42),
    Printed("Qwen2.5-Math-7B, STARE O1", STARE, 54.4),
    Printed("Qwen2.5-Math-7B, GRPO with dynamic sampling", STARE, 49.1),
)
