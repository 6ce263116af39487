"""A training run: the loop, rollouts, scoring, recording, checkpoints, warm start."""

import importlib
import sys
from types import ModuleType
from typing import Any

from trimtab.train.alarm_actions import Alarm, AlarmHandler, Monitor
from trimtab.train.build import build_policy, build_sampler, build_task, hub_note, open_policy, read_inputs
from trimtab.train.inputs import InputReader, input_changes
from trimtab.train.loop import follow_run, train
from trimtab.train.metrics import (
    METRICS,
    TOP_GRADIENT_SHARE,
    TOP_GRADIENT_TOKENS,
    best_evaluation,
    describe_metric,
    time_words,
    token_signals,
)
from trimtab.train.process import versions
from trimtab.train.recording import observed_entropy, tokenizer_vocabulary
from trimtab.train.reporting import Reporter, SampleText
from trimtab.train.responses import (
    GradedResponse,
    ToolUse,
    build_tool_use,
    build_tools,
    check_prompts,
    encode_problems,
    longest_prompt,
    prompt_lengths,
    some_problems,
)
from trimtab.train.run import Run
from trimtab.train.run_folder import MetricsLog, RunFolder, config_changes, resolved_toml
from trimtab.train.run_state import export_model
from trimtab.train.saved_run import SavedRun, load_run
from trimtab.train.stop_reason import RunStoppedError, StopReason
from trimtab.train.warm_cache import list_warm_starts, remove_warm_starts
from trimtab.train.warm_start import check_problems, repeated_problems

__all__ = [
    "METRICS", "TOP_GRADIENT_SHARE", "TOP_GRADIENT_TOKENS", "Alarm", "AlarmHandler", "GradedResponse", "InputReader",
    "MetricsLog", "Monitor", "Reporter", "Run", "RunFolder", "RunStoppedError", "SampleText", "SavedRun", "StopReason",
    "ToolUse", "best_evaluation", "build_policy", "build_sampler", "build_task", "build_tool_use", "build_tools",
    "check_problems", "check_prompts", "config_changes", "describe_metric", "encode_problems", "export_model",
    "follow_run", "hub_note", "input_changes", "list_warm_starts", "load_run", "longest_prompt", "observed_entropy",
    "open_policy", "prompt_lengths", "read_inputs", "remove_warm_starts", "repeated_problems", "resolved_toml",
    "some_problems", "time_words", "token_signals", "tokenizer_vocabulary", "train", "versions",
]  # fmt: skip


class _CallablePackage(ModuleType):
    """Makes `tt.train(...)` train: Python sets `trimtab.train` to this package as soon as anything imports it."""

    def __call__(self, *arguments: Any, **options: Any) -> SavedRun:
        """Call `trimtab.runs.train`."""
        run: SavedRun = importlib.import_module("trimtab.runs").train(*arguments, **options)
        return run


sys.modules[__name__].__class__ = _CallablePackage
