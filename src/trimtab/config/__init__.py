"""Recipes: TOML files checked by pydantic models, with errors in words."""

from trimtab.config.recipe import (
    AlarmsConfig,
    Config,
    RewardConfig,
    RolloutConfig,
    build_objective,
    find_recipe,
    load,
    parse,
    schema,
)

__all__ = [
    "AlarmsConfig",
    "Config",
    "RewardConfig",
    "RolloutConfig",
    "build_objective",
    "find_recipe",
    "load",
    "parse",
    "schema",
]
