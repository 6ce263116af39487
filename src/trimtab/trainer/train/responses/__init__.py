"""From problems to graded responses: prompts, conversations, rewards."""

from trimtab.trainer.train.responses.conversation_metrics import (
    CONVERSATION_METRICS,
    conversation_metrics,
    conversation_text,
    evaluation_metrics,
)
from trimtab.trainer.train.responses.conversations import ToolUse, build_tool_use, build_tools, set_verdicts
from trimtab.trainer.train.responses.prompts import (
    check_positions,
    check_prompts,
    drop_long_prompts,
    encode_problems,
    encode_prompts,
    longest_prompt,
    prompt_lengths,
    some_problems,
)
from trimtab.trainer.train.responses.rewards import (
    choose_flips,
    grade_terms,
    refuse_noisy_numbers,
    reward_of,
    set_reward,
)
from trimtab.trainer.train.responses.worked import worked_transcript

__all__ = [
    "CONVERSATION_METRICS", "ToolUse", "build_tool_use", "build_tools", "check_positions", "check_prompts",
    "choose_flips", "conversation_metrics", "conversation_text", "drop_long_prompts", "encode_problems",
    "encode_prompts", "evaluation_metrics", "grade_terms", "longest_prompt", "prompt_lengths", "refuse_noisy_numbers",
    "reward_of", "set_reward", "set_verdicts", "some_problems", "worked_transcript",
]  # fmt: skip
