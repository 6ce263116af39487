"""Whatever is embedded in a page comes out as it went in, and no text can leave the place it was put."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.insight.report_runs import decode_array
from trimtab.insight.report.embed import encode_array, safe_json, truncated, visible

texts = st.text(st.characters(exclude_categories=[]) | st.sampled_from("<>&/\\\"'\u2028\u2029\0\ud800\udfff\u202e-!"))


class Scripts(HTMLParser):
    """What a browser takes for the text of the scripts, and every other tag it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.inside += data


@given(
    st.recursive(texts | st.integers(-(2**53), 2**53), lambda inner: st.lists(inner) | st.dictionaries(texts, inner))
)
def test_data_comes_back_with_lone_surrogates_replaced_and_nothing_else_changed(value: Any) -> None:
    def mended(item: Any) -> Any:
        if isinstance(item, str):
            return "".join("\ufffd" if 0xD800 <= ord(c) <= 0xDFFF else c for c in item)
        if isinstance(item, dict):
            return {mended(k): mended(v) for k, v in item.items()}
        return [mended(i) for i in item] if isinstance(item, list) else item

    back = json.loads(safe_json(value))
    assert back == mended(value)


@given(texts)
def test_no_text_ends_the_script_that_holds_it(text: str) -> None:
    parser = Scripts()
    parser.feed(f'<script type="application/json">{safe_json({"x": text})}</script><p>after</p>')
    assert parser.tags == ["script", "p"]
    assert parser.inside.endswith("after")


@given(texts)
def test_json_holds_none_of_the_characters_that_html_or_javascript_take_for_their_own(text: str) -> None:
    written = safe_json([text])
    assert not set(written) & set("<>&\u2028\u2029\0\x7f")
    written.encode("utf-8")  # lone surrogates could not be written


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float32("nan")])
def test_numbers_that_are_not_finite_become_null(value: float) -> None:
    assert json.loads(safe_json({"x": value})) == {"x": None}


def test_numpy_numbers_and_foreign_things_can_be_embedded() -> None:
    assert json.loads(safe_json([np.int64(3), np.float32(0.5), 2**40, None, True, {1: object}])) == [
        3, 0.5, 2**40, None, True, {"1": "<class 'object'>"},
    ]  # fmt: skip


floats = st.lists(st.floats(width=32, allow_subnormal=True), max_size=60)


@given(floats)
def test_floats_come_back_as_they_were(values: list[float]) -> None:
    array = np.array(values, np.float32)
    back = decode_array(json.loads(safe_json(encode_array(array))))
    assert np.array_equal(array, back, equal_nan=True)


@given(st.lists(st.sampled_from([0, 0, 0, 0, 0, 0, 0, 0, 7, -1]), max_size=200), st.sampled_from(["i4", "i2"]))
def test_integers_come_back_however_they_are_spread(values: list[int], kind: str) -> None:
    assert decode_array(json.loads(safe_json(encode_array(values, kind)))).tolist() == values


def test_an_array_of_one_value_takes_no_room() -> None:
    packed = encode_array(np.full(15_000, 0.2, np.float32))
    assert len(safe_json(packed)) < 60
    assert (decode_array(packed) == np.float32(0.2)).all()


def test_a_few_silenced_tokens_among_many_take_little_room() -> None:
    weight = np.ones(15_000, np.float32)
    weight[[5, 400, 9_999]] = 0
    packed = encode_array(weight)
    assert len(safe_json(packed)) < 150
    assert np.array_equal(decode_array(packed), weight)


@pytest.mark.parametrize("value", [np.inf, np.nan, -0.0])
def test_constants_that_json_does_not_know_come_back_too(value: float) -> None:
    packed = json.loads(safe_json(encode_array(np.full(9, value, np.float32))))
    assert np.array_equal(decode_array(packed), np.full(9, value, np.float32), equal_nan=True)


def test_texts_are_cut_and_the_rest_is_counted() -> None:
    assert truncated("abc", 3) == "abc"
    assert truncated("x" * 5_000, 10) == "xxxxxxxxxx… (4,990 more characters)"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\u202eb", "a\\u{202e}b"), ("\0", "\\u{0}"), ("\x1b[31m", "\\u{1b}[31m"), ("plain ünï 漢", "plain ünï 漢")],
)
def test_what_cannot_be_seen_is_shown_as_what_it_is(text: str, shown: str) -> None:
    assert visible(text) == shown
