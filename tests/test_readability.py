"""The measure of the docs' readability counts prose, and nothing else."""

from __future__ import annotations

import readability

PAGE = """\
# A heading that does not count

The policy learns. It `samples.tokens` from [a distribution](https://example.org/many/words/here).

| a table | that does not count |
|---|---|

- One item (e.g. this one) ends here
- The probability is <b>high</b>: `<|im_end|>` and `a | b` are code.

<!-- a comment. With sentences. -->
```python
print("code. Does not count.")
```
"""


def test_only_prose_counts() -> None:
    assert readability.prose(PAGE) == [
        "The policy learns. It code from a distribution.",
        "One item (e.g. this one) ends here",
        "The probability is high: code and code are code.",
    ]


def test_sentences_and_hard_words_are_counted() -> None:
    found = readability.count([PAGE])
    # hard: policy, distribution, probability
    assert (found.sentences, found.words, found.hard) == (4, 25, 3)
    assert found.figures()["fog"] == round(0.4 * (25 / 4 + 100 * 3 / 25), 1)


def test_syllables_follow_gunnings_rules() -> None:
    words = {"tokens": 2, "policy": 3, "rate": 1, "probability": 5, "table": 2, "silenced": 2}
    assert {word: readability.syllables(word) for word in words} == words
    assert not readability.hard("Alibaba") and not readability.hard("mini-batch") and readability.hard("policy-based")


def test_long_sentences_are_counted() -> None:
    assert readability.count(["word " * readability.LONG + "end. Short one."]).long_sentences == 1
