"""The turns of a conversation in a record: what tools replied and which calls were made, as JSON of bounded size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from trimtab.record.layout import Count, Finite, RecordError
from trimtab.record.schema import Vocabulary
from trimtab.text import cut_middle

if TYPE_CHECKING:
    from trimtab.agents import Call
    from trimtab.data import Response

# A tool may print a gigabyte in every turn, and records share one size limit with all other steps.
MAX_ENTRIES = 64  # observations, and calls, of one response
MAX_TEXT = 4_000  # characters of one observation, or of the arguments of one call
MAX_TEXTS = 32_000  # characters of all of them in one response
MAX_NAME = 100  # characters: if there is no such tool, the name is the model's

Seconds = Annotated[Finite, Field(ge=0)]
T = TypeVar("T")


@dataclass(frozen=True)
class RecordedCall:
    """A call that the message number `turn` of the policy made, from 0. `arguments` is JSON, cut if it is long."""

    turn: Count
    tool: str
    arguments: str
    outcome: str
    seconds: Seconds


@dataclass(frozen=True)
class RecordedObservation:
    """What was observed after so many sampled tokens: how many tokens, and their text, special tokens by name."""

    after: Count
    tokens: Count
    text: str


_OBSERVATIONS, _CALLS = TypeAdapter(list[RecordedObservation]), TypeAdapter(list[RecordedCall])


def observations_json(response: Response, vocabulary: Vocabulary) -> str:
    """Return what the policy did not sample in a response as JSON; long texts are cut in the middle, and say so."""
    kept = response.observed[:MAX_ENTRIES]
    longest = _longest(len(kept))
    found: list[RecordedObservation] = []
    not_sampled = 0
    for start, end in kept:
        text = cut(vocabulary.decode(response.tokens[start:end].tolist()), longest)
        found.append(RecordedObservation(start - not_sampled, end - start, text))
        not_sampled += end - start
    return _json(found)


def calls_json(calls: Sequence[Call]) -> str:
    """Return the calls of a response as JSON; long arguments are cut in the middle, and say so."""
    kept = calls[:MAX_ENTRIES]
    longest = _longest(len(kept))
    found = []
    for call in kept:
        arguments = cut(json.dumps(call.arguments, ensure_ascii=False, default=str), longest)
        found.append(RecordedCall(call.turn, cut(call.tool, MAX_NAME), arguments, call.outcome, round(call.seconds, 6)))
    return _json(found)


def read_observations(columns: Mapping[str, Any], response: int) -> list[RecordedObservation]:
    """Read what was observed in a response from the table of responses; older records have nothing."""
    return _read("observations", _OBSERVATIONS, columns, response)


def read_calls(columns: Mapping[str, Any], response: int) -> list[RecordedCall]:
    """Read the calls of a response from the table of responses; older records have none."""
    return _read("calls", _CALLS, columns, response)


def _read(name: str, adapter: TypeAdapter[list[T]], columns: Mapping[str, Any], response: int) -> list[T]:
    text = columns[name][response] if name in columns else ""
    try:
        return adapter.validate_python(json.loads(text)) if text else []
    except (ValueError, RecursionError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise RecordError(f"`{name}` of response {response} cannot be read: {reason!s:.200}") from None


def cut(text: str, longest: int) -> str:
    """Leave out the middle of a text that is longer than so many characters, and say how many are left out."""
    return cut_middle(text, longest, "[... {:,} characters not recorded ...]")


def _longest(count: int) -> int:
    """Return how many characters each of so many texts may have."""
    return min(MAX_TEXT, MAX_TEXTS // max(count, 1))


def _json(entries: Sequence[RecordedObservation | RecordedCall]) -> str:
    # Lone surrogates, which a model can write as JSON escapes, cannot be stored as UTF-8.
    text = json.dumps([asdict(entry) for entry in entries], ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()
