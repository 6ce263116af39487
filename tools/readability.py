"""Measures how hard the docs are to read: Gunning fog and long sentences, over prose only.

`python tools/readability.py` prints a line per page; `--against COMMIT` measures the pages of that commit too and
writes both to benchmarks/results/readability.json.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/readability.json"
LONG = 30  # words: readers start to lose the subject of a sentence around here


class Prose(NamedTuple):
    """What is counted in a text."""

    sentences: int
    words: int
    hard: int
    long_sentences: int

    def figures(self) -> dict[str, float]:
        """Gunning fog, words per sentence, and the shares of hard words and long sentences."""
        sentences, words = max(self.sentences, 1), max(self.words, 1)
        fog = 0.4 * (words / sentences + 100 * self.hard / words)
        return {
            "fog": round(fog, 1),
            "words_per_sentence": round(words / sentences, 1),
            "hard_words": round(self.hard / words, 3),
            "long_sentences": round(self.long_sentences / sentences, 3),
            "words": self.words,
        }


def prose(markdown: str) -> list[str]:
    """Return the paragraphs and list items of a page, without code blocks, tables, headings, comments and addresses."""
    text = re.sub(r"\A---\n.*?\n---\n", "", markdown, flags=re.DOTALL)  # front matter
    text = re.sub(r"^( *)(```|~~~).*?^ *\2", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"`` .*? ``|`[^`]+`", "code", text)  # an identifier is read as one easy word
    text = re.sub(r"<[^>\n]+>", "", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^> ?", "", text, flags=re.MULTILINE)
    lines = [line for line in text.splitlines() if not re.match(r"\s*(\||#|!!!|\?\?\?|===)", line)]
    joined = re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "\n\n", "\n".join(lines), flags=re.MULTILINE)
    return [" ".join(block.split()) for block in re.split(r"\n\s*\n", joined) if block.strip()]


def sentences(block: str) -> list[str]:
    """Split a paragraph where a sentence ends and the next one begins with a capital letter, a digit or a mark."""
    guarded = re.sub(r"\b(e\.g|i\.e|vs|etc|al|Dr|Fig)\.", r"\1", block)
    ends = r"(?<=[.!?])[\"')*]*\s+(?=[A-Z0-9\"'(*]|(?:code|trimtab|verl)\b)"
    return [each for each in re.split(ends, guarded) if words(each)]


def words(text: str) -> list[str]:
    """Return the words of a text; numbers and formulas are not words."""
    return re.findall(r"[A-Za-z]+(?:['-][A-Za-z]+)*", text)


def syllables(word: str) -> int:
    """Estimate the syllables of a word by its groups of vowels."""
    word = word.lower()
    stem = re.sub(r"(?:es|ed|ing)$", "", word) if len(word) > 4 else word  # Gunning does not count these endings
    stem = re.sub(r"(?<![aeiouyl])e$", "", stem)
    return max(len(re.findall(r"[aeiouy]+", stem)), 1)


def hard(word: str) -> bool:
    """Say whether a word has three syllables or more; names and compounds of easy words do not count."""
    return not word[:1].isupper() and any(syllables(part) >= 3 for part in word.split("-"))


def count(pages: Iterable[str]) -> Prose:
    """Count sentences and words over the prose of some pages."""
    found = [words(each) for page in pages for block in prose(page) for each in sentences(block)]
    return Prose(
        sentences=len(found),
        words=sum(map(len, found)),
        hard=sum(hard(word) for each in found for word in each),
        long_sentences=sum(len(each) > LONG for each in found),
    )


def pages_now() -> dict[str, str]:
    """Return the pages of the working tree by name."""
    paths = [
        *sorted(ROOT.glob("docs/**/*.md")),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def pages_at(commit: str) -> dict[str, str]:
    """Return the same pages as they were at a commit; pages that did not exist are left out."""
    tree = _git("ls-tree", "-r", "--name-only", commit).splitlines()
    names = [name for name in tree if re.fullmatch(r"docs/.*\.md|README\.md|CONTRIBUTING\.md|SECURITY\.md", name)]
    return {name: _git("show", f"{commit}:{name}") for name in names}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def measure(pages: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Return the figures of each page and of all together."""
    each = {name: count([text]).figures() for name, text in pages.items()}
    return {**each, "all": count(pages.values()).figures()}


def main() -> None:
    """Print a table, and with --against write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", metavar="COMMIT", help="measure the pages of this commit too, and write both")
    commit = parser.parse_args().against
    now, before = measure(pages_now()), measure(pages_at(commit)) if commit else {}
    for name in sorted({*now, *before}):
        cells = []
        for figures in (before.get(name), now.get(name)):
            keys = ("fog", "words_per_sentence", "long_sentences", "words")
            cells.append("  ".join(f"{figures[key]:>6g}" for key in keys) if figures else " " * 30)
        print(f"{name:28} {'   '.join(cells)}")
    if commit:
        same = count(text for name, text in pages_now().items() if name in before).figures()
        result = {
            "index": "Gunning fog over prose",
            "long_sentence_words": LONG,
            "commit_before": commit,
            "all_after_without_new_pages": same,
        }
        RESULT.write_text(json.dumps({**result, "before": before, "after": now}, indent=1) + "\n")


if __name__ == "__main__":
    main()
