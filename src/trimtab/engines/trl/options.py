"""TRL's configuration with an objective in it, and what of TRL's own options an objective takes over.

An option of TRL that shapes the loss has no effect beside an objective. None is passed over in silence: whoever sets
one is told what to write instead.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.engines.common import make_objective, missing_engine, objective_table
from trimtab.objectives import Objective

try:
    from trl import GRPOConfig
except ImportError as error:
    raise missing_engine("trl", error) from error

_CLIP = "set clip_low and clip_high in the objective: 'dapo(clip_low=0.2, clip_high=0.28)'"
_ADVANTAGES = "the objective makes the advantages; for TRL's own set advantages='trl'"
_CORRECTION = (
    "correct for vLLM's log-probabilities in the objective: '+ tis(cap=2)' for TRL's token_truncate, '+ icepop' for "
    "token_mask, '+ mis' for sequence_mask"
)


@dataclass(frozen=True)
class TakenOver:
    """An option of TRL that the objective decides: the value it is left at, and what to write instead.

    Where that value means `off`, it may be said: it is true here too.
    """

    neutral: Any
    instead: str
    off: bool = False


TAKEN_OVER: dict[str, TakenOver] = {
    "loss_type": TakenOver(
        "dapo", "name the method as the objective: objective='grpo', 'dapo', 'dr_grpo', 'cispo', 'sapo', 'gspo', ..."
    ),
    "epsilon": TakenOver(0.2, _CLIP),
    "epsilon_high": TakenOver(None, _CLIP + "; cispo's cap is 1 + clip_high, TRL's is the cap itself"),
    "delta": TakenOver(None, "set dual_clip in the objective: 'grpo(dual_clip=4)'; it caps the ratio where A < 0"),
    "importance_sampling_level": TakenOver(
        "token", "the objective has its ratio: 'gspo' for one per response, 'sspo' for one per subsentence"
    ),
    "beta": TakenOver(
        0.0, "attach the penalty: 'grpo + kl(coef=0.04)'; TRL then keeps the reference model as for beta", off=True
    ),
    "use_bias_correction_kl": TakenOver(
        False, "the penalty of 'kl' has no factor of the ratio; leave this option out", off=True
    ),
    "top_entropy_quantile": TakenOver(
        1.0, "attach 'top_entropy(share=0.2)', or take objective='top_entropy'", off=True
    ),
    "entropy_coef": TakenOver(
        0.0,
        "an entropy bonus is no part of the objectives; 'stare' and 'entropy_advantage' hold the entropy up",
        off=True,
    ),
    "use_adaptive_entropy": TakenOver(False, "objective='stare' has a gate that follows the entropy", off=True),
    "off_policy_mask_threshold": TakenOver(None, "attach 'mis(low=0.5, high=2)', which drops off-policy responses"),
    "vllm_importance_sampling_correction": TakenOver(False, _CORRECTION, off=True),
    "vllm_importance_sampling_mode": TakenOver("sequence_mask", _CORRECTION),
    "vllm_importance_sampling_clip_max": TakenOver(3.0, _CORRECTION),
    "vllm_importance_sampling_clip_min": TakenOver(None, _CORRECTION),
    "vllm_importance_sampling_cap": TakenOver(None, _CORRECTION),
    "use_liger_kernel": TakenOver(
        False, "in some versions of TRL it replaces the loss; use model_init_kwargs={'use_kernels': True}", off=True
    ),
}
REWARD_SCALING: dict[str, TakenOver] = {
    "scale_rewards": TakenOver("group", _ADVANTAGES),
    "multi_objective_aggregation": TakenOver("sum_then_normalize", _ADVANTAGES),
}


@dataclass
class TrimtabConfig(GRPOConfig):
    """TRL's `GRPOConfig`, with the objective and what belongs to it. Everything else is TRL's.

    `objective` is a name ("stapo", "sspo + s2t") or a table with a name and options. `advantages` is "objective" (those
    that the method is defined with) or "trl" (by `scale_rewards`). With `record_to` every step is recorded under that
    folder, for `trimtab replay`; `record_every` and `record_max_megabytes` limit it.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "objective"]  # noqa: RUF012 (TRL's own way)

    objective: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "The objective: a name such as 'stapo' or 'sspo + s2t', or a table in JSON."}
    )
    advantages: str = field(
        default="objective", metadata={"help": "Whose advantages: 'objective' (as its method defines them) or 'trl'."}
    )
    record_to: str | None = field(default=None, metadata={"help": "The folder to record every step's tokens in."})
    record_every: int = field(default=1, metadata={"help": "Record one step in so many."})
    record_max_megabytes: float = field(default=2000.0, metadata={"help": "How much of the disk records may take."})

    # Options that the objective takes over: not set, so that one that is set can be told from one that is not.
    loss_type: str | None = field(default=None, metadata={"help": "Not used: the objective is the loss."})
    epsilon: float | None = field(default=None, metadata={"help": "Not used: see the objective's clip_low."})
    importance_sampling_level: str | None = field(default=None, metadata={"help": "Not used: see gspo and sspo."})
    beta: float | None = field(default=None, metadata={"help": "Not used: attach kl to the objective."})
    use_bias_correction_kl: bool | None = field(default=None, metadata={"help": "Not used: attach kl."})
    top_entropy_quantile: float | None = field(default=None, metadata={"help": "Not used: attach top_entropy."})
    entropy_coef: float | None = field(default=None, metadata={"help": "Not used."})
    use_adaptive_entropy: bool | None = field(default=None, metadata={"help": "Not used: see stare."})
    vllm_importance_sampling_correction: bool | None = field(default=None, metadata={"help": "Not used: attach tis."})
    vllm_importance_sampling_mode: str | None = field(default=None, metadata={"help": "Not used: attach tis."})
    vllm_importance_sampling_clip_max: float | None = field(default=None, metadata={"help": "Not used: attach tis."})
    use_liger_kernel: bool | None = field(default=None, metadata={"help": "Not used."})
    scale_rewards: str | None = field(default=None, metadata={"help": "Used with advantages='trl' alone."})
    multi_objective_aggregation: str | None = field(
        default=None, metadata={"help": "Used with advantages='trl' alone."}
    )

    def __post_init__(self) -> None:
        if self.advantages not in ("objective", "trl"):
            raise ValueError(f"advantages={self.advantages!r} must be 'objective' or 'trl'")
        settle(self)
        super().__post_init__()
        make_objective(objective_table(self.objective))  # a wrong name or option is told now, not after the model loads
        check_steps(self)


def settle(config: TrimtabConfig) -> None:
    """Refuse options that the objective takes over, and put the value that does nothing in their place.

    TRL reads all of its options, so each needs a value of TRL's own.
    """
    for name, taken in taken_over(config).items():
        value = getattr(config, name)
        if value is None or (taken.off and value == taken.neutral):
            setattr(config, name, taken.neutral)
        else:
            raise ValueError(_refusal(name, value, taken))
    for name, scaling in REWARD_SCALING.items():
        if getattr(config, name) is None:
            setattr(config, name, scaling.neutral)


def check_settled(config: TrimtabConfig) -> None:
    """Refuse an option that was changed after the configuration was made."""
    for name, taken in taken_over(config).items():
        if getattr(config, name) != taken.neutral:
            raise ValueError(_refusal(name, getattr(config, name), taken))


def taken_over(config: TrimtabConfig) -> Mapping[str, TakenOver]:
    """The options of TRL that have no effect under this configuration."""
    return TAKEN_OVER if config.advantages == "trl" else {**TAKEN_OVER, **REWARD_SCALING}


def check_steps(config: TrimtabConfig) -> None:
    """An update's plan is made before its first forward pass, so all its responses must have been sampled by then."""
    generation, update = config.steps_per_generation, config.gradient_accumulation_steps
    if generation % update:
        raise ValueError(
            f"steps_per_generation={generation} with gradient_accumulation_steps={update}: an update is planned over "
            "all its responses before the first of them is trained on, so steps_per_generation must be a multiple of "
            "gradient_accumulation_steps (left out, it is equal to it)"
        )


def with_reference(config: TrimtabConfig, objective: Objective) -> TrimtabConfig:
    """The configuration that makes TRL keep a reference model where the objective compares with one.

    TRL does so for any `beta` but 0; the coefficient is the objective's.
    """
    if "ref_logp" not in objective.needs:
        return config
    wanting = copy.copy(config)
    wanting.beta = 1.0
    return wanting


def check_sampler(objective: Objective, use_vllm: bool, own_rollout: bool) -> None:
    """Corrections need the sampler's log-probabilities, and vLLM's differ from the trainer's."""
    corrected = "sampler_logp" in objective.needs
    if corrected and not (use_vllm or own_rollout):
        raise ValueError(
            f"{objective.name} reads the sampler's log-probabilities, which TRL has from vLLM (use_vllm=True) or a "
            "rollout_func alone; sampling with transformers needs no correction: leave tis, icepop and mis out"
        )
    if use_vllm and not corrected:
        warnings.warn(
            "vLLM's log-probabilities differ from the trainer's, and nothing corrects for it here (TRL's own "
            f"correction is no part of the objective): write '{objective.name} + tis' or '{objective.name} + mis'",
            stacklevel=3,
        )


def _refusal(name: str, value: object, taken: TakenOver) -> str:
    return f"{name}={value!r:.80} would have no effect here, for the objective is the loss: {taken.instead}"
