"""Recipes: TOML files checked by pydantic models."""

from trimtab.config.loading import (
    LARGEST_RECIPE,
    PACKAGED,
    find_recipe,
    load,
    load_stored,
    packaged_recipes,
    parse,
    parse_toml,
)
from trimtab.config.sections import AlarmsConfig, Config, RewardConfig, RolloutConfig, build_objective, json_schema

__all__ = [
    "LARGEST_RECIPE", "PACKAGED", "AlarmsConfig", "Config", "RewardConfig", "RolloutConfig", "build_objective",
    "find_recipe", "json_schema", "load", "load_stored", "packaged_recipes", "parse", "parse_toml",
]  # fmt: skip
