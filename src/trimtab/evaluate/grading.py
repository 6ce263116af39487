"""Verdicts on generations. Grading is apart from sampling, so it can be done again, by another rule, at no cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trimtab.evaluate.figures import Sample
from trimtab.evaluate.folder import EvalFolder, Generation, Key, json_lines
from trimtab.files import write_atomically
from trimtab.rewards import Verdict, grade, grade_many
from trimtab.tasks import BenchmarkProblem, Problem

BOX_RULES = ("math", "boxed", "strict-box")  # what accepts an answer in a box


def check_rule(rule: str) -> None:
    """Refuse a rule that does not exist before anything is sampled."""
    grade("", "1", rule)


def unreadable(questions: Sequence[BenchmarkProblem], rule: str) -> list[BenchmarkProblem]:
    """The questions whose own answer the rule does not accept: no response to them can be right."""
    if rule not in BOX_RULES:
        return []
    told = [(f"The answer is \\boxed{{{_unboxed(q.problem.answer)}}}.", _by(rule, q.problem)) for q in questions]
    verdicts = grade_many(told)
    return [question for question, verdict in zip(questions, verdicts, strict=True) if verdict.kind != "correct"]


def grade_folder(
    folder: EvalFolder, questions: Sequence[BenchmarkProblem], generations: Sequence[Generation], rule: str
) -> dict[Key, Verdict]:
    """Grade every generation by a rule and keep the verdicts."""
    problems = {(q.benchmark, q.id): _by(rule, q.problem) for q in questions}
    drawn = [generation for generation in generations if generation.failed is None]
    pairs = [(generation.text, problems[generation.benchmark, generation.problem]) for generation in drawn]
    verdicts = {g.key: verdict for g, verdict in zip(drawn, grade_many(pairs), strict=True)}
    rows = [_row(key, verdict, rule) for key, verdict in verdicts.items()]
    write_atomically(folder.verdicts, "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
    return verdicts


def read_verdicts(folder: EvalFolder) -> tuple[dict[Key, Verdict], str | None]:
    """The verdicts as they were kept, and the rule they are by."""
    verdicts, rule = {}, None
    for at, row in json_lines(folder.verdicts):
        try:
            verdicts[row["benchmark"], row["problem"], row["sample"]] = Verdict(row["kind"], row["extracted"])
            rule = row["rule"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{at}: not a verdict ({error!r})") from None
    return verdicts, rule


def samples_of(generations: Sequence[Generation], verdicts: Mapping[Key, Verdict]) -> dict[str, list[Sample]]:
    """What the figures need, by benchmark."""
    samples: dict[str, list[Sample]] = {}
    for generation in sorted(generations, key=lambda g: g.key):
        verdict = verdicts.get(generation.key)
        samples.setdefault(generation.benchmark, []).append(
            Sample(
                question=generation.problem,
                kind=verdict.kind if verdict else None,
                extracted=verdict.extracted if verdict else None,
                tokens=generation.tokens,
                finished=generation.finished,
                entropy=generation.entropy,
                logp=generation.logp,
            )
        )
    return samples


def _by(rule: str, problem: Problem) -> Problem:
    return replace(problem, rule=rule)


def _row(key: Key, verdict: Verdict, rule: str) -> dict[str, Any]:
    benchmark, problem, sample = key
    row = {"benchmark": benchmark, "problem": problem, "sample": sample, "rule": rule}
    return row | {"kind": verdict.kind, "extracted": verdict.extracted, "seconds": round(verdict.seconds, 6)}


def _unboxed(answer: str) -> str:
    text = answer.strip()
    boxed = text.startswith("\\boxed{") and text.endswith("}")
    return text[len("\\boxed{") : -1] if boxed else text.strip("$")
