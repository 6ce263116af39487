"""The reference of methods, attachments and metrics: text for the command line and for docs/methods.md."""

from __future__ import annotations

import inspect
import typing
from typing import Any

from trimtab.objectives import theory
from trimtab.objectives.methods.compose import COMMON_OPTIONS, objective
from trimtab.objectives.methods.own import own_entry
from trimtab.objectives.methods.registry import ATTACHMENTS, METHODS, OPTIONS, Entry, Option
from trimtab.objectives.objective import Objective
from trimtab.objectives.plan_builder import TokenRule
from trimtab.objectives.rules.penalties import Penalty
from trimtab.own_parts import errors_located, is_own
from trimtab.text import nearest

METRICS: dict[str, str] = {
    "correction/weight_mean": "mean of p_old / p_sampler over the tokens",
    "s2t/candidate_share": "share of tokens that are rare and rewarded",
    "s2t/entropy_threshold": "the entropy below which such a token is spurious; NaN if there are none",
    "sspo/segment_entropy": "mean over segments of their mean entropy",
    "stare/gate_open": "1 while STARE reweights, 0 once the entropy is on target",
    "tokens/boosted_share": "share of tokens whose weight was raised",
    "tokens/damped_share": "share of tokens whose weight was lowered",
    "tokens/dropped_share": "share of tokens with weight 0 that stay in the denominator",
    "tokens/masked_share": "share of tokens left out for their low entropy",
    "tokens/penalized_share": "share of tokens under a penalty in place of a clip",
    "tokens/silenced_share": "share of tokens taken out of numerator and denominator",
    "update/approx_kl": "mean of r - 1 - ln(p_new / p_old): how far the policy has moved",
    "update/clip_share": "share of tokens with an advantage whose gradient a clip or DPPO's mask cuts (CISPO: caps)",
    "update/ratio_max": "largest ratio",
    "update/ratio_mean": "mean ratio",
    "update/ratio_min": "smallest ratio",
}


def summary() -> list[tuple[str, str, str, str]]:
    """Return (kind, name, paper, title) of every method and attachment."""
    rows = [("method", METHODS), ("attachment", ATTACHMENTS)]
    return [(kind, e.name, e.paper, e.title) for kind, entries in rows for e in entries.values()]


def describe(name: str) -> str:
    """Return the page of a method or attachment as Markdown: title, formula with default numbers, options."""
    if name in METHODS:
        pages = [_page(METHODS[name], objective(name).explain())]
        if name in ATTACHMENTS:
            pages.append(f"Also attaches to other methods: `gspo + {name}`.")
        return "\n\n".join(pages)
    if name in ATTACHMENTS:
        formula = f"{name}: {ATTACHMENTS[name].build().formula}"
        return _page(ATTACHMENTS[name], formula) + f"\n\nAttaches to any method: `dapo + {name}`."
    if is_own(name) and "+" not in name and "(" not in name:
        return _own_page(own_entry(name))
    if "+" in name or "(" in name:
        return f"```\n{objective(name).explain()}\n```"
    raise ValueError(f"unknown method {name!r}: {nearest(name, sorted({*METHODS, *ATTACHMENTS}))}")


def methods_reference() -> str:
    """Return docs/methods.md: all methods, attachments and metrics."""
    lines = ["# Methods", "", "Made from the code by `make docs`; `trimtab methods NAME` prints the same text.", ""]
    lines += ["| name | kind | arXiv | what it does |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {kind} | {paper or '-'} | {title} |" for kind, name, paper, title in summary()]
    own = "the method's own"
    common = {"advantage": own, "aggregation": own, "scope": Objective.scope, "token_stats": Objective.token_stats}
    lines += ["", "Options that every method takes:", "", *_table(COMMON_OPTIONS, common, OPTIONS)]
    for name in {**METHODS, **ATTACHMENTS}:  # a name that is both has one page
        lines += ["", describe(name)]
    lines += ["", "# Metrics", ""]
    lines += ["Losses of micro-batches and ranks add up, and so do metrics, except `_max` and `_min`.", ""]
    lines += ["| metric | meaning |", "|---|---|", *(f"| `{key}` | {text} |" for key, text in METRICS.items())]
    lines += ["", "# Theory", "", "`trimtab.theory` computes, per token and in plain torch:", ""]
    lines += ["| function | returns |", "|---|---|"]
    # In the order of the file; functions that it imports have another `__module__`.
    functions = [f for f in vars(theory).values() if inspect.isfunction(f) and f.__module__ == theory.__name__]
    lines += [f"| `{f.__name__}` | {_first_line(f)} |" for f in functions if not f.__name__.startswith("_")]
    return "\n".join(lines) + "\n"


def _first_line(function: typing.Callable[..., Any]) -> str:
    text = inspect.cleandoc(function.__doc__ or "").partition("\n")[0].removeprefix("Return ").removesuffix(".")
    return text.replace("|", "\\|")  # a bare | would start a new column


def _page(entry: Entry, formula: str) -> str:
    lines = [f"## {entry.name}", "", entry.title]
    if entry.notes:
        lines += ["", entry.notes]
    lines += ["", "```", formula, "```"]
    if entry.options:
        lines += ["", *_table(entry.types, entry.options, {key: entry.option(key) for key in entry.options})]
    return "\n".join(lines)


def _own_page(entry: Entry) -> str:
    """Return the page of a method or attachment of the user's own; which of the two it is shows what it returns."""
    with errors_located(entry.name, entry.build):
        built = entry.build()
    if isinstance(built, TokenRule | Penalty):
        return _page(entry, f"{entry.name}: {built.formula}") + f"\n\nAttaches to any method: `dapo + {entry.name}`."
    return _page(entry, objective(entry.name).explain())


def _table(
    types: typing.Mapping[str, Any], defaults: typing.Mapping[str, Any], options: typing.Mapping[str, Option]
) -> list[str]:
    rows = [f"| `{k}` | {_show(defaults[k])} | {options[k].meaning}{_choices(types[k])} |" for k in types]
    return ["| option | default | meaning |", "|---|---|---|", *rows]


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _choices(annotation: Any) -> str:
    is_choice = typing.get_origin(annotation) is typing.Literal
    return f" ({', '.join(typing.get_args(annotation))})" if is_choice else ""
