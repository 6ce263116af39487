"""Recipes: TOML files checked by pydantic models."""

from trimtab.trainer.config.loading import (
    LARGEST_RECIPE,
    PACKAGED,
    find_recipe,
    load,
    load_stored,
    own_code,
    packaged_recipes,
    parse,
    parse_stored,
    parse_toml,
)
from trimtab.trainer.config.recipe import Config, build_objective, json_schema
from trimtab.trainer.config.reward_section import TASK_TERM, RewardConfig, RewardTerm
from trimtab.trainer.config.run_model import (
    BEST,
    LONGEST_CHAIN,
    RunModel,
    base_model,
    find_checkpoint,
    find_run_model,
    list_checkpoints,
    model_digest,
    run_checkpoints,
)
from trimtab.trainer.config.sections import AlarmsConfig, RolloutConfig

__all__ = [
    "BEST", "LARGEST_RECIPE", "LONGEST_CHAIN", "PACKAGED", "TASK_TERM", "AlarmsConfig", "Config", "RewardConfig",
    "RewardTerm", "RolloutConfig", "RunModel", "base_model", "build_objective", "find_checkpoint", "find_recipe",
    "find_run_model", "json_schema", "list_checkpoints", "load", "load_stored", "model_digest", "own_code",
    "packaged_recipes", "parse", "parse_stored", "parse_toml", "run_checkpoints",
]  # fmt: skip
