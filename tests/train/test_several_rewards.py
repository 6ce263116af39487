"""Several rewards with weights: each is logged, recorded and shown by itself; graded rewards and their groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.train.scripted import FixedTexts, scripted_trainer
from helpers.train.short_runs import trained
from trimtab.cli.display import PlainReporter
from trimtab.data import FixedTask, Problem, Response, Sample
from trimtab.data.problems import user
from trimtab.grading import grade_samples
from trimtab.record import open_run
from trimtab.trainer.config import Config, parse
from trimtab.trainer.model import Policy, load_policy
from trimtab.trainer.train.gates import has_reward_spread
from trimtab.trainer.train.metrics import describe_metric, no_signal_diagnosis, step_metrics
from trimtab.trainer.train.rollouts import collect_rollouts, evaluate
from trimtab.trainer.train.scoring import Experience, score_rollouts
from trimtab.trainer.train.trainer import RunProgress

RULES = "python:helpers.grading.graded_rules"
HERE = f"{RULES}:returns"
NO_PROBLEM = Problem((), "", "", "")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("demo", device="cpu", seed=0)


def config(terms: dict[str, Any] | None = None, **reward: Any) -> Config:
    return parse({
        "rollout": {"prompts": 1, "samples": 4, "max_new_tokens": 6},
        "reward": {**reward, "terms": terms or {}},
    })  # fmt: skip


def experience(policy: Policy, made: Config, texts: Sequence[str], rule: str = "number") -> Experience:
    task = FixedTask("sums", (Problem(user("12+34="), "46", rule, "sums"),))
    trainer = scripted_trainer(policy, FixedTexts(policy, texts), made, task)
    return score_rollouts(trainer, collect_rollouts(trainer, RunProgress()))


def rewards(found: Experience) -> dict[str, float]:
    return {response.text: response.reward for response in found.rollouts.responses}


SHORT = {"rule": "length", "options": {"free": 2, "limit": 6}, "weight": 0.5}
EQUALS = {"rule": "format", "options": {"texts": ["="]}, "weight": -0.25}


# --- the sum


def test_the_reward_is_the_weighted_sum(policy: Policy) -> None:
    found = experience(policy, config({"short": SHORT, "equals": EQUALS}), ["46", "=46", "45", "=4500"])
    # Their lengths are 3, 4, 3 and 6 tokens, the end token included.
    assert rewards(found) == {
        "46": 1 + 0.5 * 0.75,
        "=46": 1 + 0.5 * 0.5 - 0.25,
        "45": 0.5 * 0.75,
        "=4500": -0.25,
    }
    by_text = {response.text: response.terms for response in found.rollouts.responses}
    assert by_text["=46"] == {"task": 1.0, "short": 0.5, "equals": 1.0}


def test_a_weight_of_zero_measures_and_rewards_nothing(policy: Policy) -> None:
    found = experience(policy, config({"equals": {**EQUALS, "weight": 0.0}}), ["46", "=46", "45", "=45"])
    assert rewards(found) == {"46": 1.0, "=46": 1.0, "45": 0.0, "=45": 0.0}
    metrics = step_metrics(found, [], config({"equals": {**EQUALS, "weight": 0.0}}).reward)
    assert (metrics["rewards/equals"], metrics["rewards/equals_spread"]) == (0.5, 0.0)


def test_a_number_of_the_tasks_rule_is_the_reward_times_its_weight(policy: Policy) -> None:
    found = experience(policy, config(weight=2.0, wrong=-1.0), ["3", "25", "1", "0"], rule=HERE)
    assert rewards(found) == {"3": 6.0, "25": 50.0, "1": 2.0, "0": 0.0}


def test_sums_that_are_equal_but_for_rounding_are_equal_rewards(policy: Policy) -> None:
    # 0.1 + 0.2 is not 0.3 in float64; normalised by their tiny deviation, these would have advantages of 1.
    terms = {
        "equals": {**EQUALS, "weight": 0.1},
        "twos": {"rule": "format", "options": {"texts": ["2"]}, "weight": 0.2},
        "sevens": {"rule": "format", "options": {"texts": ["7"]}, "weight": 0.3},
    }
    found = experience(policy, config(terms), ["=2", "7", "=2", "7"])
    assert not has_reward_spread(found.rollouts.responses)
    assert set(found.batch.advantage.tolist()) == {0.0}


@pytest.mark.parametrize(("crashed", "kept"), [("exclude", 3), (-1.0, 4)])
def test_a_term_that_failed_excludes_the_response_or_pays_a_number(
    policy: Policy, crashed: float | str, kept: int
) -> None:
    found = experience(policy, config({"own": {"rule": HERE, "crashed": crashed}}), ["46", "1", "2", "="])
    assert len(found.rollouts.responses) == kept
    metrics = step_metrics(found, [], config({"own": {"rule": HERE, "crashed": crashed}}).reward)
    assert metrics["reward/crashed_share"] == 0.25
    if kept == 4:
        assert rewards(found)["="] == -1.0


def test_noise_cannot_flip_a_number(policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"reward\.noise.*returned 3, and a number has no opposite"):
        experience(policy, config(noise=0.5), ["3"] * 4, rule=HERE)


# --- where they show


def test_each_reward_is_logged_with_its_mean_and_its_spread_within_groups(policy: Policy) -> None:
    made = config({"equals": EQUALS})
    metrics = step_metrics(experience(policy, made, ["46", "=46", "45", "=45"]), [], made.reward)
    assert (metrics["rewards/task"], metrics["rewards/equals"]) == (0.5, 0.5)
    assert (metrics["rewards/task_spread"], metrics["rewards/equals_spread"]) == (0.5, 0.125)
    assert metrics["reward/mean"] == 0.5 - 0.125
    assert "before its weight" in describe_metric("rewards/equals")
    assert "within" not in describe_metric("reward/mean") and describe_metric("rewards/task_spread")


def test_a_rule_with_numbers_has_a_score_beside_accuracy(policy: Policy) -> None:
    found = experience(policy, config(), ["0", "0", "0", "1"], rule=HERE)
    metrics = step_metrics(found, [])
    assert (metrics["reward/score"], metrics["reward/accuracy"]) == (0.25, 0.25)
    trainer = scripted_trainer(policy, FixedTexts(policy, ["3"]), config())
    trainer.test_task = FixedTask("sums", (Problem(user("1+1="), "2", HERE, "sums"),))
    held_out = evaluate(trainer)
    assert (held_out["eval/accuracy"], held_out["eval/score"]) == (1.0, 3.0)


def test_a_right_or_wrong_rule_has_none_of_these_metrics(policy: Policy) -> None:
    metrics = step_metrics(experience(policy, config(), ["46", "45", "=", "46"]), [])
    assert not [name for name in metrics if name.startswith("rewards/") or name.endswith("score")]


def test_groups_without_spread_are_explained_by_their_mean_reward(policy: Policy) -> None:
    metrics = step_metrics(experience(policy, config(), ["3"] * 4, rule=HERE), [])
    text = no_signal_diagnosis(5, metrics, Path("nonfinite.jsonl"))
    assert "all responses of a group get the same reward (mean 3): check the rules" in text


def test_each_reward_is_recorded_and_printed(tmp_path: Path) -> None:
    changes = {"run.steps": "2", "reward.overlong_buffer": "0", "reward.terms.short.rule": "length"}
    changes["reward.terms.short.options"] = "{free=2,limit=6}"
    run, _ = trained(tmp_path / "run", changes)
    for step in open_run(run.folder.path):
        for reward, text in zip(step.responses["reward"], step.responses["rewards"], strict=True):
            terms = json.loads(text)
            assert set(terms) == {"task", "short"} and reward == pytest.approx(terms["task"] + terms["short"])
    lines: list[str] = []
    PlainReporter(lines.append).step(2, 2, run.folder.records()[-1])
    assert "  task 0" in lines[0] and "  short 0." in lines[0]


# --- the rules that look at a response alone


@pytest.mark.parametrize(
    ("response", "score"),
    [("<a>x</a>", 1.0), ("x</a><a>", 0.0), ("<a><a></a>", 0.0), ("<a>", 0.0), ("", 0.0)],
)
def test_format_wants_every_text_once_and_in_order(response: str, score: float) -> None:
    (verdict,) = grade_samples([Sample(NO_PROBLEM, response)], "format", {"texts": ["<a>", "</a>"]})
    assert verdict.value == score


@pytest.mark.parametrize(("tokens", "score"), [(0, 1.0), (4, 1.0), (6, 0.5), (8, 0.0), (99, 0.0)])
def test_length_falls_from_free_to_limit(tokens: int, score: float) -> None:
    (verdict,) = grade_samples(
        [Sample(NO_PROBLEM, "x", response=Response([5] * tokens, [], True))], "length", {"free": 4, "limit": 8}
    )
    assert verdict.value == score


@pytest.mark.parametrize(
    ("response", "scripts", "score"),
    [("abc 123 +", ["latin"], 1.0), ("абвx", ["cyrillic"], 0.75), ("數字かな", ["cjk"], 0.5), ("12", ["thai"], 1.0)],
)
def test_language_is_the_share_of_letters_of_a_script(response: str, scripts: list[str], score: float) -> None:
    (verdict,) = grade_samples([Sample(NO_PROBLEM, response)], "language", {"scripts": scripts})
    assert verdict.value == score


# --- mistakes in a recipe


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"f": {}}, r"reward\.terms\.f\.rule is missing: how it is computed"),
        ({"f": 3}, r"reward\.terms\.f is a section, a table with the keys rule, weight"),
        ({"f": {"rule": "formt"}}, r"reward\.terms\.f: unknown rule 'formt': did you mean format"),
        ({"f": {**SHORT, "wieght": 1}}, r"unknown key reward\.terms\.f\.wieght: did you mean weight"),
        ({"f": {"rule": "format"}}, "the rule format needs its options: texts"),
        ({"f": {"rule": "format", "options": {"texts": []}}}, "texts = .* must be a list of texts"),
        ({"f": {"rule": "length", "options": {"free": 9, "limit": 4}}}, "free the smaller one"),
        ({"f": {"rule": "length", "options": {"free": 1, "limit": 4, "max": 2}}}, "no option 'max'"),
        ({"f": {"rule": "language", "options": {"scripts": ["latn"]}}}, "did you mean latin"),
        ({"f": {"rule": "math", "options": {"x": 1}}}, "the rule math has no option 'x'"),
        ({"f": {**SHORT, "crashed": "wrong"}}, "'wrong' must be a number or 'exclude'"),
        ({"task": SHORT}, "'task' is no name of a reward"),
        ({"A b": SHORT}, "'A b' is no name of a reward"),
        ({"f": {"rule": "python:no_such:f"}}, "there is no module no_such"),
        ({"f": {"rule": f"{RULES}:too_many"}}, "must take"),
        ({"f": {"rule": "http://me:secret@host/x"}}, "contains a password"),
        ({"f": {"rule": "http://host/x", "options": {"retries": -1}}}, "retries = -1 must be a whole number"),
        ({"f": {"rule": "http://host/x", "options": {"key_variable": "NO_SUCH_KEY"}}}, "no such environment variable"),
    ],
)
def test_a_wrong_term_is_an_error_that_says_what_to_write(terms: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        config(terms)
    assert "secret" not in str(error.value)


def test_a_recipe_that_rewards_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"reward: weight = 0 and no term of reward\.terms has a weight"):
        config(weight=0.0)
    assert config({"f": SHORT}, weight=0.0).reward.weight == 0.0
