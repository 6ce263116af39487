"""The core of trimtab: objectives for RL with verifiable rewards, in plain torch. See `objective`."""

from trimtab.objectives import advantages, entropy_control, splitmix64, theory
from trimtab.objectives.comm import Comm, ProcessGroup, gather_rows
from trimtab.objectives.methods.compose import COMMON_OPTIONS, METRICS, describe, objective, option_names, summary
from trimtab.objectives.methods.registry import ATTACHMENTS, METHODS, OPTIONS
from trimtab.objectives.normalizers import Normalizer
from trimtab.objectives.objective import LossOutput, Objective
from trimtab.objectives.plan import REASON_WORDS, Plan, Reason, merge_metrics, reason_words
from trimtab.objectives.plan_builder import PlanBuilder, TokenRule
from trimtab.objectives.ratios import effective_sample_share, ratio_sums
from trimtab.objectives.rules.penalties import Penalty, kl_estimate
from trimtab.objectives.rules.s2t import spurious
from trimtab.objectives.rules.stare import EntropyGate
from trimtab.objectives.segments import segment_ids, token_bytes
from trimtab.objectives.selection import largest, quantile, share_count
from trimtab.objectives.surrogates import Surrogate
from trimtab.objectives.theory import Moments, gradient_norm_squared, moments
from trimtab.objectives.token_batch import NotFiniteError, TokenBatch

__all__ = [
    "ATTACHMENTS", "COMMON_OPTIONS", "METHODS", "METRICS", "OPTIONS", "REASON_WORDS", "Comm", "EntropyGate",
    "LossOutput", "Moments", "Normalizer", "NotFiniteError", "Objective", "Penalty", "Plan", "PlanBuilder",
    "ProcessGroup", "Reason", "Surrogate", "TokenBatch", "TokenRule", "advantages", "describe",
    "effective_sample_share", "entropy_control", "gather_rows", "gradient_norm_squared", "kl_estimate", "largest",
    "merge_metrics", "moments", "objective", "option_names", "quantile", "ratio_sums", "reason_words", "segment_ids",
    "share_count", "splitmix64", "spurious", "summary", "theory", "token_bytes",
]  # fmt: skip
