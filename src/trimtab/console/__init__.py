"""What `trimtab train` shows in a terminal: live display or plain lines, dry run, closing summary."""

from trimtab.console.doctor import show_doctor
from trimtab.console.dry_run import describe_dry_run
from trimtab.console.launch import (
    INVALID,
    STOPPED,
    TrainRequest,
    export_run,
    hide_progress_bars,
    launch_run,
    recipe_name,
    resolve_request,
    slug,
    train_in_folder,
)
from trimtab.console.processes import check_gpus, supervise
from trimtab.console.recipe_from_data import InitRequest, init_recipe
from trimtab.console.run_list import run_lines
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
    "END_WINDOW", "INVALID", "STOPPED", "InitRequest", "TrainRequest", "accuracy_change", "check_gpus",
    "describe_dry_run", "describe_model", "describe_task", "export_run", "hide_progress_bars", "init_recipe",
    "launch_run", "recipe_name", "resolve_request", "run_lines", "show_doctor", "silencing_advice", "slug",
    "summarize_metrics", "supervise", "train_in_folder", "window_length",
]  # fmt: skip
