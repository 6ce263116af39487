"""Replay: what other objectives would have done to the tokens of a recorded run."""

from trimtab.insight.replay.batches import (
    CriticalWeights,
    RecordedMiniBatch,
    TokenEffects,
    as_tensor,
    gradient_coefficients,
    load_columns,
    recorded_mini_batch,
    recorded_objective,
    replan,
    set_controllers,
    token_effects,
    torch_threads,
    with_advantages_of,
)
from trimtab.insight.replay.replay import RECORDED, Replay, Replayer, make_variants, replay
from trimtab.insight.replay.tables import LEGEND, objective_rows, overlap_row, show_replay

__all__ = [
    "LEGEND", "RECORDED", "CriticalWeights", "RecordedMiniBatch", "Replay", "Replayer", "TokenEffects", "as_tensor",
    "gradient_coefficients", "load_columns", "make_variants", "objective_rows", "overlap_row", "recorded_mini_batch",
    "recorded_objective", "replan", "replay", "set_controllers", "show_replay", "token_effects", "torch_threads",
    "with_advantages_of",
]  # fmt: skip
