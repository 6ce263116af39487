"""Rules that only look at a response, for rewards beside the truth: its format, its length, its language.

Each is a dataclass: its fields are the options of a recipe's `[reward.terms.NAME]`, checked when it is made.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from trimtab.data import Sample
from trimtab.grading.verdicts import Verdict
from trimtab.text import nearest, shown

# Scripts by the first word of their letters' Unicode names.
SCRIPTS = (
    "arabic", "armenian", "bengali", "cjk", "cyrillic", "devanagari", "ethiopic", "georgian", "greek", "gujarati",
    "gurmukhi", "hangul", "hebrew", "hiragana", "kannada", "katakana", "khmer", "lao", "latin", "malayalam", "myanmar",
    "sinhala", "tamil", "telugu", "thai", "tibetan",
)  # fmt: skip


@dataclass(frozen=True)
class FormatRule:
    """`format`: 1 if each of `texts` occurs exactly once, and in this order; else 0."""

    texts: Sequence[str]

    def __post_init__(self) -> None:
        good = isinstance(self.texts, list | tuple) and self.texts and all(isinstance(t, str) and t for t in self.texts)
        if not good:
            raise ValueError(f"texts = {shown(self.texts)} must be a list of texts, as ['<think>', '</think>']")

    def grade_here(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Grade responses."""
        return [Verdict("correct" if self._fits(sample.text) else "wrong") for sample in samples]

    def _fits(self, response: str) -> bool:
        places = [response.find(text) for text in self.texts]
        # Counted, because a model that is paid for a tag soon writes it twice.
        return -1 not in places and places == sorted(places) and all(response.count(text) == 1 for text in self.texts)


@dataclass(frozen=True)
class LengthRule:
    """`length`: 1 up to `free` tokens, falling to 0 at `limit` tokens."""

    free: int
    limit: int

    def __post_init__(self) -> None:
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (self.free, self.limit))
        if not whole or not 0 <= self.free < self.limit:
            given = f"free = {shown(self.free)} and limit = {shown(self.limit)}"
            raise ValueError(f"{given} must be whole numbers of tokens, free the smaller one")

    def grade_here(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Grade responses whose lengths in tokens are known."""
        return [self._grade(None if each.response is None else each.response.num_sampled) for each in samples]

    def _grade(self, tokens: int | None) -> Verdict:
        if tokens is None:
            return Verdict("crashed", error="length: the number of tokens is not known here, only in training")
        score = min(1.0, max(0.0, (self.limit - tokens) / (self.limit - self.free)))
        return Verdict("correct" if score == 1.0 else "wrong", score=score)


@dataclass(frozen=True)
class LanguageRule:
    """`language`: the share of the letters that belong to the `scripts`; 1 if there are no letters."""

    scripts: Sequence[str]

    def __post_init__(self) -> None:
        if not isinstance(self.scripts, list | tuple) or not self.scripts:
            raise ValueError(f"scripts = {shown(self.scripts)} must be a list, as ['latin']")
        for script in self.scripts:
            if script not in SCRIPTS:
                raise ValueError(f"there is no script {shown(script)}: {nearest(str(script), SCRIPTS)}")

    def grade_here(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Grade responses."""
        return [self._grade(sample.text) for sample in samples]

    def _grade(self, response: str) -> Verdict:
        letters = Counter[str]()
        for char, count in Counter(response).items():
            if char.isalpha():
                letters[_script(char)] += count
        total = letters.total()
        score = sum(letters[script] for script in self.scripts) / total if total else 1.0
        return Verdict("correct" if score == 1.0 else "wrong", score=score)


@lru_cache(maxsize=10_000)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0].lower()


RESPONSE_RULES: dict[str, type[FormatRule | LengthRule | LanguageRule]] = {
    "format": FormatRule,
    "length": LengthRule,
    "language": LanguageRule,
}


def make_rule(name: str, kind: type[Any], options: dict[str, Any], *positional: Any) -> Any:
    """Make a rule from its options; an unknown, missing or wrong one is a ValueError that names the rule."""
    known = [each.name for each in fields(kind)][len(positional) :]
    for key in options:
        if key not in known:
            raise ValueError(f"the rule {name} has no option {shown(key)}: {nearest(str(key), known)}")
    try:
        return kind(*positional, **options)
    except TypeError:  # of a missing one
        raise ValueError(f"the rule {name} needs its options: {', '.join(known)}") from None
    except ValueError as error:
        raise ValueError(f"the rule {name}: {error}") from None
