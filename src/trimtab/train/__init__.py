"""A training run: the loop, rollouts, scoring, recording, checkpoints, warm start."""

from trimtab.train.alarm_actions import Alarm, Monitor
from trimtab.train.build import build_policy, build_sampler, build_task, open_policy
from trimtab.train.loop import follow_run, train
from trimtab.train.metrics import (
    METRICS,
    TOP_GRADIENT_SHARE,
    TOP_GRADIENT_TOKENS,
    best_evaluation,
    describe_metric,
    time_words,
)
from trimtab.train.process import versions
from trimtab.train.recording import observed_entropy, tokenizer_vocabulary
from trimtab.train.reporting import Reporter, SampleText
from trimtab.train.responses import GradedResponse, ToolUse, encode_problems
from trimtab.train.run import Run, RunStoppedError, StopReason
from trimtab.train.run_folder import RunFolder, config_changes, resolved_toml
from trimtab.train.run_state import export_model
from trimtab.train.warm_start import check_problems

__all__ = [
    "METRICS", "TOP_GRADIENT_SHARE", "TOP_GRADIENT_TOKENS", "Alarm", "GradedResponse", "Monitor", "Reporter", "Run",
    "RunFolder", "RunStoppedError", "SampleText", "StopReason", "ToolUse", "best_evaluation", "build_policy",
    "build_sampler", "build_task", "check_problems", "config_changes", "describe_metric", "encode_problems",
    "export_model", "follow_run", "observed_entropy", "open_policy", "resolved_toml", "time_words",
    "tokenizer_vocabulary", "train", "versions",
]  # fmt: skip
