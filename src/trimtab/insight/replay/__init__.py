"""Replay: what other objectives would have done to the tokens of a recorded run."""

from trimtab.insight.replay.batches import (
    RecordedMiniBatch,
    as_tensor,
    gradient_coefficients,
    load_columns,
    recorded_mini_batch,
    recorded_objective,
    replan,
    set_controllers,
    torch_threads,
    with_advantages_of,
)  # fmt: skip
from trimtab.insight.replay.replay import replay
from trimtab.insight.replay.tables import LEGEND, entropy_cell, jaccard_cell, reason_cell, show_replay, shown_reasons
from trimtab.insight.replay.variants import RECORDED

__all__ = [
    "LEGEND", "RECORDED", "RecordedMiniBatch", "as_tensor", "entropy_cell", "gradient_coefficients", "jaccard_cell",
    "load_columns", "reason_cell", "recorded_mini_batch", "recorded_objective", "replan", "replay", "set_controllers",
    "show_replay", "shown_reasons", "torch_threads", "with_advantages_of",
]  # fmt: skip
