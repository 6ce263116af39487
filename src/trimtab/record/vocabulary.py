"""The bytes of every token id, stored once for a run: records hold token ids and are read without the tokenizer."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of every token id (the name of a special token), and whether it is special. Unknown ids are special."""

    text: Sequence[bytes]
    special: Sequence[bool]

    def __len__(self) -> int:
        return len(self.text)

    def is_special(self, token: int) -> bool:
        """Return whether a token is left out when text is decoded."""
        return not 0 <= token < len(self.special) or self.special[token]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Decode tokens to one string each, which joined are the whole text.

        A character that spans several tokens is in the string of the last one; invalid bytes become U+FFFD.
        """
        # The incremental decoder keeps the bytes of an unfinished character until a later token completes it.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [decoder.decode(self._bytes(token)) for token in tokens]
        rest = decoder.decode(b"", final=True)
        return [*pieces[:-1], pieces[-1] + rest] if pieces else []

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, special ones by name."""
        return b"".join(map(self._bytes, tokens)).decode("utf-8", "replace")

    @cached_property
    def text_bytes(self) -> dict[int, bytes]:
        """Return the bytes of every token that is not special; `segment_ids` takes this in place of a tokenizer."""
        return {n: text for n, (text, special) in enumerate(zip(self.text, self.special, strict=True)) if not special}

    def _bytes(self, token: int) -> bytes:
        # A model with a padded head can sample ids that its tokenizer does not have.
        return self.text[token] if 0 <= token < len(self.text) else f"<{token}>".encode()
