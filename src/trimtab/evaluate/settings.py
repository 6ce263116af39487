"""How an evaluation samples: everything that shapes a response, shown before it starts and kept with the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from trimtab.tasks import BENCHMARKS
from trimtab.text import nearest

MAX_NEW_TOKENS = 20_480


@dataclass(frozen=True)
class Preset:
    """A published decoding."""

    temperature: float
    top_p: float
    source: str


PRESETS: Mapping[str, Preset] = {
    "train": Preset(1.0, 1.0, "the policy as it was trained: STAPO (arXiv 2602.15620)"),
    "justrl": Preset(0.7, 0.9, "JustRL's evaluation (arXiv 2512.16649), STAPO's second table"),
}

# What may differ when an evaluation goes on: where the same model answers, and on what.
FREE = {"endpoint", "device", "threads", "rule"}


@dataclass(frozen=True)
class Settings:
    """What shapes the responses of an evaluation (and `rule`, which grades them)."""

    model: str
    sampler: str  # native or endpoint
    benchmarks: tuple[str, ...]
    samples: dict[str, int]
    temperature: float
    top_p: float
    max_new_tokens: int
    suffix: str
    seed: int
    rule: str
    problems: int | None = None
    weights: str = ""  # fingerprint of the model's files
    data: dict[str, str] | None = None  # fingerprint of each benchmark's prompts and answers
    precision: str = "fp32"
    chat: bool = True
    batch: int = 256
    endpoint: str = ""
    device: str = ""
    threads: int = 0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    def shaping(self) -> dict[str, Any]:
        """What two evaluations must agree in to be one."""
        return {name: value for name, value in self.as_json().items() if name not in FREE}

    def digest(self) -> str:
        """A short name for all that shapes a response."""
        return digest(self.shaping())

    def describe(self) -> str:
        """The settings in words, a line each."""
        counts = ", ".join(f"{BENCHMARKS[name].title} x{self.samples[name]}" for name in self.benchmarks)
        preset = next((n for n, p in PRESETS.items() if (p.temperature, p.top_p) == (self.temperature, self.top_p)), "")
        where = f"{self.endpoint} (OpenAI-compatible)" if self.sampler == "endpoint" else self.device
        lines = {
            "model": f"{self.model}, {where}" + ("" if self.sampler == "endpoint" else f", {self.precision}"),
            "benchmarks": counts + (f", first {self.problems} problems" if self.problems else ""),
            "decoding": f"temperature {self.temperature:g}, top-p {self.top_p:g}" + (f" ({preset})" if preset else ""),
            "response": f"at most {self.max_new_tokens:,} tokens",
            "suffix": repr(self.suffix) if self.suffix else "none",
            "seed": str(self.seed),
            "rule": self.rule,
        }
        return "\n".join(f"{name:<11}{text}" for name, text in lines.items())


def digest(value: object) -> str:
    """A short name for a plain value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def decoding(preset: str, temperature: float | None, top_p: float | None) -> tuple[float, float]:
    """Temperature and top-p of a preset, or what was given instead."""
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: {nearest(preset, PRESETS)}")
    chosen = PRESETS[preset]
    temperature = chosen.temperature if temperature is None else temperature
    top_p = chosen.top_p if top_p is None else top_p
    if not 0 <= temperature <= 10:
        raise ValueError(f"--temperature {temperature:g}: it goes from 0 (greedy) to 10")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p {top_p:g}: it is more than 0 and at most 1")
    return temperature, top_p


def choose_benchmarks(names: Sequence[str]) -> tuple[str, ...]:
    """Benchmarks by name, in order and once each."""
    for name in names:
        if name.lower() not in BENCHMARKS:
            raise ValueError(f"unknown benchmark {name!r}: {nearest(name, BENCHMARKS)}")
    return tuple(dict.fromkeys(name.lower() for name in names))


def settings_from(stored: Mapping[str, Any]) -> Settings:
    """Settings as they were stored."""
    known = {field.name for field in fields(Settings)}
    if not known >= stored.keys():
        raise ValueError(f"settings of another version: {', '.join(sorted(stored.keys() - known))} is unknown here")
    return Settings(**{**stored, "benchmarks": tuple(stored["benchmarks"])})


def differences(before: Settings, now: Settings) -> list[str]:
    """What shapes responses and is not the same, one line each."""
    old, new = before.shaping(), now.shaping()
    return [f"{name}: {old[name]!r} -> {new[name]!r}" for name in sorted(old) if old[name] != new[name]]
