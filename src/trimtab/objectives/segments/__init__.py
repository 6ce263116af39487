"""Subsentences: which tokens of a response share one importance ratio in SSPO."""

from trimtab.objectives.segments.segment_ids import DELIMITERS, segment_ids
from trimtab.objectives.segments.token_bytes import token_bytes

__all__ = ["DELIMITERS", "segment_ids", "token_bytes"]
