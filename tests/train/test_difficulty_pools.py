"""Pools of problems by difficulty: where a problem goes, what comes next, and what a checkpoint keeps."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.data import FixedTask, Problem, stream_index, user
from trimtab.trainer.config import POOLS, CurriculumConfig, RewardConfig
from trimtab.trainer.train import curriculum
from trimtab.trainer.train.curriculum import DifficultyPools

UNEVEN = RewardConfig(wrong=-1.0)


def pools(size: int = 100, rewards: RewardConfig | None = None, **keys: Any) -> DifficultyPools:
    """Pools of a task of so many problems."""
    problems = [Problem(user(str(number)), "1", "exact", "numbers") for number in range(size)]
    task = FixedTask("numbers", problems)
    return DifficultyPools(task, 3, CurriculumConfig(problems="pools", **keys), rewards or RewardConfig())


def sizes(of: DifficultyPools) -> dict[str, int]:
    return {
        name.removeprefix("curriculum/pool_"): int(count) for name, count in of.metrics().items() if "pool_" in name
    }


@pytest.mark.parametrize(
    ("mean", "pool"),
    [
        (0.0, "hard"),
        (0.01, "normal"),
        (0.74, "normal"),
        (0.75, "easy"),
        (0.99, "easy"),
        (1.0, "solved"),
        (1.2, "solved"),
    ],
)
def test_a_problem_is_in_the_pool_of_its_latest_mean_reward(mean: float, pool: str) -> None:
    of = pools()
    of.observe([(7, 0.3), (7, mean)])
    assert of.pool_of(7) == pool
    # The same pool where wrong answers have another reward: 0 is a wrong answer's, 1 a right one's.
    other = pools(rewards=UNEVEN)
    other.observe([(7, 2 * mean - 1)])
    assert other.pool_of(7) == pool


def test_a_mean_that_rounds_is_still_that_of_solved_problems() -> None:
    of = pools(rewards=RewardConfig(correct=0.7, wrong=0.1))
    of.observe([(1, sum([0.7] * 3) / 3), (2, sum([0.1] * 3) / 3)])
    assert (of.pool_of(1), of.pool_of(2)) == ("solved", "hard")


def test_problems_not_seen_yet_come_in_the_order_of_the_uniform_stream() -> None:
    of = pools(10)
    first = of.choose(range(4))
    assert first == [stream_index(of.task, 3, n) for n in range(4)]
    of.observe([(index, 0.5) for index in first])
    later = of.choose(range(4, 14))
    assert len({*later}) == 10, "each once, as long as there are others"
    assert [index for index in later if index not in first] == [stream_index(of.task, 3, n) for n in range(4, 10)]


def test_a_task_with_fewer_problems_than_prompts_repeats_them() -> None:
    of = pools(3)
    assert Counter(of.choose(range(7))).most_common()[-1][1] == 2


def test_prompts_are_divided_by_the_shares_in_any_stretch() -> None:
    of = pools(4000, unseen_share=0.2, hard_share=0.1, normal_share=0.4, easy_share=0.2, solved_share=0.1)
    for index in range(2000):
        of.observe([(index, [0.0, 0.5, 0.8, 1.0][index % 4])])
    for start in (0, 31, 12_345):
        counts = Counter(map(of.pool_of, of.choose(range(start, start + 100))))
        expected = {"unseen": 20, "hard": 10, "normal": 40, "easy": 20, "solved": 10}
        assert all(abs(counts[name] - expected[name]) <= 2 for name in POOLS), counts


def test_the_share_of_an_empty_pool_goes_to_the_others_and_a_share_of_0_is_a_last_resort() -> None:
    of = pools(40, hard_share=0.0)
    of.observe([(index, 0.0) for index in range(30)])
    assert {*map(of.pool_of, of.choose(range(10)))} == {"unseen"}
    assert Counter(map(of.pool_of, of.choose(range(20)))) == {"unseen": 10, "hard": 10}


def test_a_pool_gives_the_problem_that_was_tried_longest_ago() -> None:
    of = pools(6, unseen_share=1e-6, normal_share=1.0)
    of.observe([(index, 0.5) for index in (4, 1, 5, 0, 2, 3)])
    assert of.choose(range(2)) == [4, 1]
    of.observe([(4, 0.5), (1, None)])
    assert of.choose(range(2, 8)) == [5, 0, 2, 3, 4, 1], "also one whose responses were all excluded goes to the end"


def test_a_problem_whose_responses_were_all_excluded_stays_unseen_and_comes_again() -> None:
    of = pools(4)
    first = of.choose(range(4))
    of.observe([(index, None if index == first[0] else 0.5) for index in first])
    assert of.pool_of(first[0]) == "unseen"
    assert first[0] in of.choose(range(4, 8))


def test_what_is_forgotten_is_measured() -> None:
    of = pools()
    of.observe([(1, 1.0), (2, 1.0), (3, 0.5)])
    assert "curriculum/still_solved_share" not in of.metrics()
    of.observe([(1, 0.5), (2, 1.0), (3, 1.0), (2, None)])
    assert of.metrics()["curriculum/still_solved_share"] == 0.5
    assert "curriculum/still_solved_share" not in of.metrics(), "of this step's groups alone"


def test_a_large_task_keeps_a_bounded_number_of_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curriculum, "MOST_SEEN", 20)
    of = pools(1000)
    for start in range(0, 400, 8):
        of.observe([(index, index % 3 / 2) for index in of.choose(range(start, start + 8))])
    assert sum(count for name, count in sizes(of).items() if name != "unseen") == 20


def test_the_largest_state_fits_into_a_checkpoint() -> None:
    state = {"position": 10**17, "pools": {"normal": [10**18 - 1] * curriculum.MOST_SEEN}}
    assert len(json.dumps(state)) < 1 << 20


MEANS = st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.875, 1.0]))


@given(st.integers(1, 30), st.lists(st.lists(MEANS, min_size=1, max_size=12), max_size=12), st.integers(0, 11))
def test_pools_that_were_saved_and_loaded_go_on_as_if_they_had_not(
    size: int, steps: list[list[float | None]], stop: int
) -> None:
    of, whole = pools(size), pools(size)
    number = 0
    for step, means in enumerate(steps):
        if step == stop:
            copy = pools(size)
            copy.load_state_dict(json.loads(json.dumps(of.state_dict())))
            of = copy
        chosen = of.choose(range(number, number + len(means)))
        assert chosen == whole.choose(range(number, number + len(means)))
        assert len({*chosen}) == min(len(means), size), "different problems, as far as there are"
        groups = list(zip(chosen, means, strict=True))
        of.observe(groups)
        whole.observe(groups)
        number += len(means)
        assert of.state_dict() == whole.state_dict()
        assert sum(sizes(of).values()) == size
        in_pools = [index for pool in of.pools.values() for index in pool]
        assert len({*in_pools}) == len(in_pools), "no problem is in two pools"


@pytest.mark.parametrize(
    "changes",
    [
        {"position": -1},
        {"position": True},
        {"pools": {}},
        {"pools": {"hard": [100], "normal": [], "easy": [], "solved": []}},
        {"pools": {"hard": [1], "normal": [1], "easy": [], "solved": []}},
        {"pools": {"hard": [True], "normal": [], "easy": [], "solved": []}},
        {"pools": {"hard": [[]], "normal": [], "easy": [], "solved": []}},
    ],
)
def test_a_state_of_another_task_is_refused(changes: dict[str, Any]) -> None:
    of = pools()
    of.observe([(5, 0.5)])
    before = of.state_dict()
    with pytest.raises(ValueError, match="the curriculum's"):
        of.load_state_dict(before | changes)
    assert of.state_dict() == before
