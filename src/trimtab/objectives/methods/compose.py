"""Build an objective from a name: `"stapo"`, `"sspo + s2t"`, `"gspo + stare(variant=C2)"`, or by keyword.

A method or attachment of the user's own is `python:MODULE:NAME`; an objective with one is tried on a small batch.
"""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Mapping
from dataclasses import replace
from types import UnionType
from typing import Any, Literal

import trimtab.objectives.methods.catalog  # noqa: F401  (it fills the registry)
from trimtab.objectives.advantages import AdvantageName
from trimtab.objectives.lazy_torch import torch
from trimtab.objectives.methods.registry import (
    ATTACHMENTS,
    METHODS,
    OPTIONS,
    Entry,
    check_option,
    check_ranges,
    title_and_notes,
)
from trimtab.objectives.normalizers import AGGREGATIONS
from trimtab.objectives.objective import Count, Objective, Scope, TokenStats
from trimtab.objectives.plan_builder import TokenRule
from trimtab.objectives.rules.penalties import Penalty
from trimtab.objectives.token_batch import TokenBatch
from trimtab.own_parts import (
    PATTERN,
    Option,
    OwnPartError,
    errors_located,
    is_own,
    load_part,
    location,
    option_error,
    read_options,
)
from trimtab.text import nearest, shown

# Options that every method takes.
COMMON_OPTIONS: dict[str, Option] = {
    key: replace(OPTIONS[key], type=kind, default=default)
    for key, kind, default in (
        (
            "advantage",
            AdvantageName,
            "the method's own",
        ),
        ("aggregation", Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"], "the method's own"),
        ("scope", Scope, Objective.scope),
        ("token_stats", TokenStats, Objective.token_stats),
        ("count", Count, Objective.count),
    )
}
_SIMPLE = (bool, int, float, str, type(None))  # types of options
_KINDS = "a number, true or false, text, or a Literal of choices"

_TERM = re.compile(rf"\s*(?P<name>{PATTERN}|[\w.-]+)\s*(?:\((?P<options>[^()]*)\))?\s*")


def objective(name: str, **options: Any) -> Objective:
    """Build an objective by name.

    `name` is a method, and after each `+` an attachment, with options in brackets if needed. Keyword options go to the
    method or attachment that has them; an attachment's name as a keyword attaches it (`True`, a mapping of its options,
    or the value of its first option). Every method takes `advantage`, `aggregation`, `scope`,
    `token_stats` and `count`.
    """
    (base, base_options), *attached = _terms(name)
    method = _method(base)
    attached += [(key, _as_options(key, options.pop(key))) for key in list(options) if _attaches(key)]
    common = {key: options.pop(key) for key in list(options) if key in COMMON_OPTIONS}
    common |= {key: base_options.pop(key) for key in list(base_options) if key in COMMON_OPTIONS}
    terms = [(method, base_options)] + [(_attachment(key), value) for key, value in attached]
    _distribute(name, options, terms)
    built = [_build(entry, given, attached=number > 0) for number, (entry, given) in enumerate(terms)]
    combined = _combine(built, [entry for entry, _ in terms], common)
    # Whatever is wrong in a user's code is to be found here, and not at the first step of a run.
    for part in (*(entry.name for entry, _ in terms), combined.advantage):
        if is_own(part):
            _try_on_a_batch(part, combined)
    return combined


def option_names(name: str) -> set[str]:
    """Return the options that an objective of this name takes: its method's, its attachments', the common ones."""
    (base, _), *attached = _terms(name)
    entries = [_method(base), *(_attachment(key) for key, _ in attached)]
    return {*COMMON_OPTIONS, *(option for entry in entries for option in entry.options)}


def _attaches(key: str) -> bool:
    return key in ATTACHMENTS or is_own(key)


def _terms(text: str) -> list[tuple[str, dict[str, Any]]]:
    terms, at = [], 0
    while at <= len(text):
        match = _TERM.match(text, at)
        if not match or (match.end() < len(text) and text[match.end()] != "+"):
            where = f"cannot read the objective {text!r:.80} at {text[at:]!r:.80}"
            raise ValueError(f"{where}: write 'method + attachment(option=value)'")
        terms.append((match["name"], _parse_options(text, match["options"] or "")))
        at = match.end() + 1
    return terms


def _parse_options(text: str, inside: str) -> dict[str, Any]:
    options = {}
    for item in filter(None, (piece.strip() for piece in inside.split(","))):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or not key.isidentifier() or not value:
            raise ValueError(f"cannot read {item!r:.80} in the objective {text!r:.80}: write option=value")
        options[key] = _literal(value)
    return options


def _literal(value: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return words[value.lower()]
    try:
        return ast.literal_eval(value)  # numbers; choices such as C2 are written without quotes and stay text
    except (ValueError, SyntaxError):
        return value


def _as_options(key: str, value: Any) -> dict[str, Any]:
    if value is True:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if value is False or value is None:
        raise ValueError(f"option {key}={value!r}: leave it out to do without {key}")
    return {next(iter(_attachment(key).options)): value}


def _method(name: str) -> Entry:
    if is_own(name):
        return own_entry(name)
    if name in METHODS:
        return METHODS[name]
    if name in ATTACHMENTS:
        raise ValueError(f"{name!r} attaches to a method and is none itself: write for example 'dapo + {name}'")
    raise ValueError(f"unknown method {name!r}: {nearest(name, sorted(METHODS))} (one of your own: python:MODULE:NAME)")


def _attachment(name: str) -> Entry:
    if is_own(name):
        return own_entry(name)
    if name in ATTACHMENTS:
        return ATTACHMENTS[name]
    if name in METHODS:
        known = ", ".join(ATTACHMENTS)
        raise ValueError(f"{name!r} is a method and cannot attach to another: attachments are {known}")
    raise ValueError(f"unknown attachment {name!r}: {nearest(name, sorted(ATTACHMENTS))}")


def own_entry(name: str) -> Entry:
    """Read an entry off the function that `python:MODULE:NAME` stands for; its keyword arguments are its options."""
    build = load_part(name)
    options = read_options(name, build)
    for key, option in options.items():
        if not _is_simple(option.type) or option.type is type(None):
            raise option_error(name, build, key, f"has the type {shown(option.type)}: an option is {_KINDS}")
    taken = sorted(options.keys() & {*COMMON_OPTIONS, *ATTACHMENTS})
    if taken:
        raise ValueError(f"{name}: {location(build)}: every method has an option {taken[0]!r}: call yours otherwise")
    return Entry(name, "", *title_and_notes(build), build, options)


def _is_simple(annotation: Any) -> bool:
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        return all(map(_is_simple, typing.get_args(annotation)))
    return typing.get_origin(annotation) is Literal or annotation in _SIMPLE


def _distribute(name: str, options: Mapping[str, Any], terms: list[tuple[Entry, dict[str, Any]]]) -> None:
    """Give each keyword option to the method if it has it, else to the one attachment that has it."""
    for key, value in options.items():
        owners = [given for entry, given in terms if key in entry.options]
        if not owners:
            known = {*COMMON_OPTIONS, *ATTACHMENTS, *(option for entry, _ in terms for option in entry.options)}
            raise ValueError(f"unknown option of {name} {key!r}: {nearest(key, sorted(known))}")
        if len(owners) > 1 and key not in terms[0][0].options:
            where = f"several attachments of {name!r} have the option {key!r}"
            raise ValueError(f"{where}: put it in brackets after the one you mean")
        owners[0][key] = value


def _build(entry: Entry, options: dict[str, Any], attached: bool) -> Objective | TokenRule | Penalty:
    for key in options:
        if key not in entry.options:
            hint = nearest(key, sorted(entry.options)) if entry.options else "it has none"
            raise ValueError(f"unknown option of {entry.name} {key!r}: {hint}")
    checked = {key: check_option(entry.name, key, value, entry.options[key]) for key, value in options.items()}
    if not is_own(entry.name):
        check_ranges(entry, checked)
        known: Objective | TokenRule | Penalty = entry.build(**checked)
        return known
    with errors_located(entry.name, entry.build):
        built = entry.build(**checked)
    return _check_built(entry, built, attached)


def _combine(built: list[Objective | TokenRule | Penalty], entries: list[Entry], common: dict[str, Any]) -> Objective:
    base, *others = built
    assert isinstance(base, Objective)
    rules, penalties = list(base.rules), list(base.penalties)
    for attached in others:
        present = rules if isinstance(attached, TokenRule) else penalties
        if any(attached.name == other.name for other in present):
            where = f"{attached.name!r} is in {entries[0].name!r} already"
            raise ValueError(f"{where}: attach it once, with the options you mean")
        present.append(attached)  # type: ignore[arg-type]
    name = " + ".join(entry.name for entry in entries)
    given = {key: value for key, value in common.items() if value is not None}  # none: as if it were not there
    own = {"advantage": given.pop("advantage")} if is_own(given.get("advantage")) else {}
    common = own | {key: check_option(name, key, value, COMMON_OPTIONS[key]) for key, value in given.items()}
    if "aggregation" in common:
        common["normalizer"] = AGGREGATIONS[common.pop("aggregation")]
    common |= {"name": name, "title": entries[0].title, "paper": entries[0].paper}
    return replace(base, rules=tuple(rules), penalties=tuple(penalties), **common)


def _check_built(entry: Entry, built: object, attached: bool) -> Objective | TokenRule | Penalty:
    """Return what a user's function built, or raise if it is not what its place in the name asks for."""
    where = f"{entry.name}: {location(entry.build)}"
    if attached:
        if isinstance(built, TokenRule | Penalty):
            return built
        if isinstance(built, Objective):
            raise OwnPartError(f"{where}: it returns an Objective, so it is a method: write it first, before any +")
        raise OwnPartError(f"{where}: it returned {shown(built)}, and an attachment is a TokenRule or a Penalty")
    if isinstance(built, Objective):
        return built
    if isinstance(built, TokenRule | Penalty):
        raise OwnPartError(f"{where}: it returns an attachment: write for example 'dapo + {entry.name}'")
    raise OwnPartError(f"{where}: it returned {shown(built)}, and a method is an Objective")


def _try_on_a_batch(name: str, objective: Objective) -> None:
    """Plan a small batch and take its loss, so that a mistake in the user's code is found before a run starts."""
    with errors_located(name, load_part(name)):
        advantage = objective.advantages(torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([0, 0, 1, 1]))
        batch = _small_batch(advantage, objective)
        out, grad_logp = objective.loss_and_grad(batch.old_logp + 0.05, objective.plan(batch))
    if not bool(torch.isfinite(out.loss)) or not bool(torch.isfinite(grad_logp).all()):
        raise OwnPartError(f"{name}: {location(load_part(name))}: on a small batch its loss or gradient is not finite")


def _small_batch(advantage: torch.Tensor, objective: Objective) -> TokenBatch:
    """Return four responses of three tokens each, with every field; no random number is drawn."""
    sequence = torch.arange(4).repeat_interleave(3)
    old_logp = -torch.linspace(0.01, 6.0, 12)
    current = old_logp if objective.token_stats == "current" else None
    return TokenBatch(
        old_logp=old_logp,
        advantage=advantage[sequence],
        sequence=sequence,
        entropy=torch.linspace(2.0, 0.1, 12),
        token=torch.arange(12),
        segment=torch.arange(12) // 2,
        sampler_logp=old_logp,
        ref_logp=old_logp,
        current_logp=current,
        proxy_logp=old_logp,
        sum_p2=torch.full((12,), 0.5),
        sum_p2_logp=torch.full((12,), -0.3),
        group=torch.tensor([0, 0, 1, 1]),
        reward=torch.tensor([1.0, 0.0, 0.5, 0.5]),
    )


METRICS: dict[str, str] = {
    "correction/weight_mean": "mean of p_old / p_sampler over the tokens",
    "entrocraft/floor": "the lower end of Entrocraft's band at this step",
    "entrocraft/side": "1 if the rollout's entropy is above Entrocraft's band, -1 if below, 0 within",
    "entropic/alpha": "coefficient of EntroPIC's term on probable tokens, -1 to 1; above 0 it lowers the entropy",
    "entropy_bonus/coef": "coefficient of the entropy bonus in this update; 0 while the entropy is above its target",
    "repo_r/strength": "REPO-R's z: above 0 it raises the entropy, below 0 it lowers it",
    "s2t/candidate_share": "share of tokens that are rare and rewarded: the candidates for silencing",
    "s2t/entropy_threshold": "a candidate with an entropy below this is spurious; absent without candidates",
    "sspo/segment_entropy": "mean entropy of a subsentence, averaged over subsentences",
    "stare/gate_open": "1 if STARE reweights tokens in this update, 0 if the entropy has reached the target",
    "stare/weight": "the critical weight that stare(boost=critical) puts on tokens; logged while its gate is open",
    "tokens/boosted_share": "share of tokens whose weight was raised above 1",
    "tokens/damped_share": "share of tokens whose weight was lowered",
    "tokens/dropped_share": "share of tokens that get weight 0 but still count in the mean",
    "tokens/masked_share": "share of tokens left out because their entropy is low",
    "tokens/penalized_share": "share of tokens with a penalty of their own, in KL-Cov and Lp-Reg instead of a clip",
    "tokens/silenced_share": "share of tokens that get weight 0 and do not count in the mean",
    "tokens/without_signal_share": "share of tokens in groups whose advantages are all zero, which count=signal leaves "
    "out",
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
