"""The section `[reward]`: what each kind of verdict pays, and further rewards beside that of the task's rule."""

from __future__ import annotations

import re
import typing
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trimtab.grading import RESPONSE_RULES, RULES, VerdictKind, check_rule, load_rule
from trimtab.text import nearest, shown
from trimtab.trainer.config.section import Section

RewardKeyword = Literal["wrong", "exclude"]
TASK_TERM = "task"  # the name of the reward by the task's own rule, beside those of the terms
TERM_RULES = (*RESPONSE_RULES, *RULES)


class RewardTerm(Section):
    """An additional reward: `weight` times the value of its rule, added to the reward of the task's rule."""

    rule: str = Field(description=f"how it is computed: {', '.join(TERM_RULES)}")
    weight: float = Field(1.0, ge=-1e6, le=1e6, description="its weight in the sum of all rewards; 0 only logs it")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the rule")
    crashed: float | Literal["exclude"] = Field(
        "exclude", description="if the rule fails: use this number instead, or exclude the response from training"
    )

    @field_validator("crashed", mode="before")
    @classmethod
    def _check_crashed(cls, value: Any) -> Any:
        if value == "exclude" or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise ValueError(f"{shown(value)} must be a number or 'exclude'")

    @model_validator(mode="after")
    def _check_rule(self) -> RewardTerm:
        if self.rule not in RESPONSE_RULES:
            try:
                check_rule(self.rule)
            except ValueError:
                raise ValueError(f"unknown rule {shown(self.rule)}: {nearest(self.rule, TERM_RULES)}") from None
        load_rule(self.rule, self.options)
        return self


class RewardConfig(Section):
    """What each kind of verdict pays: a number, `wrong` (as a wrong answer) or `exclude` (do not train on it)."""

    correct: float = Field(1.0, description="the answer is right")
    wrong: float = Field(0.0, description="the answer is wrong")
    no_answer: float | RewardKeyword = Field("wrong", description="the response contains no answer")
    ambiguous: float | RewardKeyword = Field(
        "wrong", description="the response gives several answers although one is asked for"
    )
    too_costly: float | RewardKeyword = Field("wrong", description="checking the answer takes too long")
    # Excluded by default: a failure of the grader tells nothing about the response.
    crashed: float | RewardKeyword = Field("exclude", description="the grader failed")
    void_turns: Literal["keep", "exclude"] = Field(
        "keep",
        description="what to do with a conversation that has a message without a call or an answer: keep it, or "
        "exclude it from training as SimpleTIR does",
    )
    weight: float = Field(
        1.0,
        ge=0,
        le=1e6,
        description="weight of the task's rule in the sum of all rewards; 0 means that only reward.terms pay",
    )
    terms: dict[str, RewardTerm] = Field(
        default_factory=dict, description="additional rewards by name, each a table with the keys below"
    )
    overlong_buffer: int = Field(
        0, ge=0, description="DAPO's soft overlong penalty, which grows over this many last tokens; 0 turns it off"
    )
    overlong_factor: float = Field(1.0, ge=0, description="overlong penalty of a response with the maximum length")
    # At most one half: beyond it wrong answers would be rewarded more often than right ones.
    noise: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="for stress tests: the probability that a training reward is flipped between `correct` and "
        "`wrong`, seeded by run.seed; other verdicts and evaluations do not change",
    )

    @field_validator("no_answer", "ambiguous", "too_costly", "crashed", mode="before")
    @classmethod
    def _check_number_or_keyword(cls, value: Any) -> Any:
        # Checked here because pydantic would report a wrong value once per member of the union.
        if value in typing.get_args(RewardKeyword) or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise ValueError(f"{shown(value)} must be a number, 'wrong' (the reward of a wrong answer) or 'exclude'")

    @field_validator("terms")
    @classmethod
    def _check_names(cls, value: dict[str, RewardTerm]) -> dict[str, RewardTerm]:
        for name in value:
            if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or name == TASK_TERM:
                raise ValueError(
                    f"{shown(name)} is no name of a reward: use small letters, digits and _, and not {TASK_TERM!r}, "
                    "which is the reward by the task's own rule"
                )
        return value

    @model_validator(mode="after")
    def _check_rewards(self) -> RewardConfig:
        if not self.weight and not any(term.weight for term in self.terms.values()):
            raise ValueError("weight = 0 and no term of reward.terms has a weight: nothing would be rewarded")
        return self

    def of(self, kind: VerdictKind) -> float | None:
        """Return the reward of a verdict's kind, or None if such responses are excluded from training."""
        reward = getattr(self, kind)
        return self.wrong if reward == "wrong" else None if reward == "exclude" else float(reward)
