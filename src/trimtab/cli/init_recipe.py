"""`trimtab init`: a recipe from a file of problems. Columns and rule are guessed from the rows, sizes from the GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import tomli_w

from trimtab.data import BOX_RULES, PROMPT_SUFFIX, Problem, Task, read_rows
from trimtab.grading import grade_many
from trimtab.text import PrintLine, command, one_line, printable, shorten, shown
from trimtab.trainer.config import parse
from trimtab.trainer.memory import DeviceMemory, NoEstimateError, fits, visible_gpu
from trimtab.trainer.train import check_problems

# What people call these columns, the likeliest first.
PROMPT_NAMES = ("prompt", "question", "problem", "query", "instruction", "input", "text")
ANSWER_NAMES = (
    "reward_model.ground_truth", "ground_truth", "final_answer", "answer", "target", "label", "result", "output",
    "solution",
)  # fmt: skip
SAMPLED = 200  # rows whose answers decide the rule
LONGEST_TEXT = 60  # characters of an answer that a rule compares as text
DEFAULT_PROMPT_TOKENS = 1024  # of `rollout.max_prompt_tokens`
TOKEN_BUDGETS = (32_768, 16_384, 8_192, 4_096)
LORA = {"lora_rank": 16}
LORA_LR = 1e-5


def init_recipe(
    data: str, out: Path, model: str, held_out: str | None, columns: Mapping[str, str], print_line: PrintLine
) -> None:
    """Write a recipe that `trimtab train` takes, and print what was guessed from what; an empty column is guessed."""
    if out.suffix != ".toml":
        raise ValueError(f"--out {shown(str(out))}: the name of a recipe ends in .toml")
    if out.exists():
        raise ValueError(f"{out} exists already: choose another --out")
    rows = [dict(row) for _, row in islice(read_rows(data), SAMPLED)]
    if not rows:
        raise ValueError(f"{data} has no rows: give a file with problems")
    paths = {"path": data} | ({} if held_out is None else {"eval_path": held_out})
    task = _task(paths, columns, rows, print_line)
    table = _recipe(task, model)
    problems, _ = check_problems(parse(table))  # before anything is written: names the rows that cannot be used
    _fit_to_prompts(table, problems, print_line)
    print_line(f"sizes      {_fit_to_gpu(table, visible_gpu('auto'))}")
    with out.open("x", encoding="utf-8") as file:
        file.write(f"# Made by `trimtab init` from {one_line(data)}. All keys: docs/recipes.md\n\n")
        file.write(tomli_w.dumps(table))
    print_line(f"\nwritten: {out}. Look at it, then:\n  {command('train', out, '--dry-run')}")
    if held_out is None:
        print_line("Nothing is held out, so the run has no evaluation: keep some problems apart, and name their file "
                   "with --held-out")  # fmt: skip


def _task(
    paths: Mapping[str, str], given: Mapping[str, str], rows: Sequence[Mapping[str, Any]], print_line: PrintLine
) -> dict[str, Any]:
    """Return the section `task`, and print the columns and the rule."""
    columns = {"prompt": given["prompt"] or _guess(rows, PROMPT_NAMES, "prompt")}
    columns["answer"] = given["answer"] or _guess(rows, ANSWER_NAMES, "answer", taken=columns["prompt"])
    values = {part: [dict(_flat(row)).get(column) for row in rows] for part, column in columns.items()}
    for part, column in columns.items():
        print_line(f"{part:<9}  column {one_line(column)}: {shorten(printable(repr(values[part][0])), 60)}")
    answers = [str(answer) for answer in values["answer"]]
    if columns["answer"] == "answer" and columns["prompt"] == "question" and all("####" in each for each in answers):
        print_line("rule       boxed: answers end in #### and the result, as in GSM8K")
        return {"name": "gsm8k", **paths}
    rule, why = propose_rule(answers)
    print_line(f"rule       {rule}: {why}")
    boxed = rule in BOX_RULES or rule == "choice"
    asked = all("boxed" in str(prompt) for prompt in values["prompt"])
    return {
        "name": "file", **paths, "rule": rule, "columns": columns,
        **({"suffix": f"{PROMPT_SUFFIX}."} if boxed and not asked else {}),
    }  # fmt: skip


def _guess(rows: Sequence[Mapping[str, Any]], names: Sequence[str], part: str, taken: str = "") -> str:
    """Return the likeliest column that every row has, or raise with those that there are."""
    there = set.intersection(*(set(dict(_flat(row))) for row in rows)) - {taken}
    found = next((name for name in names if name in there), None)
    if found is None:
        listed = ", ".join(shown(name) for name in dict(_flat(rows[0])))
        raise ValueError(f"no column looks like the {part}: name it with --{part}; the file has {shorten(listed, 500)}")
    return found


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a row, and those of objects in it as `object.key`."""
    for name, value in row.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", each) for key, each in value.items())


def propose_rule(answers: Sequence[str]) -> tuple[str, str]:
    """Return the rule that grades such answers, and why."""
    if all(re.fullmatch(r"\(?[A-Ja-j]\)?", answer.strip()) for answer in answers):
        return "choice", "every answer is one letter"
    if max(map(len, answers)) > LONGEST_TEXT and not any("\\" in answer for answer in answers):
        return "boxed", "answers are long texts, which it compares word by word: a reward of your own may be better"
    mathematical = sum(bool(re.search(r"[\d\\=^]", answer)) for answer in answers)
    rule = "math" if 2 * mathematical >= len(answers) else "boxed"
    kind = "numbers or expressions" if rule == "math" else "texts"
    verdicts = grade_many((f"\\boxed{{{answer}}}", Problem((), answer, rule, "")) for answer in answers)
    right = sum(verdict.kind == "correct" for verdict in verdicts)
    return rule, f"answers are {kind}, and of {len(answers)} in a box it takes {right} as right"


def _recipe(task: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the recipe of docs/own-data.md with another task and model."""
    return {
        "objective": {"name": "stapo"},
        "task": dict(task),
        "model": {"path": model, "precision": "bf16", "gradient_checkpointing": True},
        "rollout": {"prompts": 64, "samples": 8, "max_new_tokens": 2048},
        "update": {"per_step": 2, "lr": 1e-6, "warmup_steps": 10, "token_budget": TOKEN_BUDGETS[0]},
        "run": {"steps": 200, "eval_every": 20, "checkpoint_every": 50},
    }


def _fit_to_prompts(table: dict[str, Any], problems: Task, print_line: PrintLine) -> None:
    """Take fewer prompts per step than there are problems, and room for the longest of them."""
    longest = max(sum(len(m["content"]) for m in problems[n].prompt) for n in range(len(problems)))
    print_line(f"problems   {len(problems):,}, the longest of {longest:,} characters")
    updates = min(2, len(problems))
    table["update"]["per_step"] = updates
    table["rollout"]["prompts"] = min(64, len(problems) // updates * updates)  # as many in each update
    # Two characters per token is less than English or code has, and --dry-run cannot count tokens without a tokenizer.
    if longest // 2 > DEFAULT_PROMPT_TOKENS:
        table["rollout"]["max_prompt_tokens"] = 1 << (longest // 2 - 1).bit_length()


def _fit_to_gpu(table: dict[str, Any], gpu: DeviceMemory | None) -> str:
    """Choose the largest micro-batch that fits into the GPU, with LoRA if no other does; return what was chosen."""
    if gpu is None:
        return "those of docs/own-data.md: no GPU is visible here; --dry-run estimates the memory"
    try:
        for adapters in ({}, LORA):
            for budget in TOKEN_BUDGETS:
                trial = {section: dict(values) for section, values in table.items()}
                trial["model"] |= adapters
                trial["update"] |= {"token_budget": budget} | ({"lr": LORA_LR} if adapters else {})
                if fits(parse(trial), gpu):
                    table.update(trial)
                    lora = ", LoRA of rank 16: all weights do not fit" if adapters else ""
                    return f"micro-batches of {budget:,} tokens{lora}; estimated to fit into {gpu.name}"
    except NoEstimateError as error:
        return f"those of docs/own-data.md: {error}"
    return f"those of docs/own-data.md, which do not fit into {gpu.name}: --dry-run says what to lower"
