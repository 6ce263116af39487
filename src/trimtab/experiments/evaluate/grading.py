"""Grade generations. Grading is separate from sampling, so it can be repeated by another rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from trimtab.data import BOX_RULES, BenchmarkProblem
from trimtab.experiments.evaluate.conversations import environment_verdict
from trimtab.experiments.evaluate.folder import EvalFolder, Generation, SampleKey, parse_row, rows
from trimtab.experiments.evaluate.metrics import GradedSample
from trimtab.files import write_json_lines
from trimtab.grading import Verdict, VerdictKind, grade, grade_many
from trimtab.text import shown

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


def check_rule(rule: str) -> None:
    """Raise for a rule that does not exist or a service that does not answer, before anything is sampled."""
    verdict = grade("", "1", rule)  # unlike `rewards.check_rule`, this also loads a `python:` function
    if rule.startswith("http") and verdict.kind == "crashed":
        raise ValueError(verdict.error)


def rejected_truths(problems: Sequence[BenchmarkProblem], rule: str) -> list[BenchmarkProblem]:
    """Return the problems whose own answer the rule rejects: no response to them can be correct."""
    if rule not in BOX_RULES:
        return []
    boxed = [f"The answer is \\boxed{{{_unboxed(item.problem.answer)}}}." for item in problems]
    pairs = [(text, replace(item.problem, rule=rule)) for text, item in zip(boxed, problems, strict=True)]
    return [item for item, verdict in zip(problems, grade_many(pairs), strict=True) if verdict.kind != "correct"]


def grade_folder(folder: EvalFolder, problems: Sequence[BenchmarkProblem], rule: str) -> dict[SampleKey, Verdict]:
    """Grade every generation by a rule and store the verdicts."""
    by_id = {(item.benchmark, item.id): replace(item.problem, rule=rule) for item in problems}
    verdicts: dict[SampleKey, Verdict] = {}
    for batch in _batches(generation for generation in folder.iterate() if generation.failed is None):
        unknown = [g.problem for g in batch if (g.benchmark, g.problem) not in by_id]
        if unknown:
            raise ValueError(f"{folder.generations}: there is no problem {shown(unknown[0])} in problems.jsonl")
        # An environment has judged its conversations already, except where it left that to the rule.
        judged = {g.key: verdict for g in batch if (verdict := environment_verdict(g.conversation)) is not None}
        rest = [generation for generation in batch if generation.key not in judged]
        pairs = [(generation.text, by_id[generation.benchmark, generation.problem]) for generation in rest]
        graded = {g.key: verdict for g, verdict in zip(rest, grade_many(pairs), strict=True)}
        verdicts |= {g.key: (judged | graded)[g.key] for g in batch}
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


def graded_samples(
    generations: Sequence[Generation],
    verdicts: Mapping[SampleKey, Verdict],
    text_hashes: Mapping[SampleKey, int] | None = None,
) -> dict[str, list[GradedSample]]:
    """Join generations and verdicts, by benchmark; `text_hashes` tell equal responses."""
    samples: dict[str, list[GradedSample]] = {}
    # Sorted: a server's samples are stored in the order of their arrival, and sums of floats depend on the order.
    for generation in sorted(generations, key=lambda g: g.key):
        verdict = verdicts.get(generation.key)
        kind, extracted, score = (verdict.kind, verdict.extracted, verdict.score) if verdict else (None, None, None)
        measured = generation.tokens, generation.finished, generation.entropy, generation.logp
        text_hash = (text_hashes or {}).get(generation.key)
        sample = GradedSample(generation.problem, kind, extracted, *measured, text_hash, score)
        samples.setdefault(generation.benchmark, []).append(sample)
    return samples


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
    row = {"benchmark": benchmark, "problem": problem, "sample": sample, "rule": rule}
    row |= {"kind": verdict.kind, "extracted": verdict.extracted, "seconds": round(verdict.seconds, 6)}
    row |= {} if verdict.score is None else {"score": verdict.score}
    return row | ({"error": verdict.error} if verdict.error else {})


def _unboxed(answer: str) -> str:
    text = answer.strip()
    boxed = text.startswith("\\boxed{") and text.endswith("}")
    return text[len("\\boxed{") : -1] if boxed else text.strip("$")
