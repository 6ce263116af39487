"""Recipes: TOML files checked by pydantic models."""

from trimtab.trainer.config.loading import (
    LARGEST_RECIPE,
    PACKAGED,
    find_recipe,
    is_hub_model,
    load,
    load_stored,
    own_code,
    packaged_recipes,
    parse,
    parse_stored,
    parse_toml,
    stored_agent,
)
from trimtab.trainer.config.recipe import Config, build_objective, json_schema
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
from trimtab.trainer.config.sections import (
    DEMO_MODELS,
    AlarmsConfig,
    RecordConfig,
    RolloutConfig,
    Section,
    check_own_sampler,
    check_vllm_options,
)
from trimtab.trainer.config.task_sections import (
    POOLS,
    TASK_TERM,
    AgentConfig,
    CurriculumConfig,
    RewardConfig,
    ToolsConfig,
    check_own_curriculum,
    check_own_gate,
)

__all__ = [
    "BEST", "DEMO_MODELS", "LARGEST_RECIPE", "LONGEST_CHAIN", "PACKAGED", "POOLS", "TASK_TERM", "AgentConfig",
    "AlarmsConfig", "Config", "CurriculumConfig", "RecordConfig", "RewardConfig", "RolloutConfig", "RunModel",
    "Section", "ToolsConfig", "base_model", "build_objective", "check_own_curriculum", "check_own_gate",
    "check_own_sampler", "check_vllm_options", "find_checkpoint", "find_recipe", "find_run_model",
    "is_hub_model", "json_schema", "list_checkpoints", "load", "load_stored", "model_digest", "own_code",
    "packaged_recipes", "parse", "parse_stored", "parse_toml", "run_checkpoints",
    "stored_agent",
]  # fmt: skip
