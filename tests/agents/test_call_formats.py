"""Calls as models write them, and everything else that they write."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.agents.call_formats import CALL_FORMATS, MAX_CALLS, CallFormat, ParsedCall, format_of, parse_calls
from trimtab.agents.schemas import function_schema
from trimtab.agents.tool_set import BUILT_IN

SCHEMAS: dict[str, Any] = {name: function_schema(function, name) for name, function in BUILT_IN.items()}
CALCULATE = ParsedCall("calculator", {"expression": "2*3"})
OPENAI = '{"name": "calculator", "arguments": "{\\"expression\\": \\"2*3\\"}"}'
JSON = '{"name": "calculator", "arguments": {"expression": "2*3"}}'
LLAMA = '{"name": "calculator", "parameters": {"expression": "2*3"}}'


@pytest.mark.parametrize(
    ("call_format", "text", "calls"),
    [
        ("hermes", "The answer is 6.", []),
        ("hermes", f"I ask.\n<tool_call>\n{JSON}\n</tool_call>", [CALCULATE]),
        ("hermes", f"<tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>", [CALCULATE] * 2),
        ("hermes", f"<tool_call>\n{JSON}", [CALCULATE]),  # whole, though not closed
        ("hermes", f"<tool_call>{LLAMA}</tool_call>", [CALCULATE]),
        ("hermes", f"<tool_call>{OPENAI}</tool_call>", [CALCULATE]),
        ("hermes", '<tool_call>{"name": "look"}</tool_call>', [ParsedCall("look")]),
        ("hermes", f"<think>maybe <tool_call>{JSON}</tool_call></think>6", []),
        ("hermes", f"maybe <tool_call>{JSON}</tool_call></think>6", []),  # the prompt has opened the block
        ("hermes", f"<think>never closed <tool_call>{JSON}</tool_call>", []),
        ("hermes", f"<think>short</think><tool_call>{JSON}</tool_call>", [CALCULATE]),
        ("llama", LLAMA, [CALCULATE]),
        ("llama", f"<|python_tag|>{LLAMA}; {LLAMA}", [CALCULATE] * 2),
        ("llama", f"I would write {LLAMA}", []),
        ("fenced", "First\n```python\nprint(1)\n```\nthen", [ParsedCall("python", {"code": "print(1)\n"})]),
        ("fenced", "```py\na\n```\n```json\n{}\n```\n```python\na\n```", [ParsedCall("python", {"code": "a\n"})] * 2),
        ("plain", "so calculator(2*3)", [CALCULATE]),
        ("plain", "calculator(1) or calculator(2*3)\n", [CALCULATE]),
        ("plain", "mycalculator(2*3)", []),
    ],
)  # fmt: skip
def test_calls_that_can_be_read(call_format: CallFormat, text: str, calls: list[ParsedCall]) -> None:
    assert parse_calls(text, call_format, SCHEMAS) == calls


@pytest.mark.parametrize(
    ("call_format", "text", "problem"),
    [
        ("hermes", "<tool_call>{'name': 'x'}</tool_call>", "no valid JSON: Expecting property name"),
        ("hermes", '<tool_call>{"name": "calc', "no closing </tool_call>"),
        ("hermes", "<tool_call>[1]</tool_call>", 'a JSON object with "name" and "arguments", not \\[1\\]'),
        ("hermes", '<tool_call>{"name": 7}</tool_call>', 'a JSON object with "name"'),
        ("hermes", '<tool_call>{"name": "x", "arguments": [1]}</tool_call>', '"arguments" must be a JSON object'),
        ("hermes", '<tool_call>{"name": "x", "arguments": "1"}</tool_call>', '"arguments" must be a JSON object'),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deep"),
        ("hermes", '<tool_call>{"name": ' + "9" * 10_000 + "}</tool_call>", "too long a number"),
        ("hermes", '<tool_call>{"name": "x", "arguments": {"a": [NaN]}}</tool_call>', "not infinite or NaN"),
        ("hermes", '<tool_call>{"name": "x", "arguments": {"a": 1e999}}</tool_call>', "not infinite or NaN"),
        ("llama", '{"name": "x", "parameters": {"a": ' + "[" * 50 + "]" * 50 + "}}", "at most 32 levels"),
        ("llama", '{"name": "x", "parameters": ', "no valid JSON"),
        ("llama", f"{LLAMA} and so on", "no valid JSON"),
        ("fenced", "```python\nprint(1)", "no closing ```"),
        ("plain", "calculator(2*3", "no closing parenthesis"),
    ],
)
def test_calls_that_cannot(call_format: CallFormat, text: str, problem: str) -> None:
    call = parse_calls(text, call_format, SCHEMAS)[-1]
    with pytest.raises(ValueError, match=problem):
        raise ValueError(call.problem)


def test_a_message_has_a_bounded_number_of_calls() -> None:
    assert len(parse_calls(f"<tool_call>{JSON}</tool_call>" * 100, "hermes", SCHEMAS)) == MAX_CALLS + 1


pieces = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "```python\n", "\n```", "{", "}", '"name"', ":",
     "calculator(", ")", JSON, LLAMA, "<|python_tag|>", ";", "\n", "\ud800", "\0"]
)  # fmt: skip


@given(st.sampled_from(CALL_FORMATS), st.lists(st.one_of(pieces, st.text(max_size=5)), max_size=12))
def test_any_text_is_a_list_of_calls(call_format: CallFormat, parts: list[str]) -> None:
    for call in parse_calls("".join(parts), call_format, SCHEMAS):
        assert call.problem or call.tool


def test_the_format_of_a_template() -> None:
    assert format_of(None) == "plain"
    assert format_of("... <tool_call>\n{...}") == "hermes"
    assert format_of("... <|python_tag|> ...") == "llama"
    assert format_of("{{ messages[0].content }}") == "hermes"
    with pytest.raises(ValueError, match="calls in XML"):
        format_of("<tool_call>\n<function=name>")


# --- plain calls get the types of the signature

PLACE = {
    "type": "function",
    "function": {
        "name": "place",
        "parameters": {
            "type": "object",
            "properties": {
                "x": {"type": "integer"},
                "label": {"type": "string"},
                "fill": {"type": "boolean"},
                "sizes": {"type": "array", "items": {"type": "number"}},
            },
            "required": ["x", "label"],
        },
    },
}


def plain_guess(kind: str, text: str) -> Any:
    parameters = {"type": "object", "properties": {"n": {"type": kind}}, "required": ["n"]}
    schema = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    (call,) = parse_calls(f"so f({text})", "plain", {"f": schema})
    assert not call.problem
    return call.arguments["n"]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("integer", "50", 50),
        ("integer", " -7 ", -7),
        ("number", "1.5", 1.5),
        ("boolean", "true", True),
        ("boolean", "False", False),
        ("array", "[1, 2]", [1, 2]),
        ("object", '{"a": (1)}', '{"a": (1)}'),
        ("string", "50", "50"),
        ("string", "g(1, 2)", "g(1, 2)"),
        ("integer", "seven", "seven"),
        ("integer", "1.5", "1.5"),
        ("integer", "true", "true"),
        ("integer", "9" * 5000, "9" * 5000),
        ("array", "[" * 5000, "[" * 5000),
    ],
)
def test_a_plain_argument_has_the_type_of_its_parameter(kind: str, text: str, value: Any) -> None:
    found = plain_guess(kind, text)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("3, here", {"x": 3, "label": "here"}),
        ('3, "a, b"', {"x": 3, "label": "a, b"}),
        ("label='a', x=3", {"x": 3, "label": "a"}),
        ("3, here, True, [1, 2.5]", {"x": 3, "label": "here", "fill": True, "sizes": [1, 2.5]}),
        ("3, here, sizes=[1]", {"x": 3, "label": "here", "sizes": [1]}),
        ("3", {"x": 3}),
        ("", {}),
    ],
)
def test_several_plain_arguments_are_in_order_or_by_name(text: str, arguments: dict[str, Any]) -> None:
    (call,) = parse_calls(f"place({text})", "plain", {"place": PLACE})
    assert (call.problem, dict(call.arguments)) == ("", arguments)


def test_a_plain_number_that_is_none_is_no_argument() -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}
    schemas = {"f": {"type": "function", "function": {"name": "f", "parameters": parameters}}}
    (call,) = parse_calls("f(NaN)", "plain", schemas)
    assert "not infinite or NaN" in call.problem
