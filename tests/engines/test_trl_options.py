"""What a user can say: objectives by name or table, options of TRL that stand, and those that are refused and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not installed here: `make test-engines` runs these tests")

import torch
import trl
from transformers import HfArgumentParser

import trimtab as tt
from helpers.engines import trl_runs
from trimtab import engines
from trimtab.engines import common
from trimtab.engines.common import tool_tokens
from trimtab.engines.trl import TrimtabConfig, TrimtabTrainer
from trimtab.engines.trl.options import REPLACED, check_sampler, with_reference
from trimtab.engines.trl.padded import (
    ENTROPY,
    RESPONSE_INDEX,
    REWARD,
    REWARDS,
    advantages,
    sampled_positions,
    segments,
    token_batch,
)
from trimtab.engines.trl.recording import PlannedUpdate, RolloutShape, TrlRecording, start_recorder
from trimtab.record import Manifest, RecordedObservation, Vocabulary, open_run

# A value of each option that the objective takes over, as someone might set it, and a word of the advice.
SET = {
    "loss_type": ("grpo", "objective='grpo'"),
    "epsilon": (0.2, "clip_low"),
    "epsilon_high": (0.28, "clip_high"),
    "delta": (4.0, "dual_clip"),
    "importance_sampling_level": ("sequence", "gspo"),
    "beta": (0.04, "kl(coef=0.04)"),
    "use_bias_correction_kl": (True, "kl(coef=0.04, corrected=true)"),
    "top_entropy_quantile": (0.2, "top_entropy(share=0.2)"),
    "entropy_coef": (0.01, "entropy_advantage"),
    "use_adaptive_entropy": (True, "stare"),
    "off_policy_mask_threshold": (0.5, "mis"),
    "vllm_importance_sampling_correction": (True, "tis"),
    "vllm_importance_sampling_mode": ("token_truncate", "tis"),
    "vllm_importance_sampling_clip_max": (2.0, "tis"),
    "vllm_importance_sampling_clip_min": (0.5, "tis"),
    "vllm_importance_sampling_cap": (2.0, "tis"),
    "use_liger_kernel": (True, "use_kernels"),
    "scale_rewards": ("batch", "advantage='trl'"),
    "multi_objective_aggregation": ("normalize_then_sum", "advantage='trl'"),
}
# What else TRL's loss reads of its configuration: options of a `loss_type` or of a bonus that is refused (dr_grpo's
# `max_completion_length` is the objective's `length`), and how the batch is cut. Whatever is new must be thought about.
OTHERS = {
    "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
    "vespo_lambda_neg", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target",
    "max_completion_length", "steps_per_generation",
}  # fmt: skip


def test_every_replaced_option_is_tested_here() -> None:
    assert set(SET) == {*REPLACED, "scale_rewards", "multi_objective_aggregation"}


@pytest.mark.parametrize("name", SET)
def test_an_option_without_effect_is_refused_with_what_to_write_instead(name: str, tmp_path: Path) -> None:
    value, advice = SET[name]
    with pytest.raises(ValueError, match=name) as told:
        trl_runs.config(tmp_path, **{name: value})
    assert advice in str(told.value)
    assert repr(value) in str(told.value)


def test_no_option_that_trls_loss_reads_is_forgotten() -> None:
    """TRL's loss takes its options from `self.args` and from attributes made of them in the constructor."""
    import inspect
    import re

    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    known = set(trl.GRPOConfig.__dataclass_fields__)
    renamed = {"epsilon_low": "epsilon"}
    read = {renamed.get(name, name) for name in re.findall(r"self\.(?:args\.)?(\w+)", source)} & known
    unthought = read - set(REPLACED) - OTHERS - {"router_aux_loss_coef", "use_vllm"}
    assert read & set(REPLACED), "TRL's loss reads its options in another way now: look again"
    assert not unthought


def test_an_option_may_be_set_to_off(tmp_path: Path) -> None:
    off = {name: option.default for name, option in REPLACED.items() if option.off}
    args = trl_runs.config(tmp_path, **off)
    assert args.beta == 0.0
    assert args.vllm_importance_sampling_correction is False


def test_an_option_that_is_changed_afterwards_is_refused_by_the_trainer(tmp_path: Path) -> None:
    args = trl_runs.config(tmp_path)
    args.beta = 0.1
    with pytest.raises(ValueError, match=r"beta=0\.1 has no effect"):
        trl_runs.trainer(trl_runs.demo_model(0), args)


def test_trls_own_advantages_can_be_used(tmp_path: Path) -> None:
    args = trl_runs.config(tmp_path, advantage="trl", scale_rewards="batch")
    assert args.scale_rewards == "batch"
    with pytest.raises(ValueError, match=r"advantage='mine' must be 'method'.* or 'trl'"):
        trl_runs.config(tmp_path, advantage="mine")


def test_an_objective_is_a_name_or_a_table(tmp_path: Path) -> None:
    assert trl_runs.config(tmp_path, objective="sspo + s2t").objective == "sspo + s2t"
    table = {"name": "stapo", "tau_p": 0.1, "dual_clip": "none"}
    args = trl_runs.config(tmp_path, objective=table)
    trainer = trl_runs.trainer(trl_runs.demo_model(0), args)
    assert "p < 0.1" in trainer.objective.explain()
    assert "min(" not in trainer.objective.surrogate.formula or "10" not in trainer.objective.surrogate.says


def test_a_table_can_come_from_the_command_line(tmp_path: Path) -> None:
    line = ["--output_dir", str(tmp_path), "--bf16", "false", "--use_cpu", "true", "--report_to", "none"]
    (args,) = HfArgumentParser(TrimtabConfig).parse_args_into_dataclasses(
        [*line, "--objective", json.dumps({"name": "stare", "variant": "C2"})]
    )
    assert args.objective == {"name": "stare", "variant": "C2"}
    (args,) = HfArgumentParser(TrimtabConfig).parse_args_into_dataclasses([*line, "--objective", "dapo + s2t"])
    assert args.objective == "dapo + s2t"


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (None, "objective=None names no objective"),
        ({"tau_p": 0.1}, "names no objective"),
        ("stappo", "stapo"),
        ("stapo(tau_q=1)", "tau_p"),
        ({"name": "stapo", "tau_p": 7}, "tau_p=7 must be between 0 and 1"),
    ],
)
def test_a_wrong_objective_is_an_error_before_any_model_is_loaded(objective: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, LookupError)) as told:
        trl_runs.config(tmp_path, objective=objective)
    assert words in str(told.value)


def test_an_update_must_lie_within_one_rollout_batch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps_per_generation=2 must be a multiple of gradient_accumulation_steps=4"):
        trl_runs.config(tmp_path, steps_per_generation=2, gradient_accumulation_steps=4)
    assert trl_runs.config(tmp_path, steps_per_generation=8, gradient_accumulation_steps=4).steps_per_generation == 8


def test_trls_plain_configuration_is_refused(tmp_path: Path) -> None:
    plain = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    with pytest.raises(TypeError, match=r"args is GRPOConfig: pass a trimtab\.engines\.trl\.TrimtabConfig"):
        TrimtabTrainer(trl_runs.demo_model(0), trl_runs.is_right, plain)


def test_corrections_need_a_sampler_that_returns_log_probabilities(tmp_path: Path) -> None:
    args = trl_runs.config(tmp_path, objective="dapo + tis")
    with pytest.raises(ValueError, match=r"dapo \+ tis reads the sampler's log-probabilities"):
        trl_runs.trainer(trl_runs.demo_model(0), args)
    check_sampler(tt.objective("dapo + tis"), use_vllm=True, rollout_func=False)
    check_sampler(tt.objective("dapo + tis"), use_vllm=False, rollout_func=True)


def test_an_objective_that_reads_what_trl_does_not_compute_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="otb reads group, which TRL does not compute: take another objective here"):
        trl_runs.config(tmp_path, objective="otb")


def test_vllm_without_a_correction_is_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"write 'stapo \+ tis'"):
        check_sampler(tt.objective("stapo"), use_vllm=True, rollout_func=False)


@pytest.mark.parametrize("how", [{"top_p": 0.9}, {"top_k": 20}])
def test_top_p_and_top_k_are_warned_about(how: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="TRL scores responses over the whole vocabulary"):
        check_sampler(tt.objective("stapo"), use_vllm=False, rollout_func=False, **how)


def test_a_penalty_makes_trl_keep_a_reference_and_leaves_the_users_configuration_alone(tmp_path: Path) -> None:
    args = trl_runs.config(tmp_path, objective="grpo + kl")
    assert with_reference(args, tt.objective("grpo + kl")).beta != 0
    assert args.beta == 0
    assert with_reference(args, tt.objective("grpo")) is args


def test_an_engine_of_another_version_gives_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "9.9")
    with pytest.warns(UserWarning, match=r"tested with trl 1.16.0; this is 9.9") as told:
        engines.check_version("trl")
    assert len(told) == 1
    known = str(engines.missing_engine("trl", ImportError("no GRPOTrainer")))
    assert "cannot use trl 9.9: no GRPOTrainer" in known


def test_the_error_for_a_missing_engine_says_what_to_install() -> None:
    told = str(engines.missing_engine("verl" if not _installed("verl") else "no_such_engine", ImportError()))
    assert "pip install" in told


def _installed(name: str) -> bool:
    import importlib.util

    engines.TESTED_VERSIONS.setdefault("no_such_engine", "1.0")
    return importlib.util.find_spec(name) is not None


def test_a_controllers_state_goes_into_a_folder_and_back(tmp_path: Path) -> None:
    one, other = tt.objective("stare", adaptive=True), tt.objective("stare", adaptive=True)
    one.controllers["stare"].observe(0.1)
    common.save_state(tmp_path / "new", one, rollouts=7)
    assert common.load_state(tmp_path / "new", other) == {"rollouts": 7}
    assert other.state_dict() == one.state_dict()


def test_the_state_of_another_objective_is_refused_with_what_to_do(tmp_path: Path) -> None:
    common.save_state(tmp_path, tt.objective("stapo"))
    with pytest.raises(ValueError, match=r"trimtab.json does not fit stare.*remove the file"):
        common.load_state(tmp_path, tt.objective("stare"))
    (tmp_path / common.STATE_FILE).write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        common.load_state(tmp_path, tt.objective("stapo"))


def test_a_checkpoint_of_plain_trl_lets_controllers_start_anew(tmp_path: Path) -> None:
    assert common.load_state(tmp_path, tt.objective("stapo")) == {}
    with pytest.warns(UserWarning, match="the controllers of stare start anew"):
        assert common.load_state(tmp_path, tt.objective("stare")) == {}


class Two:
    """Two processes, of which the other has these values."""

    def __init__(self, *others: list[float]) -> None:
        self.others = others

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor, *(torch.tensor(values, dtype=tensor.dtype) for values in self.others)]


def test_metrics_of_all_processes_are_sums_and_extremes_even_of_one_without_tokens() -> None:
    names = ("update/clip_share", "update/ratio_min", "update/ratio_max")
    part = {"update/clip_share": torch.tensor(0.1), "update/ratio_min": torch.tensor(0.5)}
    whole = common.reduce_metrics([part, part], names, None)
    assert whole == {"update/clip_share": pytest.approx(0.2), "update/ratio_min": 0.5}
    none = [0.0, float("inf"), float("-inf")]
    both = common.reduce_metrics([{**part, "update/ratio_max": torch.tensor(2.0)}], names, Two(none))
    assert both == {"update/clip_share": pytest.approx(0.1), "update/ratio_min": 0.5, "update/ratio_max": 2.0}


def test_an_ungraded_response_has_no_advantage_and_no_part_in_the_baseline() -> None:
    nan = float("nan")
    reward = torch.tensor([1.0, 0.0, nan, nan, 1.0, nan, nan, nan])
    ours = advantages(tt.objective("dr_grpo"), reward, samples=4)
    assert ours.tolist() == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert advantages(tt.objective("grpo"), torch.full((4,), nan), samples=2).tolist() == [0.0] * 4


def test_a_tools_result_ends_a_subsentence() -> None:
    """As verl's side does, which has the same rows in its test."""
    tokenizer = trl_runs.demo_tokenizer()
    rows = ["1+1=2", "9 9  ", "4+5  "]
    ids = torch.tensor([tokenizer.encode(row) for row in rows])
    mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0], [1] * 5])
    tool = torch.tensor([[1, 1, 0, 0, 1], [1, 0, 1, 1, 1], [1] * 5])
    batch = {"completion_ids": ids, "completion_mask": mask, "tool_mask": tool}
    found = segments(batch, tokenizer)
    assert found[0].tolist() == [0, 0, 0, 0, 1], "not joined across the tool's result"
    assert found[1].tolist() == [0, 0, 1, 0, 0]
    assert torch.equal(found[2], segments({**batch, "tool_mask": None}, tokenizer)[2])
    assert tool_tokens(*sampled_positions(batch)).tolist() == [0, 0, 2] + [0, 1] + [0] * 5


def test_a_record_marks_where_tool_results_were_left_out(tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]])
    mask, tool = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]), torch.tensor([[1, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    zeros = torch.zeros(2, 5)
    batch = {
        "prompt_ids": torch.ones(2, 1, dtype=torch.int64), "prompt_mask": torch.ones(2, 1), "completion_ids": ids,
        "completion_mask": mask, "tool_mask": tool, "old_per_token_logps": zeros - 1, ENTROPY: zeros + 1,
        "advantages": torch.tensor([1.0, -1.0]), REWARD: torch.tensor([1.0, 0.0]), RESPONSE_INDEX: torch.arange(2),
        REWARDS: torch.tensor([[1.0], [0.0]]),
    }  # fmt: skip
    objective = tt.objective("grpo")
    tokens = token_batch([batch], objective)
    plan = objective.plan(tokens)
    out = objective.loss(tokens.old_logp, plan)
    vocabulary = Vocabulary([str(n).encode() for n in range(8)], [False] * 8)
    recorder = start_recorder(tmp_path, 0, Manifest({"name": "grpo"}, objective.advantage), vocabulary, "cpu")
    recording = TrlRecording(RolloutShape(1, 2, 1, frozenset({7}), ["right"], [1.0]), objective, list, recorder)
    recording.begin_step(1, [batch])
    recording.begin_update(PlannedUpdate(0, tokens, plan, [batch]))
    recording.finish_update(1, [(out, tokens.old_logp)], {"update/loss": 0.0})
    recording.close()
    step = open_run(tmp_path).step(1)
    assert step.tokens["token"].tolist() == [1, 4, 5, 1, 2, 3]
    assert step.tokens["tool_tokens"].tolist() == [0, 2, 0, 0, 0, 0]
    assert step.observations(0) == [RecordedObservation(1, 2, "23")] and step.observations(1) == []


def test_subsentences_are_found_in_sampled_tokens_alone() -> None:
    tokenizer = trl_runs.demo_tokenizer()
    ids = torch.tensor([tokenizer.encode("1+2=3  "), tokenizer.encode("4 5 6 7")])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7])
    found = segments({"completion_ids": ids, "completion_mask": mask}, tokenizer)
    assert found.shape == ids.shape
    expected = tt.segment_ids(ids[0][:5], tokenizer)
    assert torch.equal(found[0][:5], expected)
    assert found[0][5:].tolist() == [0, 0]


def test_gdpo_gets_the_reward_functions_by_themselves() -> None:
    nan = float("nan")
    both = torch.tensor([[1.0, 0.0], [0.0, 10.0], [nan, nan], [1.0, nan]])
    weights = torch.tensor([1.0, 0.5])
    reward = (both * weights).nansum(1).masked_fill(both.isnan().all(1), nan)
    ours = advantages(tt.objective("gdpo", whiten=False), reward, 4, both, weights)
    each = [tt.advantages.group_normalized(values, [0, 0, 0]) for values in ([1.0, 0.0, 1.0], [0.0, 10.0, 0.0])]
    expected = each[0] + 0.5 * each[1]
    assert ours.tolist() == pytest.approx([expected[0].item(), expected[1].item(), 0.0, expected[2].item()])
