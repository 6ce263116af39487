"""avg@k, pass@k, maj@k and what is counted beside them."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.evaluate.small_evals import graded
from trimtab.experiments.evaluate.metrics import (
    GradedSample,
    compute_metrics,
    majority,
    paired_difference,
    pass_at_k,
    vote_key,
)


def samples(problem: str, *kinds: str, **fields: object) -> list[GradedSample]:
    """Samples of a problem; an answer's text is its kind."""
    return [graded(problem, kind, None if kind == "no_answer" else kind, **fields) for kind in kinds]


def voted(*answers: str) -> list[GradedSample]:
    """Samples by their answers; those with an exclamation mark are right."""
    return [
        graded("q", "correct" if "!" in text else "wrong" if text else "no_answer", text.replace("!", "") or None)
        for text in answers
    ]


@pytest.mark.parametrize("n", range(1, 13))
def test_pass_at_k_is_what_trying_all_choices_gives(n: int) -> None:
    for correct in range(n + 1):
        right = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            choices = list(combinations(right, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-15)


def test_pass_at_k_stays_exact_where_factors_are_huge() -> None:
    assert pass_at_k(1024, 1, 1) == 1 / 1024
    assert pass_at_k(1024, 1, 512) == 0.5
    assert pass_at_k(10_000, 9_999, 1) == 0.9999
    assert pass_at_k(10_000, 3, 9_998) == 1.0
    assert pass_at_k(1024, 0, 512) == 0.0


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_pass_at_k_refuses_what_cannot_be(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {correct} correct among {n}"):
        pass_at_k(n, correct, k)


@given(st.integers(1, 64).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
@settings(max_examples=100)
def test_more_tries_never_lower_pass_at_k(case: tuple[int, int]) -> None:
    n, correct = case
    values = [pass_at_k(n, correct, k) for k in range(1, n + 1)]
    assert values == sorted(values)
    assert values[0] == pytest.approx(correct / n)
    assert values[-1] == (1.0 if correct else 0.0)


def test_the_most_frequent_answer_wins() -> None:
    assert majority(voted("4!", "4!", "5")) == 1.0
    assert majority(voted("4!", "5", "5")) == 0.0


def test_a_tie_is_worth_its_expected_value() -> None:
    assert majority(voted("4!", "5")) == 0.5
    assert majority(voted("4!", "5", "6")) == pytest.approx(1 / 3)
    assert majority(voted("4!", "4!", "5", "5", "6")) == 0.5
    assert majority(voted("5", "6")) == 0.0


def test_the_order_of_samples_decides_no_tie() -> None:
    assert majority(voted("5", "4!")) == majority(voted("4!", "5"))


def test_a_response_without_an_answer_never_wins() -> None:
    assert majority(voted("", "", "", "4!")) == 1.0
    assert majority(voted("", "", "")) == 0.0
    assert majority([]) == 0.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\frac{1}{2}", r"\dfrac{1}{2}"),
        (r"\left( 3, x \right)", "(3,x)"),
        ("$ 42 $", "42"),
        ("42.", "42"),
        (r"1\,000", "1000"),
        ("Evelyn", "evelyn"),
        (r"x + 1", "x+1"),
    ],
)
def test_answers_that_read_the_same_are_one_vote_together(one: str, other: str) -> None:
    assert vote_key(one) == vote_key(other)
    assert majority(voted(f"{one}!", f"{other}!", "7", "8")) == 1.0


@pytest.mark.parametrize(("one", "other"), [("12", "1.2"), ("-3", "3"), ("x", "y"), ("1/2", "2"), ("0.5", "1/2")])
def test_answers_that_do_not_read_the_same_are_two(one: str, other: str) -> None:
    assert vote_key(one) != vote_key(other)


def test_the_average_is_over_problems_and_their_samples() -> None:
    found = compute_metrics([*samples("a", "correct", "wrong"), *samples("b", "correct", "correct")], 2)
    assert found.problems == 2
    assert found.average is not None
    assert found.average.mean == 0.75
    assert found.pass_at[1].mean == 0.75
    assert found.pass_at[2].mean == 1.0
    assert found.majority is not None
    assert found.majority.mean == 0.75


def test_pass_at_k_is_given_for_powers_of_two_and_for_all_samples() -> None:
    found = compute_metrics(samples("a", *["wrong"] * 6), 6)
    assert list(found.pass_at) == [1, 2, 4, 6]
    assert list(compute_metrics(samples("a", *["wrong"] * 8), 8).pass_at) == [1, 2, 4, 8]
    assert list(compute_metrics(samples("a", "wrong"), 1).pass_at) == [1]


def test_a_grader_that_failed_says_nothing_about_the_response() -> None:
    found = compute_metrics([*samples("a", "correct", "crashed"), *samples("b", "wrong", "too_costly")], 2)
    assert found.grader_failures == 2
    assert found.average is not None
    assert found.average.mean == 0.5, "each problem is known by the sample that was graded"
    assert found.average_if_failures_wrong == 0.25
    assert found.kinds == {"correct": 1, "crashed": 1, "too_costly": 1, "wrong": 1}
    assert 2 not in found.pass_at, "no problem has two graded samples"


def test_a_sample_that_was_not_generated_is_not_a_wrong_answer() -> None:
    found = compute_metrics([*samples("a", "correct"), graded("a", None), *samples("b", "wrong"), graded("b", None)], 2)
    assert found.failed_samples == 2
    assert found.average is not None
    assert found.average.mean == 0.5
    assert found.average_if_failures_wrong == 0.25


def test_a_problem_with_nothing_graded_is_in_no_mean_and_is_counted() -> None:
    found = compute_metrics([*samples("a", "correct"), graded("b", None), *samples("c", "crashed")], 1)
    assert found.problems == 3
    assert found.problems_without_samples == 2
    assert found.average is not None
    assert (found.average.mean, found.average.problems) == (1.0, 1)
    assert found.average_if_failures_wrong == pytest.approx(1 / 3)


def test_where_all_went_well_there_is_no_worst_case() -> None:
    assert compute_metrics(samples("a", "correct", "wrong"), 2).average_if_failures_wrong is None


def test_nothing_graded_at_all_gives_no_figure_and_no_zero() -> None:
    found = compute_metrics([graded("a", None), *samples("b", "crashed")], 1)
    assert found.average is None
    assert found.majority is None
    assert found.pass_at == {}
    assert found.average_if_failures_wrong == 0.0


def test_several_answers_where_one_is_wanted_are_not_correct() -> None:
    found = compute_metrics(samples("a", "ambiguous", "correct"), 2)
    assert found.average is not None
    assert found.average.mean == 0.5
    assert found.grader_failures == 0


def test_lengths_truncation_and_format_are_shares_and_means_by_problem() -> None:
    drawn = [
        *samples("a", "no_answer", tokens=10, finished=False, entropy=0.5, logp=-0.25),
        *samples("a", "correct", tokens=20, entropy=1.5, logp=-0.75),
        *samples("b", "wrong", "wrong", tokens=40, entropy=2.0, logp=-1.0),
    ]
    found = compute_metrics(drawn, 2)
    assert found.length is not None and found.truncated is not None and found.no_answer is not None
    assert found.entropy is not None and found.surprisal is not None
    assert found.length.mean == 27.5
    assert found.truncated.mean == 0.25
    assert found.no_answer.mean == 0.25
    assert found.entropy.mean == 1.5
    assert found.surprisal.mean == 0.75


def test_what_the_sampler_did_not_measure_is_absent() -> None:
    found = compute_metrics(samples("a", "correct", "wrong"), 2)
    assert found.entropy is None
    assert found.surprisal is None
    assert found.length is None


def test_two_models_are_compared_on_the_problems_both_answered() -> None:
    ours = [*samples("a", "correct", "correct"), *samples("b", "wrong", "correct"), *samples("only", "correct")]
    theirs = [*samples("b", "wrong", "wrong"), *samples("a", "correct", "wrong"), *samples("other", "wrong")]
    found = paired_difference(ours, theirs)
    assert found is not None
    assert (found.mean, found.problems) == (0.5, 2)


def test_models_without_a_problem_in_common_have_no_difference() -> None:
    assert paired_difference(samples("a", "correct"), samples("b", "correct")) is None
    assert paired_difference(samples("a", "correct"), samples("a", "crashed")) is None


def test_metrics_are_json_values() -> None:
    plain = json.loads(json.dumps(asdict(compute_metrics(samples("a", "correct", "wrong"), 2)), allow_nan=False))
    assert plain["pass_at"]["2"]["mean"] == 1.0
    assert plain["average"] == {"mean": 0.5, "low": None, "high": None, "problems": 1}
