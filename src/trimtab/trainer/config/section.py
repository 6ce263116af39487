"""The base of a recipe's sections.

`extra="forbid"` makes a misspelt key an error. Types are strict: `steps = "many"`, `steps = 1.5` and `steps = true` are
all errors.
"""

from __future__ import annotations

import typing
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _none_from_string(cls, value: Any, info: ValidationInfo) -> Any:
        # TOML has no null: `--set model.reference=none` unsets an optional key of a recipe.
        kind = cls.model_fields[str(info.field_name)].annotation
        return None if value == "none" and type(None) in typing.get_args(kind) else value
