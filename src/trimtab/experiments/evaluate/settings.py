"""The settings of an evaluation, stored with the result: all that affects a response, made from the options.

A run is evaluated on its own held-out problems, the benchmark `held-out:RUN`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from pydantic import TypeAdapter

from trimtab.agents import CALL_FORMATS, CallFormat, Limits
from trimtab.data import (
    BENCHMARKS,
    DEFAULT_BENCHMARKS,
    HELD_OUT,
    BenchmarkProblem,
    SamplingOptions,
    check_columns,
    derive_seed,
    find_benchmark,
    load_benchmark,
)
from trimtab.experiments.evaluate import MAX_NEW_TOKENS, EvalOptions
from trimtab.files import short_digest
from trimtab.grading import grade
from trimtab.own_parts import is_own, require_module
from trimtab.text import nearest, shown
from trimtab.trainer.config import Config, find_run_model, load, load_stored, model_digest, own_code, stored_agent
from trimtab.trainer.model import pick_device
from trimtab.trainer.sampling import require_vllm
from trimtab.trainer.train import build_task

SampleKey = tuple[str, str, int]  # benchmark, problem, sample


class Decoding(NamedTuple):
    """How responses are sampled."""

    temperature: float
    top_p: float


PRESETS: Mapping[str, Decoding] = {
    "train": Decoding(1.0, 1.0),  # the policy as it was trained: STAPO (arXiv 2602.15620)
    "justrl": Decoding(0.7, 0.9),  # JustRL's evaluation (arXiv 2512.16649), STAPO's second table
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

    def __post_init__(self) -> None:
        if self.max_turns < 2:
            raise ValueError(f"--max-turns {self.max_turns}: a model that calls a tool needs 2 messages at least")
        self.limits  # raises for a value that makes no sense  # noqa: B018

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
    agent: str = ""

    def sample_keys(self, problems: Iterable[BenchmarkProblem]) -> set[SampleKey]:
        """Return the keys of all samples of these problems."""
        return {(p.benchmark, p.id, sample) for p in problems for sample in range(self.samples[p.benchmark])}

    def sampling_options(self, benchmark: str) -> SamplingOptions:
        """Return how the problems of a benchmark are sampled in this process."""
        return SamplingOptions(
            samples=self.samples[benchmark],
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            batch_size=self.batch,
        )

    def request_seed(self, item: BenchmarkProblem, sample: int) -> int:
        """Return the seed that a server gets with the requests for a sample."""
        return derive_seed("endpoint", self.seed, item.benchmark, item.id, sample) % (1 << 31)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    def fixed(self) -> dict[str, Any]:
        """Return the settings that must be the same when an evaluation is resumed."""
        left_out = {*MAY_DIFFER, *(name for name in ("tools", "agent") if not getattr(self, name))}
        return {name: value for name, value in self.as_json().items() if name not in left_out}

    def digest(self) -> str:
        """Return a short hash of all that affects a response."""
        return short_digest(self.fixed())

    def describe(self) -> str:
        """Return the settings for people, one line each."""
        counts = ", ".join(f"{find_benchmark(name).title} x{self.samples[name]}" for name in self.benchmarks)
        # By the values, not by the option: --temperature may have moved a preset's decoding away from it.
        preset = next((name for name, each in PRESETS.items() if each == (self.temperature, self.top_p)), "")
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
            **({"agent": self.agent} if self.agent else {}),
            "seed": str(self.seed),
            "rule": self.rule,
        }
        return "\n".join(f"{name:<11}{text}" for name, text in lines.items())


def decoding(preset: str, temperature: float | None, top_p: float | None) -> Decoding:
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
    return Decoding(temperature, top_p)


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


def prepare(options: EvalOptions) -> tuple[EvalSettings, list[BenchmarkProblem]]:
    """Load the benchmarks and check everything that can be checked before a model is loaded."""
    model = options.name  # first: without a model, nothing that the data lacks matters
    for name in ("samples", "problems", "max_new_tokens", "batch"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: it must be at least 1")
    temperature, top_p = decoding(options.preset, options.temperature, options.top_p)
    benchmarks = parse_benchmarks(options.benchmarks)
    columns = parse_columns(options.columns or "")
    held_out = all(name.startswith(HELD_OUT) for name in benchmarks)
    if held_out and options.suffix:
        raise ValueError("--suffix is not added to the held-out problems of a run: their prompts are those of the run")
    problems = {
        name: load_held_out(name, options.problems, options.own_code)
        if name.startswith(HELD_OUT)
        else load_benchmark(name, options.data, options.prompt_suffix, options.rule or "math", columns)
        for name in benchmarks
    }
    problems = {name: items[: options.problems] for name, items in problems.items()}
    rules = list(dict.fromkeys(item.problem.rule for items in problems.values() for item in items))
    if options.rule is None and len(rules) > 1:
        raise ValueError(f"the problems are graded by several rules ({', '.join(rules)}): name one with --rule")
    rule = options.rule or rules[0]
    check_rule(rule)  # hours of sampling should not end with a misspelt rule
    native = options.connection is None
    if options.engine not in ("native", "vllm"):
        raise ValueError(f"--engine {options.engine}: it must be native or vllm")
    if options.engine == "vllm" and not native:
        raise ValueError("--engine vllm samples in this process: leave it out with --endpoint")
    if options.engine == "vllm":
        require_vllm("--engine vllm")
    settings = EvalSettings(
        model=model,
        sampler=options.engine if native else "endpoint",
        benchmarks=benchmarks,
        samples={name: options.samples or find_benchmark(name).samples for name in benchmarks},
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=options.max_new_tokens or MAX_NEW_TOKENS,
        suffix="" if held_out else options.prompt_suffix,
        seed=options.seed,
        rule=rule,
        problems=options.problems,
        weights=model_digest(model) if native else "",
        data={name: _data_digest(items) for name, items in problems.items()},
        precision=options.precision if native else "",
        chat=options.chat,
        batch=options.batch if native else 0,
        endpoint=options.endpoint or "",
        device=str(pick_device(options.device)) if native else "",
        threads=torch.get_num_threads() if native else 0,
        tools=tool_settings(options),
        agent=checked_agent(options),
    )
    return settings, [item for items in problems.values() for item in items]


def check_rule(rule: str) -> None:
    """Raise for a rule that does not exist or a service that does not answer, before anything is sampled."""
    verdict = grade("", "1", rule)  # unlike `trimtab.grading.check_rule`, this also loads a `python:` function
    if rule.startswith("http") and verdict.kind == "crashed":
        raise ValueError(verdict.error)


def tool_settings(options: EvalOptions) -> ToolSettings | None:
    """Return the tools that were asked for; None without."""
    use = tuple(name.strip() for name in (options.tools or "").split(",") if name.strip())
    if not use and options.environment is None:
        return None
    if options.tool_format != "auto" and options.connection is not None:
        raise ValueError("--tool-format: a server writes calls in its own way; leave it out with --endpoint")
    if options.tool_format not in ("auto", *CALL_FORMATS):
        raise ValueError(f"--tool-format {options.tool_format}: {nearest(options.tool_format, CALL_FORMATS)}")
    return ToolSettings(
        use=use,
        environment=options.environment or "",
        format=cast("CallFormat", options.tool_format),
        max_turns=options.max_turns,
        max_observation_tokens=options.max_observation_tokens,
        timeout=options.tool_timeout,
    )


def checked_agent(options: EvalOptions) -> str:
    """Return the agent that was asked for; "" without."""
    if options.agent is None:
        return ""
    if not options.agent.strip():
        raise ValueError("--agent names neither a function, python:MODULE:NAME, nor a command")
    if options.tools or options.environment:
        raise ValueError("--agent: an agent calls its tools itself; leave out --tools and --environment")
    if is_own(options.agent):
        require_module(options.agent, "an agent")
    return options.agent


def with_benchmarks(options: EvalOptions) -> EvalOptions:
    """Return the options with benchmarks: without any, a run has its held-out problems, decoded as in training.

    That is one greedy response to each, with the run's tools, and as long as the run's may be.
    """
    if options.benchmarks is not None:
        return options
    # With a folder of benchmarks they are what is asked for.
    found = None if options.endpoint or options.data else find_run_model(options.name)
    if found is None:
        return replace(options, benchmarks=",".join(DEFAULT_BENCHMARKS))
    config = _config(found.run, options.own_code)
    greedy = options.preset == EvalOptions.preset and options.temperature is None
    filled = replace(
        options,
        benchmarks=f"{HELD_OUT}{found.run}",
        temperature=0.0 if greedy else options.temperature,
        samples=1 if greedy and options.samples is None else options.samples,
        max_new_tokens=options.max_new_tokens or config.rollout.max_new_tokens,
    )
    if options.agent is None and (agent := stored_agent(found.run / "config.toml")):
        if not options.own_code:
            raise ValueError(
                f"{found.run} was trained through an agent ({shown(agent)}), code of its own: to run it, add "
                "--own-code; or name one with --agent"
            )
        return replace(filled, agent=agent)
    if not config.has_tools or options.tools is not None or options.environment is not None:
        return filled
    return replace(
        filled,
        tools=",".join(config.tools.use),
        environment=config.task.environment,
        tool_format=config.tools.format,
        max_turns=config.rollout.max_turns,
        max_observation_tokens=config.rollout.max_observation_tokens,
        tool_timeout=config.tools.timeout,
    )


def load_held_out(name: str, count: int | None, own_code: bool) -> list[BenchmarkProblem]:
    """Load the held-out problems of a run; of a generated task as many as asked for, or as the run evaluates."""
    run = Path(name.removeprefix(HELD_OUT))
    config = _config(run, own_code)
    if count is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"eval_problems": count})})
    task = build_task(config, "test")
    if task is None:
        raise ValueError(
            f"{run} has no held-out problems (task.eval_path): name what to evaluate with --benchmarks, for example "
            "--benchmarks problems.jsonl"
        )
    problems = [task[number] for number in range(len(task))]
    return [
        # Rules get `extra` as JSON, and so it is stored; a task of the user's own may put anything into it.
        BenchmarkProblem(name, str(n), p.location, replace(p, extra=json.loads(json.dumps(dict(p.extra), default=str))))
        for n, p in enumerate(problems)
    ]


def _config(run: Path, trusted: bool) -> Config:
    """Load the configuration of a run; code that its problems need is run only if it is trusted."""
    path = run / "config.toml"
    if not path.is_file():
        raise ValueError(f"{run} is not a run (a folder with config.toml)")
    names = own_code(path)
    # The folder may come from somebody else, and must not choose what code runs here.
    if names and not trusted:
        raise ValueError(
            f"the held-out problems of {run} need code of its own ({', '.join(names[:3])}): to run it, add --own-code; "
            "or name what to evaluate with --benchmarks"
        )
    return load(path) if names else load_stored(path)


def problem_row(item: BenchmarkProblem) -> dict[str, Any]:
    """Return a problem as a JSON object."""
    # What a rule may ask for of a problem; the benchmarks have one rule, which asks for nothing.
    asked = {} if item.benchmark in BENCHMARKS else {"source": item.problem.source, "extra": dict(item.problem.extra)}
    return {
        "benchmark": item.benchmark,
        "id": item.id,
        "location": item.location,
        "prompt": [dict(message) for message in item.problem.prompt],
        "answer": item.problem.answer,
        "prompt_hash": prompt_hash(item),
        **{key: value for key, value in asked.items() if value},
    }


def prompt_hash(item: BenchmarkProblem) -> str:
    """Return a short hash of the prompt."""
    return short_digest([dict(message) for message in item.problem.prompt])


def _data_digest(problems: Sequence[BenchmarkProblem]) -> str:
    # Without the locations: the same problems in another folder are the same data. What only rules ask for shapes no
    # response.
    left_out = ("location", "source", "extra")
    return short_digest([{k: v for k, v in problem_row(item).items() if k not in left_out} for item in problems])
