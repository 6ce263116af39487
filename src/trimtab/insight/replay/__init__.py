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
    to_token_batch,
    with_advantages_of,
)
from trimtab.insight.replay.replay import replay, replay_steps
from trimtab.insight.replay.tables import LEGEND, entropy_cell, jaccard_cell, reason_cell, show_replay, shown_reasons
from trimtab.insight.replay.variants import RECORDED, has_option, make_variants, parse_sweep

__all__ = [
    "LEGEND",
    "RECORDED",
    "RecordedMiniBatch",
    "as_tensor",
    "entropy_cell",
    "gradient_coefficients",
    "has_option",
    "jaccard_cell",
    "load_columns",
    "make_variants",
    "parse_sweep",
    "reason_cell",
    "recorded_mini_batch",
    "recorded_objective",
    "replan",
    "replay",
    "replay_steps",
    "set_controllers",
    "show_replay",
    "shown_reasons",
    "to_token_batch",
    "with_advantages_of",
]
