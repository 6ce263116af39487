"""What `trimtab train` shows in a terminal: live display or plain lines, dry run, closing summary."""

from trimtab.console.doctor import show_doctor
from trimtab.console.dry_run import describe_dry_run
from trimtab.console.launch import STOPPED, export_run, launch_run, recipe_name, resolve_request, slug
from trimtab.console.processes import check_gpus, supervise
from trimtab.console.summary_text import (
    END_WINDOW,
    accuracy_change,
    describe_model,
    describe_task,
    silencing_advice,
    summarize_metrics,
    window_length,
)

__all__ = [
    "END_WINDOW", "STOPPED", "accuracy_change", "check_gpus", "describe_dry_run", "describe_model", "describe_task",
    "export_run", "launch_run", "recipe_name", "resolve_request", "show_doctor", "silencing_advice", "slug",
    "summarize_metrics", "supervise", "window_length",
]  # fmt: skip
