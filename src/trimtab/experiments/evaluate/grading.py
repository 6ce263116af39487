"""Grade generations, and count how their conversations went. Grading can be repeated by another rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from trimtab.data import BOX_RULES, BenchmarkProblem
from trimtab.experiments.evaluate.folder import EvalFolder, Generation, StoredConversation, parse_row, rows
from trimtab.experiments.evaluate.settings import SampleKey
from trimtab.files import write_json_lines
from trimtab.grading import Verdict, VerdictKind, grade_many, verdict_of
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


def environment_verdict(row: StoredConversation | None) -> Verdict | None:
    """Return what the environment says of a stored conversation; None if it leaves that to the rule."""
    if row is None:
        return None
    if row["reward"] is not None:
        return verdict_of(row["reward"])
    return Verdict("crashed", error=row["error"]) if row["ended"] == "environment" else None


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
    row = {"benchmark": benchmark, "problem": problem, "sample": sample, "rule": rule}
    row |= {"kind": verdict.kind, "extracted": verdict.extracted, "seconds": round(verdict.seconds, 6)}
    row |= {} if verdict.score is None else {"score": verdict.score}
    return row | ({"error": verdict.error} if verdict.error else {})


def _unboxed(answer: str) -> str:
    text = answer.strip()
    boxed = text.startswith("\\boxed{") and text.endswith("}")
    return text[len("\\boxed{") : -1] if boxed else text.strip("$")
