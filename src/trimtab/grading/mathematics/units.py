"""Units after a number: which words are one, which are the same, and which an answer may add.

An answer may leave out or add a known unit, but not exchange it. A word that is not known to be harmless is accepted
only where the truth has it too: after `7`, `lakh`, `eighths`, `M` and `doubled` all change the value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trimtab.grading.mathematics.commands import CONSTANTS, FUNCTIONS
from trimtab.grading.mathematics.tokenizer import Token, tokenize
from trimtab.grading.mathematics.unit_words import (
    COMPOUND_MEASURES,
    COUNTED,
    COUNTED_ALIKE,
    DESCRIPTIONS,
    EXTENTS,
    MEASURES,
    SAME_UNITS,
    SQUARED,
    SQUARED_AFTER,
    changes_value,
)

MAX_UNIT_CHARS = 60
MAX_UNIT_TOKENS = 16

_DIMENSIONS = {group.split()[0]: name for name, groups in MEASURES.items() for group in groups.split("|")}
_MEASURES = {
    spelling: group.split()[0]
    for groups in MEASURES.values()
    for group in groups.split("|")
    for spelling in group.split()
}
_COUNTED = {word: word for word in COUNTED.split()}
_COUNTED |= {word: group.split()[0] for group in re.split(r"[|\n]", COUNTED_ALIKE) for word in group.split()}
_CURRENCIES = {"\\$": "dollar", "euro": "euro", "pounds": "gbp"}
_SHORT_WORDS = frozenset("cm km mm kg mg ft mi yd lb oz hr ml mL Hz eV".split())  # not products of variables
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"\s*({'|'.join(_SCALES)})(?![A-Za-z])\.?", re.IGNORECASE)
_PART = re.compile(r"\s*(?:([A-Za-z]+(?:\.[A-Za-z]+)*)\.?(?:\s*\^\s*(-?\d))?|(/)|[-*])\s*")


def parse_unit(text: str) -> str | None:
    """Return the unit that the text after a number names, in one spelling; None where it changes the number's value.

    A measure is `cm^2` or `h^-1 km`. A known thing that is counted starts with `#`, words that are not known with `?`.
    """
    text = re.sub(r"[~\\]+", " ", text).strip().removesuffix(",")
    text = re.sub(r"\b(?:un)?ordered (pair|triple)s?\b", r"ordered\1", text)
    text = re.sub(r"\bdegrees? (?=celsius|fahrenheit)", "", text, flags=re.IGNORECASE)
    parts: list[tuple[str, int]] = []
    position = 0
    while position < len(text) <= MAX_UNIT_CHARS and (match := _PART.match(text, position)):
        position = match.end()
        if match[1] or match[3]:
            parts.append(("per" if match[3] else match[1], int(match[2] or 1)))
    if not parts or position < len(text) or text[-1] in "*-/":
        return None
    words = [word.lower() if len(word) > 3 else word for word, _ in parts]  # MB is not Mb
    if unit := _parse_measure(parts) or _parse_counted(parts):
        return unit
    if any(changes_value(word.replace(".", "")) for word in words) or any(power != 1 for _, power in parts):
        return None
    return "?" + " ".join(word.removesuffix("s") for word in words)


def _parse_measure(parts: list[tuple[str, int]]) -> str | None:
    """Return a product of powers of measures, `per` included; None where a word is not a measure."""
    if len(parts) > 1 and parts[-1][0].lower() in EXTENTS:
        parts = parts[:-1]
    if "per" in (parts[0][0].lower(), parts[-1][0].lower()):
        return None
    factors: dict[str, int] = {}
    sign = prefix = 1
    for place, (word, power) in enumerate(parts):
        name = word.lower()
        if name == "per":
            sign = -1
        elif name == "of":  # `cups of flour` are cups
            if not factors or _parse_counted(parts[place + 1 :]) is None:
                return None
            break
        elif name in SQUARED:
            prefix = SQUARED[name]
        elif name in SQUARED_AFTER and factors:
            factors[next(reversed(factors))] *= SQUARED_AFTER[name]
        else:
            thing = _thing(word) if sign < 0 or ("per", 1) in parts else None  # `dollars per apple`
            units = _measure(word) or ({"#" + thing: 1} if thing else None)
            if units is None or (prefix > 1 and any(_DIMENSIONS.get(unit) != "length" for unit in units)):
                return None
            for unit, exponent in units.items():
                factors[unit] = factors.get(unit, 0) + sign * exponent * prefix * power
            prefix = 1
    above, below = ({_DIMENSIONS.get(unit, unit) for unit, n in factors.items() if n * side > 0} for side in (1, -1))
    if not factors or prefix > 1 or 0 in factors.values() or above & below:  # cents per dollar are hundredths
        return None
    return " ".join(unit if n == 1 else f"{unit}^{n}" for unit, n in sorted(factors.items()))


def _parse_counted(parts: list[tuple[str, int]]) -> str | None:
    """Return a thing that is counted, with the words that describe it; None where a word is not known."""
    words = [word.lower() for word, power in parts if power == 1]
    if "of" in words[1:]:  # `pieces of candy` are pieces
        place = words.index("of")
        return _parse_counted(parts[:place]) if _parse_counted(parts[place + 1 :]) else None
    things = [_thing(word) for word in words]
    known = all(thing or word in DESCRIPTIONS for thing, word in zip(things, words, strict=True))
    if not known or len(words) < len(parts) or not things or things[-1] is None:
        return None
    return "#" + " ".join(thing or word for thing, word in zip(things, words, strict=True))


def _measure(word: str) -> dict[str, int] | None:
    """Return the measure that a word spells, as powers of canonical ones; symbols are known by their case."""
    if word in COMPOUND_MEASURES:
        return COMPOUND_MEASURES[word]
    lower = word.lower()
    spellings = (
        word,
        *((lower, lower.removesuffix("s")) if len(word) > 3 or (len(word) > 2 and word.istitle()) else ()),
    )
    return next(({_MEASURES[spelling]: 1} for spelling in spellings if spelling in _MEASURES), None)


def _thing(word: str) -> str | None:
    """Return the name of a thing that is counted, in the singular; None where it is not known."""
    word = word.lower()
    endings = {"": "", "s": "", "es": "", "ies": "y"}
    forms = (word.removesuffix(old) + new for old, new in endings.items() if word.endswith(old))
    return next((_COUNTED[form] for form in forms if form in _COUNTED), None)


def compatible_units(truth: str | None, extracted: str | None) -> bool:
    """Return whether an answer's unit fits the truth's: one may be missing or added if known, but not exchanged."""
    if extracted is None or truth == extracted:
        return True
    if truth is None:
        return not extracted.startswith("?")
    if truth[0] in "#?" and extracted[0] in "#?":  # the same thing, described in more words or in fewer
        asked, given = truth[1:].split(), extracted[1:].split()
        added = extracted[0] == "#" and set(asked) <= set(given)
        return asked[-1] == given[-1] and (added or set(given) <= set(asked))
    return frozenset((truth, extracted)) in SAME_UNITS


def strip_unit(tokens: list[Token]) -> tuple[list[Token], str | None, bool]:
    """Return the tokens without their unit, the unit, and whether a percent sign followed them."""
    texts = [token.text for token in tokens]
    sign = 1 if texts[0] in ("-", "+") else 0
    if len(tokens) > sign + 1 and tokens[sign].kind != "number" and (money := _currency(tokens[sign])):
        return _strip_price([*tokens[:sign], *tokens[sign + 1 :]], money)
    if len(tokens) > 1 and texts[-1] in _CURRENCIES:
        return tokens[:-1], _CURRENCIES[texts[-1]], False
    if len(tokens) > 1 and (texts[-1] == "%" or texts[-1].strip().lower() in ("percent", "per cent")):
        return tokens[:-1], None, True
    scale = {"C": "celsius", "F": "fahrenheit"}.get(texts[-1].strip())
    for tail in (["^", "circ"], ["^", "{", "circ", "}"], ["degree"]):
        end = len(texts) - (scale is not None)
        if end > len(tail) and texts[end - len(tail) : end] == tail:
            # In `\sin 30^\circ` the degrees belong to the function: it is not an angle.
            applied = any(token.text in FUNCTIONS for token in tokens)
            return (tokens, None, False) if applied else (tokens[: end - len(tail)], scale or "deg", False)
    if texts[-7:-5] == ["frac", "{"] and texts[-4:-2] == ["}", "{"] and tokens[-5].kind == tokens[-2].kind == "text":
        unit = parse_unit(f"{texts[-5]}/{texts[-2]}")
        return (tokens, None, False) if unit is None else (tokens[:-7], unit, False)
    start = _unit_start(tokens)
    if start is None:
        return tokens, None, False
    words = _join(tokens[start:])
    scaled = _SCALE.match(words)
    number, words = tokens[:start], words[scaled.end() :] if scaled else words
    if scaled:
        number += tokenize(rf"\times 10^{{{_SCALES[scaled[1].lower()]}}}")
    unit = parse_unit(words)
    return (number, unit, False) if unit or (scaled and not words.strip()) else (tokens, None, False)


def _currency(token: Token) -> str | None:
    """Return the currency that stands before a price: a sign, or its name or code (`USD 25`); else None."""
    if token.kind not in ("text", "word"):
        return _CURRENCIES.get(token.text)
    known = _MEASURES.get(token.text.strip().rstrip("."))
    return known if known and _DIMENSIONS[known] == "money" else None


def _strip_price(tokens: list[Token], money: str) -> tuple[list[Token], str | None, bool]:
    """Strip what follows a price: nothing, the same currency in words, or `per` something."""
    start = _unit_start(tokens)
    words = "" if start is None else _join(tokens[start:])
    if words and parse_unit(words) == money:
        return tokens[:start], money, False
    unit = parse_unit(f"{money} {words}") if re.match(r"\s*(?:per\b|/)", words) else None
    return (tokens, money, False) if unit is None else (tokens[:start], unit, False)


def _unit_start(tokens: Sequence[Token]) -> int | None:
    """Return where the unit at the end of an answer starts; None where there is none."""
    first = len(tokens)
    while first > 1 and len(tokens) - first < MAX_UNIT_TOKENS and _may_be_in_unit(tokens, first - 1):
        first -= 1
    start = next((place for place in range(first, len(tokens)) if _starts_unit(tokens[place])), None)
    if start is None:
        return None
    while start > first and tokens[start - 1].text in ("{", "/"):
        start -= 1
    texts = [token.text for token in tokens[start:]]
    return start if texts.count("{") == texts.count("}") and tokens[start - 1].kind != "word" else None


def _may_be_in_unit(tokens: Sequence[Token], place: int) -> bool:
    token, before = tokens[place], tokens[place - 1]
    if token.kind == "number" or token.text == "-":
        return len(token.text) == 1 and before.text in ("^", "{", "-")
    if token.text == ".":  # of an abbreviation
        return before.kind == "word"
    return token.kind in ("text", "word", "letter") or token.text in ("/", "^", "{", "}", "cdot")


def _starts_unit(token: Token) -> bool:
    """Return whether a word can only be one, not a product of variables or a function."""
    if token.kind != "word" or token.text in FUNCTIONS - {"min"} or token.text in CONSTANTS or token.text == "sqrt":
        return token.kind == "text"
    known = _measure(token.text) or _thing(token.text)
    return token.text in _SHORT_WORDS or len(token.text) > 3 or (len(token.text) == 3 and known is not None)


def _join(tokens: Sequence[Token]) -> str:
    """Return the text of a unit: words apart, no braces."""
    marks = {"cdot": "*", "{": "", "}": ""}
    return "".join(
        f" {token.text} " if token.kind in ("text", "word", "letter") else marks.get(token.text, token.text)
        for token in tokens
    )
