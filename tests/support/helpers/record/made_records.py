"""Small synthetic records, with every kind of value that a run can record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.record import (
    Manifest,
    RecordedStep,
    RecordError,
    RecordSettings,
    RecordWriter,
    StepData,
    StepInfo,
    UpdateInfo,
    Vocabulary,
    open_run,
)
from trimtab.record.layout import RECORDS_FOLDER, recorded_steps

VOCABULARY = Vocabulary(
    [b"<end>", b"1", b"2", b" and ", b".", "ü".encode()[:1], "ü".encode()[1:]], [True] + [False] * 6
)
OPTIONAL = ("current_logp", "ref_logp", "proxy_logp", "planned_advantage", "penalty", "entropy_coef")


def made_step(
    step: int,
    lengths: Sequence[int] = (3, 1, 4, 2),
    updates: int = 2,
    seed: int | None = None,
    sampled: int | None = None,
    optional: Sequence[str] = (),
) -> StepData:
    """Make a step of responses with these lengths, four to a group, from a random generator of its own."""
    rng = np.random.default_rng(step if seed is None else seed)
    n, count = sum(lengths), len(lengths)

    def floats(low: float, high: float) -> np.ndarray[Any, Any]:
        return rng.uniform(low, high, n).astype(np.float32)

    reward = rng.integers(0, 2, count).astype(np.float32)
    tokens: dict[str, Any] = {
        "response": np.repeat(np.arange(count, dtype=np.int32), lengths),
        "token": rng.integers(0, len(VOCABULARY), n).astype(np.int32),
        "old_logp": floats(-6, 0),
        "new_logp": floats(-6, 0),
        "sampler_logp": floats(-6, 0),
        "entropy": floats(0, 3),
        "sum_p2": floats(0.1, 0.9),
        "sum_p2_logp": floats(-0.9, 0),
        "advantage": (reward - 0.5).repeat(lengths),
        "weight": np.ones(n, np.float32),
        "scale": np.full(n, 1 / max(n, 1), np.float32),
        "clip_low": np.full(n, 0.2, np.float32),
        "clip_high": np.full(n, np.inf, np.float32),
        "clipped": rng.integers(0, 2, n).astype(bool),
        "reason": rng.integers(0, 5, n).astype(np.int16),
        "segment": np.zeros(n, np.int32),
        **{name: floats(-6, 0) for name in optional},
    }
    bounds = np.linspace(0, count, updates + 1).astype(int)
    spans = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    infos = [UpdateInfo(k, b - a, sum(lengths[a:b]), micro_batches=[b - a]) for k, (a, b) in enumerate(spans)]
    responses: dict[str, Any] = {
        "step": [step] * count,
        "response": list(range(count)),
        "update": [k for k, (a, b) in enumerate(spans) for _ in range(a, b)],
        "tokens": list(lengths),
        "group": [number // 4 for number in range(count)],
        "sample": [number % 4 for number in range(count)],
        "reward": reward,
        "verdict": ["correct" if r else "wrong" for r in reward],
        "extracted": [str(number) for number in range(count)],
        "finished": [True] * count,
        "prompt": [f"1+{number // 4}=" for number in range(count)],
        "answer": ["2"] * count,
        "source": ["made"] * count,
    }
    if optional:
        tokens |= {name: np.zeros(n, np.int32) for name in ("tool_tokens", "kept", "version")}
        responses["rewards"] = ['{"task": 1.0, "format": 0.5}'] * count
        responses["observations"] = ['[{"after": 1, "tokens": 3, "text": "2 and 2"}]'] * count
        call = {"turn": 0, "tool": "add", "arguments": '{"a": 1}', "outcome": "ok", "seconds": 0.25}
        responses["calls"] = [json.dumps([call])] * count
        responses["ended"] = ["answer"] * count
    info = StepInfo(step, count, n, count if sampled is None else sampled, infos, 1.0 + step / 7)
    return StepData(info, tokens, responses)


def manifest(**changes: Any) -> Manifest:
    """Return the manifest of a run with DAPO."""
    return Manifest(**{"objective": {"name": "dapo"}, "advantage": "group_normalized", **changes})


def record(run: Path, steps: Sequence[StepData], after: int = 0, **changes: Any) -> list[str]:
    """Record steps in a run's folder, continuing after a step; return the warnings."""
    messages: list[str] = []
    writer = RecordWriter(run / RECORDS_FOLDER, manifest(**changes), VOCABULARY, messages.append)
    writer.start(after)
    for data in steps:
        writer.write(data.info.step, lambda data=data: data)  # type: ignore[misc]
    writer.close()
    return messages


def made_run(run: Path, steps: int = 3, **changes: Any) -> Path:
    """Write a run of some complete steps."""
    assert record(run, [made_step(step) for step in range(1, steps + 1)], **changes) == []
    return run


def same(step: RecordedStep, data: StepData) -> bool:
    """Return whether a step that was read equals what was recorded, bit by bit."""
    return step.info == data.info and all(
        _bits(table[name]) == _bits(values)
        for table, given in ((step.tokens, data.tokens), (step.responses, data.responses))
        for name, values in given.items()
    )


def _bits(values: Any) -> Any:
    array = np.asarray(values)
    return array.tolist() if array.dtype.kind in "US" else (len(array), array.astype(_wide(array)).tobytes())


def _wide(array: np.ndarray[Any, Any]) -> Any:
    return np.int64 if array.dtype.kind in "iub" else array.dtype


def readable(run: Path) -> dict[int, RecordedStep]:
    """Read the steps that can be read, by number."""
    records, found = open_run(run), {}
    for number in recorded_steps(run / RECORDS_FOLDER):
        try:
            found[number] = records.step(number).checked()
        except RecordError:
            continue
    return found


def budget(megabytes: float, every: int = 1) -> RecordSettings:
    """Return settings with a size limit."""
    return RecordSettings(every=every, max_megabytes=megabytes)
