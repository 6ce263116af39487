"""Replay: what other objectives would have done to the tokens of a recorded run."""

from trimtab.insight.replay.replay import RECORDED, has_option, make_variants, parse_sweep, replay, replay_steps
from trimtab.insight.replay.table import show_replay

__all__ = ["RECORDED", "has_option", "make_variants", "parse_sweep", "replay", "replay_steps", "show_replay"]
