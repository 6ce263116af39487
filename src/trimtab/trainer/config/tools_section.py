"""The section `[tools]`: what the policy may call in a conversation, and within which limits."""

from __future__ import annotations

import inspect
from typing import Literal

from pydantic import Field, field_validator

from trimtab.agents import BUILT_IN, ToolCatalog
from trimtab.own_parts import is_own, load_part
from trimtab.text import nearest, shown
from trimtab.trainer.config.section import Section
from trimtab.workers import LEVELS


class ToolsConfig(Section):
    """Tools that the policy may call during a response ([tools.md](tools.md))."""

    use: list[str] = Field(
        default_factory=list,
        max_length=64,
        description="names of the tools: python, python_session, calculator, or your own function, python:MODULE:NAME; "
        "needs rollout.max_turns of 2 or more",
    )
    format: Literal["auto", "hermes", "llama", "fenced", "plain"] = Field(
        "auto", description="how the model writes a call; auto follows its chat template"
    )
    timeout: float = Field(10.0, gt=0, le=86_400, description="seconds for one call; then its process is killed")
    deadline: float = Field(120.0, gt=0, le=86_400, description="seconds for all calls of a conversation together")
    workers: int = Field(
        4, ge=1, le=1024, description="number of calls that run at the same time, each in its own process"
    )
    memory_mb: int = Field(2048, ge=64, le=1_000_000, description="memory limit of one call, in megabytes")
    sandbox_level: str = Field(
        "full", description="python, python_session: the lowest level of isolation to accept ([sandbox.md](sandbox.md))"
    )

    @field_validator("use")
    @classmethod
    def _check_use(cls, value: list[str]) -> list[str]:
        if len({*value}) < len(value):
            raise ValueError(f"{shown(value)} names a tool twice")
        for name in value:
            if not is_own(name) and name not in BUILT_IN:
                raise ValueError(f"{shown(name)}: {nearest(name, BUILT_IN)} (one of your own: python:MODULE:NAME)")
            if is_own(name) and inspect.isclass(load_part(name)):
                raise ValueError(f"{shown(name)} is a class: a tool is a function, and an environment task.environment")
        if any(map(is_own, value)):  # of built-in tools there is nothing to find, and schemas import transformers
            ToolCatalog(value)
        return value

    @field_validator("sandbox_level")
    @classmethod
    def _check_level(cls, value: str) -> str:
        if value not in LEVELS:
            raise ValueError(f"{shown(value)}: {nearest(value, LEVELS)}")
        return value


def check_environment(name: str) -> str:
    """Return the name of an environment, or raise where it names no class whose methods can be tools."""
    if not is_own(name):
        raise ValueError(f"{shown(name)}: an environment is a class of your own, python:MODULE:NAME")
    if not inspect.isclass(load_part(name)):
        raise ValueError(f"{shown(name)} is no class: an environment is one, and functions belong in tools.use")
    ToolCatalog(environment=name)
    return name
