"""The resolved settings of an evaluation: everything that affects a response, stored with the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from trimtab.agents import CallFormat, Limits
from trimtab.data import BENCHMARKS, DEFAULT_BENCHMARKS, HELD_OUT, check_columns, find_benchmark
from trimtab.private_cache import short_digest
from trimtab.text import nearest, shown


@dataclass(frozen=True)
class Preset:
    """Decoding parameters of a paper."""

    temperature: float
    top_p: float
    source: str


PRESETS: Mapping[str, Preset] = {
    "train": Preset(1.0, 1.0, "the policy as it was trained: STAPO (arXiv 2602.15620)"),
    "justrl": Preset(0.7, 0.9, "JustRL's evaluation (arXiv 2512.16649), STAPO's second table"),
}

# These do not affect which response is sampled (but for rounding), so a resumed evaluation may change them.
MAY_DIFFER = {"endpoint", "device", "threads", "rule"}


@dataclass(frozen=True)
class ToolSettings:
    """The tools of an evaluation by conversations, and the limits of one conversation."""

    use: tuple[str, ...]
    environment: str = ""
    format: CallFormat | Literal["auto"] = "auto"
    max_turns: int = 8
    max_observation_tokens: int = 512
    timeout: float = 10.0

    @property
    def limits(self) -> Limits:
        """Return what one conversation may take; its calls together as long as so many single ones."""
        return Limits(self.max_turns, self.max_observation_tokens, self.timeout, self.timeout * self.max_turns)

    def describe(self) -> str:
        """Return a line for people."""
        names = ", ".join([*self.use, *([self.environment] if self.environment else [])])
        return f"{names}; at most {self.max_turns} messages, {self.timeout:g} s a call"


@dataclass(frozen=True)
class EvalSettings:
    """What affects the responses of an evaluation (and `rule`, which grades them)."""

    model: str
    sampler: str  # native, vllm or endpoint
    benchmarks: tuple[str, ...]
    samples: dict[str, int]
    temperature: float
    top_p: float
    max_new_tokens: int
    suffix: str
    seed: int
    rule: str
    problems: int | None = None
    weights: str = ""  # hash of the contents of the model's files
    data: dict[str, str] | None = None  # fingerprint of each benchmark's prompts and answers
    precision: str = "fp32"
    chat: bool = True
    batch: int = 256
    endpoint: str = ""
    device: str = ""
    threads: int = 0
    tools: ToolSettings | None = None

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    def fixed(self) -> dict[str, Any]:
        """Return the settings that must be the same when an evaluation is resumed."""
        values = {name: value for name, value in self.as_json().items() if name not in MAY_DIFFER}
        # Evaluations from before there were tools go on, and keep their digest.
        return values if self.tools else {name: value for name, value in values.items() if name != "tools"}

    def digest(self) -> str:
        """Return a short hash of all that affects a response."""
        return short_digest(self.fixed())

    def describe(self) -> str:
        """Return the settings for people, one line each."""
        counts = ", ".join(f"{find_benchmark(name).title} x{self.samples[name]}" for name in self.benchmarks)
        # By the values, not by the option: --temperature may have moved a preset's decoding away from it.
        preset = next((n for n, p in PRESETS.items() if (p.temperature, p.top_p) == (self.temperature, self.top_p)), "")
        where = f"{self.endpoint} (OpenAI-compatible)" if self.sampler == "endpoint" else self.device
        held_out = all(name.startswith(HELD_OUT) for name in self.benchmarks)  # their prompts are those of the run
        lines = {
            "model": f"{self.model}, {where}"
            + ("" if self.sampler == "endpoint" else f", {self.precision}")
            + (", sampled with vLLM" if self.sampler == "vllm" else ""),
            "benchmarks": counts + (f", first {self.problems} problems" if self.problems else ""),
            "decoding": f"temperature {self.temperature:g}, top-p {self.top_p:g}" + (f" ({preset})" if preset else ""),
            "response": f"at most {self.max_new_tokens:,} tokens",
            **({} if held_out else {"suffix": repr(self.suffix) if self.suffix else "none"}),
            **({"tools": self.tools.describe()} if self.tools else {}),
            "seed": str(self.seed),
            "rule": self.rule,
        }
        return "\n".join(f"{name:<11}{text}" for name, text in lines.items())


def decoding(preset: str, temperature: float | None, top_p: float | None) -> tuple[float, float]:
    """Return temperature and top-p of a preset, or what was given instead."""
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: {nearest(preset, PRESETS)}")
    chosen = PRESETS[preset]
    temperature = chosen.temperature if temperature is None else temperature
    top_p = chosen.top_p if top_p is None else top_p
    if not 0 <= temperature <= 10:
        raise ValueError(f"--temperature {temperature:g}: it must be between 0 (greedy) and 10")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p {top_p:g}: it must be more than 0 and at most 1")
    return temperature, top_p


def parse_benchmarks(text: str | None) -> tuple[str, ...]:
    """Return the benchmarks named in a comma-separated list, in order and once each; the default ones for None."""
    if text is None:
        return DEFAULT_BENCHMARKS
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [name.lower() if name.lower() in BENCHMARKS else name for name in names]
    for name in known:
        find_benchmark(name)
    return tuple(dict.fromkeys(known))


def parse_columns(text: str) -> dict[str, str]:
    """Return the columns of a file of the user's own, as `prompt=question,answer=result` names them."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(f"--columns {shown(text)}: write for example prompt=question,answer=result")
    try:
        return check_columns({part.strip(): column.strip() for part, _, column in pairs})
    except ValueError as error:
        raise ValueError(f"--columns {shown(text)}: {error}") from None


def settings_from(stored: Mapping[str, Any]) -> EvalSettings:
    """Return settings from their JSON object."""
    known = {field.name for field in fields(EvalSettings)}
    if not known >= stored.keys():
        raise ValueError(f"settings of another version: unknown {', '.join(sorted(stored.keys() - known))}")
    from pydantic import TypeAdapter  # not for `--help`

    settings = TypeAdapter(EvalSettings).validate_python(stored)
    for name in settings.benchmarks:
        find_benchmark(name)
        if settings.samples.get(name, 0) < 1:
            raise ValueError(f"benchmark {name!r:.100} has no samples")
    return settings


def differences(before: EvalSettings, now: EvalSettings) -> list[str]:
    """Return the settings that affect responses and differ, one line each."""
    old, new = before.fixed(), now.fixed()
    names = sorted({*old, *new})
    return [f"{n}: {old.get(n)!r} -> {new.get(n)!r}" for n in names if old.get(n) != new.get(n)]
