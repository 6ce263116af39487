"""A run: the loop, sampling, grading, scoring, recording, checkpoints, warm start."""

from trimtab.train.alarm_actions import Alarm, Watcher
from trimtab.train.build import build_policy, build_sampler, build_task
from trimtab.train.checkpoints import newest
from trimtab.train.experience import GradedResponse
from trimtab.train.loop import train
from trimtab.train.metrics import METRICS
from trimtab.train.recording import observed_entropy, open_recorder, tokenizer_vocabulary
from trimtab.train.reporter import Reporter
from trimtab.train.run import Run, RunStoppedError, Stop, versions
from trimtab.train.run_folder import RunFolder, config_changes, resolved_toml
from trimtab.train.token_signals import FEW, FEW_SHARE
from trimtab.train.warm_start import load_parameters

__all__ = [
    "FEW",
    "FEW_SHARE",
    "METRICS",
    "Alarm",
    "GradedResponse",
    "Reporter",
    "Run",
    "RunFolder",
    "RunStoppedError",
    "Stop",
    "Watcher",
    "build_policy",
    "build_sampler",
    "build_task",
    "config_changes",
    "load_parameters",
    "newest",
    "observed_entropy",
    "open_recorder",
    "resolved_toml",
    "tokenizer_vocabulary",
    "train",
    "versions",
]
