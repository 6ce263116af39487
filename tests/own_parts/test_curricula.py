"""Curricula and gates of the user's own: the protocol, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.train.short_runs import contents, differences, trained
from trimtab.own_parts import OwnPartError
from trimtab.trainer.config import load_stored, parse
from trimtab.trainer.train import checkpoints
from trimtab.trainer.train.curriculum import MAX_STATE, OwnCurriculum

WriteFile = Callable[[str, str], Path]

MINE = """
    class Hardest:
        '''Take the problems whose latest groups had the lowest means.'''

        def __init__(self, task, seed, first=0.5):
            self.means = [first] * len(task)

        def choose(self, numbers):
            order = sorted(range(len(self.means)), key=lambda index: (self.means[index], index))
            return [order[place % len(order)] for place in range(len(numbers))]

        def observe(self, groups):
            for index, mean in groups:
                self.means[index] = 0.0 if mean is None else mean

        def state_dict(self):
            return {"means": self.means}

        def load_state_dict(self, state):
            self.means = state["means"]


    def in_order(task, seed):
        return InOrder()


    class InOrder:
        def choose(self, numbers):
            return [number % 10 for number in numbers]


    def positive(problem, rewards):
        assert problem.prompt
        return max(rewards, default=0.0) > 0


    def vague(problem, rewards):
        return sum(rewards)
"""
RUN = {"warm_start.steps": "0", "run.eval_every": "0", "run.steps": "4"}


def test_a_run_takes_the_problems_of_a_curriculum_of_ones_own_and_resumes_with_its_state(own_file: WriteFile) -> None:
    folder = own_file("curricula.py", MINE).parent
    changes = RUN | {
        "curriculum.problems": '"python:curricula:Hardest"',
        "curriculum.problems_options": "{first = 0.25}",
        "curriculum.gates": '["python:curricula:positive"]',
        "rollout.dynamic_max_rounds": "2",
    }
    whole, _ = trained(folder / "whole", changes)
    assert all("curriculum/refused_positive" in record for record in whole.folder.records())
    trained(folder / "run", changes | {"run.steps": "2"})
    assert checkpoints.read(checkpoints.list_checkpoints(folder / "run/checkpoints")[-1]).state["curriculum"]["means"]
    trained(folder / "run", changes, resume=True)
    assert not differences(contents(folder / "run"), contents(folder / "whole"))


def test_a_run_takes_its_problems_from_the_pages_class_and_its_groups_from_the_pages_function(
    own_file: WriteFile, tmp_path: Path
) -> None:
    page = Path(__file__).parents[2] / "docs" / "more-signal.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    own_file("mine.py", code)
    own = {"curriculum.problems": '"python:mine:EasyFirst"', "curriculum.problems_options": "{ step = 4 }"}
    own |= {"curriculum.gates": '["python:mine:somebody_is_right"]', "rollout.dynamic_max_rounds": "1"}
    run, _ = trained(tmp_path / "run", own)
    curriculum = run.trainer.curriculum
    assert curriculum is not None
    saved = checkpoints.read(checkpoints.list_checkpoints(run.folder.checkpoints)[-1]).state["curriculum"]
    assert saved == curriculum.state_dict() and saved["reach"] >= 4
    shares = [step["curriculum/admitted_share"] for step in run.folder.records() if "curriculum/admitted_share" in step]
    assert len(shares) == run.config.run.steps and all(0 <= share <= 1 for share in shares)


def test_a_curriculum_without_state_needs_only_choose(own_file: WriteFile) -> None:
    folder = own_file("curricula.py", MINE).parent
    run, _ = trained(folder / "run", RUN | {"curriculum.problems": '"python:curricula:in_order"', "run.steps": "1"})
    assert run.trainer.curriculum is not None and run.trainer.curriculum.state_dict() == {}


def test_who_only_reads_a_run_does_not_run_its_curriculum(own_file: WriteFile, tmp_path: Path) -> None:
    path = own_file("config.toml", '[curriculum]\nproblems = "python:nowhere:X"\nproblems_options = {a = 1}\n')
    assert load_stored(path).curriculum.problems == "uniform"


@pytest.mark.parametrize(
    ("curriculum", "words"),
    [
        ({"problems": "python:curricula:Hardes"}, "did you mean Hardest"),
        ({"problems": "python:curricula:Hardest", "problems_options": {"fist": 1}}, "did you mean first"),
        ({"problems": "python:curricula:InOrder"}, "a curriculum's first arguments are the task and the seed"),
        ({"gates": ["python:curricula:in_orde"]}, "did you mean in_order"),
        ({"gates": ["python:curricula:InOrder"]}, "a gate takes a problem and its rewards"),
    ],
)
def test_a_mistake_is_found_before_the_run(own_file: WriteFile, curriculum: dict[str, Any], words: str) -> None:
    own_file("curricula.py", MINE)
    with pytest.raises(ValueError, match=re.escape(words)):
        parse({"curriculum": curriculum})


def test_a_gate_that_returns_no_verdict_is_refused_with_its_place(own_file: WriteFile) -> None:
    folder = own_file("curricula.py", MINE).parent
    with pytest.raises(OwnPartError, match=r"vague: curricula\.py:\d+: it returned .*a gate returns True or False"):
        trained(folder / "run", RUN | {"curriculum.gates": '["python:curricula:vague"]'})


class Returns:
    """Chooses whatever it is given, and has whatever state it is given."""

    def __init__(self, chosen: Any = (), state: Any = None) -> None:
        self.chosen, self.state = chosen, state

    def choose(self, numbers: range) -> Any:
        return self.chosen

    def observe(self, groups: Any) -> None:
        raise KeyError(groups)

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        raise SystemExit(1)


def endless() -> Any:
    while True:
        yield 0


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ([0], "choose returned 1 problems for 2 numbers"),
        ([0, 1, 2], "choose returned more problems for 2 numbers"),
        (endless(), "choose returned more problems for 2 numbers"),
        ([0, 5], "choose returned 5: problems are numbered 0 to 4"),
        ([0, -1], "choose returned -1"),
        ([True, 1], "choose returned True"),
        ([0, 1.0], "choose returned 1.0"),
        ([0, "1"], "choose returned '1'"),
        (None, "TypeError"),
    ],
)
def test_what_choose_returns_is_checked(chosen: Any, words: str) -> None:
    with pytest.raises(OwnPartError, match="python:mine:Returns") as error:
        OwnCurriculum("python:mine:Returns", Returns(chosen), 5).choose(range(2))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (None, "JSON keeps tables"),
        ([1], "JSON keeps tables"),
        ({1: 2}, "JSON keeps tables"),
        ({"a": (1, 2)}, "JSON keeps tables"),
        ({"a": {1}}, "not JSON serializable"),
        ({"a": float("nan")}, "not JSON compliant"),
        ({"a": "x" * MAX_STATE}, "a checkpoint takes"),
    ],
)
def test_a_state_that_would_not_come_back_is_refused_when_it_is_saved(state: Any, words: str) -> None:
    with pytest.raises(OwnPartError) as error:
        OwnCurriculum("python:mine:Returns", Returns(state=state), 5).state_dict()
    assert words in str(error.value)


def test_whatever_it_raises_names_its_file() -> None:
    curriculum = OwnCurriculum("python:mine:Returns", Returns(), 5)
    for call in (lambda: curriculum.observe([(1, 0.5)]), lambda: curriculum.load_state_dict({})):
        with pytest.raises(OwnPartError, match=r"test_curricula\.py:\d+"):
            call()


def test_one_that_observes_must_keep_what_it_saw() -> None:
    class Forgets:
        choose = observe = staticmethod(len)

    with pytest.raises(OwnPartError, match="add state_dict and load_state_dict"):
        OwnCurriculum("python:mine:Forgets", Forgets(), 5)
    with pytest.raises(OwnPartError, match="it has no method choose"):
        OwnCurriculum("python:mine:None", object(), 5)
