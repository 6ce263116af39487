"""What the recorded tokens say together, one step at a time: planes, quadrants, quantiles, and who is worth a look.

A long run is sampled: planes and quantiles are of evenly spaced steps, so that they are of the run as a whole;
candidates for the microscope also come from steps that the metrics or the alarms point to.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimtab.insight.report.embed import Array, pack
from trimtab.insight.report.measured import Measured
from trimtab.insight.report.run_files import Curve, RunFiles
from trimtab.objectives import Reason
from trimtab.record import read_step

MOST_STEPS = 160  # that are read for planes and quantiles
MOST_POINTED = 24  # more that the metrics or the alarms point to, of each kind
MOST_TOKENS = 8_000_000  # that are read for planes, as long as that leaves a few steps
FEWEST_STEPS = 8
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
TOP_TOKENS = 100
KEPT = 200  # candidates of each kind
OUT = Reason.SILENCED | Reason.MASKED | Reason.DROPPED

P_RANGE, P_BINS = (-6.0, 0.0), 60  # log10 of the probability
H_MOST, H_BINS = 6.0, 48
S_RANGE, S_BINS = (-4.0, 8.0), 60  # surprisal beyond the critical one
A_RANGE, A_BINS = (-3.0, 3.0), 48
POPULATIONS = ("rewarded", "punished", "neutral", "silenced")
QUADRANTS = ("rewarded_expected", "rewarded_surprising", "punished_expected", "punished_surprising")


@dataclass(frozen=True)
class Chosen:
    """The steps to read: `even` for everything, `pointed` for candidates alone."""

    even: list[int]
    pointed: list[int]


@dataclass(frozen=True, order=True)
class Candidate:
    """A response worth a look: how much so, where it is, and the token that makes it so."""

    score: float
    step: int
    response: int
    position: int = field(compare=False)
    length: int = field(compare=False)


def choose_steps(run: RunFiles, asked: Sequence[int] = ()) -> Chosen:
    """Which recorded steps are read."""
    assert run.records is not None
    steps = run.records.steps
    even = _spaced(steps, _affordable(run, steps))
    if len(even) == len(steps):
        return Chosen(even, [])
    wanted = {_nearest(steps, alarm.step) for alarm in run.alarms[:MOST_POINTED]}
    wanted |= {_nearest(steps, step) for step in asked}
    for name in ("tokens/silenced_share", "update/grad_norm", "update/clip_share"):
        if name in run.curves:
            wanted |= _highest(run.curves[name], set(steps))
    return Chosen(even, sorted(wanted - set(even)))


def _highest(curve: Curve, recorded: set[int]) -> set[int]:
    """The recorded steps at which a metric is highest."""
    rows = np.argsort(-curve.values, kind="stable")
    return set([step for step in curve.steps[rows].tolist() if step in recorded][:MOST_POINTED])


def _affordable(run: RunFiles, steps: Sequence[int]) -> int:
    """How many steps can be read, by the size of the middle one."""
    assert run.records is not None
    try:
        tokens = read_step(run.records.folder, steps[len(steps) // 2])[0].tokens
    except (ValueError, IndexError):
        return MOST_STEPS
    return max(FEWEST_STEPS, min(MOST_STEPS, MOST_TOKENS // max(tokens, 1)))


def _spaced(steps: Sequence[int], count: int) -> list[int]:
    if len(steps) <= count:
        return list(steps)
    rows = np.unique(np.linspace(0, len(steps) - 1, count).round().astype(int))
    return [steps[row] for row in rows]


def _nearest(steps: Sequence[int], step: int) -> int:
    return min(steps, key=lambda number: abs(number - step))


@dataclass
class Survey:
    """Sums over the steps read so far. `alarmed` are steps with an alarm, `ends` the first and the last one."""

    h_most: float
    alarmed: frozenset[int] = frozenset()
    ends: frozenset[int] = frozenset()
    asked: frozenset[int] = frozenset()
    plane: Array = field(default_factory=lambda: np.zeros((len(POPULATIONS), H_BINS, P_BINS), np.int64))
    quadrant_plane: Array = field(default_factory=lambda: np.zeros((A_BINS, S_BINS), np.int64))
    quadrants: Array = field(default_factory=lambda: np.zeros((len(QUADRANTS), 3)))
    steps: list[int] = field(default_factory=list)
    quantiles: list[list[float]] = field(default_factory=list)
    tokens: int = 0
    candidates: dict[str, list[Candidate]] = field(default_factory=dict)

    def add(self, measured: Measured) -> None:
        """Take in an evenly spaced step."""
        self.tokens += len(measured.logp)
        if len(measured.logp) and np.isfinite(measured.entropy).all():
            self.steps.append(measured.step.number)
            self.quantiles.append(np.quantile(measured.entropy, QUANTILES).tolist())
            self._add_plane(measured)
            self._add_quadrants(measured)
        self.look(measured, spread=True)

    def look(self, measured: Measured, spread: bool = False) -> None:
        """Only look for candidates; `spread` takes one at random as well."""
        step, offsets = measured.step, np.array(measured.step.offsets)
        if not step.info.tokens:
            return
        owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        gradient = np.nan_to_num(measured.gradient)
        out = (measured.treated.reason & int(OUT)) != 0
        self._best("gradient", step.number, gradient, owner, offsets, TOP_TOKENS)
        self._most("silenced", step.number, out, owner, offsets)
        self._most("clipped", step.number, measured.treated.clipped, owner, offsets)
        if step.number in self.alarmed:
            self._best("alarm", step.number, gradient, owner, offsets, 4)
        lengths = np.diff(offsets)
        self._keep("longest", int(lengths.max()), step.number, int(lengths.argmax()), 0, offsets)
        lot = np.random.default_rng(step.number)
        if spread:
            self._keep("random", lot.random(), step.number, int(lot.integers(len(lengths))), 0, offsets)
        for kind, among, few in (("ends", self.ends, 8), ("asked", self.asked, KEPT)):
            if step.number in among:
                for row in lot.permutation(len(lengths))[:few].tolist():
                    self._keep(kind, lot.random(), step.number, row, 0, offsets)

    def _add_plane(self, measured: Measured) -> None:
        x = _bins(measured.logp / math.log(10), P_RANGE, P_BINS)
        y = _bins(measured.entropy, (0.0, self.h_most), H_BINS)
        advantage = measured.treated.advantage
        for row, mask in enumerate((advantage > 0, advantage < 0, advantage == 0)):
            self.plane[row] += _counts(y[mask], x[mask], H_BINS, P_BINS)
        out = (measured.treated.reason & int(OUT)) != 0
        self.plane[3] += _counts(y[out], x[out], H_BINS, P_BINS)

    def _add_quadrants(self, measured: Measured) -> None:
        beyond, advantage = measured.beyond, measured.treated.advantage
        if not np.isfinite(beyond).all():
            return
        x, y = _bins(beyond, S_RANGE, S_BINS), _bins(advantage, A_RANGE, A_BINS)
        told = advantage != 0
        self.quadrant_plane += _counts(y[told], x[told], A_BINS, S_BINS)
        code = np.where(advantage > 0, 0, 2) + (beyond > 0)
        for column, weights in enumerate((None, measured.gradient[told], measured.entropy_change[told])):
            self.quadrants[:, column] += np.bincount(code[told], weights, len(QUADRANTS))

    def _most(self, kind: str, step: int, mask: Array, owner: Array, offsets: Array) -> None:
        """The response with the most tokens of a kind, and the first of them."""
        counts = np.bincount(owner[mask], minlength=len(offsets) - 1)
        for row in np.argsort(-counts, kind="stable")[:4].tolist():
            if counts[row]:
                first = int(np.flatnonzero(mask[offsets[row] : offsets[row + 1]])[0])
                self._keep(kind, int(counts[row]), step, row, first, offsets)

    def _best(self, kind: str, step: int, score: Array, owner: Array, offsets: Array, few: int) -> None:
        """The responses of the tokens that score highest."""
        rows = np.argpartition(-score, min(few, len(score)) - 1)[:few]
        for row in rows.tolist():
            if score[row] > 0:
                response = int(owner[row])
                self._keep(kind, float(score[row]), step, response, int(row - offsets[response]), offsets)

    def _keep(self, kind: str, score: float, step: int, response: int, position: int, offsets: Array) -> None:
        found = Candidate(score, step, response, position, int(offsets[response + 1] - offsets[response]))
        heap = self.candidates.setdefault(kind, [])
        if len(heap) < KEPT:
            heapq.heappush(heap, found)
        elif found > heap[0]:
            heapq.heapreplace(heap, found)

    def packed(self) -> dict[str, Any]:
        """For the page."""
        quantiles = np.array(self.quantiles, np.float32).reshape(-1, len(QUANTILES))
        return {
            "tokens": self.tokens,
            "quantiles": {
                "steps": pack(self.steps, "i4"),
                "shares": QUANTILES,
                "values": [pack(column) for column in quantiles.T],
            },
            "plane": {
                "x": [*P_RANGE, P_BINS],
                "y": [0.0, self.h_most, H_BINS],
                "counts": {name: pack(self.plane[row].ravel(), "i4") for row, name in enumerate(POPULATIONS)},
            },
            "quadrants": {
                "x": [*S_RANGE, S_BINS],
                "y": [*A_RANGE, A_BINS],
                "counts": pack(self.quadrant_plane.ravel(), "i4"),
                "sums": {name: self.quadrants[row].tolist() for row, name in enumerate(QUADRANTS)},
            },
        }


def _bins(values: Array, limits: tuple[float, float], count: int) -> Array:
    """The bin of each value; what lies outside goes into the outermost."""
    low, high = limits
    return np.clip((values - low) * (count / (high - low)), 0, count - 1).astype(np.int64)


def _counts(y: Array, x: Array, rows: int, columns: int) -> Array:
    return np.bincount(y * columns + x, minlength=rows * columns).reshape(rows, columns)
