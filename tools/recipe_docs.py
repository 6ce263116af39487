"""Generate docs/recipes.md from the models of the configuration and from the recipes themselves."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trimtab.data import TASKS
from trimtab.trainer.config.loading import load, packaged_recipes
from trimtab.trainer.config.recipe import Config
from trimtab.trainer.config.sections import description
from trimtab.trainer.config.task_sections import TaskConfig, task_section

_INTRO = """\
# Recipes

A recipe is a TOML file with all settings of a run. This page lists the recipes that come with trimtab, and every key
with its values, default and meaning. It is generated from the code by `make docs`.

```
trimtab train demo                              # a recipe that comes with trimtab, by name
trimtab train mine.toml                         # your own
trimtab train mine.toml --dry-run               # check it, and estimate the memory, without loading a model
trimtab train demo --set update.lr=1e-4 --set run.seed=3
trimtab train demo --set "objective.name=sspo + s2t" --set objective.tau_p=0.001
```

**Your own recipe** only needs the keys that differ from the defaults below. These six lines train your model on a
file of problems ([own-data.md](own-data.md) explains them):

```toml
objective = { name = "stapo" }                        # or "sspo + s2t", "stare", "grpo", ...
task = { name = "file", path = "problems.jsonl", eval_path = "held_out.jsonl", rule = "math" }
model = { path = "Qwen/Qwen3-1.7B-Base", precision = "bf16", gradient_checkpointing = true }
rollout = { prompts = 64, samples = 8, max_new_tokens = 2048 }
update = { per_step = 2, lr = 1e-6, warmup_steps = 10, token_budget = 32768 }
run = { steps = 200, eval_every = 20, checkpoint_every = 50 }
```

`problems.jsonl` (or parquet) has verl's columns: `prompt` (chat messages or text), `reward_model.ground_truth`,
`data_source` and `extra_info`. `held_out.jsonl` has other problems of the same format. If your columns have other
names, say so in `task`: `columns = { prompt = "question", answer = "result" }`.

**`--set KEY=VALUE`** changes any key from the command line. The value is parsed as TOML (`3`, `1e-6`, `true`, `[0.9,
0.95]`), and anything else is a string. `none` removes the value of an optional key. If you set `objective.name` to
another method, the options of the recipe's method are dropped. If the method stays and only attachments change, they
are kept. If you set `task.name` to another task, the options of the recipe's task are dropped too.

**How the sizes relate.** A *step* samples `rollout.prompts` x `rollout.samples` responses. They are split into
`update.per_step` mini-batches, and each mini-batch gets one optimizer *update*. An update runs in as many
*micro-batches* as `update.token_budget` requires. The token budget changes memory and speed, but the result only by
rounding.

**If you come from TRL:** `rollout.samples` is `num_generations`, `rollout.max_new_tokens` is `max_completion_length`,
`update.passes` is `num_iterations`, and `update.token_budget` replaces `per_device_train_batch_size`. `run.steps`
counts rollout batches, not optimizer steps. The KL coefficient `beta` is the attachment `+ kl(coef=0.04)`.

**If memory runs out**, lower `update.token_budget` first, then `rollout.batch_size` and `update.head_chunk`. These
three change results only by rounding. `model.gradient_checkpointing = true` and `model.lora_rank` save more. The error
message says which phase ran out of memory and what to change, and `--dry-run` shows the estimate beforehand.

## Recipes that come with trimtab

Each file starts with a comment that says what it trains, which paper it follows, what hardware it needs, what the paper
leaves open, and how to run the baselines. "Updates" are per step, "tokens" is the maximum response length. The model of
the recipes `smollm2...` is a package of its own: [how to install it](support.md#smollm2)."""

_OBJECTIVE = """\
## `[objective]`

The loss. `name` is a method, with attachments after `+` if you want any. The other keys are their options
([methods.md](methods.md)). You can also write an attachment as a key: `kl = 0.001`, `s2t = true`, `stare = { variant =
"C2" }`."""

_TASK = """\
## `[task]`

Where prompts and ground-truth answers come from. `name` is one of the tasks below, each with its own options, or
`python:MODULE:NAME` for a task of your own, whose options are the arguments of your function
([own-parts.md](own-parts.md)). Every task can also have an `environment`, `python:MODULE:NAME`: a class of your own
whose methods are tools ([tools.md](tools.md)). It needs `rollout.max_turns` of 2 or more."""


def recipes_page() -> str:
    """Return the content of docs/recipes.md."""
    parts = [_INTRO, *_recipe_table(), _OBJECTIVE]
    for name, field in Config.model_fields.items():
        section = field.annotation
        if section is TaskConfig:
            parts += [_TASK, *map(_task_part, TASKS)]
        elif isinstance(section, type) and issubclass(section, BaseModel):
            parts.append(_section(f"## `[{name}]`", section))
            parts += _tables_by_name(name, section)
    return "\n\n".join(parts) + "\n"


def _section(heading: str, section: type[BaseModel]) -> str:
    return "\n".join([heading, "", inspect.cleandoc(section.__doc__ or ""), "", *_key_table(section)])


def _task_part(name: str) -> str:
    section = task_section(name.lower())
    keys = [line for line in _key_table(section) if not line.startswith(("| `name`", "| `environment`"))]
    return "\n".join([f'### `name = "{name}"`', "", _first_line(TASKS[name]), "", *keys])


def _first_line(function: Any) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _tables_by_name(name: str, section: type[BaseModel]) -> list[str]:
    """Return the tables of keys of the sections that a user names, as `[reward.terms.NAME]`."""
    parts = []
    for key, field in section.model_fields.items():
        inner = (*typing.get_args(field.annotation), None)[1] if typing.get_origin(field.annotation) is dict else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            parts.append(_section(f"### `[{name}.{key}.NAME]`", inner))
    return parts


def recipe_title(path: Path) -> str:
    """Return the first line of a recipe's comment, which says what it trains."""
    line = path.read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""


def _recipe_table() -> list[str]:
    lines = ["| recipe | what it trains | prompts x responses | updates | tokens |", "|---|---|---|---|---|"]
    for name, path in packaged_recipes().items():
        config = load(name)
        rollout = config.rollout
        lines.append(
            f"| `{name}` | {recipe_title(path)} | {rollout.prompts} x {rollout.samples} | {config.update.per_step} "
            f"| {rollout.max_new_tokens} |"
        )
    return ["\n".join(lines)]


def _key_table(section: type[BaseModel]) -> list[str]:
    rows = [
        f"| `{key}` | {_values(field.annotation, field.metadata)} | {_default(field)} | {description(field)} |"
        for key, field in section.model_fields.items()
    ]
    return ["| key | values | default | meaning |", "|---|---|---|---|", *rows]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ([], {}, ""):
        return "none" if value is None else "empty"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{list(value)}`" if isinstance(value, tuple) else "`{}`".format(str(value).replace("\n", "\\n"))


def _values(kind: Any, metadata: list[Any]) -> str:
    """Describe the values of a key by its type and limits."""
    arguments = [argument for argument in typing.get_args(kind) if argument is not type(None)]
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if typing.get_origin(kind) is list:
        return f"list of {_values(arguments[0], [])}"
    if typing.get_origin(kind) is tuple:
        return f"[{', '.join(_values(*_bare(argument)) for argument in arguments)}]"
    if typing.get_origin(kind) is dict:
        return "table"
    if arguments:  # a union; None was removed above
        return " or ".join(_values(argument, metadata) for argument in arguments)
    names = {bool: "true, false", int: "whole number", float: "number", str: "text"}
    return names[kind] + ",".join(filter(None, map(_limit, metadata)))


def _bare(kind: Any) -> tuple[Any, list[Any]]:
    base, field = typing.get_args(kind)
    return base, field.metadata


def _limit(limit: Any) -> str:
    signs = {annotated_types.Ge: ("≥", "ge"), annotated_types.Gt: (">", "gt")}
    signs |= {annotated_types.Le: ("≤", "le"), annotated_types.Lt: ("<", "lt")}
    sign, name = signs.get(type(limit), ("", ""))
    return f" {sign} {getattr(limit, name):,.10g}" if sign else ""
