"""What a person sees in a terminal: the live display, plain lines, the dry run, the closing summary."""

from trimtab.console.dry_run import describe_dry_run
from trimtab.console.launch import STOPPED, launch_run, recipe_name, resolve, slug
from trimtab.console.summary_text import LONGEST_WINDOW, model_words, outcome, task_words

__all__ = [
    "LONGEST_WINDOW",
    "STOPPED",
    "describe_dry_run",
    "launch_run",
    "model_words",
    "outcome",
    "recipe_name",
    "resolve",
    "slug",
    "task_words",
]
