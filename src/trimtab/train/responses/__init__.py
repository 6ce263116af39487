"""From problems to graded responses: prompts, conversations, rewards."""

from trimtab.train.responses.graded import GradedResponse, Group, Rollouts
from trimtab.train.responses.prompts import check_positions, encode_prompts
from trimtab.train.responses.rewards import (
    Reward,
    choose_flips,
    combined_reward,
    flipped_verdict,
    grade_terms,
    refuse_noisy_numbers,
    reward_of,
)

__all__ = [
    "GradedResponse", "Group", "Reward", "Rollouts", "check_positions", "choose_flips", "combined_reward",
    "encode_prompts", "flipped_verdict", "grade_terms", "refuse_noisy_numbers", "reward_of",
]  # fmt: skip
