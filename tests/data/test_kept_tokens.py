"""Kept tokens hold any sets of token ids in little memory, and give them back."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.data import KeptTokens, words_of_bits

VOCABULARIES = st.sampled_from([1, 31, 32, 33, 64, 100, 700])


def random_mask(seed: int, rows: int, vocabulary: int) -> np.ndarray:
    """Rows of which some keep a token, some a few, some nearly all, and none keeps nothing."""
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, vocabulary)) < rng.choice([0.0, 0.03, 0.5, 1.0], (rows, 1))
    mask[np.arange(rows), rng.integers(0, vocabulary, rows)] = True
    return mask


@given(seed=st.integers(0, 10_000), rows=st.integers(0, 12), vocabulary=VOCABULARIES)
@settings(max_examples=60, deadline=None)
def test_a_mask_comes_back_whole_in_parts_and_reordered(seed: int, rows: int, vocabulary: int) -> None:
    mask, rng = random_mask(seed, rows, vocabulary), np.random.default_rng(seed)
    kept = KeptTokens.from_mask(mask)
    assert len(kept) == rows and kept.words.dtype == np.int32
    np.testing.assert_array_equal(kept.mask(), mask)
    np.testing.assert_array_equal(kept.counts, mask.sum(1))
    first, last = sorted(rng.integers(0, rows + 1, 2))
    np.testing.assert_array_equal(kept[first:last].mask(), mask[first:last])
    np.testing.assert_array_equal(KeptTokens.concat([kept[:first], kept[first:]]).mask(), mask)
    order = rng.integers(0, rows, 2 * rows)
    np.testing.assert_array_equal(kept.take(order).mask(), mask[order])
    tokens = rng.integers(0, vocabulary, rows)
    np.testing.assert_array_equal(kept.contains(tokens), mask[np.arange(rows), tokens])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(kept)).mask(), mask)


@given(seed=st.integers(0, 10_000), vocabulary=VOCABULARIES)
@settings(max_examples=30, deadline=None)
def test_a_row_takes_a_word_per_token_or_a_bit_for_each_of_the_vocabulary(seed: int, vocabulary: int) -> None:
    mask = random_mask(seed, 8, vocabulary)
    kept = KeptTokens.from_mask(mask)
    np.testing.assert_array_equal(kept.sizes, np.minimum(mask.sum(1), words_of_bits(vocabulary)))


def test_sets_of_two_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"vocabularies of \[3, 4\] tokens: they must be of one model"):
        KeptTokens.concat([KeptTokens.from_mask(np.ones((1, size), bool)) for size in (3, 4)])
