"""Chat completions of every shape: parsed in bounded memory, or refused in words that say what is wrong."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest

from helpers.evaluate.small_evals import completion
from helpers.thorough import THOROUGH
from trimtab.experiments.evaluate.completion import MAX_BYTES, BadCompletionError, Completion, parse_completion


def parse(reply: Any) -> Completion:
    """Parse a reply of at most 100 tokens."""
    return parse_completion(reply if isinstance(reply, bytes) else json.dumps(reply).encode(), 8, 100)


def with_choice(**changes: Any) -> dict[str, Any]:
    """A completion of one choice with some fields changed."""
    reply = completion(["2"])
    reply["choices"][0] |= changes
    return reply


def with_logprobs(*values: Any) -> dict[str, Any]:
    """A completion with these log-probabilities."""
    return with_choice(logprobs={"content": [{"token": "2", "logprob": value} for value in values]})


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"", "not JSON"),
        (b"<html>", "not JSON"),
        (b'{"choices": [', "not JSON"),
        (b'{"choices": "\xff"}', "byte 14 is not UTF-8"),
        (b"[" * 100_000, "too many nested brackets"),
        (b'{"choices": ' + b'{"a":' * 100_000, "too many nested brackets"),
        (b'{"choices": 1' + b"0" * 5_000 + b"}", "not JSON: Exceeds the limit"),
        ([], "the reply is an empty list, not an object"),
        (None, "the reply is null, not an object"),
        (7, "the reply is 7, not an object"),
        ({}, "choices is null, not a list"),
        ({"choices": []}, "choices is an empty list, not a list of choices"),
        ({"choices": {"0": 1}}, "choices is an object, not a list"),
        ({"choices": [None]}, r"choices\[0\] is null, not an object"),
        ({"choices": [{}]}, r"choices\[0\].message is null, not an object"),
        (with_choice(message="hello"), r"choices\[0\].message is 'hello', not an object"),
        (with_choice(message={"content": 42}), r"choices\[0\].message.content is 42, not text"),
        (with_choice(message={"content": ["a"]}), r"choices\[0\].message.content is a list, not text"),
        (with_choice(message={"content": True}), r"choices\[0\].message.content is true, not text"),
        (with_choice(message={"content": "x" * 100_000}), "100,000 characters where 100 tokens were requested"),
        (with_choice(finish_reason=10**400), "finish_reason is a number of more than 20 digits, not text"),
        (with_choice(finish_reason=["stop"]), "finish_reason is a list, not text"),
        (with_choice(index="0"), r"choices\[0\].index is '0', not a number"),
        (with_choice(index=-1), r"choices\[0\].index is -1, not a number from 0 on"),
        (with_choice(index=10**400), "index is a number of more than 20 digits, not a number from 0 on"),
        (with_choice(index=True), "index is true, not a number"),
        ({"choices": completion(["1"])["choices"] * 2}, r"choices\[1\].index is 0, as is choices\[0\].index"),
    ],
)
def test_what_is_no_completion_is_refused_with_what_is_wrong(reply: Any, words: str) -> None:
    with pytest.raises(BadCompletionError, match=words) as error:
        parse(reply)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "logprob", [math.nan, math.inf, -math.inf, -1.7e308, -(10**400), 10**400, 0.5, "-1", None, True, [], {}]
)
def test_a_log_probability_that_is_none_is_left_out_with_the_reason(logprob: Any) -> None:
    parsed = parse(with_logprobs(-1.0, logprob, logprob, logprob))
    (choice,) = parsed.choices
    assert (choice.text, choice.tokens, choice.logp) == ("2", 4, None)
    assert parsed.left_out.startswith("choices[0].logprobs.content[1].logprob is ")
    assert parsed.left_out.endswith(", no log-probability")


@pytest.mark.parametrize("logprobs", [7, "none", [1], {"content": 7}, {"content": {"0": -1.0}}, {"content": [[-1.0]]}])
def test_log_probabilities_of_another_form_are_left_out_with_the_reason(logprobs: Any) -> None:
    parsed = parse(with_choice(logprobs=logprobs))
    assert parsed.choices[0].logp is None
    assert "choices[0].logprobs" in parsed.left_out


@pytest.mark.parametrize("logprobs", [None, {}, [], {"content": None}, {"content": []}, {"tokens": ["2"]}])
def test_no_log_probabilities_are_nothing_to_complain_of(logprobs: Any) -> None:
    parsed = parse(with_choice(logprobs=logprobs))
    assert (parsed.choices[0].logp, parsed.choices[0].tokens, parsed.left_out) == (None, None, "")


def test_rounding_and_the_servers_minus_infinity_are_accepted() -> None:
    (choice,) = parse(with_logprobs(1e-6, -9999.0, 0, -1)).choices
    assert choice.logp == pytest.approx(-2500.0)


@pytest.mark.parametrize(
    "usage",
    [None, {}, 7, [7], "7", *({"completion_tokens": n} for n in (-1, True, "7", 7.5, 10**400, None, [7]))],
)
def test_a_usage_that_is_no_count_is_left_out(usage: Any) -> None:
    assert parse(completion(["2"], usage=usage)).tokens is None


def test_fields_that_are_not_used_are_removed_from_structure_and_never_from_text() -> None:
    text = 'so, "bytes":[1,2], "top_logprobs":[] and \\", "bytes":[3]'
    entry = {"token": text, "logprob": -0.5, "bytes": [1, 22, 255], "top_logprobs": []}
    reply = with_choice(message={"content": text}, logprobs={"content": [entry, entry]})
    for spaces in (None, (",", ":"), (" , ", " : ")):
        (choice,) = parse(json.dumps(reply, separators=spaces).encode()).choices
        assert (choice.text, choice.tokens, choice.logp) == (text, 2, -0.5)


PARSE_AND_MEASURE = """
import sys
from trimtab.experiments.evaluate.completion import MAX_BYTES, BadCompletionError, parse_completion

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) >> 10

start, unit, end = (part.encode("latin-1") for part in sys.argv[1:4])
size = int(sys.argv[4])
if b"%d" in unit:
    body = start + b",".join(unit % n for n in range(size // (len(unit) + 6))) + end
else:
    body = start + unit * (size // len(unit)) + end
before = peak()
try:
    parse_completion(body, 8, 20_480)
    print("parsed")
except BadCompletionError as error:
    print(error)
print(peak() - before)
"""
ENTRY = '{"token":" the","logprob":-0.0012345678,"bytes":[32,116,104,101],"top_logprobs":[]},'
HOSTILE = {
    "empty lists": ('{"a":[', "[],", "0]}"),
    "lists": ('{"a":[', "[0],", "0]}"),
    "objects": ('{"a":[', '{"a":0},', "0]}"),
    "objects with keys of their own": ('{"a":[', '{"%d":0}', "]}"),
    "keys": ("{", '"%d":0', "}"),
    "keys of lists": ("{", '"%d":[]', "}"),
    "numbers": ('{"a":[', "1.5,", "0]}"),
    "short texts": ('{"a":[', '"ab",', "0]}"),
    "short wide texts": ('{"a":[', '"\xf0\x9f\x98\x80",', "0]}"),
    "a long text": ('{"a":"', "x", '"}'),
    "a long text with one wide character": ('{"a":"\xf0\x9f\x98\x80', "x", '"}'),
    "a long text with one escaped wide character": ('{"a":"\\ud83d\\ude00', "x", '"}'),
    "escapes": ('{"a":"', "\\u0436", '"}'),
    "nothing": ("", " ", ""),
    "choices": ('{"choices":[', '{"message":{"content":null}},', "0]}"),
    "log-probabilities": ('{"choices":[{"message":{"content":""},"logprobs":{"content":[', "0,", "0]}}]}"),
}


def measured(name: str, start: str, unit: str, end: str, size: int) -> tuple[str, int]:
    """What came of a body, and by how many megabytes the process grew."""
    command = [sys.executable, "-c", PARSE_AND_MEASURE, start, unit, end, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    outcome, growth = done.stdout.splitlines()
    return outcome, int(growth)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("name", HOSTILE if THOROUGH else ["objects with keys of their own"])
def test_no_body_takes_more_memory_than_the_limit(name: str) -> None:
    """The largest body that is not refused at once, found by halving, and the largest that is read at all."""
    sizes = (MAX_BYTES, MAX_BYTES // 2, MAX_BYTES // 4, MAX_BYTES // 6, MAX_BYTES // 8)
    for size in sizes:
        outcome, growth = measured(name, *HOSTILE[name], size)
        assert growth < 200, f"{growth} MB for {size:,} bytes of {name}: {outcome}"
        if "may take" not in outcome:
            return


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_eight_responses_of_twenty_thousand_tokens_with_log_probabilities_fit() -> None:
    size = 8 * 20_480 * len(ENTRY)
    start = '{"choices":[{"message":{"content":"\xe2\x86\x92"},"logprobs":{"content":['
    outcome, growth = measured("legitimate", start, ENTRY, '{"logprob":0}]}}]}', size)
    assert outcome == "parsed"
    assert growth < 200
