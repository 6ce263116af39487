"""Where prompts and answers come from: generated arithmetic, reasoning-gym, GSM8K, your own jsonl or parquet."""

from trimtab.tasks.arithmetic import Arithmetic
from trimtab.tasks.benchmarks import BENCHMARKS, SIX, SUFFIX, Question, load_benchmark
from trimtab.tasks.files import gsm8k, plain_file, read_rows, verl_file
from trimtab.tasks.gym import GymTask, gym_dataset
from trimtab.tasks.problems import FixedTask, Message, Part, Problem, Task, optional_module, problem_number, stream_seed

__all__ = [
    "BENCHMARKS",
    "SIX",
    "SUFFIX",
    "Arithmetic",
    "FixedTask",
    "GymTask",
    "Message",
    "Part",
    "Problem",
    "Question",
    "Task",
    "gsm8k",
    "gym_dataset",
    "load_benchmark",
    "optional_module",
    "plain_file",
    "problem_number",
    "read_rows",
    "stream_seed",
    "verl_file",
]
