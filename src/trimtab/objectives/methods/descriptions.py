"""Methods, attachments and metrics in words: what `trimtab methods` prints, and docs/methods.md with it."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from trimtab.objectives.methods.compose import objective, own_entry
from trimtab.objectives.methods.registry import ATTACHMENTS, METHODS, Entry
from trimtab.objectives.plan_builder import TokenRule
from trimtab.objectives.rules.penalties import Penalty
from trimtab.own_parts import Option, errors_located, is_own
from trimtab.text import nearest

METRICS: dict[str, str] = {
    "correction/weight_mean": "mean of p_old / p_sampler over the tokens",
    "entropy_bonus/coef": "coefficient of the entropy bonus in this update; 0 while the entropy is above its target",
    "s2t/candidate_share": "share of tokens that are rare and rewarded: the candidates for silencing",
    "s2t/entropy_threshold": "a candidate with an entropy below this is spurious; absent without candidates",
    "sspo/segment_entropy": "mean entropy of a subsentence, averaged over subsentences",
    "stare/gate_open": "1 if STARE reweights tokens in this update, 0 if the entropy has reached the target",
    "stare/weight": "the critical weight that stare(boost=critical) puts on tokens; logged while its gate is open",
    "tokens/boosted_share": "share of tokens whose weight was raised above 1",
    "tokens/damped_share": "share of tokens whose weight was lowered",
    "tokens/dropped_share": "share of tokens that get weight 0 but still count in the mean",
    "tokens/masked_share": "share of tokens left out because their entropy is low",
    "tokens/penalized_share": "share of tokens that have a penalty instead of a clip",
    "tokens/silenced_share": "share of tokens that get weight 0 and do not count in the mean",
    "trim/drive": "the change of entropy that trim asks for, as a share (-1 to 1) of what all tokens together could "
    "do to it; 0 while the entropy is in its band",
    "trim/entropy_change": "measured change of policy/entropy since the rollout before",
    "trim/leverage": "share of all effects on the entropy that surprising tokens have, which trim weighs; at 0 it "
    "cannot steer",
    "trim/predicted_change": "first-order change of the entropy under the plan, added up over the tokens, per unit of "
    "step size on the logits",
    "trim/saturated": "1 if trim's weight is at its limit, else 0",
    "trim/target": "the floor that trim holds the entropy above, at this step",
    "trim/weight": "trim's factor on rewarded surprising tokens; punished ones get its inverse; 1 when it is off",
    "update/approx_kl": "mean over tokens of p_new / p_old - 1 - ln(p_new / p_old): how far the policy has moved",
    "update/clip_share": "share of tokens with an advantage whose gradient the clip or DPPO's mask cuts (CISPO: caps)",
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


def option_table(options: Mapping[str, Option]) -> list[str]:
    """Return the lines of a Markdown table of options."""
    rows = [f"| `{key}` | {_show(each.default)} | {_meaning(each)} |" for key, each in options.items()]
    return ["| option | default | meaning |", "|---|---|---|", *rows]


def _page(entry: Entry, formula: str) -> str:
    lines = [f"## {entry.name}", "", entry.title]
    if entry.notes:
        lines += ["", entry.notes]
    lines += ["", "```", formula, "```"]
    if entry.options:
        lines += ["", *option_table(entry.options)]
    return "\n".join(lines)


def _own_page(entry: Entry) -> str:
    """Return the page of a method or attachment of the user's own; which of the two it is shows what it returns."""
    with errors_located(entry.name, entry.build):
        built = entry.build()
    if isinstance(built, TokenRule | Penalty):
        return _page(entry, f"{entry.name}: {built.formula}") + f"\n\nAttaches to any method: `dapo + {entry.name}`."
    return _page(entry, objective(entry.name).explain())


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _meaning(option: Option) -> str:
    is_choice = typing.get_origin(option.type) is typing.Literal
    choices = f" ({', '.join(typing.get_args(option.type))})" if is_choice else ""
    return option.meaning.replace("|", "\\|") + choices  # a bare | would start a new column
