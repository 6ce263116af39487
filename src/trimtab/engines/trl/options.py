"""TRL's configuration with an objective, and the options of TRL that the objective replaces.

An option of TRL that shapes the loss has no effect here. Setting one is an error that says what to write instead.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from typing import Any

from trimtab.engines import missing_engine
from trimtab.engines.options import EngineOptions, missing_fields, objective_table, read_options
from trimtab.objectives import Objective
from trimtab.trainer.config import build_objective

try:
    from trl import GRPOConfig
except ImportError as error:
    raise missing_engine("trl", error) from error

_CLIP = "set clip_low and clip_high in the objective: 'dapo(clip_low=0.2, clip_high=0.28)'"
_ADVANTAGES = "the objective computes the advantages; for TRL's own set advantage='trl'"
_CORRECTION = (
    "correct for vLLM's log-probabilities in the objective: '+ tis(cap=2)' for TRL's token_truncate, '+ icepop' for "
    "token_mask, '+ mis' for sequence_mask"
)


@dataclass(frozen=True)
class Replaced:
    """An option of TRL that the objective replaces: TRL's default, and what to write instead.

    `off` is true if the default switches a feature off; setting that value is allowed, since it holds here too.
    """

    default: Any
    instead: str
    off: bool = False


REPLACED = {
    "loss_type": Replaced(
        "dapo",
        "name the method as the objective: objective='grpo', 'dapo', 'dr_grpo', 'cispo', 'sapo', 'luspo', 'vespo', ...",
    ),
    "epsilon": Replaced(0.2, _CLIP),
    "epsilon_high": Replaced(None, _CLIP + "; cispo's cap is 1 + clip_high, TRL's is the cap itself"),
    "delta": Replaced(
        None, "set dual_clip in the objective: 'grpo(dual_clip=4)'; it caps the ratio of negative advantages"
    ),
    "importance_sampling_level": Replaced(
        "token", "the objective sets the ratio: 'gspo' for one per response, 'sspo' for one per subsentence"
    ),
    "beta": Replaced(
        0.0, "attach the penalty: 'grpo + kl(coef=0.04)'; TRL then keeps the reference model as for beta", off=True
    ),
    "use_bias_correction_kl": Replaced(
        False, "set corrected=true in the attachment: 'grpo + kl(coef=0.04, corrected=true)'", off=True
    ),
    "top_entropy_quantile": Replaced(1.0, "attach 'top_entropy(share=0.2)', or take objective='top_entropy'", off=True),
    "entropy_coef": Replaced(
        0.0,
        "attach the bonus: 'dapo + entropy_bonus(coef=0.01, gradient=exact)'; 'trim', 'stare' and 'entropy_advantage' "
        "keep the entropy up too",
        off=True,
    ),
    "use_adaptive_entropy": Replaced(
        False, "give the bonus a target: 'dapo + entropy_bonus(target=0.2, gradient=exact)', or use 'stare'", off=True
    ),
    "off_policy_mask_threshold": Replaced(None, "attach 'mis(low=0.5, high=2)', which drops off-policy responses"),
    "vllm_importance_sampling_correction": Replaced(False, _CORRECTION, off=True),
    "vllm_importance_sampling_mode": Replaced("sequence_mask", _CORRECTION),
    "vllm_importance_sampling_clip_max": Replaced(3.0, _CORRECTION),
    "vllm_importance_sampling_clip_min": Replaced(None, _CORRECTION),
    "vllm_importance_sampling_cap": Replaced(None, _CORRECTION),
    "use_liger_kernel": Replaced(
        False, "in some versions of TRL it replaces the loss; set model_init_kwargs={'use_kernels': True}", off=True
    ),
}
REWARD_SCALING = {
    "scale_rewards": Replaced("group", _ADVANTAGES),
    "multi_objective_aggregation": Replaced("sum_then_normalize", _ADVANTAGES),
}


SHARED = ("advantage", "record", "record_every", "record_group_share", "record_max_megabytes")


def _shared(name: str) -> Any:
    """Return the field of an option that is the same in verl."""
    option = EngineOptions.model_fields[name]
    return field(default=option.default, metadata={"help": option.description})


@dataclass
class TrimtabConfig(GRPOConfig):
    """TRL's `GRPOConfig` with the options of trimtab.

    `objective` is a name ("stapo", "sspo + s2t") or a table with a name and options. `advantage` is "method" (what the
    objective is defined with) or "trl" (by `scale_rewards`). With `record` steps are recorded in that folder, for
    `trimtab replay`; `record_every`, `record_group_share` and `record_max_megabytes` limit how much.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "objective"]  # noqa: RUF012  (as in TRL)

    objective: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": f"The objective: {EngineOptions.model_fields['objective'].description}, in JSON."},
    )
    advantage: str = _shared("advantage")
    record: str | None = _shared("record")
    record_every: int = _shared("record_every")
    record_group_share: float = _shared("record_group_share")
    record_max_megabytes: float = _shared("record_max_megabytes")

    # Options that the objective replaces. None here, where TRL has a default, shows which ones the user has set.
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
    scale_rewards: str | None = field(default=None, metadata={"help": "Only used with advantage='trl'."})
    multi_objective_aggregation: str | None = field(default=None, metadata={"help": "Only used with advantage='trl'."})

    def __post_init__(self) -> None:
        shared = {key: getattr(self, key) for key in SHARED}
        read_options("trl", {**shared, "objective": objective_table(self.objective)})
        check_replaced(self, built=False)
        super().__post_init__()
        objective = build_objective(objective_table(self.objective))  # a mistake is an error before the model loads
        if missing := missing_fields(objective, "TRL"):
            raise ValueError(f"{missing[0]}: take another objective here, or train with trimtab's own trainer")
        generation = self.steps_per_generation
        update = self.gradient_accumulation_steps
        if generation % update:  # an update that spans rollout batches cannot be planned before its first forward pass
            raise ValueError(
                f"steps_per_generation={generation} must be a multiple of gradient_accumulation_steps={update}: an "
                "update is planned over all its responses before the first forward pass (left out, the two are equal)"
            )


def check_replaced(config: TrimtabConfig, *, built: bool) -> None:
    """Refuse options that the objective replaces; set the others to TRL's defaults unless that is done (`built`)."""
    for name, option in {**REPLACED, **REWARD_SCALING}.items():
        value = getattr(config, name)
        default = option.default
        is_set = value != default if built else value is not None and not (option.off and value == default)
        if is_set and (name in REPLACED or config.advantage != "trl"):
            raise ValueError(
                f"{name}={value!r:.80} has no effect here, because the objective is the loss: {option.instead}"
            )
        if value is None and not built:
            setattr(config, name, default)  # TRL reads the option and expects a value


def with_reference(config: TrimtabConfig, objective: Objective) -> TrimtabConfig:
    """Return a configuration with which TRL loads a reference model if the objective needs one."""
    if "ref_logp" not in objective.needs:
        return config
    changed = copy.copy(config)
    changed.beta = 1.0  # TRL loads it for any beta but 0; the coefficient in the loss is the objective's
    return changed


def check_sampler(objective: Objective, use_vllm: bool, rollout_func: bool, top_p: float = 1.0, top_k: int = 0) -> None:
    """Check that the sampler's log-probabilities are there if the objective needs them, and used if vLLM samples.

    Warn of top-p and top-k, which TRL's scores do not know.
    """
    corrected = "sampler_logp" in objective.needs
    if corrected and not (use_vllm or rollout_func):
        raise ValueError(
            f"{objective.name} reads the sampler's log-probabilities, which TRL has only from vLLM (use_vllm=True) or "
            "a rollout_func; sampling with transformers needs no correction: leave tis, icepop and mis out"
        )
    if top_p < 1 or top_k:
        warnings.warn(
            f"top_p={top_p:g}, top_k={top_k}: TRL scores responses over the whole vocabulary, not over the tokens that "
            "these keep, so ratios to the sampler are biased; trimtab's own trainer has rollout.exact_truncation",
            stacklevel=3,
        )
    if use_vllm and not corrected:
        warnings.warn(
            "vLLM's log-probabilities differ from the trainer's, and this objective does not correct for it (TRL's own "
            f"correction has no effect here): write '{objective.name} + tis' or '{objective.name} + mis'",
            stacklevel=3,
        )
