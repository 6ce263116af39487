"""Stop strings of a request, looked for while its answer is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopStrings:
    """Says after how many tokens a message holds one of these texts; called with the tokens so far.

    Only the end of the message is decoded each time: as many tokens as a stop string can have, and a few more.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._stop, self._decode = stop, decode
        self._back = 4 * max(map(len, stop)) + 8  # a character may be four tokens
        self._seen = 0

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """Return after how many tokens the message is over; None if it is not."""
        if len(tokens) < self._seen:  # sampled anew
            self._seen = 0
        start = max(0, self._seen - self._back)
        window = [int(token) for token in tokens[start:]]
        if not self._is_in(window):
            self._seen = len(tokens)
            return None
        counts = range(max(1, self._seen - start), len(window))
        return start + next((count for count in counts if self._is_in(window[:count])), len(window))

    def _is_in(self, tokens: list[int]) -> bool:
        text = self._decode(tokens)
        return any(stop in text for stop in self._stop)
