"""What became of a run of a stress test: whether it survived, and its figures and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from trimtab.experiments.grid.runs import RunOutcome
from trimtab.record import HOLD_STEPS, LAST_STEP, LOW, MIN_BEST, find_fall, iter_step_lines
from trimtab.trainer.train import summarize_metrics

ENTROPY_BAND = (0.22, 0.42)  # nats: where STARE's paper holds the entropy, for its target of 0.3
LEARNED = 0.02  # accuracy above a start near 0
CURVES = ("eval/accuracy", "eval/score", "reward/accuracy", "policy/entropy", "groups/mixed_share")
TOUCHED = ("silenced", "boosted", "damped", "masked", "dropped", "penalized", "clipped")
FELL = "fell"  # begins the end, in words, of a run that ended low

Step = Annotated[int, Field(ge=0, le=LAST_STEP)]  # checked where figures are read from a file


@dataclass(frozen=True)
class RunFigures:
    """What became of a run; `survived` is None if it failed or is not finished."""

    objective: str
    axis: str
    value: str
    seed: int
    folder: str
    state: str
    why: str
    survived: bool | None
    end: str
    collapse_step: Step | None
    steps: Step
    accuracy_start: float | None
    accuracy_end: float | None
    entropy_end: float | None
    in_band: float | None
    touched: dict[str, float]
    seconds: float | None
    curves: dict[str, list[tuple[Step, float]]]
    score_end: float | None = None  # held-out, of a rule that returns numbers

    @property
    def ended_low(self) -> bool:
        """Whether it ended below half of its best accuracy, too soon to tell whether that lasts."""
        return self.survived is False and self.collapse_step is None and self.end.startswith(FELL)

    @property
    def never_learned(self) -> bool:
        """Whether it did not survive although it neither collapsed nor fell."""
        return self.survived is False and self.collapse_step is None and not self.ended_low


def run_figures(outcome: RunOutcome, came_back: bool = False) -> RunFigures:
    """Judge a run by its metrics; `came_back`: it was stopped since it had collapsed, and then had not."""
    run = outcome.run
    records = run.folder.records()
    summary = summarize_metrics(records)
    survived, end, step = _judge(outcome, records, came_back)
    entropies = [record["policy/entropy"] for record in records if "policy/entropy" in record]
    low, high = ENTROPY_BAND
    shares = {name: f"tokens/{name}_share" if name != "clipped" else "update/clip_share" for name in TOUCHED}
    touched = {name: [r[metric] for r in records if metric in r] for name, metric in shares.items()}
    return RunFigures(
        **asdict(run.cell),
        seed=run.seed,
        folder=run.name,
        state=outcome.state,
        why=outcome.why,
        survived=survived,
        end=end,
        collapse_step=step,
        steps=summary.steps,
        accuracy_start=summary.accuracy_start,
        accuracy_end=summary.accuracy_end,
        entropy_end=summary.entropy_end,
        in_band=fmean(low <= value <= high for value in entropies) if entropies else None,
        touched={name: fmean(values) for name, values in touched.items() if values},
        seconds=summary.seconds or None,
        curves={name: [(int(r["step"]), round(r[name], 6)) for r in records if name in r] for name in CURVES},
        score_end=summary.score_end,
    )


def _judge(
    outcome: RunOutcome, records: Sequence[Mapping[str, Any]], came_back: bool
) -> tuple[bool | None, str, int | None]:
    """Return whether a run survived, how it ended in words, and the step at which it collapsed."""
    if not outcome.counts:
        return None, f"{outcome.state}: {outcome.why}", None
    last = int(records[-1]["step"]) if records else 0
    # A run whose weights are no longer finite ends in a step that is not logged.
    if any(line["step"] > last for line in iter_step_lines(outcome.run.folder.nonfinite, lambda problem: None)):
        return False, f"not finite at step {last + 1}", last + 1
    fall = find_fall(records)
    if fall and fall.kind != LOW:
        return False, fall.words, fall.step
    if came_back:
        return None, f"unfinished: it came back in step {last}, as it was being stopped", None
    return *((False, fall.words) if fall else _judge_end(records, last)), None


def _judge_end(records: Sequence[Mapping[str, Any]], last: int) -> tuple[bool | None, str]:
    """Return whether a run that did not fall survived, and how it ended."""
    if last <= HOLD_STEPS:
        return None, f"too short to be judged: {last} steps, and a collapse lasts {HOLD_STEPS} or more"
    # As for a collapse, the mean of a rule's numbers stands for the accuracy.
    word = "score" if any("eval/score" in record for record in records) else "accuracy"
    found = [record[f"eval/{word}"] for record in records if f"eval/{word}" in record]
    if found and found[0] < MIN_BEST and max(found[-2:]) < found[0] + LEARNED:
        return False, f"never learned: {word} {found[-1]:.2f} after {last} steps"
    return True, "survived"
