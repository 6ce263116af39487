"""A training run: the loop, rollouts, scoring, recording, checkpoints, warm start."""

from trimtab.trainer.train.agents import AgentUse, EndedRollout, agent_metrics, error_of
from trimtab.trainer.train.alarm_actions import (
    INVALID,
    STOPPED,
    UNSAVED,
    Alarm,
    AlarmHandler,
    RunStoppedError,
    StopReason,
)
from trimtab.trainer.train.build import (
    InputReader,
    build_policy,
    build_sampler,
    build_task,
    hub_note,
    input_changes,
    open_policy,
    read_inputs,
)
from trimtab.trainer.train.conversations import ToolUse, build_tool_use, build_tools, sample_responses, set_verdicts
from trimtab.trainer.train.loop import follow_run, train
from trimtab.trainer.train.metrics import (
    METRICS,
    TIMES,
    TOP_GRADIENT_SHARE,
    TOP_GRADIENT_TOKENS,
    best_evaluation,
    describe_metric,
    time_words,
    token_signals,
)
from trimtab.trainer.train.prompts import check_prompts, encode_problems, longest_prompt, prompt_lengths, some_problems
from trimtab.trainer.train.recording import observed_entropy, tokenizer_vocabulary
from trimtab.trainer.train.reporting import Reporter, SampleText
from trimtab.trainer.train.run import Run
from trimtab.trainer.train.run_folder import MetricsLog, RunFolder, SavedRun, config_changes, load_run, resolved_toml
from trimtab.trainer.train.run_state import export_model, versions
from trimtab.trainer.train.run_words import (
    END_WINDOW,
    AccuracyChange,
    RunSummary,
    accuracy_change,
    describe_model,
    describe_task,
    nothing_to_learn,
    silencing_advice,
    summarize_metrics,
    window_length,
)
from trimtab.trainer.train.scoring import transcripts_of
from trimtab.trainer.train.warm_start import check_problems, list_warm_starts, remove_warm_starts, repeated_problems

__all__ = [
    "END_WINDOW", "INVALID", "METRICS", "STOPPED", "TIMES", "TOP_GRADIENT_SHARE", "TOP_GRADIENT_TOKENS", "UNSAVED",
    "AccuracyChange", "AgentUse", "Alarm", "AlarmHandler", "EndedRollout", "InputReader", "MetricsLog", "Reporter",
    "Run", "RunFolder", "RunStoppedError", "RunSummary", "SampleText", "SavedRun", "StopReason", "ToolUse",
    "accuracy_change", "agent_metrics", "best_evaluation", "build_policy", "build_sampler", "build_task",
    "build_tool_use", "build_tools", "check_problems", "check_prompts", "config_changes", "describe_metric",
    "describe_model", "describe_task", "encode_problems", "error_of", "export_model", "follow_run", "hub_note",
    "input_changes", "list_warm_starts", "load_run", "longest_prompt", "nothing_to_learn", "observed_entropy",
    "open_policy", "prompt_lengths", "read_inputs", "remove_warm_starts", "repeated_problems", "resolved_toml",
    "sample_responses", "set_verdicts", "silencing_advice", "some_problems", "summarize_metrics", "time_words",
    "token_signals", "tokenizer_vocabulary", "train", "transcripts_of", "versions", "window_length",
]  # fmt: skip
