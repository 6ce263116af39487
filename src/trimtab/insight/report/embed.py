"""Data on its way into a page: numbers as packed arrays, everything else as JSON that no text can break out of.

Whatever a model, a task or a user wrote is hostile here. It only ever travels inside JSON in which every character that
HTML or JavaScript could take for its own is escaped, and the page puts it on the screen as text and never as markup.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LONGEST_TEXT = 20_000  # characters of a prompt, a message, a configuration
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029\x7f"}
_SURROGATES = re.compile("[\ud800-\udfff]")
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_NOT_FINITE = {"inf": "Infinity", "-inf": "-Infinity", "nan": None}  # as JavaScript's Number takes them
_SPARSE = 0.2  # an array with fewer values than this share away from its commonest is written as those alone

Array = np.ndarray[Any, Any]


def safe_json(value: Any) -> str:
    """JSON that may stand inside a script element; numbers that are not finite become null."""
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _SURROGATES.sub("\ufffd", text).translate(_ESCAPES)


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    """A text that is not endless; what was cut off is counted."""
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text) - longest:,} more characters)"


def visible(text: str) -> str:
    """A text in which characters that are not seen, or turn others around, are shown as what they are."""
    return _UNSEEN.sub(lambda found: f"\\u{{{ord(found[0]):x}}}", text)


def pack(values: Sequence[float] | Array, kind: str = "f4") -> dict[str, Any]:
    """An array for the page: its little-endian bytes in base64, or less where most values are the same.

    `kind` is a NumPy type: f4, i4, i2, u1. The page's `unpack` gives a typed array back, value for value.
    """
    array = np.ascontiguousarray(values, dtype=f"<{kind}")
    packed: dict[str, Any] = {"t": kind, "n": len(array)}
    if not len(array):
        return packed | {"c": 0}
    common = array[0] if (array == array[0]).all() else _commonest(array)
    rest = np.flatnonzero(~_same(array, common))
    if len(rest) > _SPARSE * len(array):
        return packed | {"b": _base64(array)}
    packed["c"] = common.item() if np.abs(common) < np.inf else _NOT_FINITE[str(common)]
    if len(rest):
        packed |= {"i": _base64(rest.astype("<i4")), "v": _base64(array[rest])}
    return packed


def _same(array: Array, value: Any) -> Array:
    return np.isnan(array) if np.isnan(value) else array == value


def _commonest(array: Array) -> Any:
    values, counts = np.unique(array, return_counts=True)
    return values[counts.argmax()]


def _base64(array: Array) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _plain(value: Any) -> Any:
    """Only what JSON knows: keys become text, numbers finite or null, anything foreign its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.integer):
        return int(value)
    return value if value is None or isinstance(value, str | int | bool) else str(value)
