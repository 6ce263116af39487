"""The alarms by name: detector, metrics, thresholds, and what to try when it rings. A new alarm is added here."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.insight.alarms import detectors, ratio_detectors
from trimtab.insight.alarms.detector_input import Detector
from trimtab.record import COLLAPSE_METRICS


@dataclass(frozen=True)
class AlarmKind:
    """An alarm: its detector, the metrics it reads, the thresholds that only it uses, and what to try.

    `at_once`: the finding has held for long enough by its own definition.
    """

    detect: Detector
    metrics: tuple[str, ...]
    thresholds: tuple[str, ...]
    suggestion: str
    at_once: bool = False


GO_BACK = "trimtab train --from RUN@STEP --set update.lr=..."

# The names are also keys of [alarms] in a recipe, and the suggestions name keys of a recipe: tests check both.
# The order is that in which alarms of one step are reported.
ALARM_KINDS: dict[str, AlarmKind] = {
    "entropy_collapse": AlarmKind(
        detectors.entropy_collapse,
        ("policy/entropy",),
        ("collapse_level", "collapse_target", "collapse_floor"),
        "Add trim, which holds the entropy above objective.floor: objective.name = '... + trim'. Try a lower "
        "update.lr, and problems on which rewards still differ within groups. A wider objective.clip_high and "
        "objective.name = 'stare' (or '... + stare') are made to keep the entropy up too, but neither held it in the "
        "stability study",
    ),
    "entropy_explosion": AlarmKind(
        detectors.entropy_explosion,
        ("policy/entropy",),
        ("explosion_level", "explosion_ceiling", "explosion_min_rise"),
        "Try a lower update.lr or fewer update.per_step or update.passes, and lower any entropy bonus or "
        "objective.boost. Silencing spurious tokens (objective.name = 'stapo', or '... + s2t') is made for this; in "
        "the stability study more runs survived with it from 0 % accuracy, and it changed nothing after a warm start",
    ),
    "control": AlarmKind(
        detectors.control,
        (
            "policy/entropy",
            "trim/target",
            "trim/drive",
            "trim/leverage",
            "groups/mixed_share",
            "trim/saturated",
            "trim/weight",
            "trim/r2",
            "trim/gain",
        ),
        ("control_below", "control_steps", "control_leverage", "control_mixed", "control_r2"),
        ". ".join(detectors.CONTROL_ADVICE.values()),
    ),
    "spurious_growth": AlarmKind(
        detectors.spurious_growth,
        ("tokens/spurious_share", "groups/mixed_share", "tokens/count"),
        ("spurious_growth", "spurious_min_share"),
        "Silence them: objective.name = 'stapo', or '... + s2t' (objective.tau_p says what is rare); look at them in "
        "the records",
    ),
    "gradient_concentration": AlarmKind(
        detectors.gradient_concentration,
        ("tokens/top_gradient_share", "groups/mixed_share", "tokens/count"),
        ("gradient_growth", "gradient_min_share"),
        "Try objective.name = 'stapo', a lower update.max_grad_norm or more rollout.prompts, and look at these tokens "
        "in the records",
    ),
    "ratio": AlarmKind(
        ratio_detectors.ratio,
        ("update/approx_kl", "update/ratio_max"),
        ("ratio_kl", "ratio_kl_once", "ratio_growth", "ratio_kl_min", "ratio_max"),
        "Try a lower update.lr or fewer update.per_step or update.passes; keep a clip (objective.clip_low, "
        "objective.clip_high, objective.dual_clip)",
    ),
    "clip": AlarmKind(
        ratio_detectors.clip,
        ("update/clip_share",),
        ("clip_growth", "clip_min_share"),
        "The policy leaves the clip range more and more often: try a lower update.lr, or fewer update.per_step or "
        "update.passes",
    ),
    "sampler_mismatch": AlarmKind(
        ratio_detectors.sampler_mismatch,
        ("sampler/mismatch_mean",),
        ("mismatch_level", "mismatch_growth", "mismatch_min", "mismatch_rising_min", "mismatch_rising"),
        "Check that the sampler has the newest weights, that rollout.sampler_temperature and rollout.precision are not "
        "set, and that rollout.top_p and rollout.top_k are off or rollout.exact_truncation is "
        "on; '... + tis' corrects what must remain",
    ),
    "effective_samples": AlarmKind(
        ratio_detectors.effective_samples,
        ("sampler/effective_sample_share", "update/effective_sample_share_min"),
        ("samples_level", "samples_growth", "samples_min_loss", "samples_rising_min", "samples_rising"),
        "For trainer / sampler: check what sampler_mismatch names, and let samples be less old. '... + tis' or "
        "'... + mis' limits the ratios. For new / old: try a lower update.lr or fewer update.per_step or update.passes",
    ),
    "no_signal": AlarmKind(
        detectors.no_signal,
        ("groups/mixed_share", "reward/accuracy", "reward/mean", "eval/accuracy"),
        ("signal_min_share", "signal_fall", "signal_right"),
        "If all responses are wrong, use an easier task, a warm start or more rollout.samples. If all are right, use a "
        "harder task, or stop. rollout.dynamic_sampling = true samples until rewards differ. Check the verifier",
    ),
    "rule_errors": AlarmKind(
        detectors.rule_errors,
        ("reward/crashed_share", *detectors.AGENT_FAILURES),
        ("crashed_share",),
        "Read rule_errors.jsonl in the run's folder, and fix the rule (of the task or of reward.terms) or the rows "
        "that it names; reward.crashed sets what such responses get",
        at_once=True,
    ),
    "truncation": AlarmKind(
        detectors.truncation,
        ("response/truncated_share",),
        ("truncated_level", "truncated_growth"),
        "Raise rollout.max_new_tokens, or penalize long responses: reward.overlong_buffer",
    ),
    "repetition": AlarmKind(
        detectors.repetition,
        ("response/repetition_share",),
        ("repetition_growth",),
        "Look at what is rewarded in these responses; try reward.overlong_buffer, a lower update.lr, and the last "
        f"checkpoint before it began ({GO_BACK})",
    ),
    "length_drift": AlarmKind(
        detectors.length_drift,
        ("response/length_mean", "reward/accuracy"),
        ("length_factor", "length_gain"),
        "Check what is rewarded; try objective.name = 'dr_grpo' or 'dapo' (no length bias), or reward.overlong_buffer",
    ),
    "failing_calls": AlarmKind(
        detectors.failing_calls,
        ("tools/failed_share",),
        ("failing_level", "failing_growth"),
        "Look at tools/exception, tools/timeout, tools/malformed and the others, and at such calls in the report's "
        "microscope. For malformed calls try a warm start or another tools.format, for timeouts a higher tools.timeout",
    ),
    "void_turns": AlarmKind(
        detectors.void_turns,
        ("conversation/void_share",),
        ("void_level", "void_growth"),
        "Exclude such conversations from training: reward.void_turns. Check in the report's microscope that calls are "
        "written in the format that tools.format expects",
    ),
    "calls_vanish": AlarmKind(
        detectors.calls_vanish,
        ("conversation/called_share", "reward/accuracy", "eval/accuracy"),
        ("vanish_level", "vanish_min_start"),
        "Check that calls pay off: can the task be solved without them, do they fail, do rollout.max_turns and "
        "rollout.max_new_tokens leave room for an answer after them? Try a longer warm start or a lower update.lr",
    ),
    "tool_wait": AlarmKind(
        detectors.tool_wait,
        ("time/tools_wait_share",),
        ("tool_wait_share",),
        "Raise tools.workers if cores are idle, lower tools.timeout, make the tool faster, or sample more "
        "conversations at the same time: rollout.prompts, rollout.samples",
    ),
    "agent": AlarmKind(
        detectors.agent,
        detectors.AGENT_FAILURES,
        ("agent_failed_share",),
        "Read rule_errors.jsonl in the run's folder, which has the agent's errors. If rollouts take too long, raise "
        "agent.timeout or lower agent.concurrency; agent.on_timeout sets what such rollouts get",
    ),
    "reward_hacking": AlarmKind(
        detectors.reward_hacking,
        ("reward/accuracy", "reward/mean", "eval/accuracy", "response/length_mean", "policy/entropy"),
        ("hacking_rise", "hacking_follow", "jump_rise", "jump_length", "jump_entropy"),
        "Read the newest rewarded responses: does the verifier (task.rule) reward anything but right answers? "
        "If not, train on more problems, because the model may be memorising",
    ),
    "reward_drop": AlarmKind(
        detectors.reward_drop,
        ("reward/accuracy", "reward/mean", "eval/accuracy"),
        ("drop_share", "drop_min", "drop_noise"),
        f"Go back to a checkpoint before the fall, with a lower update.lr ({GO_BACK}); the other alarms may say why",
    ),
    "collapse": AlarmKind(
        detectors.collapse,
        COLLAPSE_METRICS,
        (),
        f"Go back to a checkpoint before this step, with a lower update.lr or fewer update.per_step ({GO_BACK}); "
        "`trimtab stress` finds how far an objective can be pushed",
        at_once=True,
    ),
}
