"""Recipes: TOML files checked by pydantic models."""

from trimtab.config.loading import PACKAGED, find_recipe, load, packaged_recipes, parse
from trimtab.config.sections import AlarmsConfig, Config, RewardConfig, RolloutConfig, build_objective, json_schema

__all__ = [
    "PACKAGED", "AlarmsConfig", "Config", "RewardConfig", "RolloutConfig", "build_objective", "find_recipe",
    "json_schema", "load", "packaged_recipes", "parse",
]  # fmt: skip
