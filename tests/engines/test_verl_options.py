"""trimtab's options in verl's configuration: what is taken, what is refused, and in which words."""

from __future__ import annotations

import helpers.engines.verl_quiet  # noqa: F401  # isort: skip

from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import get_trainer_cls

from helpers.engines.verl_configs import changed, composed
from trimtab.engines.verl.options import LOSSES, REPLACED, check_config, read_options
from trimtab.engines.verl.plugin import command_problem
from trimtab.engines.verl.trainer import TrimtabRayTrainer, _rename_loss_metrics
from trimtab.objectives import METHODS
from trimtab.trainer.config import build_objective

GRPO = "algorithm.adv_estimator=grpo"
ACTOR = "actor_rollout_ref.actor"


def refused(*overrides: str, objective: str = "stapo") -> str:
    """What is said of a configuration; empty where it is taken."""
    config = changed([GRPO, f'+trimtab.objective="{objective}"', *overrides])
    options = read_options(OmegaConf.to_container(config.trimtab, resolve=True))
    try:
        check_config(config, options, build_objective(options.objective))
    except ValueError as error:
        return str(error)
    return ""


def test_an_entropy_bonus_with_its_own_gradient_needs_verls_entropies() -> None:
    bonus = "grpo + entropy_bonus(gradient=exact)"
    assert f"set {ACTOR}.calculate_entropy=True" in refused(objective=bonus)
    assert not refused(f"{ACTOR}.calculate_entropy=True", objective=bonus)
    assert not refused(objective="grpo + entropy_bonus")


def section(*overrides: str) -> dict[str, Any]:
    found = OmegaConf.to_container(changed(overrides).trimtab, resolve=True)
    assert isinstance(found, dict)
    return found


def test_verl_finds_the_trainer_by_its_mode() -> None:
    assert get_trainer_cls("trimtab") is TrimtabRayTrainer


def test_verls_command_line_takes_the_section() -> None:
    config = composed([GRPO, '+trimtab.objective="sspo + s2t"', "+trimtab.stare.variant=C2"])
    assert OmegaConf.to_container(config.trimtab) == {"objective": "sspo + s2t", "stare": {"variant": "C2"}}


def test_options_reach_the_objective() -> None:
    options = read_options(section("+trimtab.objective=stapo", "+trimtab.tau_p=0.01", "+trimtab.dual_clip=null"))
    assert options.objective == {"name": "stapo", "tau_p": 0.01, "dual_clip": None}
    assert "p < 0.01" in build_objective(options.objective).explain()


def test_attachments_can_be_written_in_the_name_or_below() -> None:
    named = read_options(section('+trimtab.objective="sspo + stare(variant=C2)"'))
    below = read_options(section("+trimtab.objective=sspo", "+trimtab.stare.variant=C2"))
    assert build_objective(named.objective).explain() == build_objective(below.objective).explain()


def test_what_is_recorded_is_no_option_of_the_objective() -> None:
    options = read_options(section("+trimtab.objective=grpo", "+trimtab.record=/tmp/x", "+trimtab.record_every=5"))
    assert (options.record, options.record_every, options.objective) == ("/tmp/x", 5, {"name": "grpo"})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["+trimtab.tau_p=0.1"], "no objective is set"),
        (["+trimtab.objective=stapoo"], "did you mean stapo"),
        (["+trimtab.objective=stapo", "+trimtab.tau_q=0.1"], "did you mean tau_p"),
        (["+trimtab.objective=stapo", "+trimtab.recrod=x"], "did you mean record"),
        (["+trimtab.objective=stapo", "+trimtab.tau_p=2"], "tau_p=2 must be between 0 and 1"),
        (["+trimtab.objective=stapo", "+trimtab.advantage=mine"], "must be 'method'"),
        (["+trimtab.objective=stapo", "+trimtab.record=5"], "record=5 must be a valid string: folder"),
        (["+trimtab.objective=stapo", "+trimtab.record_every=0"], "greater than or equal to 1"),
        (["+trimtab.objective=stapo", "+trimtab.record_group_share=1.5"], "less than or equal to 1"),
        (["+trimtab.objective=stapo", "+trimtab.record_max_megabytes=lots"], "must be a valid number"),
    ],
)
def test_a_wrong_option_is_refused_with_the_nearest_name(overrides: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_options(section(*overrides))


def test_a_missing_section_is_an_error_that_asks_for_an_objective() -> None:
    with pytest.raises(ValueError, match=r"\+trimtab.objective=stapo"):
        read_options(None)


# otb reads sum p^2, which verl does not compute; the advantages of the others are not among verl's.
IN_VERL = [name for name in METHODS if name not in ("otb", "maxrl", "gdpo")]


@pytest.mark.parametrize("name", [*IN_VERL, "grpo + kl", "sspo + s2t + stare"])
def test_every_method_works_with_verls_defaults(name: str) -> None:
    more = ["algorithm.norm_adv_by_std_in_grpo=False"] if name == "dr_grpo" else []
    assert refused(*more, objective=name) == ""


@pytest.mark.parametrize("key", list(REPLACED))
def test_a_setting_of_verls_loss_is_refused_and_ours_is_named(key: str) -> None:
    other = {
        "loss_agg_mode": "seq-mean-token-mean", "use_kl_loss": "True", "loss_scale_factor": "100",
    }.get(key, "0.7")  # fmt: skip
    said = refused(f"{ACTOR}.{key}={other}")
    assert f"{ACTOR}.{key}={other}" in said
    assert REPLACED[key][1] in said


def test_the_defaults_of_verls_loss_are_what_they_were() -> None:
    actor = composed([GRPO]).actor_rollout_ref.actor
    assert {key: actor[key] for key in REPLACED} == {key: default for key, (default, _) in REPLACED.items()}


@pytest.mark.parametrize("mode", [*LOSSES, "dro"])
def test_another_loss_of_verl_is_refused_with_our_name_for_it(mode: str) -> None:
    said = refused(f"{ACTOR}.policy_loss.loss_mode={mode}")
    assert f"+trimtab.objective={LOSSES[mode]}" in said if mode in LOSSES else "trimtab methods" in said
    assert mode not in LOSSES or LOSSES[mode].partition("(")[0] in METHODS


@pytest.mark.parametrize(
    ("overrides", "objective", "words"),
    [
        (["algorithm.adv_estimator=gae"], "stapo", "a critic"),
        (["critic.enable=True"], "stapo", "a critic"),
        (["trainer.use_v1=False"], "stapo", "verl's old trainer"),
        ([f"{ACTOR}.shuffle=True"], "stapo", "other mini-batches"),
        (["algorithm.rollout_correction.bypass_mode=True"], "stapo", "computes the entropy, which stapo reads"),
        (["algorithm.rollout_correction.rollout_is=token"], "grpo", "METHOD + tis"),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], "grpo", "METHOD + mis"),
        (["actor_rollout_ref.rollout.calculate_log_probs=False"], "grpo + tis", "calculate_log_probs=True"),
        ([], "stapo(token_stats=current)", "for the first update of a step it makes no difference"),
        ([], "stapo(scope=micro)", "per micro-batch"),
        ([], "dr_grpo", "norm_adv_by_std_in_grpo=False"),
        (["algorithm.norm_adv_by_std_in_grpo=False"], "stapo", "norm_adv_by_std_in_grpo=True"),
        (["algorithm.adv_estimator=rloo"], "stapo", "trimtab.advantage=verl"),
        ([], "maxrl", "advantages that verl does not have"),
        ([], "gdpo", "advantages that verl does not have"),
        (["algorithm.norm_adv_by_std_in_grpo=False"], "otb", "reads sum_p2, which verl does not compute"),
        (["distillation.enabled=True"], "stapo", "a loss of its own"),
    ],
)
def test_what_cannot_work_together_is_refused(overrides: list[str], objective: str, words: str) -> None:
    if any("calculate" in key for key in overrides):
        assert words in refused(*overrides, objective=objective)
    else:
        assert words in refused("actor_rollout_ref.rollout.calculate_log_probs=True", *overrides, objective=objective)


def test_bypass_mode_works_for_a_method_that_reads_no_entropy() -> None:
    assert refused("algorithm.rollout_correction.bypass_mode=True", objective="grpo") == ""


def test_any_advantage_of_verl_can_be_configured() -> None:
    assert refused("algorithm.adv_estimator=rloo", "+trimtab.advantage=verl") == ""


def test_all_problems_are_in_one_message() -> None:
    said = refused(f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.shuffle=True", objective="dr_grpo")
    assert said.count("\n  - ") == 3


def test_a_command_with_options_but_without_the_trainer_is_stopped() -> None:
    mode = "trainer.v1.trainer_mode=trimtab"
    assert "trimtab.tau_p is set" in command_problem(["+trimtab.tau_p=0.1"])
    assert "trimtab.objective is set" in command_problem(["+trimtab.objective=stapo", "trainer.v1.trainer_mode=sync"])
    assert "v1 trainer" in command_problem([mode, "+trimtab.objective=stapo", "trainer.use_v1=False"])
    assert command_problem([mode, "+trimtab.objective=stapo"]) == ""
    assert command_problem(["trainer.v1.trainer_mode='trimtab'", "+trimtab.objective=stapo"]) == ""
    assert command_problem(["--config-name=mine", "+trimtab.tau_p=0.1"]) == ""  # the mode may be in there
    assert command_problem(["data.train_files=x", "-q", "tests/engines"]) == ""


def test_an_update_with_another_loss_stops_the_run() -> None:
    with pytest.raises(RuntimeError, match="used another loss than trimtab's"):
        _rename_loss_metrics({"actor/pg_loss": 1.0})
    metrics = {"actor/trimtab/update/clip_share": 0.5, "actor/lr": 1.0}
    _rename_loss_metrics(metrics)
    assert metrics == {"trimtab/update/clip_share": 0.5, "actor/lr": 1.0}
