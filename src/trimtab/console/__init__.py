"""What `trimtab train` shows in a terminal: live display or plain lines, dry run, closing summary."""

from trimtab.console.doctor import show_doctor
from trimtab.console.dry_run import describe_dry_run
from trimtab.console.launch import (
    TrainRequest,
    export_run,
    hide_progress_bars,
    launch_run,
    recipe_name,
    resolve_request,
    train_in_folder,
)
from trimtab.console.processes import check_gpus, supervise
from trimtab.console.recipe_from_data import InitRequest, init_recipe
from trimtab.console.run_list import run_lines

__all__ = [
    "InitRequest", "TrainRequest", "check_gpus", "describe_dry_run", "export_run", "hide_progress_bars", "init_recipe",
    "launch_run", "recipe_name", "resolve_request", "run_lines", "show_doctor", "supervise", "train_in_folder",
]  # fmt: skip
