"""Made-up run folders for the tests of the report: metrics, alarms and records with given texts."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from helpers.record.made_records import made_step
from trimtab.objectives import objective
from trimtab.record import Manifest, RecordWriter, StepData, Vocabulary

PIECES = ["<end>", "1", "2", " and", ".", " so", "\n", " the", " answer", " is", " 42"]
OBJECTIVE = {"name": "stapo", "tau_p": 0.2}
CONFIG = """
[objective]
name = "stapo"
tau_p = 0.2

[run]
steps = 8
seed = 3
"""
KINDS = {"f4": "<f4", "i4": "<i4", "i2": "<i2", "u1": "u1"}


@dataclass(frozen=True)
class Made:
    """The contents of a made-up run; `texts` replaces columns of its responses."""

    steps: int = 4
    lengths: Sequence[int] = (9, 5, 12, 7)
    pieces: Sequence[str] = tuple(PIECES)
    objective: Mapping[str, Any] = field(default_factory=lambda: dict(OBJECTIVE))
    config: str = CONFIG
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    metrics: Sequence[str] = ()
    alarms: Sequence[Mapping[str, Any]] = ()
    without: Sequence[str] = ()
    optional: Sequence[str] = ()
    updates: int = 2
    entropy: float | None = None  # that controllers observed at every step; None records no state of theirs


def make_run(folder: Path, made: Made | None = None) -> Path:
    """Write a run folder and return it."""
    made = made or Made()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(made.config, encoding="utf-8", errors="surrogateescape")
    (folder / "metrics.jsonl").write_text(metrics_lines(made.steps, made.metrics))
    if made.alarms:
        (folder / "alarms.jsonl").write_text("".join(json.dumps(alarm) + "\n" for alarm in made.alarms))
    warnings: list[str] = []
    manifest = Manifest(objective=dict(made.objective), advantage="group_normalized")
    text = [piece.encode("utf-8", "surrogatepass") for piece in made.pieces]
    vocabulary = Vocabulary(text, [n == 0 for n in range(len(text))])
    recorder = RecordWriter(folder / "tokens", manifest, vocabulary, warnings.append)
    recorder.start(0)
    for step in range(1, made.steps + 1):
        data = step_of(step, made)
        recorder.write(step, lambda data=data: data)  # type: ignore[misc]
    recorder.close()
    assert warnings == []
    return folder


def step_of(step: int, made: Made) -> StepData:
    """Return a step whose tokens go through the vocabulary in order, so that every piece occurs."""
    data = made_step(step, made.lengths, made.updates, optional=made.optional)
    count = sum(made.lengths)
    tokens = {name: values for name, values in data.tokens.items() if name not in made.without}
    tokens["token"] = ((np.arange(count) + step) % len(made.pieces)).astype(np.int32)
    tokens["segment"] = np.concatenate([np.arange(n) // 4 for n in made.lengths]).astype(np.int32)
    tokens["reason"] = np.where(np.arange(count) % 5 == 0, 2, 0).astype(np.int16)
    tokens["weight"] = np.where(tokens["reason"] == 2, 0, 1).astype(np.float32)
    if "tool_tokens" in made.optional:  # a tool spoke before the second token of every response
        tokens["tool_tokens"] = np.concatenate([np.where(np.arange(n) == 1, 3, 0) for n in made.lengths]).astype(
            np.int32
        )
    responses = {name: made.texts.get(name, values) for name, values in data.responses.items()}
    info = data.info if made.entropy is None else replace(data.info, controllers=_states(made))
    return StepData(info, tokens, responses)


def _states(made: Made) -> dict[str, dict[str, float]]:
    built = objective(**made.objective)
    for controller in built.controllers.values():
        controller.observe(made.entropy or 0.0)
    return built.state_dict()


def metrics_lines(steps: int, more: Sequence[str] = ()) -> str:
    """Return the text of a metrics.jsonl with the usual metrics, and more by name."""
    lines = [json.dumps({"step": 0, "eval/accuracy": 0.25})]
    for step in range(1, steps + 1):
        record: dict[str, Any] = {
            "step": step,
            "reward/mean": step / (steps + 1),
            "reward/accuracy": step / (steps + 1),
            "policy/entropy": 1 / step,
            "tokens/silenced_share": 1e-4 * step,
            "tokens/count": 33,
            "update/clip_share": 0.01,
            "update/grad_norm": 1.5,
            "response/length_mean": 8.25,
            "s2t/entropy_threshold": 1.2,
            **dict.fromkeys(more, 1.0),
        }
        lines.append(json.dumps(record | ({"eval/accuracy": 0.5} if step == steps else {})))
    return "".join(f"{line}\n" for line in lines)


def trim_metrics(steps: int) -> str:
    """Return a metrics.jsonl whose entropy changes by twice AdamW's mean of predictions, and stays near its target."""
    rng, entropy, mean, lines = random.Random(0), 0.3, 0.0, []
    for step in range(1, steps + 1):
        predicted = rng.gauss(0, 0.004)
        mean = 0.9 * mean + 0.1 * predicted
        change = 2 * mean + rng.gauss(0, 0.0005)
        record = {"step": step, "policy/entropy": entropy, "trim/predicted_change": predicted, "trim/target": 0.3}
        record |= {"trim/weight": 1.4, "trim/drive": 0.1, "trim/leverage": 0.4, "trim/saturated": 0.0, "trim/r2": 0.9}
        lines.append(json.dumps(record | {"update/entropy_change": change}))
        entropy = 0.3 + 0.9 * (entropy - 0.3) + change
    return "".join(f"{line}\n" for line in lines)


def decode_array(packed: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Decode an array as the page's `decodeArray` does."""
    kind = KINDS[packed["t"]]
    if "b" in packed:
        return np.frombuffer(base64.b64decode(packed["b"]), kind)
    common = np.nan if packed["c"] is None else float(packed["c"])
    values = np.full(packed["n"], common).astype(kind)
    if "i" in packed:
        values[np.frombuffer(base64.b64decode(packed["i"]), "<i4")] = np.frombuffer(base64.b64decode(packed["v"]), kind)
    return values


def data_of(page: str) -> dict[str, Any]:
    """Return the data block of a page."""
    return json.loads(_between(page, 'id="data">'))


def response_of(page: str, number: int) -> dict[str, Any]:
    """Return the block of a response."""
    return json.loads(_between(page, f'id="response-{number}">'))


def _between(page: str, mark: str) -> str:
    start = page.index(mark) + len(mark)
    return page[start : page.index("</script>", start)]
