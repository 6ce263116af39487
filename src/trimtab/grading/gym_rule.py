"""Grade by reasoning-gym's checkers, which get only answers and entries that pass a filter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trimtab.data import gym_dataset

_NUMBERS = re.compile(r"[-0-9\s]*")  # the checker calls eval
_MOVES = re.compile(r"(?:\D|\d(?!\d)){0,1000}")  # R999999999 is a billion moves

# Some checkers run the answer as Python, can be made to work for hours, or take NaN for correct. For those only answers
# of the form that a correct one has are passed on; another is wrong. Kinds that no filter makes safe are in
# `tasks.gym.UNSUITABLE`. Found by reading reasoning-gym 0.1.25.
ANSWER_FILTERS: Mapping[str, re.Pattern[str]] = {
    "binary_matrix": _NUMBERS,
    "coin_flip": re.compile(r"[0-9./, ]+(?:[eE]-[0-9]{1,2})?"),  # 1e999999999
    "complex_arithmetic": re.compile(r"[-+0-9.ij\s()]*"),  # nan
    "countdown": re.compile(r"(?:[-+0-9() ]|\*(?!\*)|/(?!/)){0,200}"),  # code, and 9**9**9
    "n_queens": re.compile(r"[Q_\s]*"),
    "number_sorting": re.compile(r"[-0-9.,\s\[\]'\"]*"),  # [NaN, NaN]
    "rubiks_cube": _MOVES,
    "rush_hour": _MOVES,
    "spiral_matrix": _NUMBERS,
    "string_insertion": re.compile(r"[A-Za-z]*"),
}

# The entry of a problem may come from a data file, and two checkers run a text of it as Python: where it is, and the
# form that reasoning-gym gives it.
ENTRY_FILTERS: Mapping[str, tuple[tuple[str, ...], re.Pattern[str]]] = {
    "bitwise_arithmetic": (
        ("metadata", "problem"),
        re.compile(r"(?:[-+() ]|\*(?!\*)|(?:<<|>>) 0x[0-3](?![0-9a-f])|0x[0-9a-f]{1,4}(?![0-9a-f]))*"),
    ),
    "number_sorting": (("answer",), ANSWER_FILTERS["number_sorting"]),
}


def gym_score(answer: str, kind: str, entry: Mapping[str, Any], options: Mapping[str, Any]) -> float | None:
    """Return the checker's score between 0 and 1; None where the checker failed."""
    checker = gym_dataset(kind, options)
    allowed = ANSWER_FILTERS.get(kind)
    if allowed and not allowed.fullmatch(answer):
        return 0.0
    if not _entry_is_safe(kind, entry):
        return None
    try:
        return float(checker.score_answer(answer, entry))
    except Exception:  # a third-party checker may raise anything
        return None


def _entry_is_safe(kind: str, entry: Mapping[str, Any]) -> bool:
    """Return whether the text of an entry that the checker runs, if any, has the form of reasoning-gym's own."""
    if kind not in ENTRY_FILTERS:
        return True
    names, allowed = ENTRY_FILTERS[kind]
    text: Any = entry
    for name in names:
        text = text.get(name) if isinstance(text, Mapping) else None
    return isinstance(text, str) and allowed.fullmatch(text) is not None
