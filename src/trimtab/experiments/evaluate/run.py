"""Run an evaluation: resolve its settings, generate what is missing, grade it, and compute the metrics."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from trimtab.agents import CALL_FORMATS, CallFormat, ReplyTemplate, ToolSet
from trimtab.data import HELD_OUT, BenchmarkProblem, find_benchmark, load_benchmark
from trimtab.experiments.evaluate import grading
from trimtab.experiments.evaluate.conversations import ToolFigures, tool_figures, without_texts
from trimtab.experiments.evaluate.endpoint import EndpointGenerator
from trimtab.experiments.evaluate.folder import EvalFolder, GenerationRequest, SampleKey, problem_row
from trimtab.experiments.evaluate.held_out import common_rule, load_held_out, with_benchmarks
from trimtab.experiments.evaluate.metrics import BenchmarkMetrics, GradedSample, compute_metrics
from trimtab.experiments.evaluate.native import NativeGenerator, open_model
from trimtab.experiments.evaluate.options import MAX_NEW_TOKENS, EvalOptions
from trimtab.experiments.evaluate.progress import EvalProgress, MessageLog
from trimtab.experiments.evaluate.settings import EvalSettings, ToolSettings, decoding, parse_benchmarks, parse_columns
from trimtab.files import locked
from trimtab.grading import Verdict
from trimtab.private_cache import short_digest
from trimtab.stop_signals import check_interrupted
from trimtab.text import nearest, one_line
from trimtab.trainer.config import model_digest
from trimtab.trainer.memory import is_out_of_memory
from trimtab.trainer.model import Policy, pick_device
from trimtab.trainer.sampling import require_vllm
from trimtab.trainer.train import ToolUse


@dataclass(frozen=True)
class EvalResult:
    """A finished evaluation: its samples and metrics by benchmark."""

    folder: EvalFolder
    settings: EvalSettings
    samples: dict[str, list[GradedSample]]
    metrics: dict[str, BenchmarkMetrics]
    rejected_truths: list[str] = field(default_factory=list)  # locations of problems whose answer the rule rejects
    # What this process generated:
    seconds: float = 0.0
    new_samples: int = 0
    tokens: float = 0.0
    tools: dict[str, ToolFigures] = field(default_factory=dict)  # by benchmark, in an evaluation with tools


def prepare(options: EvalOptions) -> tuple[EvalSettings, list[GenerationRequest]]:
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
    rule = options.rule or common_rule([item for items in problems.values() for item in items])
    grading.check_rule(rule)  # hours of sampling should not end with a misspelt rule
    native = options.connection is None
    check_engine(options.engine, native)
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
    )
    requests = [GenerationRequest(item, settings.samples[name]) for name, items in problems.items() for item in items]
    return settings, requests


def tool_settings(options: EvalOptions) -> ToolSettings | None:
    """Return the tools that were asked for; None without."""
    use = tuple(name.strip() for name in (options.tools or "").split(",") if name.strip())
    if not use and options.environment is None:
        return None
    if options.tool_format != "auto" and options.connection is not None:
        raise ValueError("--tool-format: a server writes calls in its own way; leave it out with --endpoint")
    if options.tool_format not in ("auto", *CALL_FORMATS):
        raise ValueError(f"--tool-format {options.tool_format}: {nearest(options.tool_format, CALL_FORMATS)}")
    settings = ToolSettings(
        use=use,
        environment=options.environment or "",
        format=cast("CallFormat", options.tool_format),
        max_turns=options.max_turns,
        max_observation_tokens=options.max_observation_tokens,
        timeout=options.tool_timeout,
    )
    if settings.max_turns < 2:
        raise ValueError(f"--max-turns {settings.max_turns}: a model that calls a tool needs 2 messages at least")
    settings.limits  # raises for a value that makes no sense  # noqa: B018
    return settings


def check_engine(engine: str, native: bool) -> None:
    """Raise for an engine that does not exist, or is not installed."""
    if engine not in ("native", "vllm"):
        raise ValueError(f"--engine {engine}: it must be native or vllm")
    if engine == "vllm" and not native:
        raise ValueError("--engine vllm samples in this process: leave it out with --endpoint")
    if engine == "vllm":
        require_vllm("--engine vllm")


def evaluate(options: EvalOptions, progress: EvalProgress) -> EvalResult:
    """Generate what is missing, grade it, and compute the metrics."""
    options = with_benchmarks(options)
    settings, requests = prepare(options)
    folder = options.folder
    if options.resume:
        folder.settings()  # raises where there is nothing to resume
    progress.message(settings.describe())
    with locked(folder.path):
        _warn_of_other_machine(folder, settings, progress.message)  # before `open` replaces the stored settings
        folder.open(settings, [request.item for request in requests])
        samples, tokens, seconds = _generate(folder, options, settings, requests, progress)
        result = grade_evaluation(folder, settings.rule, progress.message)
    return replace(result, settings=settings, seconds=seconds, new_samples=samples, tokens=tokens)


def grade_evaluation(folder: EvalFolder, rule: str | None = None, log: MessageLog = lambda text: None) -> EvalResult:
    """Compute the metrics of a folder; grade again where a rule is given or a verdict is missing."""
    settings = folder.settings()
    generations, hashes = [], {}
    held: dict[str, list[dict[str, Any]]] = {}
    for generation in folder.iterate():
        hashes[generation.key] = hash(generation.text)
        if generation.conversation is not None:
            held.setdefault(generation.benchmark, []).append(without_texts(generation.conversation))
        generations.append(replace(generation, text="", conversation=None))  # only the graders need the texts
    verdicts, used = grading.read_verdicts(folder) if rule is None else ({}, None)
    rejected: list[str] = []
    # A process may be killed between sampling and grading; then some generations have no verdict.
    if not {generation.key for generation in generations if generation.failed is None} <= verdicts.keys():
        used = rule or trusted_rule(folder, used or settings.rule)
        verdicts, rejected = _grade(folder, len(generations), used, log)
    samples = grading.graded_samples(generations, verdicts, hashes)
    metrics = {
        name: compute_metrics(samples[name], settings.samples[name])
        for name in settings.benchmarks
        if samples.get(name)
    }
    tools = {name: figures for name in metrics if (figures := tool_figures(held.get(name, [])))}
    return EvalResult(folder, replace(settings, rule=used or settings.rule), samples, metrics, rejected, tools=tools)


def trusted_rule(folder: EvalFolder, rule: str) -> str:
    """Return the rule that a folder names, or raise where it names a Python function."""
    # A folder may come from somebody else, and must not choose what code runs here.
    if rule.startswith("python:"):
        option = shlex.join(["--rule", rule])
        raise ValueError(f"{folder.path} was graded by {rule[:100]!r}, code of its own: to run it, pass {option}")
    return rule


def _grade(folder: EvalFolder, count: int, rule: str, log: MessageLog) -> tuple[dict[SampleKey, Verdict], list[str]]:
    """Return the verdicts by a rule, and the locations of the problems whose own answers the rule rejects."""
    grading.check_rule(rule)
    log(f"grading {count:,} responses by the rule {rule}")
    problems = folder.problems()
    rejected = [item.location for item in grading.rejected_truths(problems, rule)]
    for location in map(one_line, rejected[:5]):
        log(f"warning: {location}: the rule {rule} rejects the answer itself; no response to it can be correct")
    if len(rejected) > 5:
        log(f"warning: and {len(rejected) - 5} more such answers, listed in result.json")
    return grading.grade_folder(folder, problems, rule), rejected


def _generate(
    folder: EvalFolder,
    options: EvalOptions,
    settings: EvalSettings,
    requests: Sequence[GenerationRequest],
    progress: EvalProgress,
) -> tuple[int, float, float]:
    """Generate what is missing; return its samples and tokens, and the seconds once the model was loaded."""
    if options.retry_failed:
        folder.keep_only(generation for generation in folder.iterate() if generation.failed is None)
    known = {generation.key for generation in folder.iterate()}
    keys = {key for request in requests for key in request.sample_keys()}
    if keys <= known:
        progress.message("all samples are there already")
        return 0, 0, 0.0
    with open_tools(settings, options.tool_workers) as tools:
        return _generate_missing(folder, options, settings, requests, progress, tools, known)


def _generate_missing(
    folder: EvalFolder,
    options: EvalOptions,
    settings: EvalSettings,
    requests: Sequence[GenerationRequest],
    progress: EvalProgress,
    tools: ToolSet | None,
    known: set[SampleKey],
) -> tuple[int, float, float]:
    keys = {key for request in requests for key in request.sample_keys()}
    # Loads the model, so not before something is missing.
    generator = open_generator(options, settings, requests, tools, progress.message)
    reused = generator.reusable(requests, known)
    if reused != known:
        folder.keep_only(generation for generation in folder.iterate() if generation.key in reused)
    if reused:
        progress.message(f"{len(reused):,} of {len(keys):,} samples are there already")
    samples = 0
    tokens: float = 0  # whole where they were counted, a mean where a server gave their sum
    start = time.monotonic()
    with progress.samples(len(keys), len(reused)) as advance:
        try:
            with closing(generator.generate(requests, reused)) as batches:  # whose requests end with it, on Ctrl-C too
                for batch in batches:
                    folder.append(batch)  # on the disk before it is counted: Ctrl-C may come at any line
                    samples += len(batch)
                    tokens += sum(generation.tokens or 0 for generation in batch)
                    advance(batch)
                    check_interrupted()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            native = options.connection is None
            lower = f"--batch smaller than {settings.batch}" if native else f"--concurrency below {options.concurrency}"
            raise ValueError(f"out of memory: use a {lower}") from None
    return samples, tokens, time.monotonic() - start


def open_generator(
    options: EvalOptions,
    settings: EvalSettings,
    requests: Sequence[GenerationRequest],
    tools: ToolSet | None = None,
    log: MessageLog = lambda text: None,
) -> NativeGenerator | EndpointGenerator:
    """Return what generates the samples: a server, or a model in this process."""
    if options.connection is not None:
        return EndpointGenerator(options.connection, settings, options.name, log, tools=tools)
    policy = open_model(options.name, settings.device, options.precision, options.chat)
    generator = NativeGenerator(policy, settings, options.entropy, tool_use(policy, settings, tools))
    for note in generator.tool_use.template.notes if generator.tool_use else []:
        log(f"note: {note}")
    generator.check_lengths(requests)
    return generator


def open_tools(settings: EvalSettings, workers: int) -> AbstractContextManager[ToolSet | None]:
    """Return the tools of an evaluation, to be closed at its end."""
    if settings.tools is None:
        return nullcontext()
    return closing(ToolSet(settings.tools.use, environment=settings.tools.environment or None, workers=workers))


def tool_use(policy: Policy, settings: EvalSettings, tools: ToolSet | None) -> ToolUse | None:
    """Return how a policy uses its tools; None without."""
    if settings.tools is None or tools is None:
        return None
    template = ReplyTemplate(policy.tokenizer, tools, chat=policy.chat, call_format=settings.tools.format)
    return ToolUse(tools, template, settings.tools.limits)


def _data_digest(problems: Sequence[BenchmarkProblem]) -> str:
    # Without the locations: the same problems in another folder are the same data. What only rules ask for shapes no
    # response.
    left_out = ("location", "source", "extra")
    return short_digest([{k: v for k, v in problem_row(item).items() if k not in left_out} for item in problems])


def _warn_of_other_machine(folder: EvalFolder, settings: EvalSettings, log: MessageLog) -> None:
    """Warn where a resumed evaluation runs on another device or thread count, which changes rounding."""
    if not (folder.path / "settings.json").exists():
        return
    before = folder.settings()
    for name in ("device", "threads"):
        old, new = getattr(before, name), getattr(settings, name)
        if old != new:
            log(f"warning: begun with {name} {old}, now {new}: new samples may differ by rounding")
