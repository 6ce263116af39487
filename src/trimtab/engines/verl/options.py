"""trimtab's options in verl's configuration, and what of verl's own cannot work with them.

`+trimtab.objective=stapo +trimtab.tau_p=0.002` on verl's command line, or a `trimtab` section in its YAML. All of that
section but a few keys are options of the objective. verl's loss is replaced as a whole, so a setting of it that was
changed is refused rather than passed over: the message says which of ours to use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.engines.common import make_objective
from trimtab.objectives import Objective
from trimtab.text import nearest

OWN = ("advantage", "record", "record_every", "record_share", "record_max_megabytes")

ADVANTAGES = {
    "group_normalized": "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=True",
    "group_centered": "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False",
    "leave_one_out": "algorithm.adv_estimator=rloo",
}

# verl's losses by our names.
LOSSES = {
    "gspo": "gspo", "sapo": "sapo", "gpg": "reinforce", "clip_cov": "clip_cov", "kl_cov": "kl_cov", "geo_mean": "gmpo",
    "cispo": "cispo",
}  # fmt: skip

# Settings of verl's loss: their default there, and what to write instead.
REPLACED: Mapping[str, tuple[Any, str]] = {
    "clip_ratio": (0.2, "+trimtab.clip_low and +trimtab.clip_high"),
    "clip_ratio_low": (0.2, "+trimtab.clip_low"),
    "clip_ratio_high": (0.2, "+trimtab.clip_high"),
    "clip_ratio_c": (3.0, "+trimtab.dual_clip"),
    "loss_agg_mode": ("token-mean", "+trimtab.aggregation"),
    "loss_scale_factor": (None, "+trimtab.objective=dr_grpo +trimtab.length"),
    "tau_pos": (1.0, "+trimtab.objective=sapo +trimtab.tau_positive"),
    "tau_neg": (1.05, "+trimtab.objective=sapo +trimtab.tau_negative"),
    "entropy_coeff": (0, "no entropy bonus: stare steers the entropy, entropy_advantage shapes the advantage"),
    "use_kl_loss": (False, '+trimtab.objective="METHOD + kl(coef=...)"; the reference model is then loaded'),
}


@dataclass(frozen=True)
class Options:
    """What the `trimtab` section says: the objective's table (`name` and options), the advantage, what to record."""

    objective: dict[str, Any]
    advantage: str = "method"
    record: str | None = None
    record_every: int = 1
    record_share: float = 1.0
    record_max_megabytes: float = 2000.0


def read_options(section: Mapping[str, Any] | None) -> Options:
    """The options of a section of plain values."""
    given = {str(key): value for key, value in (section or {}).items()}
    if not given.get("objective"):
        raise ValueError("trimtab: which objective? Add for example +trimtab.objective=stapo")
    name = str(given.pop("objective"))
    own = {key: given.pop(key) for key in OWN if key in given}
    options = Options({"name": name, **given}, **own)
    _check_own(options)
    try:
        make_objective(options.objective)
    except ValueError as error:
        raise _explained(error, given) from None
    return options


def _check_own(options: Options) -> None:
    """The keys that are not the objective's."""
    every, share, megabytes = options.record_every, options.record_share, options.record_max_megabytes
    rules = {
        "advantage": (options.advantage in ("method", "verl"), "method (what it is defined with) or verl (any)"),
        "record": (isinstance(options.record, str | None), "a folder"),
        "record_every": (type(every) is int and every >= 1, "a whole number of steps, at least 1"),
        "record_share": (type(share) in (int, float) and 0 < share <= 1, "a share of the groups, above 0, at most 1"),
        "record_max_megabytes": (type(megabytes) in (int, float) and megabytes > 0, "a number above 0"),
    }
    for key, (right, wanted) in rules.items():
        if not right:
            raise ValueError(f"trimtab.{key}={getattr(options, key)!r} must be {wanted}")


def _explained(error: ValueError, given: Mapping[str, Any]) -> ValueError:
    """The error, or a better one where a key was meant for this section itself (recrod, advantge)."""
    for key in given:
        close = f"unknown option of trimtab {key!r}: {nearest(key, OWN)}"
        if repr(key) in str(error) and "did you mean" not in str(error) and "did you mean" in close:
            return ValueError(close)
    return ValueError(f"trimtab: {error}")


def check(config: Any, options: Options, objective: Objective) -> None:
    """Refuse what cannot work: everything that is wrong, in one message. `config` is verl's."""
    faults = [
        *_loss_faults(config.actor_rollout_ref.actor),
        *_run_faults(config),
        *_field_faults(config, objective),
        *_advantage_faults(config.algorithm, options, objective),
    ]
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in faults)
        raise ValueError(f"trimtab cannot run {objective.name} in verl with this configuration:\n{listed}")


def _loss_faults(actor: Any) -> list[str]:
    where = "actor_rollout_ref.actor"
    faults = []
    for key, (default, ours) in REPLACED.items():
        value = actor.get(key, default)
        if value != default:
            faults.append(f"{where}.{key}={value} is of verl's loss, which is replaced: leave it out and use {ours}")
    mode = actor.policy_loss.loss_mode
    if mode != "vanilla":
        ours = f"+trimtab.objective={LOSSES[mode]}" if mode in LOSSES else "a method of `trimtab methods`"
        faults.append(f"{where}.policy_loss.loss_mode={mode} is replaced: leave it out and use {ours}")
    if actor.shuffle:
        faults.append(f"{where}.shuffle=True cuts other mini-batches than were planned: turn it off")
    return faults


def _run_faults(config: Any) -> list[str]:
    faults = []
    if not config.trainer.use_v1:
        faults.append("trainer.use_v1=False is verl's old trainer, which has no place for a plan: leave it out")
    if config.algorithm.adv_estimator == "gae" or config.critic.enable:
        faults.append("a critic (algorithm.adv_estimator=gae or critic.enable=True): use algorithm.adv_estimator=grpo")
    if config.get("distillation") and config.distillation.get("enabled", False):
        faults.append("distillation.enabled=True has a loss of its own: leave it out")
    correction = config.algorithm.get("rollout_correction") or {}
    if correction.get("rollout_is"):
        faults.append(
            f"algorithm.rollout_correction.rollout_is={correction['rollout_is']} weights verl's loss, which goes: "
            'use +trimtab.objective="METHOD + tis" or "METHOD + icepop"'
        )
    if correction.get("rollout_rs"):
        faults.append(
            f"algorithm.rollout_correction.rollout_rs={correction['rollout_rs']} masks tokens behind the plan's back: "
            'use +trimtab.objective="METHOD + mis"'
        )
    return faults


def _field_faults(config: Any, objective: Objective) -> list[str]:
    """What the objective reads and this run does not measure."""
    faults, needs = [], objective.needs
    correction = config.algorithm.get("rollout_correction") or {}
    if "entropy" in needs and correction.get("bypass_mode"):
        faults.append(
            f"algorithm.rollout_correction.bypass_mode=True leaves out the pass that measures the entropy, which "
            f"{objective.name} reads: turn it off"
        )
    if "sampler_logp" in needs and not config.actor_rollout_ref.rollout.calculate_log_probs:
        faults.append(
            f"{objective.name} reads the sampler's log-probabilities: set "
            "actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    if "current_logp" in needs:
        faults.append(
            "token_stats=current would need a pass before every update; verl runs all updates of a step in one call: "
            "leave it out (for the first update of a step both are the same)"
        )
    if objective.scope == "micro":
        faults.append("scope=micro plans per micro-batch, which verl cuts after the plan: leave it out")
    faults += [
        f"{objective.name} reads {name}, which verl does not measure"
        for name in sorted(needs - {"entropy", "sampler_logp", "ref_logp", "segment", "current_logp"})
    ]
    return faults


def _advantage_faults(algorithm: Any, options: Options, objective: Objective) -> list[str]:
    if options.advantage == "verl" or algorithm.adv_estimator == "gae":
        return []
    normalized = algorithm.get("norm_adv_by_std_in_grpo", True)
    right = {
        "group_normalized": algorithm.adv_estimator == "grpo" and normalized,
        "group_centered": algorithm.adv_estimator == "grpo" and not normalized,
        "leave_one_out": algorithm.adv_estimator == "rloo",
    }[objective.advantage]
    if right:
        return []
    return [
        f"{objective.name} is defined with another advantage: set {ADVANTAGES[objective.advantage]}, or "
        "+trimtab.advantage=verl to take what verl computes"
    ]
