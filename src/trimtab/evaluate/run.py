"""An evaluation from beginning to end: settle what is asked, draw what is missing, grade it, and put figures to it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from trimtab.evaluate import grading
from trimtab.evaluate.endpoint import Connection, EndpointSource
from trimtab.evaluate.figures import Figures, Sample, figures
from trimtab.evaluate.folder import EvalFolder, Generation, Key, question_row
from trimtab.evaluate.jobs import Job, Source
from trimtab.evaluate.native import NativeSource, fingerprint, open_model
from trimtab.evaluate.progress import Progress
from trimtab.evaluate.settings import MAX_NEW_TOKENS, Settings, choose_benchmarks, decoding, digest
from trimtab.memory import is_out_of_memory
from trimtab.policy import pick_device
from trimtab.rewards import Verdict
from trimtab.tasks import BENCHMARKS, DEFAULT_BENCHMARKS, PROMPT_SUFFIX, BenchmarkProblem, load_benchmark


@dataclass(frozen=True)
class EvalRequest:
    """An evaluation as the user asked for it; None is the default of the preset or the benchmark."""

    model: str | None = None
    benchmarks: tuple[str, ...] = DEFAULT_BENCHMARKS
    data: Path | None = None
    preset: str = "train"
    samples: int | None = None
    max_new_tokens: int = MAX_NEW_TOKENS
    temperature: float | None = None
    top_p: float | None = None
    suffix: str = PROMPT_SUFFIX
    problems: int | None = None
    seed: int = 0
    rule: str = "math"
    out: Path | None = None
    connection: Connection | None = None
    model_name: str | None = None
    device: str = "auto"
    precision: str = "fp32"
    chat: bool = True
    batch: int = 256
    entropy: bool = True
    resume: bool = False  # there must be something to go on with
    retry_failed: bool = False

    @property
    def name(self) -> str:
        """What the evaluation calls its model."""
        name = self.model_name or self.model if self.connection else self.model
        if not name:
            raise ValueError("which model? Say trimtab eval MODEL, or --endpoint URL --model-name NAME")
        return name

    @property
    def folder(self) -> EvalFolder:
        """Where it goes: by model and preset, so that the same command goes on with the same evaluation."""
        short = re.sub(r"[^\w.+=-]+", "-", self.name).strip("-.")[-80:] or "model"
        return EvalFolder(self.out or Path("runs") / f"eval-{short}-{self.preset}")


@dataclass(frozen=True)
class Evaluated:
    """An evaluation that is done: its samples and figures by benchmark. `drawn` and `seconds` are of this process."""

    folder: EvalFolder
    settings: Settings
    samples: dict[str, list[Sample]]
    figures: dict[str, Figures]
    unreadable: list[str] = field(default_factory=list)
    seconds: float = 0.0
    drawn: int = 0
    tokens: float = 0.0


Tell = Callable[[str], object]


def prepare(wanted: EvalRequest) -> tuple[Settings, list[Job]]:
    """Read and check everything that can be checked before a model is loaded."""
    for name in ("samples", "problems", "max_new_tokens", "batch"):
        value = getattr(wanted, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: it is at least 1")
    temperature, top_p = decoding(wanted.preset, wanted.temperature, wanted.top_p)
    benchmarks = choose_benchmarks(wanted.benchmarks)
    grading.check_rule(wanted.rule)
    asked = {
        name: load_benchmark(name, wanted.data, wanted.suffix, wanted.rule)[: wanted.problems] for name in benchmarks
    }
    native = wanted.connection is None
    settings = Settings(
        model=wanted.name,
        sampler="native" if native else "endpoint",
        benchmarks=benchmarks,
        samples={name: wanted.samples or BENCHMARKS[name].samples for name in benchmarks},
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=wanted.max_new_tokens,
        suffix=wanted.suffix,
        seed=wanted.seed,
        rule=wanted.rule,
        problems=wanted.problems,
        weights=fingerprint(wanted.name) if native else "",
        data={name: _data_digest(questions) for name, questions in asked.items()},
        precision=wanted.precision if native else "",
        chat=wanted.chat,
        batch=wanted.batch if native else 0,
        endpoint=wanted.connection.url if wanted.connection else "",
        device=str(pick_device(wanted.device)) if native else "",
        threads=torch.get_num_threads() if native else 0,
    )
    return settings, [Job(q, settings.samples[name]) for name, questions in asked.items() for q in questions]


def evaluate(wanted: EvalRequest, progress: Progress) -> Evaluated:
    """Draw what is missing, grade, and put figures to it."""
    settings, jobs = prepare(wanted)
    folder = wanted.folder
    if wanted.resume:
        folder.settings()
    progress.message(settings.describe())
    with folder.alone():
        _warn_of_other_machine(folder, settings, progress.message)
        folder.open(settings, [job.question for job in jobs])
        drawn, seconds = _draw(folder, wanted, settings, jobs, progress)
        done = graded(folder, settings.rule, progress.message)
    tokens = sum(generation.tokens or 0 for generation in drawn)
    return replace(done, settings=settings, seconds=seconds, drawn=len(drawn), tokens=tokens)


def graded(folder: EvalFolder, rule: str | None = None, tell: Tell = lambda text: None) -> Evaluated:
    """The figures of an evaluation, graded anew where a rule is given or a verdict is missing."""
    settings, generations = folder.settings(), folder.read()
    verdicts, used = grading.read_verdicts(folder) if rule is None else ({}, None)
    unread: list[str] = []
    if not {generation.key for generation in generations if generation.failed is None} <= verdicts.keys():
        used = rule or rule_of(folder, used or settings.rule)
        verdicts, unread = _grade(folder, generations, used, tell)
    samples = grading.samples_of(generations, verdicts)
    found = {name: figures(samples[name], settings.samples[name]) for name in settings.benchmarks if samples.get(name)}
    return Evaluated(folder, replace(settings, rule=used or settings.rule), samples, found, unread)


def rule_of(folder: EvalFolder, rule: str) -> str:
    """The rule that a folder names. A folder may be someone else's, and must not choose what code runs here."""
    if rule.startswith("python:"):
        raise ValueError(f"{folder.path} was graded by {rule[:100]!r}, code of its own: to run that, say --rule {rule}")
    return rule


def _grade(
    folder: EvalFolder, generations: Sequence[Generation], rule: str, tell: Tell
) -> tuple[dict[Key, Verdict], list[str]]:
    """Verdicts by a rule, and where the answers stand that the rule does not accept for themselves."""
    grading.check_rule(rule)
    tell(f"grading {len(generations):,} responses by the rule {rule}")
    questions = folder.questions()
    unread = [question.location for question in grading.unreadable(questions, rule)]
    for at in unread[:5]:
        tell(f"warning: {at}: the rule {rule} does not accept the answer itself; no response to it can be right")
    if len(unread) > 5:
        tell(f"warning: and {len(unread) - 5} more such answers, listed in result.json")
    return grading.grade_folder(folder, questions, generations, rule), unread


def _draw(
    folder: EvalFolder, wanted: EvalRequest, settings: Settings, jobs: Sequence[Job], progress: Progress
) -> tuple[list[Generation], float]:
    """Draw what is missing; the generations of this process, and the seconds they took once the model was loaded."""
    known = {generation.key: generation for generation in folder.read()}
    if wanted.retry_failed:
        known = {key: generation for key, generation in known.items() if generation.failed is None}
        folder.keep_only(known.values())
    names = {name for job in jobs for name in job.names()}
    if names <= known.keys():
        progress.message("all samples are there already")
        return [], 0.0
    source = open_source(wanted, settings, jobs)
    kept = source.kept(jobs, known.keys())
    if kept != known.keys():
        folder.keep_only(generation for key, generation in known.items() if key in kept)
    if kept:
        progress.message(f"{len(kept):,} of {len(names):,} samples are there already")
    drawn, began = [], time.monotonic()
    with progress.samples(len(names), len(kept)) as advance:
        try:
            for batch in source.draw(jobs, kept):
                folder.append(batch)
                drawn += batch
                advance(batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(f"out of memory: say a --batch smaller than {settings.batch}") from None
    return drawn, time.monotonic() - began


def open_source(wanted: EvalRequest, settings: Settings, jobs: Sequence[Job]) -> Source:
    """What draws the samples: a server, or a model in this process."""
    if wanted.connection is not None:
        return EndpointSource(wanted.connection, settings, wanted.name)
    policy = open_model(wanted.name, settings.device, wanted.precision, wanted.chat)
    source = NativeSource(policy, settings, wanted.entropy)
    source.check_lengths(jobs)
    return source


def _data_digest(questions: Sequence[BenchmarkProblem]) -> str:
    return digest([{k: v for k, v in question_row(question).items() if k != "location"} for question in questions])


def _warn_of_other_machine(folder: EvalFolder, settings: Settings, tell: Tell) -> None:
    """What may differ when an evaluation goes on, but changes roundings."""
    if not (folder.path / "settings.json").exists():
        return
    before = folder.settings()
    for name in ("device", "threads"):
        old, new = getattr(before, name), getattr(settings, name)
        if old != new:
            tell(f"warning: begun with {name} {old}, now {new}: new samples may differ by rounding")
