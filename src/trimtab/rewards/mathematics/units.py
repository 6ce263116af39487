"""Units after a number: which words are one, and which are the same.

An answer may leave out or add a unit, but not exchange it. A single word that is not a unit (`42 apples`) names what is
counted; words that change a number's meaning (`42 hundred`, `42 or so`) are not accepted.
"""

from __future__ import annotations

import re

_SPELLINGS = """
cm centimeter centimeters centimetre centimetres|m meter meters metre metres|mm millimeter millimeters|in inch inches
km kilometer kilometers kilometre kilometres|ft foot feet|yd yard yards|mi mile miles|g gram grams gm
kg kilogram kilograms|mg milligram milligrams|lb lbs pound pounds|oz ounce ounces|s sec secs second seconds
min mins minute minutes|h hr hrs hour hours|ms millisecond milliseconds|day days|week weeks|month months
year years yr yrs|dollar dollars usd|cent cents|euro euros|deg degree degrees|rad radian radians|unit units
l liter liters litre litres|ml milliliter milliliters|mph|kmh|hz hertz|newton newtons|j joule joules|w watt watts
v volt volts|amp amps ampere|kelvin kelvins|pa pascal pascals|mol mole moles|ev|mev|gev|kw|kj|cal calorie calories
kcal|people person persons|gallon gallons gal|quart quarts|pint pints|cup cups|acre acres|ton tons|point points
way ways|time times|piece pieces
"""
# Each line and each `|` separates groups of spellings; the first of a group is its canonical one.
_CANONICAL = {word: group.split()[0] for group in re.split(r"[|\n]", _SPELLINGS) for word in group.split()}
_NOT_COUNTABLE = frozenset(
    """
    ones tens hundred hundreds thousand thousands million millions billion billions trillion dozen dozens percent permil
    pi half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths tenth tenths hundredth
    hundredths thousandth thousandths zero one two three four five six seven eight nine ten not no or and maybe wrong
    false incorrect mod base factorial squared cubed square cubic root over plus minus times divided by than
    approximately about nearly almost less more least most to if is are but either neither any all none score nan inf
    infinity undefined choose
    """.split()
)
_PATTERN = re.compile(r"[a-zA-Z.]+(?:(?: |/| per |-)[a-zA-Z.]+){0,3}")
_POWER_PREFIX = {"square": "^2", "sq": "^2", "sq.": "^2", "cubic": "^3", "cu": "^3"}
_POWER_SUFFIX = {"squared": "^2", "cubed": "^3"}


def parse_unit(words: str, power: str = "") -> str | None:
    """Return the unit that the words after a number name, in one spelling; None where they are not a unit.

    `power` is the exponent that follows them: `cm` and `2` are square centimeters.
    """
    words = " ".join(words.replace("~", " ").replace("\\", " ").split()).strip(" .,")
    if not words or len(words) > 40 or not _PATTERN.fullmatch(words):
        return None
    suffix = "^" + power if power else ""
    parts = words.lower().replace("/", " per ").split()
    if len(parts) > 1 and parts[0] in _POWER_PREFIX and not suffix:
        suffix, parts = _POWER_PREFIX[parts[0]], parts[1:]
    elif len(parts) > 1 and parts[-1] in _POWER_SUFFIX and not suffix:
        suffix, parts = _POWER_SUFFIX[parts[-1]], parts[:-1]
    if len(parts) == 1:
        name = _CANONICAL.get(parts[0].rstrip("."))
        if name:
            return name + suffix
        # `#` marks a thing that is counted: any two of those are compatible.
        countable = len(parts[0]) > 2 and parts[0].isalpha() and parts[0] not in _NOT_COUNTABLE
        return "#" + parts[0].removesuffix("s") if countable else None
    known = [_CANONICAL.get(part) for part in parts if part != "per"]
    if "per" in parts and all(known):
        return " per ".join(str(name) for name in known) + suffix
    return None


def compatible_units(truth: str | None, extracted: str | None) -> bool:
    """Return whether two units may mean the same: one may be missing, two must be equal (things counted may differ)."""
    if truth is None or extracted is None or truth == extracted:
        return True
    return truth.startswith("#") and extracted.startswith("#")
