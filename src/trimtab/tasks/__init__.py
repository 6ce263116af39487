"""Where prompts and answers come from: generated arithmetic, reasoning-gym, GSM8K, your own jsonl or parquet."""

from trimtab.tasks.arithmetic import Arithmetic
from trimtab.tasks.files import gsm8k, plain_file, verl_file
from trimtab.tasks.gym import GymTask
from trimtab.tasks.problems import FixedTask, Message, Part, Problem, Task, problem_number, stream_seed

__all__ = [
    "Arithmetic",
    "FixedTask",
    "GymTask",
    "Message",
    "Part",
    "Problem",
    "Task",
    "gsm8k",
    "plain_file",
    "problem_number",
    "stream_seed",
    "verl_file",
]
