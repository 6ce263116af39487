"""What the model sampled, in words: its reasoning, its content, and the calls in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trimtab.agents.call_formats import MAX_CALLS, CallFormat, parse_calls
from trimtab.agents.reply_template import ANSWER, THOUGHT


@dataclass(frozen=True)
class ReadMessage:
    """A sampled message in words.

    `text` is all of it without special tokens, `raw` with them. `content` is without reasoning, calls and what follows
    a stop string; `reasoning` is None if there is none. `calls` have the name and arguments of calls.
    """

    text: str
    raw: str
    content: str
    reasoning: str | None
    calls: tuple[tuple[str, Mapping[str, Any]], ...]


Think = Literal["none", "closed", "open"]  # how a message of the model reasons: what templates look for in it
MADE: dict[Think, str] = {
    "none": ANSWER,
    "closed": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}",
    "open": f"<think>\n{THOUGHT}",
}


def think_of(raw: str, opened: bool) -> Think:
    """Return how a message with its special tokens reasons; `opened`: the prompt began the block."""
    # Templates look for the tags anywhere in a message.
    if "</think>" in raw:
        return "closed"
    return "open" if opened or "<think>" in raw else "none"


def split_reasoning(raw: str, opened: bool) -> tuple[str | None, str]:
    """Return the reasoning of a message, None without any, and the rest."""
    begun = raw.lstrip()
    unopened = "<think>" not in raw and "</think>" in raw
    if not opened and not unopened and not begun.startswith("<think>"):
        return None, raw
    body = begun.removeprefix("<think>")
    reasoning, closed, content = body.partition("</think>")
    return reasoning.strip("\n"), content.lstrip("\n") if closed else ""


def read_message(
    text: str,
    raw: str,
    opened: bool,
    call_format: CallFormat,
    schemas: Mapping[str, Mapping[str, Any]],
    stop: Sequence[str],
    without_special: Callable[[str], str],
) -> ReadMessage:
    """Return a sampled message in words. A call that cannot be read leaves all of them in the content."""
    kept = raw[: min((at for each in stop if (at := raw.find(each)) >= 0), default=len(raw))]
    reasoning, content = split_reasoning(kept, opened)
    parsed = parse_calls(content, call_format, schemas)[:MAX_CALLS] if schemas else []
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    if parsed and not any(call.problem for call in parsed):
        calls = tuple((call.tool, call.arguments) for call in parsed)
        content = _before_calls(content, call_format, calls[-1][0]).rstrip()
    thought = None if reasoning is None else without_special(reasoning)
    return ReadMessage(text, raw, without_special(content), thought, calls)


def _before_calls(content: str, call_format: CallFormat, tool: str) -> str:
    """Return what a message says before its calls."""
    if call_format == "hermes":
        return content.partition("<tool_call>")[0]
    if call_format == "fenced":
        return re.split(r"^[ \t]*```", content, maxsplit=1, flags=re.MULTILINE)[0]
    return content[: max(content.rfind(f"{tool}("), 0)] if call_format == "plain" else ""


def written_calls(calls: Sequence[Mapping[str, Any]], call_format: CallFormat) -> str:
    """Return calls as a model writes them, for templates that do not."""
    texts = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if call_format == "hermes":
            texts.append(f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {written}}}\n</tool_call>')
        elif call_format == "llama":
            texts.append(f'{{"name": {json.dumps(name)}, "parameters": {written}}}')
        elif call_format == "fenced" and isinstance(arguments, dict) and isinstance(arguments.get("code"), str):
            texts.append(f"```python\n{arguments['code']}\n```")
        else:
            values = arguments.values() if isinstance(arguments, dict) else [written]
            texts.append(f"{name}({', '.join(each if isinstance(each, str) else json.dumps(each) for each in values)})")
    return "; ".join(texts) if call_format == "llama" else "\n".join(texts)
