"""Grading and the sandbox work where engines use them: inside Ray's tasks and actors, several at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trimtab.data import Problem
from trimtab.grading import Verdict, grade
from trimtab.workers import Sandbox, SandboxError

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
            from trimtab.grading import grade_many

            return grade_many(pairs)

    actor = ray.remote(Grader).remote()
    for _ in range(3):
        check(ray.get(actor.grade.remote(problems), timeout=600))


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        with Sandbox(workers=2) as made:
            yield made
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.mark.filterwarnings("ignore")
def test_actors_run_programs_and_sessions_at_all_walls(cluster: None, sandbox: Sandbox) -> None:
    class Tools:
        def __init__(self, sandbox: Any) -> None:
            self.sandbox = sandbox
            self.session = sandbox.session(timeout=60.0)

        def level(self) -> Any:
            return self.sandbox.probe.level

        def run(self, code: str, timeout: float) -> Any:
            return self.sandbox.run(code, timeout=timeout)

        def turn(self, code: str) -> Any:
            return self.session.run(code)

    actors = [ray.remote(Tools).options(max_concurrency=2).remote(sandbox) for _ in range(2)]
    assert ray.get([actor.level.remote() for actor in actors], timeout=600) == ["full", "full"]
    # Programs at once in both, one of which does not end by itself, and one that looks for Ray.
    endless = [actor.run.remote("while True:\n    pass", 1.0) for actor in actors]
    look = "import os, sympy\nprint(sympy.factorint(360), os.path.exists('/tmp/ray'), 'RAY' in str(os.environ))"
    looks = [actor.run.remote(look, 60.0) for actor in actors]
    assert [result.kind for result in ray.get(endless, timeout=600)] == ["timeout", "timeout"]
    assert [result.stdout for result in ray.get(looks, timeout=600)] == ["{2: 3, 3: 2, 5: 1} False False\n"] * 2
    for number, actor in enumerate(actors):
        assert ray.get(actor.turn.remote(f"x = {number}"), timeout=600).kind == "ok"
    turns = ray.get([actor.turn.remote("print(x)") for actor in actors], timeout=600)
    assert [result.stdout for result in turns] == ["0\n", "1\n"]
