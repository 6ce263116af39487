"""trimtab's options in verl's configuration, and checks of verl's own.

`+trimtab.objective=stapo +trimtab.tau_p=0.002` on verl's command line, or a `trimtab` section in its YAML. All keys of
that section but those of `EngineOptions` are options of the objective. verl's loss is replaced as a whole, so a setting
of it that was changed is an error that says what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.engines import AGENT_LOOP, AGENT_LOOP_KEY, LAST_MESSAGE, OWN_AGENT_LOOP
from trimtab.engines import options as engine_options
from trimtab.engines.options import EngineOptions, missing_fields
from trimtab.objectives import Objective
from trimtab.own_parts import is_own, module_folders
from trimtab.text import nearest
from trimtab.trainer.config import build_objective

KEYS = tuple(EngineOptions.model_fields)

# verl's losses: our methods for them.
LOSSES = {
    "gspo": "gspo", "sapo": "sapo", "gpg": "reinforce", "clip_cov": "clip_cov", "kl_cov": "kl_cov", "geo_mean": "gmpo",
    "cispo": "cispo", "dppo_tv": "dppo", "dppo_kl": "dppo(divergence=kl)",
}  # fmt: skip

# Settings of verl's loss: verl's default, and what to write instead.
REPLACED: Mapping[str, tuple[Any, str]] = {
    "clip_ratio": (0.2, "+trimtab.clip_low and +trimtab.clip_high (in dppo shift_low and shift_high)"),
    "clip_ratio_low": (0.2, "+trimtab.clip_low (in dppo shift_low)"),
    "clip_ratio_high": (0.2, "+trimtab.clip_high (in dppo shift_high)"),
    "clip_ratio_c": (3.0, "+trimtab.dual_clip (in dppo cap)"),
    "loss_agg_mode": ("token-mean", "+trimtab.aggregation"),
    "loss_scale_factor": (None, "+trimtab.objective=dr_grpo +trimtab.length"),
    "tau_pos": (1.0, "+trimtab.objective=sapo +trimtab.tau_positive"),
    "tau_neg": (1.05, "+trimtab.objective=sapo +trimtab.tau_negative"),
    "entropy_coeff": (0, '+trimtab.objective="METHOD + entropy_bonus(coef=..., gradient=exact)", or stare or trim'),
    "use_kl_loss": (False, '+trimtab.objective="METHOD + kl(coef=...)"; the reference model is then loaded'),
}


def read_options(section: Mapping[str, Any] | None) -> EngineOptions:
    """Read the `trimtab` section and check it."""
    options = shared_options(section or {})
    if not options.objective:
        raise ValueError("trimtab: no objective is set: add for example +trimtab.objective=stapo")
    unused = [key for key in section or {} if key in KEYS and key.startswith("tool_")]
    if unused and not options.has_tools:
        raise ValueError(f"trimtab.{unused[0]} without tools: add for example +trimtab.tools=[python]")
    unused = [key for key in section or {} if key in KEYS and key.startswith("agent_")]
    if unused and not options.has_agent:
        raise ValueError(f"trimtab.{unused[0]} without an agent: add for example +trimtab.agent=python:my_agent:solve")
    try:
        build_objective(options.objective)
    except ValueError as error:
        raise _explained(error, options.objective) from None
    return options


def shared_options(section: Mapping[str, Any]) -> EngineOptions:
    """Return what the `trimtab` section says, without a check of the objective; agent loops need the tools only."""
    given = {"tool_folders": module_folders(), **{str(key): value for key, value in section.items()}}
    shared = {key: given.pop(key) for key in KEYS if key in given}
    if shared.get("objective"):
        shared["objective"] = {"name": str(shared["objective"]), **given}
    return engine_options.read_options("verl", shared, "trimtab.")


def _explained(error: ValueError, given: Mapping[str, Any]) -> ValueError:
    """Return the error, or a better one for a misspelt key of this section itself (recrod, advantge)."""
    for key in given:
        suggestion = f"unknown option of trimtab {key!r}: {nearest(key, KEYS)}"
        if repr(key) in str(error) and "did you mean" not in str(error) and "did you mean" in suggestion:
            return ValueError(suggestion)
    return ValueError(f"trimtab: {error}")


def check_config(config: Any, options: EngineOptions, objective: Objective) -> None:
    """Check verl's configuration; one error lists all problems."""
    checks = {
        **_loss_problems(config.actor_rollout_ref.actor),
        **_run_problems(config),
        **_field_problems(config, objective),
        **_advantage_problem(config.algorithm, options, objective),
        **_tool_problems(config),
        **_agent_problems(config, options),
    }
    if any(checks.values()):
        listed = "\n".join(f"  - {problem}" for problem, found in checks.items() if found)
        raise ValueError(f"trimtab cannot run {objective.name} in verl with this configuration:\n{listed}")


# Each of the following returns possible problems, and whether this configuration has them.


def _loss_problems(actor: Any) -> dict[str, bool]:
    where = "actor_rollout_ref.actor"
    mode = actor.policy_loss.loss_mode
    checks = {}
    for key, (default, ours) in REPLACED.items():
        value = actor.get(key, default)
        replaced = f"{where}.{key}={value} is a setting of verl's loss, which is replaced: leave it out and use {ours}"
        checks[replaced] = value != default
    ours = f"+trimtab.objective={LOSSES[mode]}" if mode in LOSSES else "a method of `trimtab methods`"
    checks[f"{where}.policy_loss.loss_mode={mode} is replaced: leave it out and use {ours}"] = mode != "vanilla"
    checks[f"{where}.shuffle=True makes other mini-batches than were planned: turn it off"] = bool(actor.shuffle)
    return checks


def _run_problems(config: Any) -> dict[str, bool]:
    old = "trainer.use_v1=False selects verl's old trainer, which the adapter does not support: leave it out"
    critic = "a critic (algorithm.adv_estimator=gae or critic.enable=True): use algorithm.adv_estimator=grpo"
    distilled = config.get("distillation") and config.distillation.get("enabled", False)
    correction = config.algorithm.get("rollout_correction") or {}
    weights = correction.get("rollout_is")
    mask = correction.get("rollout_rs")
    return {
        old: not config.trainer.use_v1,
        critic: config.algorithm.adv_estimator == "gae" or bool(config.critic.enable),
        "distillation.enabled=True uses a loss of its own: leave it out": bool(distilled),
        f"algorithm.rollout_correction.rollout_is={weights} weights verl's loss, which is replaced: use "
        '+trimtab.objective="METHOD + tis" or "METHOD + icepop"': bool(weights),
        f"algorithm.rollout_correction.rollout_rs={mask} masks tokens after the plan is made: use "
        '+trimtab.objective="METHOD + mis"': bool(mask),
    }


def _tool_problems(config: Any) -> dict[str, bool]:
    """Name tools that would not be there, and what lets a tool earn the reward under trimtab's reward function."""
    ours = _reward_path(config).startswith("pkg://trimtab")
    manager = config.reward.reward_manager.get("name")
    loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    return {
        f"trimtab's tools need its agent loop: set {AGENT_LOOP_KEY}={AGENT_LOOP}": (
            _own_tools(config) and loop in ("single_turn_agent", "tool_agent")
        ),
        f"{AGENT_LOOP_KEY}=tool_agent hands the reward function the replies of tools as part of the answer: set "
        f"{AGENT_LOOP_KEY}={AGENT_LOOP}, which is the same loop with the last message by itself": (
            ours and has_tools(config) and loop == "tool_agent"
        ),
        f"reward.reward_manager.name={manager} does not pass on the last message of a conversation, so replies of "
        "tools would be graded: set naive": ours and has_tools(config) and manager != "naive",
    }


def _agent_problems(config: Any, options: EngineOptions) -> dict[str, bool]:
    """Name what an agent of the user's own cannot be combined with."""
    estimator = config.algorithm.adv_estimator
    loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    mine = loop == OWN_AGENT_LOOP
    return {
        f"an agent of your own needs trimtab's agent loop: set {AGENT_LOOP_KEY}={OWN_AGENT_LOOP}": (
            options.has_agent and not mine
        ),
        f"{AGENT_LOOP_KEY}={OWN_AGENT_LOOP} without an agent: add for example +trimtab.agent=python:my_agent:solve": (
            mine and not options.has_agent
        ),
        f"algorithm.adv_estimator={estimator} compares the branches of rollouts as if each were a rollout: with an "
        "agent set algorithm.adv_estimator=grpo": mine and estimator != "grpo",
    }


def has_tools(config: Any) -> bool:
    """Return whether the policy can call tools, by the configuration; agent loops can also be named in the data."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    named = turns.get("tool_config_path") or turns.get("function_tool_path")
    return bool(named or _own_tools(config) or loop in ("tool_agent", AGENT_LOOP, OWN_AGENT_LOOP))


def _own_tools(config: Any) -> bool:
    section = config.get("trimtab") or {}
    return bool(section.get("tools") or section.get("environment"))


def reward_warning(config: Any) -> str:
    """Return what to know about a reward function of the user's own in a run with tools; else nothing."""
    path = _reward_path(config)
    if not has_tools(config) or path.startswith("pkg://trimtab"):
        return ""
    loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    passes = OWN_AGENT_LOOP if loop == OWN_AGENT_LOOP else AGENT_LOOP
    return (
        f"trimtab: the reward function ({path or 'one of verl'}) gets the whole response, replies of tools included, "
        f"which can earn the reward: grade extra_info['{LAST_MESSAGE}'], which {AGENT_LOOP_KEY}={passes} passes on"
    )


def _reward_path(config: Any) -> str:
    return str(config.reward.custom_reward_function.get("path") or "")


def _field_problems(config: Any, objective: Objective) -> dict[str, bool]:
    """Name what the objective reads and this run does not have."""
    name = objective.name
    needs = objective.needs
    bypass = (config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False)
    sampler = config.actor_rollout_ref.rollout.calculate_log_probs
    return {
        "algorithm.rollout_correction.bypass_mode=True skips the forward pass that computes the entropy, which "
        f"{name} reads: turn it off": "entropy" in needs and bool(bypass),
        f"{name} reads the sampler's log-probabilities: set actor_rollout_ref.rollout.calculate_log_probs=True": (
            "sampler_logp" in needs and not sampler
        ),
        f"{name} has a term of the entropy: set actor_rollout_ref.actor.calculate_entropy=True, with which verl's "
        "forward passes of an update return it": (
            objective.needs_entropy_grad and not config.actor_rollout_ref.actor.get("calculate_entropy", False)
        ),
        "token_stats=current needs a forward pass before every update, but verl runs all updates of a step in one "
        "call: leave it out (for the first update of a step it makes no difference)": "current_logp" in needs,
        "scope=micro plans per micro-batch, and verl makes micro-batches after the plan: leave it out": (
            objective.scope == "micro"
        ),
        **dict.fromkeys(missing_fields(objective, "verl"), True),
    }


def _advantage_problem(algorithm: Any, options: EngineOptions, objective: Objective) -> dict[str, bool]:
    if is_own(objective.advantage):
        problem = (
            f"{objective.advantage} is an advantage of your own, and in verl the advantages are verl's: register it "
            "with verl's register_adv_est, name it as algorithm.adv_estimator, and set +trimtab.advantage=verl"
        )
        return {problem: options.advantage != "verl"}
    estimator = algorithm.adv_estimator
    normalized = bool(algorithm.get("norm_adv_by_std_in_grpo", True))
    grpo = "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo"
    known = {
        "group_normalized": (f"{grpo}=True", estimator == "grpo" and normalized),
        "group_centered": (f"{grpo}=False", estimator == "grpo" and not normalized),
        "leave_one_out": ("algorithm.adv_estimator=rloo", estimator == "rloo"),
    }
    if objective.advantage not in known:
        problem = (
            f"{objective.name} is defined with advantages that verl does not have ({objective.advantage}): register "
            "them with verl's register_adv_est, name them as algorithm.adv_estimator, and set +trimtab.advantage=verl"
        )
        return {problem: options.advantage != "verl"}
    wanted, right = known[objective.advantage]
    problem = (
        f"{objective.name} is defined with another advantage: set {wanted}, or +trimtab.advantage=verl to take what "
        "verl computes"
    )
    return {problem: not right and options.advantage != "verl" and estimator != "gae"}
