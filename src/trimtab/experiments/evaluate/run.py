"""Run an evaluation: generate what is missing, grade it (also again, by another rule), and compute the metrics."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import Field, TypeAdapter

from trimtab.agents import ReplyTemplate, ToolSet
from trimtab.data import BOX_RULES, BenchmarkProblem, Sample
from trimtab.experiments.evaluate import EvalOptions
from trimtab.experiments.evaluate.agents import open_agent_generator
from trimtab.experiments.evaluate.folder import (
    Batches,
    EvalFolder,
    Generation,
    StoredConversation,
    parse_row,
    rows,
)
from trimtab.experiments.evaluate.metrics import BenchmarkMetrics, GradedSample, compute_metrics
from trimtab.experiments.evaluate.native import NativeGenerator, open_model
from trimtab.experiments.evaluate.settings import EvalSettings, SampleKey, check_rule, prepare, with_benchmarks
from trimtab.files import locked, write_json_lines
from trimtab.grading import Verdict, VerdictKind, grade_samples
from trimtab.process import check_interrupted
from trimtab.text import PrintLine, one_line, shown
from trimtab.trainer.memory import is_out_of_memory
from trimtab.trainer.model import Policy
from trimtab.trainer.train import ToolUse, set_verdicts

if TYPE_CHECKING:
    from trimtab.experiments.evaluate.endpoint import EndpointGenerator


class EvalProgress(Protocol):
    """Shows messages, and how many of the samples are there."""

    def message(self, text: str) -> None:
        """Show a message."""

    def samples(self, total: int, done: int) -> AbstractContextManager[Callable[[Sequence[Generation]], None]]:
        """Return a context whose value is called with every new batch."""


class Generator(Protocol):
    """Makes the samples of an evaluation."""

    def reusable(self, problems: Sequence[BenchmarkProblem], done: AbstractSet[SampleKey]) -> set[SampleKey]:
        """Return which of the samples that are there need not be made again."""

    def generate(self, problems: Sequence[BenchmarkProblem], done: AbstractSet[SampleKey]) -> Batches:
        """Yield the samples that are missing."""


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


def evaluate(options: EvalOptions, progress: EvalProgress) -> EvalResult:
    """Generate what is missing, grade it, and compute the metrics."""
    options = with_benchmarks(options)
    settings, problems = prepare(options)
    folder = options.folder
    if options.resume:
        folder.settings()  # raises if there is nothing to resume
    progress.message(settings.describe())
    with locked(folder.path):
        _warn_of_other_machine(folder, settings, progress.message)  # before `open` replaces the stored settings
        folder.open(settings, problems)
        samples, tokens, seconds = _generate(folder, options, settings, problems, progress)
        result = grade_evaluation(folder, settings.rule, progress.message)
    return replace(result, settings=settings, seconds=seconds, new_samples=samples, tokens=tokens)


def grade_evaluation(folder: EvalFolder, rule: str | None = None, log: PrintLine = lambda text: None) -> EvalResult:
    """Compute the metrics of a folder; grade again if a rule is given or a verdict is missing."""
    settings = folder.settings()
    generations = []
    held: dict[str, list[Any]] = {}
    for generation in folder.iterate():
        if (conversation := generation.conversation) is not None and not settings.agent:
            held.setdefault(generation.benchmark, []).append(without_texts(conversation))
        # Only the graders need the texts; the metrics, whether two are equal.
        generations.append(replace(generation, text=str(hash(generation.text)), conversation=None))
    verdicts, used = read_verdicts(folder) if rule is None else ({}, None)
    rejected: list[str] = []
    # A process may be killed between sampling and grading; then some generations have no verdict.
    if not {generation.key for generation in generations if generation.failed is None} <= verdicts.keys():
        used = rule or trusted_rule(folder, used or settings.rule)
        verdicts, rejected = _grade(folder, len(generations), used, log)
    samples: dict[str, list[GradedSample]] = {name: [] for name in settings.benchmarks}
    # Sorted: a server's samples are stored in the order of their arrival, and sums of floats depend on the order.
    for generation in sorted(generations, key=lambda g: g.key):
        graded = GradedSample(generation, verdicts.get(generation.key))
        samples.setdefault(generation.benchmark, []).append(graded)
    samples = {name: found for name, found in samples.items() if found}
    metrics = {
        name: compute_metrics(samples[name], settings.samples[name]) for name in settings.benchmarks if name in samples
    }
    tools = {name: figures for name in metrics if (figures := tool_figures(held.get(name, [])))}
    return EvalResult(folder, replace(settings, rule=used or settings.rule), samples, metrics, rejected, tools=tools)


def trusted_rule(folder: EvalFolder, rule: str) -> str:
    """Return the rule that a folder names, or raise if it names a Python function."""
    # A folder may come from somebody else, and must not choose what code runs here.
    if rule.startswith("python:"):
        option = shlex.join(["--rule", rule])
        raise ValueError(f"{folder.path} was graded by {rule[:100]!r}, code of its own: to run it, pass {option}")
    return rule


def _grade(folder: EvalFolder, count: int, rule: str, log: PrintLine) -> tuple[dict[SampleKey, Verdict], list[str]]:
    """Return the verdicts by a rule, and the locations of the problems whose own answers the rule rejects."""
    check_rule(rule)
    log(f"grading {count:,} responses by the rule {rule}")
    problems = folder.problems()
    rejected = [item.location for item in rejected_truths(problems, rule)]
    for location in map(one_line, rejected[:5]):
        log(f"warning: {location}: the rule {rule} rejects the answer itself; no response to it can be correct")
    if len(rejected) > 5:
        log(f"warning: and {len(rejected) - 5} more such answers, listed in result.json")
    return grade_folder(folder, problems, rule), rejected


def _generate(
    folder: EvalFolder,
    options: EvalOptions,
    settings: EvalSettings,
    problems: Sequence[BenchmarkProblem],
    progress: EvalProgress,
) -> tuple[int, float, float]:
    """Generate what is missing; return its samples and tokens, and the seconds once the model was loaded."""
    if options.retry_failed:
        folder.keep_only(generation for generation in folder.iterate() if generation.failed is None)
    known = {generation.key for generation in folder.iterate()}
    keys = settings.sample_keys(problems)
    if keys <= known:
        progress.message("all samples are there already")
        return 0, 0, 0.0
    samples = 0
    tokens: float = 0  # whole if they were counted, a mean if a server gave their sum
    with ExitStack() as started:
        tools = started.enter_context(open_tools(settings, options.tool_workers))
        # Loads the model, so not before something is missing.
        if settings.agent:
            generator: Generator = open_agent_generator(options, settings, started)
        else:
            generator = open_generator(options, settings, problems, tools, progress.message)
        reused = generator.reusable(problems, known)
        if reused != known:
            folder.keep_only(generation for generation in folder.iterate() if generation.key in reused)
        if reused:
            progress.message(f"{len(reused):,} of {len(keys):,} samples are there already")
        start = time.monotonic()
        with progress.samples(len(keys), len(reused)) as advance:
            try:
                # The requests of a server end with the generator, on Ctrl-C too.
                with closing(generator.generate(problems, reused)) as batches:
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
                lower = f"batch smaller than {settings.batch}" if native else f"concurrency below {options.concurrency}"
                raise ValueError(f"out of memory: use a --{lower}") from None
    return samples, tokens, time.monotonic() - start


def open_generator(
    options: EvalOptions,
    settings: EvalSettings,
    problems: Sequence[BenchmarkProblem],
    tools: ToolSet | None = None,
    log: PrintLine = lambda text: None,
) -> NativeGenerator | EndpointGenerator:
    """Return what generates the samples: a server, or a model in this process."""
    if options.connection is not None:
        from trimtab.experiments.evaluate.endpoint import EndpointGenerator  # the openai package takes half a second

        return EndpointGenerator(options.connection, settings, options.name, log, tools)
    policy = open_model(options.name, settings.device, options.precision, options.chat)
    generator = NativeGenerator(policy, settings, options.entropy, tool_use(policy, settings, tools))
    for note in generator.tool_use.template.notes if generator.tool_use else []:
        log(f"note: {note}")
    generator.check_lengths(problems)
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


def _warn_of_other_machine(folder: EvalFolder, settings: EvalSettings, log: PrintLine) -> None:
    """Warn if a resumed evaluation runs on another device or thread count, which changes rounding."""
    if not (folder.path / "settings.json").exists():
        return
    before = folder.settings()
    for name in ("device", "threads"):
        old, new = getattr(before, name), getattr(settings, name)
        if old != new:
            log(f"warning: begun with {name} {old}, now {new}: new samples may differ by rounding")


# Of responses that are graded side by side: enough that slow ones overlap, and little enough for memory.
CHARACTERS_AT_A_TIME = 1 << 24


@dataclass(frozen=True)
class _VerdictRow:
    benchmark: str
    problem: str
    sample: Annotated[int, Field(strict=True)]
    kind: VerdictKind
    extracted: str | None
    rule: str
    score: float | None = None


_VERDICT = TypeAdapter(_VerdictRow)


@dataclass(frozen=True)
class ToolFigures:
    """How the model used its tools on a benchmark: means over responses, shares of calls and of responses."""

    responses: int
    turns: float
    calls: float
    ok_share: float | None  # of calls
    answers_with_call_share: float  # responses with at least one call that went well
    outcomes: dict[str, int]
    ended: dict[str, int]


def rejected_truths(problems: Sequence[BenchmarkProblem], rule: str) -> list[BenchmarkProblem]:
    """Return the problems whose own answer the rule rejects: no response to them can be correct."""
    if rule not in BOX_RULES:
        return []
    right = [Sample(item.problem, f"The answer is \\boxed{{{_unboxed(item.problem.answer)}}}.") for item in problems]
    verdicts = grade_samples(right, rule)
    return [item for item, verdict in zip(problems, verdicts, strict=True) if verdict.kind != "correct"]


def grade_folder(folder: EvalFolder, problems: Sequence[BenchmarkProblem], rule: str) -> dict[SampleKey, Verdict]:
    """Grade every generation by a rule and store the verdicts."""
    by_id = {(item.benchmark, item.id): replace(item.problem, rule=rule) for item in problems}
    verdicts: dict[SampleKey, Verdict] = {}
    for batch in _batches(generation for generation in folder.iterate() if generation.failed is None):
        unknown = [g.problem for g in batch if (g.benchmark, g.problem) not in by_id]
        if unknown:
            raise ValueError(f"{folder.generations}: there is no problem {shown(unknown[0])} in problems.jsonl")
        samples = [generation.to_grade(by_id[generation.benchmark, generation.problem]) for generation in batch]
        set_verdicts(samples)
        verdicts |= {generation.key: sample.verdict for generation, sample in zip(batch, samples, strict=True)}
    write_json_lines(folder.verdicts, (_row(key, verdict, rule) for key, verdict in verdicts.items()))
    return verdicts


def read_verdicts(folder: EvalFolder) -> tuple[dict[SampleKey, Verdict], str | None]:
    """Read the stored verdicts, and the rule that gave them."""
    verdicts, rule = {}, None
    for location, row in rows(folder.verdicts):
        stored = parse_row(_VERDICT, row, location, "verdict")
        key = stored.benchmark, stored.problem, stored.sample
        verdicts[key], rule = Verdict(stored.kind, stored.extracted, score=stored.score), stored.rule
    return verdicts, rule


def without_texts(row: StoredConversation) -> dict[str, Any]:
    """Return what the figures need of a stored conversation, so that memory does not hold all that was said."""
    messages = [{"role": message["role"]} for message in row["messages"]]
    return {"ended": row["ended"], "messages": messages, "calls": [{"outcome": c["outcome"]} for c in row["calls"]]}


def tool_figures(rows: Iterable[Mapping[str, Any]]) -> ToolFigures | None:
    """Return the figures of stored conversations; None without any."""
    outcomes: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    turns = helped = 0
    for row in rows:
        found = [str(call["outcome"]) for call in row["calls"]]
        outcomes.update(found)
        ended[str(row["ended"])] += 1
        turns += sum(message["role"] == "assistant" for message in row["messages"])
        helped += "ok" in found
    responses, calls = ended.total(), outcomes.total()
    if not responses:
        return None
    return ToolFigures(
        responses=responses,
        turns=turns / responses,
        calls=calls / responses,
        ok_share=outcomes["ok"] / calls if calls else None,
        answers_with_call_share=helped / responses,
        outcomes=dict(sorted(outcomes.items())),
        ended=dict(sorted(ended.items())),
    )


def _batches(generations: Iterable[Generation]) -> Iterator[list[Generation]]:
    """Split generations into batches of about so much text as may be in memory."""
    batch: list[Generation] = []
    characters = 0
    for generation in generations:
        batch.append(generation)
        characters += len(generation.text)
        if characters >= CHARACTERS_AT_A_TIME:
            yield batch
            batch, characters = [], 0
    yield batch


def _row(key: SampleKey, verdict: Verdict, rule: str) -> dict[str, Any]:
    benchmark, problem, sample = key
    return {"benchmark": benchmark, "problem": problem, "sample": sample, "rule": rule, **verdict.as_row()}


def _unboxed(answer: str) -> str:
    text = answer.strip()
    boxed = text.startswith("\\boxed{") and text.endswith("}")
    return text[len("\\boxed{") : -1] if boxed else text.strip("$")
