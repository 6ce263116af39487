"""The words that may stand after a number without changing it: units of measure, and names of things that are counted.

Any other word is refused after an answer's number, so a word is listed here only if no reading of it scales, negates or
bounds the number: `pair`, `dozen`, `quarter`, `fold` and `log` are left out on purpose.
"""

from __future__ import annotations

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
COMPOUND_MEASURES = {
    "mph": {"mi": 1, "h": -1}, "kph": {"km": 1, "h": -1}, "kmh": {"km": 1, "h": -1}, "kmph": {"km": 1, "h": -1},
    "mpg": {"mi": 1, "gallon": -1}, "kWh": {"kW": 1, "h": 1},
}  # fmt: skip
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
