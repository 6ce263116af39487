"""Alarms: each rings once for its own problem, with a message and numbers; none rings for noise."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, fields

import pytest

from helpers.insight.made_metrics import HEALTHY, after, alarms_of, first_rings, made_run
from trimtab.insight.alarms import (
    ALARM_KINDS,
    AlarmKind,
    AlarmMonitor,
    DetectorInput,
    Thresholds,
    alarm_monitor,
    replay_metrics,
    threshold_reasons,
)
from trimtab.insight.alarms import detector_input as history_module
from trimtab.insight.alarms.detector_input import History, slope, spread
from trimtab.insight.alarms.detectors import even_share, forecast
from trimtab.record import HOLD_STEPS, find_collapse
from trimtab.trainer.config import AlarmsConfig, load
from trimtab.trainer.train.metrics import METRICS

ADVISED = ("update", "objective", "rollout", "reward", "task", "tools", "agent")  # sections of a recipe
TROUBLE = 40  # the step after which a run goes wrong


# --- the table of alarms


def test_the_recipe_has_a_key_for_every_alarm_and_no_other() -> None:
    assert {"enabled", "default", *ALARM_KINDS} == set(AlarmsConfig.model_fields)


def test_every_alarm_looks_at_metrics_that_the_trainer_writes_and_has_advice_that_names_a_key() -> None:
    for name, kind in ALARM_KINDS.items():
        assert set(kind.metrics) <= set(METRICS), name
        assert any(f"{section}." in kind.suggestion for section in ADVISED)


def test_advice_names_keys_that_a_recipe_has() -> None:
    config = load(None, ["task.name=file"]).model_dump()
    for name, kind in ALARM_KINDS.items():
        for word in kind.suggestion.replace("(", " ").replace(")", " ").split():
            section, dot, key = word.partition("=")[0].strip(",;:.").partition(".")
            if dot and section in config and section != "objective":
                assert key in config[section], (name, word)


def test_every_threshold_says_why() -> None:
    assert set(threshold_reasons()) == {each.name for each in fields(Thresholds)}
    assert all(len(why) > 20 for _, why in threshold_reasons().values())


def test_every_threshold_belongs_to_an_alarm_or_to_all_of_them() -> None:
    own = [name for kind in ALARM_KINDS.values() for name in kind.thresholds]
    assert len(own) == len(set(own))
    assert set(threshold_reasons()) - set(own) == {
        "start_steps",
        "recent_steps",
        "trend_steps",
        "forecast_steps",
        "min_spreads",
        "learned_gain",
        "hold_steps",
        "quiet_steps",
    }


# --- healthy runs


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_rings_nothing(seed: int) -> None:
    assert first_rings(made_run(400, seed)) == {}


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.2])
def test_noise_rings_nothing(noise: float) -> None:
    for seed in range(5):
        steady = {name.replace("/", "__"): curve for name, curve in HEALTHY.items() if not callable(curve)}
        assert first_rings(made_run(300, seed, noise, **steady)) == {}


@pytest.mark.parametrize("metric", [name for name in HEALTHY if not name.startswith(("tokens/count", "reward"))])
@pytest.mark.parametrize("factor", [0.0, 30.0])
def test_one_odd_step_rings_nothing(metric: str, factor: float) -> None:
    usual = HEALTHY[metric]

    def once(step: int) -> float:
        value = usual(step) if callable(usual) else usual
        return value * factor if step in (60, 61) else value

    assert first_rings(made_run(120, **{metric.replace("/", "__"): once})) == {}


def test_a_run_that_learns_to_give_longer_answers_is_no_drift() -> None:
    longer = {"response__length_mean": lambda step: 400 + 8 * step}
    assert "length_drift" not in first_rings(made_run(eval__accuracy=lambda step: 0.4 + 0.004 * step, **longer))
    assert "length_drift" in first_rings(made_run(eval__accuracy=0.4, **longer))


def test_sharpening_is_no_hacking() -> None:
    """Sampled accuracy catches up with greedy accuracy, which was high all along."""
    sharper = {"reward__accuracy": lambda step: min(0.9, 0.4 + 0.01 * step), "eval__accuracy": 0.92}
    assert "reward_hacking" not in first_rings(made_run(noise=0.01, **sharper))


def test_a_reward_of_another_scale_is_compared_as_an_accuracy() -> None:
    """Rewards of -1 and 1 whose mean rises from 0.1 to 0.3 are an accuracy that rises by 0.1."""
    rises = {"reward__mean": after(TROUBLE, 0.3, 0.1), "reward__accuracy": None, "eval__accuracy": 0.45}
    assert "reward_hacking" not in first_rings(made_run(noise=0.0, **rises), rewards=(-1.0, 1.0))
    rises["reward__mean"] = after(TROUBLE, 0.9, 0.1)
    assert "reward_hacking" in first_rings(made_run(noise=0.0, **rises), rewards=(-1.0, 1.0))


# --- trouble


@pytest.mark.parametrize(
    ("alarm", "changes"),
    [
        ("entropy_collapse", {"policy__entropy": after(TROUBLE, lambda step: 0.6 * 0.9 ** (step - TROUBLE), 0.6)}),
        ("entropy_collapse", {"policy__entropy": after(TROUBLE, 0.05, 0.6)}),
        ("entropy_explosion", {"policy__entropy": after(TROUBLE, lambda step: 0.6 + 0.03 * (step - TROUBLE), 0.6)}),
        ("spurious_growth", {"tokens__spurious_share": after(TROUBLE, 0.006, 0.001)}),
        ("gradient_concentration", {"tokens__top_gradient_share": after(TROUBLE, 0.4, 0.03)}),
        ("ratio", {"update__approx_kl": after(TROUBLE, 0.2, 0.002)}),
        ("ratio", {"update__ratio_max": after(TROUBLE, 80.0, 2.0)}),
        ("ratio", {"update__approx_kl": after(TROUBLE, lambda step: 2.0 if step == TROUBLE + 1 else 0.002, 0.002)}),
        ("ratio", {"update__approx_kl": after(TROUBLE, 0.015, 0.002)}),
        ("clip", {"update__clip_share": after(TROUBLE, 0.2, 0.004)}),
        ("sampler_mismatch", {"sampler__mismatch_mean": after(TROUBLE, 0.2, 0.004)}),
        ("sampler_mismatch", {"sampler__mismatch_mean": after(TROUBLE, 0.03, 0.004)}),
        (
            "sampler_mismatch",
            {"sampler__mismatch_mean": after(TROUBLE, lambda step: 0.004 * 1.06 ** (step - TROUBLE), 0.004)},
        ),
        ("effective_samples", {"sampler__effective_sample_share": after(TROUBLE, 0.4, 0.99)}),
        ("effective_samples", {"update__effective_sample_share_min": after(TROUBLE, 0.7, 0.99)}),
        ("no_signal", {"groups__mixed_share": after(TROUBLE, 0.03, 0.7)}),
        ("no_signal", {"groups__mixed_share": after(TROUBLE, 0.25, 0.7), "eval__accuracy": 0.35}),
        ("truncation", {"response__truncated_share": after(TROUBLE, 0.8, 0.02)}),
        ("truncation", {"response__truncated_share": after(TROUBLE, 0.35, 0.02)}),
        ("repetition", {"response__repetition_share": after(TROUBLE, 0.3, 0.03)}),
        ("length_drift", {"response__length_mean": after(TROUBLE, 1200.0, 400.0), "eval__accuracy": 0.4}),
        ("length_drift", {"response__length_mean": after(TROUBLE, 100.0, 400.0), "eval__accuracy": 0.4}),
        ("reward_hacking", {"reward__accuracy": after(TROUBLE, 0.9, 0.3), "eval__accuracy": 0.4}),
        (
            "reward_hacking",
            {"reward__accuracy": after(TROUBLE, 0.9, 0.3), "response__length_mean": after(TROUBLE, 150.0, 400.0)},
        ),
        ("reward_hacking", {"reward__mean": after(TROUBLE, 0.9, 0.2), "reward__accuracy": 0.2, "eval__accuracy": 0.3}),
        ("reward_drop", {"reward__accuracy": after(TROUBLE, 0.2, 0.6)}),
        ("reward_drop", {"eval__accuracy": after(TROUBLE, 0.1, 0.5)}),
    ],
)
def test_each_trouble_rings_its_own_alarm_soon_and_not_before(alarm: str, changes: dict[str, float]) -> None:
    step = first_rings(made_run(**changes))[alarm]
    assert TROUBLE < step <= TROUBLE + 30


@pytest.mark.parametrize(
    ("alarm", "metric", "curve", "limit"),
    [
        ("sampler_mismatch", "sampler/mismatch_mean", lambda n: 0.004 * 1.06**n, 0.02),
        ("effective_samples", "sampler/effective_sample_share", lambda n: 1 - 0.01 * 1.06**n, 0.8),
        ("effective_samples", "update/effective_sample_share_min", lambda n: 1 - 0.02 * 1.06**n, 0.8),
    ],
)
def test_a_steady_trend_rings_before_its_limit_is_reached(
    alarm: str, metric: str, curve: Callable[[int], float], limit: float
) -> None:
    rises = after(TROUBLE, lambda step: curve(step - TROUBLE), curve(0))
    records = made_run(110, noise=0.002, **{metric.replace("/", "__"): rises})
    reached = next(record["step"] for record in records[1:] if (record[metric] > limit) == (limit < 0.5))
    rung = [each for each in alarms_of(records) if each.alarm == alarm]
    assert TROUBLE < rung[0].step < reached and "going on like this" in rung[0].message
    assert rung[0].evidence["forecast"]["steps"] == Thresholds().forecast_steps


@pytest.mark.parametrize("metric", ["sampler/mismatch_mean", "update/effective_sample_share_min"])
def test_noise_and_a_slow_rise_are_no_trend(metric: str) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        curve = {metric: [0.012 * (1 + 0.004 * step) * rng.lognormvariate(0, 0.4) for step in range(200)]}
        if metric.endswith("_min"):
            curve[metric] = [1 - 2 * value for value in curve[metric]]
        records = [{"step": float(n), metric: value} for n, value in enumerate(curve[metric], start=1)]
        assert not alarms_of(records), seed


def test_trouble_from_the_first_step_rings_too() -> None:
    broken = {"groups__mixed_share": 0.0, "response__truncated_share": 1.0, "sampler__mismatch_mean": 0.3}
    assert first_rings(made_run(20, **broken)) == {"sampler_mismatch": 7, "no_signal": 17, "truncation": 17}


def test_a_collapse_rings_once_it_is_certain_by_the_definition_that_stress_uses() -> None:
    records = made_run(groups__mixed_share=after(TROUBLE, 0.0, 0.7), noise=0.0)
    found = find_collapse(records)
    assert found is not None
    (alarm,) = [alarm for alarm in alarms_of(records) if alarm.alarm == "collapse"]
    assert alarm.step == found.step + HOLD_STEPS
    assert alarm.evidence == {"criterion": "stuck", "step": found.step}
    assert alarm.message.startswith(f"collapsed at step {found.step}: ")


def test_the_evaluation_before_the_first_step_is_a_level_to_fall_from() -> None:
    fallen = [{"step": 0, "eval/accuracy": 0.5}, {"step": 10, "eval/accuracy": 0.1}, {"step": 20, "eval/accuracy": 0.1}]
    assert [(alarm.alarm, alarm.step) for alarm in alarms_of(fallen)] == [("collapse", 20)]


def test_a_falling_trend_rings_before_the_level_is_reached() -> None:
    falling = made_run(policy__entropy=after(TROUBLE, lambda step: 0.6 * 0.94 ** (step - TROUBLE), 0.6))
    (first,) = [alarm for alarm in alarms_of(falling) if alarm.alarm == "entropy_collapse"]
    assert "going on like this" in first.message
    now = first.evidence["policy/entropy"]["now"]
    assert now > Thresholds().collapse_level * 0.6


def test_a_rising_trend_rings_before_the_level_is_reached() -> None:
    rising = made_run(policy__entropy=after(TROUBLE, lambda step: 0.6 * 1.02 ** (step - TROUBLE), 0.6), noise=0.01)
    (first,) = [alarm for alarm in alarms_of(rising) if alarm.alarm == "entropy_explosion"]
    assert "rises fast" in first.message
    assert first.evidence["policy/entropy"]["now"] < Thresholds().explosion_level * 0.6


def test_fewer_mixed_groups_are_welcome_where_more_answers_are_right() -> None:
    solved = {"groups__mixed_share": after(TROUBLE, 0.25, 0.7), "eval__accuracy": after(TROUBLE, 0.9, 0.4)}
    assert "no_signal" not in first_rings(made_run(noise=0.01, **solved))


def test_the_objectives_target_counts_beside_the_start() -> None:
    """0.6 at the start, a target of 0.5: 0.2 is far below the target, and not yet below a quarter of the start."""
    low = made_run(policy__entropy=after(TROUBLE, 0.2, 0.6), noise=0.01)
    assert "entropy_collapse" in first_rings(low, target=0.5, forecast_steps=0)
    assert "entropy_collapse" not in first_rings(low, forecast_steps=0)


def test_entropy_that_rises_to_its_target_is_as_it_should_be() -> None:
    rising = made_run(policy__entropy=lambda step: min(0.3, 0.1 + 0.004 * step))
    assert "entropy_explosion" in first_rings(rising)
    assert "entropy_explosion" not in first_rings(rising, target=0.3)


def test_few_mixed_groups_do_not_look_like_few_heavy_tokens() -> None:
    """With a hundredth of the groups left, ten tokens naturally hold a hundred times the share."""
    few = {"tokens__count": 1000.0, "groups__mixed_share": after(TROUBLE, 0.03, 0.8)}
    held = {"tokens__top_gradient_share": after(TROUBLE, 0.5, 0.02)}
    assert "gradient_concentration" not in first_rings(made_run(**few, **held))
    assert "gradient_concentration" in first_rings(made_run(tokens__count=1000.0, **held))


def test_counts_of_a_few_tokens_need_many_steps_to_be_news() -> None:
    """In 300 tokens, a share of 1 % is three tokens."""
    some = {"tokens__count": 300.0, "tokens__spurious_share": lambda step: (step % 3 == 0) / 300}
    assert "spurious_growth" not in first_rings(made_run(noise=0.0, **some))


def test_more_rewarded_tokens_are_not_more_spurious_ones() -> None:
    """A run that starts at 0 % accuracy has no spurious tokens until some groups are mixed."""

    def mixed(step: int) -> float:
        return 0.0 if step < 5 else min(0.6, 0.01 * step)

    def rings(factor: float) -> bool:
        share = after(TROUBLE, lambda step: factor * mixed(step), lambda step: 0.01 * mixed(step))
        return "spurious_growth" in first_rings(made_run(groups__mixed_share=mixed, tokens__spurious_share=share))

    assert not rings(0.01)
    assert rings(0.04)


# --- the message of an alarm


def test_an_alarm_has_its_numbers_in_words_and_as_evidence() -> None:
    alarms = alarms_of(made_run(update__clip_share=after(TROUBLE, 0.2, 0.004), noise=0.0))
    (alarm,) = alarms
    assert alarm.message == "the clip cuts 20 % of the tokens; at the start 0.4 %"
    assert alarm.evidence == {
        "update/clip_share": {
            "now": 0.2,
            "steps": [alarm.step - 4, alarm.step],
            "start": 0.004,
            "start_steps": [1, 10],
            "start_spread": 0.0,
        }
    }
    assert "update.lr" in alarm.suggestion


def test_alarms_are_plain_data() -> None:
    trouble = {"policy__entropy": after(TROUBLE, 0.01, 0.6), "update__approx_kl": 0.3, "groups__mixed_share": 0.0}
    alarms = alarms_of(made_run(**trouble))
    assert len(alarms) >= 3
    for alarm in alarms:
        assert json.loads(json.dumps(asdict(alarm), allow_nan=False)) == asdict(alarm)


# --- episodes


def test_an_alarm_rings_once_per_episode() -> None:
    long = alarms_of(made_run(300, groups__mixed_share=after(TROUBLE, 0.0, 0.7)))
    assert [alarm.alarm for alarm in long] == ["no_signal", "collapse"]


def test_an_alarm_rings_again_when_the_trouble_was_away_for_long() -> None:
    def comes_and_goes(step: int) -> float:
        return 0.0 if 40 < step <= 60 or 120 < step <= 140 else 0.7

    alarms = alarms_of(made_run(200, groups__mixed_share=comes_and_goes))
    assert [alarm.step for alarm in alarms if alarm.alarm == "no_signal"] == [45, 125]


def test_trouble_that_flickers_is_one_episode() -> None:
    def flickers(step: int) -> float:
        return 0.0 if step > 40 and step // 10 % 2 else 0.7

    assert len(alarms_of(made_run(200, groups__mixed_share=flickers))) == 1


# --- what is a pure function of the metrics


def test_a_monitor_that_gets_the_records_again_continues_as_the_one_before() -> None:
    records = made_run(200, groups__mixed_share=lambda step: 0.0 if step // 35 % 2 else 0.7)
    whole = AlarmMonitor()
    expected = [alarm for record in records for alarm in whole(record)]
    assert len(expected) > 3
    for cut in range(0, 201, 7):
        again = AlarmMonitor()
        for record in records[:cut]:
            again(json.loads(json.dumps(record)))
        rest = [alarm for record in records[cut:] for alarm in again(record)]
        assert rest == [alarm for alarm in expected if alarm.step >= (records[cut]["step"] if cut < 201 else math.inf)]


def test_what_is_not_a_number_changes_nothing() -> None:
    records = made_run(policy__entropy=after(TROUBLE, 0.05, 0.6))
    spoilt = [{**record, "policy/entropy_p90": math.nan, "name": "text", "time/x": math.inf} for record in records]
    assert replay_metrics(spoilt) == replay_metrics(records)


@pytest.mark.parametrize("missing", sorted({metric for kind in ALARM_KINDS.values() for metric in kind.metrics}))
def test_a_run_without_a_metric_does_without_its_alarm(missing: str) -> None:
    records = made_run(policy__entropy=after(TROUBLE, 0.05, 0.6), groups__mixed_share=after(TROUBLE, 0.0, 0.7))
    monitor = AlarmMonitor()
    for record in records:
        monitor({name: value for name, value in record.items() if name != missing})
    assert monitor.broken == set()


@pytest.mark.parametrize(
    "values",
    [
        *((value,) for value in (0.0, -1.0, 1e308, -1e308, 1e-308, 10**400, 1e38)),
        (1e308, 0.1), (1e38, -1e38), (1e38, 1e-300),
    ],
)  # fmt: skip
def test_strange_values_break_no_alarm(values: tuple[float, ...]) -> None:
    monitor = AlarmMonitor()
    for number, record in enumerate(made_run(60)):
        value = values[number * len(values) // 61]
        monitor({name: known if name == "step" else value for name, known in record.items()})
        monitor({name: known if name == "step" else values[number % len(values)] for name, known in record.items()})
    assert monitor.broken == set()


# --- bugs in a detector


def test_a_detector_that_fails_disables_its_own_alarm_and_is_reported_once() -> None:
    def breaks(run: DetectorInput) -> None:
        raise ZeroDivisionError("a bug")

    warnings: list[str] = []
    kinds = {"clip": AlarmKind(breaks, (), (), ""), "no_signal": ALARM_KINDS["no_signal"]}
    monitor = AlarmMonitor(kinds=kinds, warn=warnings.append)
    alarms = replay_metrics(made_run(groups__mixed_share=0.0), monitor)
    assert [alarm.alarm for alarm in alarms] == ["no_signal"]
    (text,) = warnings
    assert "clip" in text and "a bug" in text


# --- figures


def test_the_spread_is_that_of_a_normal_distribution_and_an_odd_value_does_not_move_it() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert spread(values) == pytest.approx(1.4826)
    assert spread([*values[:-1], 1000.0]) == spread(values)


def test_a_slope_is_exact_on_a_line_and_an_odd_value_does_not_move_it() -> None:
    line = [0.5 * n for n in range(20)]
    assert slope(line) == pytest.approx(0.5)
    line[15] = 1e6
    assert slope(line) == pytest.approx(0.5)


def test_a_forecast_goes_on_by_the_same_factor() -> None:
    run = DetectorInput()
    for step in range(1, 31):
        run.history.add({"step": step, "policy/entropy": 0.5 * 0.9**step})
    expected = 0.5 * 0.9**28 * 0.9**run.limits.forecast_steps  # from the middle of the last five steps
    assert forecast(run) == pytest.approx(expected)


def test_the_best_of_a_metric_is_remembered_as_if_it_were_found_anew() -> None:
    history, values = History(), [3.0, 1.0, 2.0, 9.0, 2.0, 2.0, 4.0, 5.0, 4.0, 1.0]
    for step, value in enumerate(values):
        history.add({"step": step, "x": value})
        assert history.best("x", 1) == max(values[: step + 1])
    assert history.best("x", 3) == 4.0


def test_a_long_history_is_bounded_and_no_detector_sees_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, steps = random.Random(1), 3000
    values = [round(0.5 + 0.4 * math.sin(step / 300) + rng.gauss(0, 0.05), 4) for step in range(steps)]
    whole, short = History(), History()
    for step, value in enumerate(values):
        for history, edge in ((whole, steps), (short, 100)):
            monkeypatch.setattr(history_module, "EDGE", edge)
            history.add({"step": step, "x": value})
        assert short.best("x", 10) == whole.best("x", 10)
        assert short.noise("x") == whole.noise("x") and short.last("x", 20) == whole.last("x", 20)
        assert short.values("x")[:10] == whole.values("x")[:10]
        assert short.steps("x")[-5:] == whole.steps("x")[-5:]
    assert short.count("x") == whole.count("x") == steps
    assert len(short.values("x")) <= 400


def test_an_even_share_is_what_ten_tokens_of_all_would_hold() -> None:
    assert even_share(1000) == pytest.approx(0.01)
    assert even_share(1e6) == pytest.approx(0.001)
    assert even_share(0) == 1.0


def test_the_monitor_of_a_run_has_its_objectives_entropy_target() -> None:
    assert alarm_monitor(load("addition", ["objective.name=stare", "objective.target=0.25"])).run.entropy_target == 0.25
    assert alarm_monitor(load("addition")).run.entropy_target is None
    assert alarm_monitor(load("addition", ["reward.wrong=-1.0"])).run.rewards == (-1.0, 1.0)
