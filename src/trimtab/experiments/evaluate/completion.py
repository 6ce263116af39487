"""Parse the chat completions of a server: untrusted input, in bounded memory, with errors that say what is wrong."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, TypeGuard

MAX_BYTES = 1 << 24  # of a body: 160,000 tokens with their log-probabilities take 13 MB
MAX_PARSED_BYTES = 160 << 20
TEXT_BESIDES, TEXT_PER_TOKEN = 1 << 16, 32  # characters of a response; ordinary text has three to five per token
MAX_CALLS = 128  # of one message
MAX_COUNT = 1_000_000_000  # more tokens than any server generates
# Servers write -9999 for minus infinity, and rounding may give a little more than 0. No log-probability is beyond.
LOWEST_LOGP, HIGHEST_LOGP = -1e6, 1e-3

# Two of the four fields of a token's log-probability. They are half of the body, and nothing here reads them. Inside a
# JSON string a quote has a backslash before it, so no text matches.
UNUSED_FIELDS = re.compile(rb',\s*"(?:bytes"\s*:\s*\[[\d\s,]*\]|top_logprobs"\s*:\s*\[\s*\])')


class BadCompletionError(ValueError):
    """A body that is no chat completion; the message says what is wrong with it."""


@dataclass(frozen=True)
class Choice:
    """One response of a completion. `tokens` and the mean `logp` are those of its log-probabilities, if any.

    `calls` are in the form in which a server wants them back, with arguments that are JSON if the model was right.
    """

    text: str
    finished: bool
    tokens: float | None = None
    logp: float | None = None
    calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Completion:
    """The choices of a completion, their mean length if known, and why log-probabilities were left out ('': none)."""

    choices: list[Choice]
    tokens: float | None
    left_out: str = ""


def parse_completion(body: bytes, count: int, max_new_tokens: int) -> Completion:
    """Return a completion with at most `count` choices, or raise `BadCompletionError`."""
    reply = _object(_parse_json(body), "the reply")
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices:
        raise BadCompletionError(f"choices is {_short(choices)}, not a list of choices")
    left_out: list[str] = []
    parsed = [_parse_choice(c, f"choices[{n}]", max_new_tokens, left_out) for n, c in enumerate(choices[:count])]
    _check_indexes(choices[:count])
    usage = reply.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None  # of all choices together
    mean = tokens / len(choices) if _is_count(tokens) else None
    return Completion(parsed, mean, left_out[0] if left_out else "")


def _parse_json(body: bytes) -> Any:
    body = UNUSED_FIELDS.sub(b"", body)
    if (needed := _parsed_bytes(body)) > MAX_PARSED_BYTES:
        raise BadCompletionError(f"parsing it may take {needed >> 20} MB, more than {MAX_PARSED_BYTES >> 20}")
    try:
        return json.loads(body.decode("utf-8-sig", "surrogatepass"))
    except UnicodeDecodeError as error:
        raise BadCompletionError(f"byte {error.start + 1} is not UTF-8") from None
    except (ValueError, MemoryError) as error:  # a number of more than 4,300 digits is a ValueError too
        raise BadCompletionError(f"not JSON: {str(error)[:100]}") from None
    except RecursionError:
        raise BadCompletionError("too many nested brackets") from None


def _parsed_bytes(body: bytes) -> int:
    """Return an upper bound on the memory that parsing takes."""
    # Measured with CPython 3.11: a list of two bytes, `[]`, takes 64 bytes of memory, and an object with a key of its
    # own takes 320. One character beyond Latin-1 makes a whole text four times as large, while it is copied.
    plain = body.isascii() and b"\\u" not in body
    return (
        len(body) * (2 if plain else 10)
        + 88 * body.count(b",")
        + 24 * body.count(b"[")
        + 180 * body.count(b"{")
        + 60 * body.count(b":")
    )


def _parse_choice(value: Any, place: str, max_new_tokens: int, left_out: list[str]) -> Choice:
    choice = _object(value, place)
    message = _object(choice.get("message"), f"{place}.message")
    text, calls = message.get("content"), _parse_calls(message.get("tool_calls"), f"{place}.message.tool_calls")
    if text is None:  # cut off while reasoning, before any content
        text = ""
    if not isinstance(text, str):
        raise BadCompletionError(f"{place}.message.content is {_short(text)}, not text")
    if len(text) > TEXT_BESIDES + TEXT_PER_TOKEN * max_new_tokens:
        raise BadCompletionError(f"{place} has {len(text):,} characters where {max_new_tokens:,} tokens were requested")
    reason = choice.get("finish_reason")
    if not isinstance(reason, str | None):
        raise BadCompletionError(f"{place}.finish_reason is {_short(reason)}, not text")
    finished = reason != "length"
    logprobs = choice.get("logprobs")
    tokens = logprobs.get("content") if isinstance(logprobs, dict) else logprobs
    if not tokens:
        return Choice(text, finished, calls=calls)
    if not isinstance(tokens, list):
        left_out.append(f"{place}.logprobs is {_short(tokens)}, not a list of tokens")
        return Choice(text, finished, calls=calls)
    if len(tokens) > max_new_tokens:
        left_out.append(f"{place}.logprobs has {len(tokens):,} tokens where {max_new_tokens:,} were requested")
        return Choice(text, finished, calls=calls)
    # Without its log-probabilities a response is still a response: they are left out, and the text is kept.
    logps: list[Any] = [token.get("logprob") if isinstance(token, dict) else token for token in tokens]
    wrong = next((n for n, logp in enumerate(logps) if not _is_logp(logp)), None)
    if wrong is not None:
        left_out.append(f"{place}.logprobs.content[{wrong}].logprob is {_short(logps[wrong])}, no log-probability")
        return Choice(text, finished, len(tokens), calls=calls)
    return Choice(text, finished, len(tokens), math.fsum(logps) / len(logps), calls)


def _parse_calls(value: Any, place: str) -> tuple[dict[str, Any], ...]:
    if not value:
        return ()
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise BadCompletionError(f"{place} is {_short(value)}, not a list of at most {MAX_CALLS} calls")
    calls = []
    for n, each in enumerate(value):
        call = _object(each, f"{place}[{n}]")
        function = _object(call.get("function"), f"{place}[{n}].function")
        # Some servers send no id, and some the arguments as an object.
        arguments = function.get("arguments", "")
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        name, number = function.get("name"), call.get("id") or f"call_{n}"
        if not isinstance(name, str) or not isinstance(number, str):
            raise BadCompletionError(f"{place}[{n}] has the name {_short(name)} and the id {_short(number)}: no texts")
        calls.append({"id": number, "type": "function", "function": {"name": name, "arguments": written}})
    return tuple(calls)


def _check_indexes(choices: list[dict[str, Any]]) -> None:
    """Raise where two choices have the same index: one of them would be counted twice."""
    seen: dict[int, int] = {}
    for n, choice in enumerate(choices):
        index = choice.get("index")
        if index is None:  # some servers leave it out
            continue
        if not _is_count(index):
            raise BadCompletionError(f"choices[{n}].index is {_short(index)}, not a number from 0 on")
        if seen.setdefault(index, n) != n:
            raise BadCompletionError(f"choices[{n}].index is {_short(index)}, as is choices[{seen[index]}].index")


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadCompletionError(f"{place} is {_short(value)}, not an object")
    return value


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _is_logp(value: Any) -> bool:
    # The range also excludes NaN, and integers that no float can hold.
    return isinstance(value, int | float) and not isinstance(value, bool) and LOWEST_LOGP <= value <= HIGHEST_LOGP


def _short(value: Any) -> str:
    """Return a value for a message: numbers and short texts as they are, of others the type."""
    if value is None or isinstance(value, bool | float):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else "a number of more than 20 digits"
    if isinstance(value, str):
        return ascii(value[:40])
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return "an object"
