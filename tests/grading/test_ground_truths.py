r"""Every answer of the six benchmarks is right when a response gives it, as it stands and in common ways of writing."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from trimtab.data import Problem, read_file
from trimtab.data.problems import user
from trimtab.grading import Verdict, grade_many

DATA = Path(__file__).parents[2].parent / "shared" / "data"
BENCHMARKS = {"aime24": 30, "aime25": 30, "amc23": 40, "math500": 500, "minerva": 272, "olympiadbench": 674}

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the benchmarks' answers are not here")


def _plain(answer: str) -> str:
    r"""Out of its own `\boxed{}`, which one benchmark has."""
    boxed = re.fullmatch(r"\s*\\boxed\{(.*)\}\s*", answer, re.DOTALL)
    return boxed[1] if boxed else answer


def _bare(answer: str) -> str:
    """Without dollars; escaped ones are part of the answer."""
    return re.sub(r"(?<!\\)\$", "", answer)


def _wide(answer: str) -> str:
    if re.search(r"\\(left|right|big)", answer, re.IGNORECASE) or answer.count("(") != answer.count(")"):
        return answer
    return answer.replace("(", r"\left(").replace(")", r"\right)")


def _large(answer: str) -> str:
    return answer.replace(r"\frac", r"\dfrac")


def _braced(answer: str) -> str:
    return re.sub(r"([_^])([0-9])(?![0-9])", r"\1{\2}", answer)


FORMS: dict[str, Callable[[str], str]] = {
    "in a box": lambda answer: rf"The answer is \boxed{{{answer}}}.",
    "in a box between dollars": lambda answer: rf"The answer is $\boxed{{{_bare(answer)}}}$.",
    "dollars in the box": lambda answer: rf"\boxed{{${_bare(answer)}$}}",
    "large fractions": lambda answer: rf"\[ \boxed{{{_large(_bare(answer))}}} \]",
    "spaces and a full stop": lambda answer: rf"So we get $$\boxed{{ {_bare(answer).rstrip('.')}. }}$$",
    "wide brackets": lambda answer: rf"\( \boxed{{{_wide(_bare(answer))}}} \)",
    "braces about digits": lambda answer: rf"\boxed{{{_braced(_bare(answer))}}}",
}

# (benchmark, answer): why no form, or only some, can be right. An entry that becomes gradable must go.
UNGRADABLE: dict[tuple[str, str], str] = {}


def _answers(benchmark: str) -> list[str]:
    return list(dict.fromkeys(problem.answer for problem in read_file(str(DATA / f"{benchmark}.parquet"))))


def _verdicts(benchmark: str, answers: list[str]) -> dict[tuple[str, str], Verdict]:
    asked = [(answer, form) for answer in answers for form in FORMS]
    responses = [FORMS[form](_plain(answer)) for answer, form in asked]
    problems = [Problem(user("?"), answer, "math", benchmark) for answer, _ in asked]
    return dict(zip(asked, grade_many(zip(responses, problems, strict=True)), strict=True))


@needs_data
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_answer_is_right_in_common_ways_of_writing(benchmark: str) -> None:
    verdicts = _verdicts(benchmark, _answers(benchmark))
    refused = {key: verdict for key, verdict in verdicts.items() if verdict.kind != "correct"}
    new = [f"{v.kind}: {a!r} {form}" for (a, form), v in refused.items() if (benchmark, a) not in UNGRADABLE]
    assert not new, "\n".join(new)
    mended = {answer for name, answer in UNGRADABLE if name == benchmark} - {answer for answer, _ in refused}
    assert not mended, "these can be graded now: take them off the table"


@needs_data
def test_a_benchmarks_answer_is_right_without_its_unit_and_with_it_outside_text() -> None:
    answers = [answer for name in BENCHMARKS for answer in _answers(name)]
    unit = re.compile(r"\s*\\(?:text|mbox|mathrm)\{([^}]*)\}(\^\d)?$")
    measured = [answer for answer in answers if unit.search(answer) and unit.sub("", answer)]
    forms = [(rf"\boxed{{{unit.sub(new, answer)}}}", answer) for answer in measured for new in ("", r" \1\2")]
    verdicts = grade_many((form, Problem(user("?"), answer, "math", "units")) for form, answer in forms)
    assert len(measured) >= 4
    assert [form for form, v in zip(forms, verdicts, strict=True) if v.kind != "correct"] == []


@needs_data
@pytest.mark.parametrize(("benchmark", "rows"), BENCHMARKS.items())
def test_no_answer_is_right_for_the_next_ones_question(benchmark: str, rows: int) -> None:
    """Unless the two are written alike: then nobody could tell."""
    answers = [problem.answer for problem in read_file(str(DATA / f"{benchmark}.parquet"))]
    assert len(answers) == rows
    others = [(mine, other) for mine, other in pairwise(answers) if mine != other]
    responses = [FORMS["in a box"](_plain(mine)) for mine, _ in others]
    problems = [Problem(user("?"), other, "math", benchmark) for _, other in others]
    verdicts = grade_many(zip(responses, problems, strict=True))
    paid = [pair for pair, verdict in zip(others, verdicts, strict=True) if verdict.kind == "correct"]
    assert [pair for pair in paid if pair not in ALIKE] == []


@needs_data
def test_nought_and_one_are_right_only_where_they_are_the_truth() -> None:
    """What is misread often comes to one of these: `I(0)` as I times 0, an empty sum, a power of nothing."""
    truths = [(name, answer) for name in BENCHMARKS for answer in _answers(name)]
    for guess in ("0", "1"):
        response = rf"\boxed{{{guess}}}"
        verdicts = grade_many((response, Problem(user("?"), answer, "math", name)) for name, answer in truths)
        paid = {answer for (_, answer), verdict in zip(truths, verdicts, strict=True) if verdict.kind == "correct"}
        assert paid <= {guess, rf"\boxed{{{guess}}}", f"$k={guess}$", f"$f(x)={guess}$"}


# Neighbours in a benchmark that are the same number, written differently.
ALIKE = frozenset({("5", "x=5")})
