"""The text of every token id, kept once for a run: so a record holds ids alone, and is read without the tokenizer."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Vocabulary:
    """By token id: its bytes (a special token's name), and whether it is special. Ids beyond it are special too."""

    text: Sequence[bytes]
    special: Sequence[bool]

    def __len__(self) -> int:
        return len(self.text)

    def is_special(self, token: int) -> bool:
        """Whether a token is no part of a text."""
        return not 0 <= token < len(self.special) or self.special[token]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The tokens as text, one piece each; together they are the whole text.

        A character that is cut into several tokens comes with the last of them, bytes that are no text become the
        replacement character.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [decoder.decode(self._bytes(token)) for token in tokens]
        rest = decoder.decode(b"", final=True)
        return [*pieces[:-1], pieces[-1] + rest] if pieces else []

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, special ones by name."""
        return b"".join(map(self._bytes, tokens)).decode("utf-8", "replace")

    @cached_property
    def spelling(self) -> dict[int, bytes]:
        """The bytes of every token that is part of a text: `segment_ids` takes it in place of a tokenizer."""
        return {n: text for n, (text, special) in enumerate(zip(self.text, self.special, strict=True)) if not special}

    def _bytes(self, token: int) -> bytes:
        return self.text[token] if 0 <= token < len(self.text) else f"<{token}>".encode()
