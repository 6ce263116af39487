"""Published results on these benchmarks, each with its source, to be shown beside our own.

They compare only where model, data and decoding are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.data import BENCHMARKS

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
