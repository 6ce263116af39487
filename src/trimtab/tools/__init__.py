"""The sandbox: programs that a model wrote run in milliseconds and get nowhere. Imports no torch."""

from trimtab.tools.command import probe_lines, run_input
from trimtab.tools.jail import confine
from trimtab.tools.probe import LEVELS, Probe
from trimtab.tools.results import KILLED_KINDS, Kind, Result, SandboxError
from trimtab.tools.sandbox import Sandbox, Session

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
