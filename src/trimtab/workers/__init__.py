"""Worker processes: calls within limits, and the sandbox for programs that a model wrote. Imports no torch."""

from trimtab.workers.calls import (
    WorkerLimits,
    WorkerResult,
    WorkerSession,
    call_worker,
    keep_output,
    redirected,
    result_of,
    start_worker,
    stop_worker,
    submit_call,
)
from trimtab.workers.chat_template import RENDER, special_tokens, template_of
from trimtab.workers.jail import confine
from trimtab.workers.linux import die_with_parent, kill_descendants
from trimtab.workers.results import LEVELS, Kind, Probe, Result, SandboxError
from trimtab.workers.sandbox import Sandbox, Session, probe_lines, run_input

__all__ = [
    "LEVELS", "RENDER", "Kind", "Probe", "Result", "Sandbox", "SandboxError", "Session",
    "WorkerLimits", "WorkerResult", "WorkerSession", "call_worker", "confine", "die_with_parent", "keep_output",
    "kill_descendants", "probe_lines", "redirected", "result_of", "run_input", "special_tokens", "start_worker",
    "stop_worker", "submit_call", "template_of",
]  # fmt: skip
