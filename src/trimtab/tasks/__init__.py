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
from trimtab.tasks.files import (
    check_columns,
    check_paths,
    gsm8k,
    is_hub_data,
    read_file,
    read_rows,
    source_paths,
    worked_solution,
    worked_solutions,
)
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
    prompts_per_epoch,
    stream_index,
    user,
)
from trimtab.tasks.registry import TASKS, TaskArgument, build_task, has_held_out_problems, task_arguments
from trimtab.tasks.repeats import Repeats, find_repeats

__all__ = [
    "BENCHMARKS", "BOX_RULES", "DEFAULT_BENCHMARKS", "HELD_OUT", "PROMPT_SUFFIX", "TASKS", "Arithmetic",
    "BenchmarkProblem", "Countdown", "FixedTask", "GymTask", "Message", "Problem", "Repeats", "Split", "Task",
    "TaskArgument", "TaskOption", "build_task", "check_columns", "check_paths", "derive_seed", "find_benchmark",
    "find_repeats", "gsm8k", "gym_dataset", "has_held_out_problems", "is_hub_data", "load_benchmark",
    "optional_module", "problem_index", "prompts_per_epoch", "read_file", "read_rows", "source_paths", "stream_index",
    "task_arguments", "user", "worked_solution", "worked_solutions",
]  # fmt: skip
