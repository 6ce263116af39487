"""The sandbox: programs that a model wrote run in milliseconds and get nowhere. Imports no torch."""

from trimtab.workers.command import probe_lines, run_input
from trimtab.workers.jail import confine
from trimtab.workers.probe import LEVELS, Probe
from trimtab.workers.results import KILLED_KINDS, Kind, Result, SandboxError
from trimtab.workers.sandbox import Sandbox, Session

__all__ = [
    "KILLED_KINDS",
    "LEVELS",
    "Kind",
    "Probe",
    "Result",
    "Sandbox",
    "SandboxError",
    "Session",
    "confine",
    "probe_lines",
    "run_input",
]
