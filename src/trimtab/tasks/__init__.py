"""Tasks: sequences of problems from generated arithmetic, reasoning-gym, GSM8K, or jsonl and parquet files."""

from trimtab.tasks.arithmetic import Arithmetic
from trimtab.tasks.benchmarks import BENCHMARKS, DEFAULT_BENCHMARKS, PROMPT_SUFFIX, BenchmarkProblem, load_benchmark
from trimtab.tasks.files import gsm8k, plain_file, read_rows, verl_file
from trimtab.tasks.gym import GymTask, gym_dataset
from trimtab.tasks.problems import FixedTask, Message, Problem, Split, Task, derive_seed, optional_module, problem_index

__all__ = [
    "BENCHMARKS", "DEFAULT_BENCHMARKS", "PROMPT_SUFFIX", "Arithmetic", "BenchmarkProblem", "FixedTask", "GymTask",
    "Message", "Problem", "Split", "Task", "derive_seed", "gsm8k", "gym_dataset", "load_benchmark", "optional_module",
    "plain_file", "problem_index", "read_rows", "verl_file",
]  # fmt: skip
