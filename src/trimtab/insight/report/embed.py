"""Encode data for the page: numbers as base64 arrays, everything else as JSON that no text can break out of.

What a model, a task or a user wrote is untrusted. It is only embedded as JSON in which every character with a
meaning in HTML or JavaScript is escaped, and the page inserts it as text nodes, never as markup.
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
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_NOT_FINITE = {"inf": "Infinity", "-inf": "-Infinity", "nan": None}  # as JavaScript's Number takes them
_SPARSE = 0.2  # an array with at most this share of exceptions from its most common value is encoded as exceptions

NumpyArray = np.ndarray[Any, Any]


def safe_json(value: Any) -> str:
    """Return JSON that is safe inside a script element; numbers that are not finite become null."""
    # `<` could end the script element, U+2028 ends a line in old JavaScript, a lone surrogate cannot be written.
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _SURROGATES.sub("\ufffd", text).translate(_ESCAPES)


def truncated(text: str, longest: int = LONGEST_TEXT) -> str:
    """Truncate a text and say how many characters were cut."""
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text) - longest:,} more characters)"


def visible(text: str) -> str:
    """Return the text with invisible and bidirectional control characters written out as escapes."""
    return _INVISIBLE.sub(lambda found: f"\\u{{{ord(found[0]):x}}}", text)


def encode_array(values: Sequence[float] | NumpyArray, dtype: str = "f4") -> dict[str, Any]:
    """Encode an array for the page: its little-endian bytes in base64, or the exceptions if most values are the same.

    `dtype` is f4, i4, i2 or u1. The page's `decodeArray` returns a typed array with exactly these values.
    """
    array = np.ascontiguousarray(values, dtype=f"<{dtype}")
    encoded: dict[str, Any] = {"t": dtype, "n": len(array)}
    if not len(array):
        return encoded | {"c": 0}
    # Weights, clip ranges and reasons are the same for nearly all tokens: exceptions are far shorter.
    common = array[0]
    if (array != common).any():
        distinct, counts = np.unique(array, return_counts=True)
        common = distinct[counts.argmax()]
    # NaN is not equal to itself.
    rest = np.flatnonzero(~np.isnan(array) if np.isnan(common) else array != common)
    if len(rest) > _SPARSE * len(array):
        return encoded | {"b": _base64(array)}
    encoded["c"] = common.item() if np.abs(common) < np.inf else _NOT_FINITE[str(common)]
    if len(rest):
        encoded |= {"i": _base64(rest.astype("<i4")), "v": _base64(array[rest])}
    return encoded


def _base64(array: NumpyArray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _plain(value: Any) -> Any:
    """Convert to JSON types: keys become text, numbers finite or null, any other value its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.integer):
        return int(value)
    return value if value is None or isinstance(value, str | int | bool) else str(value)
