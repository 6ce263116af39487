"""Tasks: sequences of problems, generated (arithmetic, countdown), from reasoning-gym, GSM8K, jsonl or parquet."""

from trimtab.tasks.arithmetic import Arithmetic
from trimtab.tasks.benchmarks import (
    BENCHMARKS,
    BOX_RULES,
    DEFAULT_BENCHMARKS,
    HELD_OUT,
    PROMPT_SUFFIX,
    BenchmarkProblem,
    find_benchmark,
    load_benchmark,
)
from trimtab.tasks.countdown import Countdown
from trimtab.tasks.files import check_columns, gsm8k, read_file, read_rows, worked_solution, worked_solutions
from trimtab.tasks.gym import GymTask, gym_dataset
from trimtab.tasks.problems import (
    FixedTask,
    Message,
    Problem,
    Split,
    Task,
    TaskOption,
    derive_seed,
    optional_module,
    problem_index,
    user,
)
from trimtab.tasks.registry import TASKS, TaskArgument, build_task, has_held_out_problems, task_arguments

__all__ = [
    "BENCHMARKS", "BOX_RULES", "DEFAULT_BENCHMARKS", "HELD_OUT", "PROMPT_SUFFIX", "TASKS", "Arithmetic",
    "BenchmarkProblem", "Countdown", "FixedTask", "GymTask", "Message", "Problem", "Split", "Task", "TaskArgument",
    "TaskOption", "build_task", "check_columns", "derive_seed", "find_benchmark", "gsm8k", "gym_dataset",
    "has_held_out_problems", "load_benchmark", "optional_module", "problem_index", "read_file", "read_rows",
    "task_arguments", "user", "worked_solution", "worked_solutions",
]  # fmt: skip
