"""Build an objective from a name: `"stapo"`, `"sspo + s2t"`, `"gspo + stare(variant=C2)"`, or by keyword."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import trimtab.objectives.methods.attachments
import trimtab.objectives.methods.catalog  # noqa: F401  (both fill the registry)
from trimtab.objectives.methods.registry import ATTACHMENTS, METHODS, Entry, check_option
from trimtab.objectives.normalizers import AGGREGATIONS
from trimtab.objectives.objective import Objective, Scope, TokenStats
from trimtab.objectives.plan_builder import TokenRule
from trimtab.objectives.rules.penalties import Penalty
from trimtab.text import nearest

# Options that every method takes.
COMMON_OPTIONS: dict[str, Any] = {
    "aggregation": Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"],
    "scope": Scope,
    "token_stats": TokenStats,
}

_TERM = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\((?P<options>[^()]*)\))?\s*")


def objective(name: str, **options: Any) -> Objective:
    """Build an objective by name.

    `name` is a method, and after each `+` an attachment, with options in brackets if needed. Keyword options go to the
    method or attachment that has them; an attachment's name as a keyword attaches it (`True`, a mapping of its options,
    or the value of its first option). Every method takes `aggregation`, `scope` and `token_stats`.
    """
    (base, base_options), *attached = _terms(name)
    method = _method(base)
    attached += [(key, _as_options(key, options.pop(key))) for key in list(options) if key in ATTACHMENTS]
    common = {key: options.pop(key) for key in list(options) if key in COMMON_OPTIONS}
    common |= {key: base_options.pop(key) for key in list(base_options) if key in COMMON_OPTIONS}
    terms = [(method, base_options)] + [(_attachment(key), value) for key, value in attached]
    _distribute(name, options, terms)
    return _combine([_build(entry, given) for entry, given in terms], [entry for entry, _ in terms], common)


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
    return {next(iter(ATTACHMENTS[key].options)): value}


def _method(name: str) -> Entry:
    if name in METHODS:
        return METHODS[name]
    if name in ATTACHMENTS:
        raise ValueError(f"{name!r} attaches to a method and is none itself: write for example 'dapo + {name}'")
    raise ValueError(f"unknown method {name!r}: {nearest(name, sorted(METHODS))}")


def _attachment(name: str) -> Entry:
    if name in ATTACHMENTS:
        return ATTACHMENTS[name]
    if name in METHODS:
        known = ", ".join(ATTACHMENTS)
        raise ValueError(f"{name!r} is a method and cannot attach to another: attachments are {known}")
    raise ValueError(f"unknown attachment {name!r}: {nearest(name, sorted(ATTACHMENTS))}")


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


def _build(entry: Entry, options: dict[str, Any]) -> Objective | TokenRule | Penalty:
    for key in options:
        if key not in entry.options:
            raise ValueError(f"unknown option of {entry.name} {key!r}: {nearest(key, sorted(entry.options))}")
    checked = {key: check_option(entry.name, key, value, entry.types[key]) for key, value in options.items()}
    built: Objective | TokenRule | Penalty = entry.build(**checked)
    return built


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
    common = {key: check_option(name, key, value, COMMON_OPTIONS[key]) for key, value in given.items()}
    if "aggregation" in common:
        common["normalizer"] = AGGREGATIONS[common.pop("aggregation")]
    common |= {"name": name, "title": entries[0].title, "paper": entries[0].paper}
    return replace(base, rules=tuple(rules), penalties=tuple(penalties), **common)
