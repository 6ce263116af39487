"""Units after a number: which words are one, which are the same, and which an answer may add.

An answer may leave out or add a known unit, but not exchange it. A word that is not known is accepted only if the truth
has it too: after `7`, `lakh`, `eighths`, `M` and `doubled` all change the value. So a word is listed here only if no
reading of it scales, negates or bounds the number: `pair`, `dozen`, `quarter`, `fold` and `log` are left out for that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trimtab.grading.mathematics.tokenizer import CONSTANTS, FUNCTIONS, Token, tokenize

# One unit per entry: its canonical symbol, then other spellings. A name of four letters or more is known in any case
# and in the plural; a symbol only as it is written here, because `m` is a meter and `M` a million.
MEASURES = {
    "length": "m meter metre|cm centimeter centimetre|mm millimeter millimetre|km kilometer kilometre|dm decimeter|nm "
    "nanometer|um micrometer micron|in inch inches|ft foot feet|yd yard yds|mi mile|unit|ly lightyear|pc parsec|AU|"
    "angstrom angstroms",
    "mass": "g gram gm|kg kilogram kgs|mg milligram|lb lbs|pound|oz ounce|ton tonne",
    "time": "s sec second secs|min minute mins|h hr hrs hour|ms millisecond|ns nanosecond|day days|week wk wks|month|"
    "year yr yrs",
    "money": "dollar usd USD buck|cent|euro eur EUR|gbp GBP|rupee|yen|yuan|peso",
    "angle": "deg degree|rad radian rads",
    "temperature": "celsius|fahrenheit|kelvin",
    "volume": "l L liter litre|ml mL milliliter millilitre|gallon gal|quart qt|pint|cup|tablespoon tbsp|teaspoon tsp",
    "area": "acre|hectare",
    "force": "N newton|dyne",
    "energy": "J joule|kJ kilojoule|cal calorie|kcal kilocalorie|eV ev|keV|MeV mev|GeV gev|erg ergs",
    "power": "W watt|kW kw kilowatt|MW megawatt",
    "voltage": "V volt|kV kilovolt|mV millivolt",
    "current": "A amp amps ampere|mA milliamp",
    "frequency": "Hz hz hertz|kHz kilohertz|MHz megahertz|GHz gigahertz",
    "pressure": "Pa pascal|kPa kilopascal|MPa|atm",
    "amount": "mol mole mols",
    "charge": "coulomb",
    "resistance": "ohm ohms",
    "data": "bit bits|byte",
}
_COMPOUNDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "mpg": "mi/gallon", "kWh": "kW*h"}
_COMPOUND = re.compile(rf"\b(?:{'|'.join(_COMPOUNDS)})\b")
SQUARED = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
SQUARED_AFTER = {"squared": 2, "cubed": 3}
# A word that names two units fits either.
SAME_UNITS = frozenset(frozenset(pair.split()) for pair in ("pound lb", "pound gbp", "deg celsius", "deg fahrenheit"))

# Words of a group name the same thing where a question asks how many; each other word names a thing of its own.
COUNTED_ALIKE = """
way arrangement possibility outcome combination permutation choice selection option method
solution value answer orderedpair orderedtriple roots|number integer|person people persons|child children kid kids
man men|woman women|mouse mice|goose geese|tooth teeth|knife knives|loaf loaves|leaf leaves|shelf shelves|scarf scarves
"""
COUNTED = """
times piece item object thing point term element member unit vertex vertices edge face side angle triangle
squares rectangle circle polygon diagonal segment line plane region cubes sphere zeros prime divisor factors digit
subset function polynomial sequence graph path route word letter symbol character game
round match win goal turn move step lap jump shot hit throw roll flip toss draw vote trip ride visit class lesson
question problem test quiz page chapter book novel story article magazine newspaper notebook paper sheet card stamp
sticker photo picture painting drawing poster song record video movie episode show message email text call ticket coin
student pupil teacher boy girl adult parent friend sibling brother sister son daughter guest visitor customer client
passenger player athlete runner worker employee builder doctor nurse patient neighbor classmate senior camper voter
participant team group family animal pet dog cat puppy kitten bird chicken hen duck cow goat sheep horse pig rabbit
fish frog turtle snake lizard ant bee bug insect spider worm butterfly bear lion tiger elephant monkey shark whale
apple orange banana pear peach plum grape lemon cherry strawberry blueberry mango melon watermelon pineapple coconut
tomato potato onion carrot pepper cucumber mushroom vegetable fruit berry nut seed egg cookie cake cupcake pie brownie
muffin donut doughnut pancake pizza sandwich burger hamburger hotdog taco burrito candy candies chocolate lollipop
marshmallow cracker pretzel snack meal serving slice bite drink soda juice coffee milk water flour sugar rice corn
bread cheese butter meat bottle can jar box bag basket bucket barrel carton crate container packet package pack tray
plate bowl glass mug spoon fork pot pan tub tin bin bundle bunch batch load row column rack room house home
apartment building floor wall window door seat chair table desk bed lamp candle bulb towel blanket pillow shirt hat cap
coat jacket dress skirt sock shoe glove ring necklace bracelet earring bead button toy doll ball balloon block marble
brick tile stick string rope ribbon nail screw bolt plank board stone rock pebble shell crayon pencil pen marker
eraser tree flower rose tulip daisy petal plant bush branch stem car truck bus buses bike bicycle train boat plane
vehicle wheel tire phone computer laptop machine robot tool leg arm hand head eye ear finger star dot spot stripe
color colour shape pattern type kind flavor flavour ingredient chip token prize medal gift present
handshake coloring colouring committee lattice cut palindrome
"""
# Words that may stand before a thing that is counted (`distinct integers`), or behind a measure (`years old`).
EXTENTS = frozenset("old long tall wide high deep".split())
DESCRIPTIONS = frozenset(
    """
    distinct different possible unique positive real whole natural even odd prime complex rational consecutive ordered
    right isosceles equilateral acute obtuse congruent similar identical total such valid red blue green yellow white
    black brown pink purple golden small large big little new old young long tall wide high deep
    """.split()
)

# A truth may name its unit by a word that is not listed (`16 daps`), which an answer may leave out: but not one of
# these, which are part of the value.
_SCALING = frozenset(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety ones tens hundred hundreds thousand
    thousands lakh lakhs crore crores dozen dozens score scores gross grand myriad half halves third thirds quarter
    quarters fifth pair pairs couple couples double doubled doubles twice thrice triple tripled quadruple single once
    times square squared cube cubed cubic root roots inverse reciprocal negative minus plus positive opposite over
    divided by of mod modulo base factorial percent percentage permil permille promille ppm ppb bps mille pi degree
    log ln exp kilo mega giga tera peta hecto deca deci centi milli micro nano pico k m b bn mn mil mm g t am pm noon
    midnight oclock bc ad bce ce or and not no nor than less more fewer least most about approximately approx roughly
    nearly almost around to from through until up down if is are but either neither any all none nan inf infinity
    infinite undefined choose maybe wrong false incorrect below above under before after ago north south east west
    left right clockwise counterclockwise profit loss debt gain owed short real imaginary decimal binary octal hex
    hexadecimal st nd rd th
    """.split()
)


def changes_value(word: str) -> bool:
    """Return whether a word is, or may be, part of a number's value: a numeral, a scale, a sign, a bound, a time."""
    word = word.lower()
    return word in _SCALING or word.endswith(("illion", "illions", "illiard", "th", "ths", "fold", "teen", "nds"))


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
    """Return the unit that the text after a number names, in one spelling; None if it changes the number's value.

    A measure is `cm^2` or `h^-1 km`. A known thing that is counted starts with `#`, words that are not known with `?`.
    """
    text = re.sub(r"[~\\]+", " ", text).strip().removesuffix(",")
    text = re.sub(r"\b(?:un)?ordered (pair|triple)s?\b", r"ordered\1", text)
    text = re.sub(r"\bdegrees? (?=celsius|fahrenheit)", "", text, flags=re.IGNORECASE)
    text = _COMPOUND.sub(lambda match: _COMPOUNDS[match[0]], text)
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
    """Return a product of powers of measures, `per` included; None if a word is not a measure."""
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
            unit = _measure(word)
            if unit is None and ("per", 1) in parts and (thing := _thing(word)):  # `dollars per apple`
                unit = "#" + thing
            if unit is None or (prefix > 1 and _DIMENSIONS.get(unit) != "length"):
                return None
            factors[unit] = factors.get(unit, 0) + sign * prefix * power
            prefix = 1
    above, below = ({_DIMENSIONS.get(unit, unit) for unit, n in factors.items() if n * side > 0} for side in (1, -1))
    if not factors or prefix > 1 or 0 in factors.values() or above & below:  # cents per dollar are hundredths
        return None
    return " ".join(unit if n == 1 else f"{unit}^{n}" for unit, n in sorted(factors.items()))


def _parse_counted(parts: list[tuple[str, int]]) -> str | None:
    """Return a thing that is counted, with the words that describe it; None if a word is not known."""
    words = [word.lower() for word, power in parts if power == 1]
    if "of" in words[1:]:  # `pieces of candy` are pieces
        place = words.index("of")
        return _parse_counted(parts[:place]) if _parse_counted(parts[place + 1 :]) else None
    named = [_thing(word) or (word if word in DESCRIPTIONS else "") for word in words]
    if not all(named) or len(words) < len(parts) or not words or _thing(words[-1]) is None:
        return None
    return "#" + " ".join(named)


def _measure(word: str) -> str | None:
    """Return the canonical name of the measure that a word spells, if it does; symbols are known by their case."""
    lower = word.lower()
    is_name = len(word) > 3 or (len(word) > 2 and word.istitle())
    spellings = (word, lower, lower.removesuffix("s")) if is_name else (word,)
    return next((_MEASURES[spelling] for spelling in spellings if spelling in _MEASURES), None)


def _thing(word: str) -> str | None:
    """Return the name of a thing that is counted, in the singular; None if it is not known."""
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
    """Return where the unit at the end of an answer starts; None if there is none."""
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
    known = _measure(token.text) or _thing(token.text) or token.text in _COMPOUNDS
    return token.text in _SHORT_WORDS or len(token.text) > 3 or (len(token.text) == 3 and bool(known))


def _join(tokens: Sequence[Token]) -> str:
    """Return the text of a unit: words apart, no braces."""
    marks = {"cdot": "*", "{": "", "}": ""}
    return "".join(
        f" {token.text} " if token.kind in ("text", "word", "letter") else marks.get(token.text, token.text)
        for token in tokens
    )
