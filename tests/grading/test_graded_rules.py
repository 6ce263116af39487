"""A rule of one's own returns a bool, a number or a verdict; batched, in the trainer's process, with options."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest
import torch

import trimtab as tt
from trimtab import own_parts
from trimtab.data import Problem, Response, Sample
from trimtab.data.problems import user
from trimtab.grading import Verdict, grade, grade_many, grade_samples, load_rule
from trimtab.grading.verdicts import verdict_of
from trimtab.workers import calls

RULES = "python:helpers.grading.graded_rules"


@pytest.fixture(autouse=True, scope="module")
def no_workers_afterwards() -> Iterator[None]:
    yield
    calls.close()


def graded(name: str, responses: Sequence[str], answer: str = "rows") -> list[Verdict]:
    problem = Problem(user("q"), answer, f"{RULES}:{name}", "sums", location="train.jsonl, row 7")
    return grade_many((response, problem) for response in responses)


# --- what a rule may return


@pytest.mark.parametrize(
    ("returned", "kind", "score"),
    [
        ("0.3", "wrong", 0.3),
        ("2.5", "correct", 2.5),
        ("0.99", "correct", 0.99),
        ("-4", "wrong", -4.0),
        ("true", "correct", None),
        ("kind", "ambiguous", None),
        ("verdict", "no_answer", -0.5),
        ("object", "correct", 7),
    ],
)
def test_a_number_is_the_score_and_a_bool_or_a_kind_has_none(returned: str, kind: str, score: float | None) -> None:
    for name in ("returns", "named", "named_here"):
        (verdict,) = graded(name, [returned])
        assert (verdict.kind, verdict.score) == (kind, score), name


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert verdict_of(numpy.float32(0.5)) == Verdict("wrong", score=0.5)
    assert verdict_of(numpy.bool_(True)) == verdict_of(torch.tensor(True)) == Verdict("correct")
    assert verdict_of(torch.tensor(2.0)) == Verdict("correct", score=2.0)


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        ("nan", "nan"),
        ("inf", "inf"),
        ("huge", "1000"),
        ("text", "'very good'"),
        ("list", r"\[1.0\]"),
        ("none", "None"),
        ("bad kind", "'fine'"),
        ("bad score", "'high'"),
    ],
)
@pytest.mark.parametrize("name", ["named", "named_here"])
def test_another_result_is_a_crash_that_names_rule_row_and_value(name: str, returned: str, value: str) -> None:
    good, bad, last = graded(name, ["0.3", returned, "1"])
    assert (good.score, bad.kind, last.score) == (0.3, "crashed", 1.0)
    where = rf"{RULES}:{name} for row 2 of 3, train.jsonl, row 7, the response '{returned}': .*{value}"
    with pytest.raises(ValueError, match=where):
        raise ValueError(bad.error)


def test_one_response_at_a_time_has_no_row_but_its_own() -> None:
    (verdict,) = graded("returns", ["nan"])
    assert verdict.kind == "crashed"
    assert verdict.error.startswith(f"{RULES}:returns for train.jsonl, row 7, the response 'nan': nan is no verdict")


@pytest.mark.parametrize(("answer", "got"), [("too few", "1 results"), ("number", "3.0"), ("none", "None")])
@pytest.mark.parametrize("name", ["named", "named_here"])
def test_a_batched_rule_with_too_few_results_has_crashed_on_all_of_them(name: str, answer: str, got: str) -> None:
    verdicts = graded(name, ["0.3", "1"], answer)
    assert [verdict.kind for verdict in verdicts] == ["crashed", "crashed"]
    expected = f"{RULES}:{name} returned {got} for 2 responses: a batched rule returns one for each"
    assert {verdict.error for verdict in verdicts} == {expected}


def test_a_verdict_of_no_kind_or_with_no_number_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="kind of a verdict is 'good'; it must be one of correct, wrong"):
        Verdict("good")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="score of a verdict is nan; it must be a finite number"):
        Verdict("wrong", score=float("nan"))


# --- how a rule is called


def test_a_batched_rule_gets_lists_and_keeps_the_order() -> None:
    responses = ["x" * n for n in range(150)]  # more than one call
    assert [verdict.score for verdict in graded("lengths", responses)] == list(range(150))


def test_a_rule_runs_in_this_process_only_if_it_says_so() -> None:
    assert graded("process", ["x"])[0].score == os.getpid()
    assert graded("other_process", ["x"])[0].score != os.getpid()


@pytest.mark.parametrize("name", ["raises", "raises_here"])
def test_an_exception_has_its_traceback_from_the_users_function_on(name: str) -> None:
    (verdict,) = graded(name, ["x"])
    lines = verdict.error.splitlines()
    assert (verdict.kind, lines[0], lines[-1]) == (
        "crashed",
        "Traceback (most recent call last):",
        "ZeroDivisionError: float division by zero",
    )
    assert "graded_rules.py" in lines[1] and f"in {name}" in lines[1]


def test_a_rule_gets_the_facts_and_options_that_its_signature_names() -> None:
    problem = Problem(({"role": "user", "content": "four"},), "a", "", "sums")
    item = Sample(problem, "r", response=Response([5] * 10, [], True))
    assert grade_samples([item], f"{RULES}:facts")[0].score == 10 + 4 + 4
    assert grade_samples([item], f"{RULES}:facts", {"scale": 0.5})[0].score == 5 + 4 + 4
    cut = Sample(problem, "r", response=Response([5] * 3, [], False))
    assert [verdict.score for verdict in grade_samples([item, cut], f"{RULES}:facts_in_lists")] == [10.0, -3.0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("too_many", {}, r"graded_rules.py:\d+\) must take \(response, answer, extra\)"),
        ("unknown_fact", {}, "after a \\* any of prompt, source, tokens, finished or options of its own.*'color'"),
        ("facts", {"scales": 2.0}, "has no option 'scales'; its options, after a \\*, are: scale"),
        ("no_such", {}, "has no no_such"),
    ],
)
def test_a_rule_that_cannot_be_called_is_found_before_it_is_needed(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(own_parts.OwnPartError, match=message):
        load_rule(f"{RULES}:{name}", options)


def test_a_registered_rule_runs_in_this_process() -> None:
    def first_letter(response: str, answer: str, extra: object) -> bool:
        return response[:1] == answer[:1]

    tt.register(first_letter)
    assert grade("yes", "yellow", "python:first_letter").kind == "correct"


@pytest.mark.parametrize("marks", [{"seconds": 0}, {"seconds": 9999}, {"seconds": 5, "in_process": True}])
def test_a_limit_that_cannot_hold_is_refused_where_it_is_written(marks: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="seconds"):
        tt.rule(**marks)  # type: ignore[call-overload]


def test_a_rule_that_takes_too_long_has_failed_and_says_what_its_limits_are() -> None:
    (verdict,) = graded("sleeps", ["x"])
    assert verdict.kind == "crashed"
    assert "the response 'x': more than 0.2 s" in verdict.error and "@trimtab.rule(seconds=...)" in verdict.error
