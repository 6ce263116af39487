"""The alarms by name: what each looks at, what finds it, and what to try when it rings."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.insight.alarms import policy_detectors as policy
from trimtab.insight.alarms import response_detectors as response
from trimtab.insight.alarms.detector_input import Detector


@dataclass(frozen=True)
class Kind:
    """An alarm: its detector, the metrics it looks at, the thresholds of its own, and what to try."""

    detect: Detector
    metrics: tuple[str, ...]
    limits: tuple[str, ...]
    suggestion: str


KINDS: dict[str, Kind] = {
    "entropy_collapse": Kind(
        policy.entropy_collapse,
        ("policy/entropy",),
        ("collapse_level", "collapse_target", "collapse_floor"),
        "Try a lower update.lr, a wider objective.clip_high, or an objective that holds the entropy "
        "(objective.name = 'stare', or '... + stare')",
    ),
    "entropy_explosion": Kind(
        policy.entropy_explosion,
        ("policy/entropy",),
        ("explosion_level", "explosion_ceiling", "explosion_least"),
        "Try a lower update.lr or fewer update.per_step, silence spurious tokens (objective.name = 'stapo', or "
        "'... + s2t'), and lower any entropy bonus or objective.boost",
    ),
    "spurious_growth": Kind(
        policy.spurious_growth,
        ("tokens/spurious_share", "tokens/count"),
        ("spurious_growth", "spurious_least"),
        "Silence them: objective.name = 'stapo', or '... + s2t' (objective.tau_p says what is rare); look at them in "
        "the records",
    ),
    "gradient_concentration": Kind(
        policy.gradient_concentration,
        ("tokens/top_gradient_share", "groups/mixed_share", "tokens/count"),
        ("gradient_growth", "gradient_least"),
        "Try objective.name = 'stapo' or a lower update.max_grad_norm, more rollout.prompts, and look at these tokens "
        "in the records",
    ),
    "ratio": Kind(
        policy.ratio,
        ("update/approx_kl", "update/ratio_max"),
        ("ratio_kl", "ratio_kl_once", "ratio_growth", "ratio_least", "ratio_high"),
        "Try a lower update.lr or fewer update.per_step; keep a clip (objective.clip_low, objective.clip_high, "
        "objective.dual_clip)",
    ),
    "clip": Kind(
        policy.clip,
        ("update/clip_share",),
        ("clip_growth", "clip_least"),
        "The policy leaves the clip range more and more often: try a lower update.lr or fewer update.per_step",
    ),
    "sampler_mismatch": Kind(
        policy.sampler_mismatch,
        ("sampler/mismatch_mean",),
        ("mismatch_level", "mismatch_growth", "mismatch_least"),
        "Check that the sampler has the newest weights, the same rollout.temperature and precision, and that "
        "rollout.top_p and rollout.top_k are off; '... + tis' corrects what must remain",
    ),
    "no_signal": Kind(
        response.no_signal,
        ("groups/mixed_share",),
        ("signal_least", "signal_fall"),
        "If all are wrong: an easier task, a warm start, more rollout.samples. If all are right: a harder task, or "
        "stop here. rollout.dynamic_sampling = true draws until groups differ. Check the verifier",
    ),
    "truncation": Kind(
        response.truncation,
        ("response/truncated_share",),
        ("truncated_level", "truncated_growth"),
        "Raise rollout.max_new_tokens, or make long responses dear: reward.overlong_buffer",
    ),
    "repetition": Kind(
        response.repetition,
        ("response/repetition_share",),
        ("repetition_growth",),
        "Look at what is rewarded in these responses; try reward.overlong_buffer, a lower update.lr, and the last "
        "checkpoint before it began",
    ),
    "length_drift": Kind(
        response.length_drift,
        ("response/length_mean", "reward/accuracy"),
        ("length_factor", "length_gain"),
        "Check what the reward pays for; try objective.name = 'dr_grpo' or 'dapo' (no length bias), "
        "reward.overlong_buffer",
    ),
    "reward_hacking": Kind(
        response.reward_hacking,
        ("reward/accuracy", "reward/mean", "eval/accuracy", "response/length_mean", "policy/entropy"),
        ("hacking_rise", "hacking_follow", "jump_rise", "jump_length", "jump_entropy"),
        "Read the newest rewarded responses: does the verifier (task.rule) pay for something else than right answers? "
        "Else more problems (it may be memorising)",
    ),
    "reward_drop": Kind(
        response.reward_drop,
        ("reward/accuracy", "reward/mean", "eval/accuracy"),
        ("drop_share", "drop_least", "drop_sure"),
        "Go back to a checkpoint before the fall, with a lower update.lr; the other alarms may say why",
    ),
}
