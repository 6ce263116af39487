"""Tasks: sequences of problems, generated (arithmetic, countdown), from reasoning-gym, GSM8K, jsonl or parquet."""

from trimtab.data.arithmetic import Arithmetic
from trimtab.data.benchmarks import (
    BENCHMARKS,
    BOX_RULES,
    DEFAULT_BENCHMARKS,
    HELD_OUT,
    PROMPT_SUFFIX,
    BenchmarkProblem,
    find_benchmark,
    load_benchmark,
)
from trimtab.data.countdown import Countdown
from trimtab.data.files import (
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
from trimtab.data.gym import GymTask, gym_dataset
from trimtab.data.kept_tokens import KeptTokens, words_of_bits
from trimtab.data.problems import (
    FixedTask,
    Problem,
    Split,
    Task,
    derive_seed,
    optional_module,
    problem_index,
    prompts_per_epoch,
    stream_index,
    user,
)
from trimtab.data.registry import TASKS, agent_of, build_task, has_held_out_problems, task_options
from trimtab.data.repeats import Repeats, find_repeats
from trimtab.data.sampler import (
    Group,
    PromptTokens,
    Reply,
    Request,
    Requests,
    Response,
    Sample,
    Sampler,
    SamplingOptions,
    Turns,
    by_rollout,
    check_prompts,
    rollout_ids,
)
from trimtab.own_parts import Option

TaskOption = Option  # of a task, in files of users

__all__ = [
    "BENCHMARKS", "BOX_RULES", "DEFAULT_BENCHMARKS", "HELD_OUT", "PROMPT_SUFFIX", "TASKS", "Arithmetic",
    "BenchmarkProblem", "Countdown", "FixedTask", "Group", "GymTask", "KeptTokens", "Option", "Problem",
    "PromptTokens", "Repeats", "Reply", "Request", "Requests", "Response", "Sample", "Sampler", "SamplingOptions",
    "Split", "Task", "TaskOption", "Turns", "agent_of", "build_task", "by_rollout", "check_columns", "check_paths",
    "check_prompts", "derive_seed", "find_benchmark", "find_repeats", "gsm8k", "gym_dataset", "has_held_out_problems",
    "is_hub_data", "load_benchmark", "optional_module", "problem_index", "prompts_per_epoch", "read_file", "read_rows",
    "rollout_ids", "source_paths", "stream_index", "task_options", "user", "words_of_bits", "worked_solution",
    "worked_solutions",
]  # fmt: skip
