"""Grading works where engines do it: inside Ray's tasks and actors, several at a time, hostile answers among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trimtab.rewards import Verdict, grade
from trimtab.tasks import Problem

ray: Any = pytest.importorskip("ray", reason="Ray comes with verl")

PAIRS = [
    (r"so \boxed{\sqrt{8}}", r"2\sqrt{2}", "correct"),
    (r"so \boxed{\frac{x^2-1}{x-1}}", "x+1", "correct"),
    (r"so \boxed{9^{9^{9^{9}}}}", "7", "too_costly"),
    (r"so \boxed{41 = 42}", "42", "ambiguous"),
    (r"so \boxed{\sin(\cos(\tan(12345^{678})))}", "0", "wrong"),
    ("nothing", "7", "no_answer"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def check(found: list[Verdict]) -> None:
    for verdict, (response, _, expected) in zip(found, PAIRS, strict=True):
        allowed = {expected} if expected in ("correct", "no_answer") else {"wrong", "ambiguous", "too_costly"}
        assert verdict.kind in allowed, response


@pytest.mark.filterwarnings("ignore")
def test_tasks_grade_side_by_side(cluster: None) -> None:
    task = ray.remote(grade)  # by its import path: Ray's workers cannot import this file
    asked = [[task.remote(response, answer) for response, answer, _ in PAIRS] for _ in range(3)]
    for round_of in asked:
        check(ray.get(round_of, timeout=600))


@pytest.mark.filterwarnings("ignore")
def test_an_actor_grades_several_batches(cluster: None) -> None:
    problems = [(response, Problem((), answer, "math", "here")) for response, answer, _ in PAIRS]

    class Grader:
        def grade(self, pairs: Any) -> Any:
            from trimtab.rewards import grade_many

            return grade_many(pairs)

    actor = ray.remote(Grader).remote()
    for _ in range(3):
        check(ray.get(actor.grade.remote(problems), timeout=600))
