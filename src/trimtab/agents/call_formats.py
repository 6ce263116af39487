"""How models write calls: Hermes and Qwen, Llama's JSON, fenced code, and a plain form for models without a template.

What a model wrote is hostile: whatever it is, the result is a list of calls, some of which say what is wrong with them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trimtab.agents.schemas import value_of
from trimtab.text import shown

CallFormat = Literal["hermes", "llama", "fenced", "plain"]
CALL_FORMATS: tuple[CallFormat, ...] = get_args(CallFormat)
MAX_CALLS = 8  # of one message
MAX_ARGUMENTS = 100  # of one call in the plain format
MAX_DEPTH = 32  # of lists and objects in the arguments of a call

_ARGUMENT_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)\s*")
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(?:python|py|python3)[ \t]*\n(.*?)(^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class ParsedCall:
    """A call as it was written; `problem` says in words for the model why it cannot be read."""

    tool: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def without_reasoning(text: str) -> str:
    """Return a message without its reasoning: <think> ... </think>, also if the prompt opened the block."""
    opened, closed = text.find("<think>"), text.find("</think>")
    if closed >= 0 and not 0 <= opened < closed:
        text = text[closed + len("</think>") :]
    return re.sub(r"<think>.*?(?:</think>|\Z)", "", text, flags=re.DOTALL)


def parse_calls(text: str, call_format: CallFormat, schemas: Mapping[str, Mapping[str, Any]]) -> list[ParsedCall]:
    """Return the calls of a message in order, one beyond `MAX_CALLS` at most; its reasoning is not searched.

    `schemas` are those of the tools by name.
    """
    return _PARSERS[call_format](without_reasoning(text), schemas)[: MAX_CALLS + 1]


def format_of(template: str | None) -> CallFormat:
    """Return the format in which a chat template tells the model to write calls; Hermes's if it tells nothing."""
    if template is None:
        return "plain"
    if "<function=" in template and "<tool_call>" in template:
        raise ValueError(
            "the model's chat template has calls in XML (<function=...>), which trimtab does not read: set "
            f"tools.format to one of {', '.join(CALL_FORMATS)}, and say so in the prompt"
        )
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters": dictionary' in template):
        return "llama"
    return "hermes"


def instructions(schemas: Sequence[Mapping[str, Any]], call_format: CallFormat) -> str:
    """Return the words of a system message that tells the model its tools, where the chat template does not."""
    written = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    how = {
        "hermes": "To call one, write a JSON object with its name and arguments between tags:\n"
        '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>',
        "llama": 'To call one, answer with a JSON object alone: {"name": NAME, "parameters": OBJECT}',
        "fenced": "To run a program, write it in a fenced block:\n```python\nprint(1 + 1)\n```",
        "plain": "To call one, end the message with NAME(ARGUMENT).",
    }[call_format]
    if call_format == "plain" and any(len(_required(schema)) > 1 for schema in schemas):
        how += " Several arguments are written NAME(FIRST, SECOND) or NAME(KEY=VALUE, ...)."
    return f"You may call tools. Their signatures:\n{written}\n{how}\nA message without a call is your final answer."


def _required(schema: Mapping[str, Any]) -> Sequence[str]:
    required: Sequence[str] = schema["function"]["parameters"].get("required", [])
    return required


def _hermes(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> list[ParsedCall]:
    calls = []
    for found in _HERMES.finditer(text):
        body, end = found.group(1).strip(), found.group(2)
        call = _json_call(body)
        if call.problem and not end:
            call = ParsedCall(problem="the call has no closing </tool_call>")
        calls.append(call)
    return calls


def _llama(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> list[ParsedCall]:
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return []
    calls: list[ParsedCall] = []
    decoder, position = json.JSONDecoder(), 0
    while position < len(body):  # several are separated by semicolons
        try:
            value, end = decoder.raw_decode(body, position)
        except (ValueError, RecursionError) as error:
            return [*calls, ParsedCall(problem=_json_problem(error))]
        calls.append(read_json_call(value, "parameters"))
        position = end + len(body[end:]) - len(body[end:].lstrip("; \t\r\n"))
    return calls


def _fenced(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> list[ParsedCall]:
    tool = next((name for name in ("python", "python_session") if name in schemas), "python")
    calls = []
    for found in _FENCE.finditer(text):
        whole = ParsedCall(tool, {"code": found.group(1)})
        calls.append(whole if found.group(2) else ParsedCall(tool, problem="the block of code has no closing ```"))
    return calls


def _plain(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> list[ParsedCall]:
    names = "|".join(sorted(map(re.escape, schemas), key=len, reverse=True))
    found = list(re.finditer(rf"(?<!\w)({names})\(", text)) if names else []
    if not found:
        return []
    tool, rest = found[-1].group(1), text[found[-1].end() :].rstrip()
    if not rest.endswith(")"):
        return [ParsedCall(tool, problem="the call has no closing parenthesis at the end of the message")]
    parameters = schemas[tool]["function"]["parameters"]
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    first = [*required, *properties][:1]
    # With one argument its text may be anything, commas and brackets too.
    texts = _split_arguments(rest[:-1], list(properties)) if len(required) > 1 else dict.fromkeys(first, rest[:-1])
    arguments = {name: value_of(properties.get(name, {}), written) for name, written in texts.items()}
    return [read_json_call({"name": tool, "arguments": arguments})]


def _split_arguments(text: str, names: Sequence[str]) -> dict[str, str]:
    """Return the text of each of several arguments: by name if one is written (`a=1`), else in their order."""
    texts: dict[str, str] = {}
    decoder, position = json.JSONDecoder(), 0
    while text[position:].strip() and len(texts) < MAX_ARGUMENTS:
        written = _ARGUMENT_NAME.match(text, position)
        start = written.end() if written else position + len(text[position:]) - len(text[position:].lstrip())
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start
        comma = text.find(",", end)
        end = len(text) if comma < 0 else comma
        value = text[start:end].strip()
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        in_order = names[len(texts)] if len(texts) < len(names) else f"argument {len(texts) + 1}"
        texts[written.group(1) if written else in_order] = value[1:-1] if quoted else value
        position = end + 1
    return texts


def _json_call(body: str) -> ParsedCall:
    try:
        return read_json_call(json.loads(body))
    except (ValueError, RecursionError) as error:  # an integer of 5,000 digits is a ValueError too
        return ParsedCall(problem=_json_problem(error))


def read_json_call(value: object, key: str = "arguments") -> ParsedCall:
    """Return the call that an object stands for; both names of the arguments are accepted."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ParsedCall(problem=f'a call is a JSON object with "name" and "{key}", not {shown(value)}')
    arguments: Any = next((value[each] for each in (key, "arguments", "parameters") if each in value), {})
    if isinstance(arguments, str):  # as OpenAI's interface writes them
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return ParsedCall(value["name"], problem=f'"{key}" must be a JSON object, not {shown(arguments)}')
    if not _is_plain(arguments):
        limits = f"numbers that are not infinite or NaN, and at most {MAX_DEPTH} levels"
        return ParsedCall(value["name"], problem=f'"{key}" must have {limits}')
    return ParsedCall(value["name"], arguments)


def _is_plain(arguments: dict[str, Any]) -> bool:
    """Return whether arguments can be stored as JSON: all numbers are finite, and nothing is nested too deep."""
    level: list[Any] = [arguments]
    for _ in range(MAX_DEPTH):
        if any(isinstance(each, float) and not math.isfinite(each) for each in level):
            return False
        inside = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = list(itertools.chain.from_iterable(inside))
    return not level


def _json_problem(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"the call is no valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    return "the call is no JSON that can be read: it is nested too deep, or has too long a number"


_PARSERS: dict[CallFormat, Callable[[str, Mapping[str, Mapping[str, Any]]], list[ParsedCall]]] = {
    "hermes": _hermes,
    "llama": _llama,
    "fenced": _fenced,
    "plain": _plain,
}
