"""What can be continued exactly with a model's chat template, in words: for `trimtab doctor --model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.agents.chat_tokens import TOOL, ChatRenderError, ChatTokens
from trimtab.agents.sampled_message import Think

ASKED = {"role": "user", "content": "Q"}
USER = {"role": "user", "content": "A"}
SYSTEM = {"role": "system", "content": "S"}
REPLY = {"role": "tool", "content": "R", "name": "Qtool", "tool_call_id": "Qcall0000"}
ANEW = "such a request is a new branch, rendered anew"
WHY = {
    "rewritten": f"the template writes earlier messages differently once it follows: {ANEW}",
    "roles": f"the template does not write it behind a message of the model: {ANEW}",
}


@dataclass(frozen=True)
class TemplateFinding:
    """One kind of conversation: whether it is continued token for token, and why not."""

    name: str
    exact: bool
    words: str


def check_template(chat: ChatTokens) -> list[TemplateFinding]:
    """Return what can be continued exactly: plain chat, system messages, tools and reasoning."""
    if chat.template is None:
        words = "there is no chat template: texts are joined as they are, and continued behind the model's tokens"
        return [TemplateFinding("chat template", True, words)]
    findings = [
        _finding("plain chat", [("a user's message", _reason(chat, "none", [USER]))]),
        _system(chat),
        _tools(chat),
    ]
    if "<think>" in chat.template:
        cases = [
            ("a tool's reply to a message with reasoning", _reason(chat, "closed", [REPLY], [TOOL])),
            ("a user's message after one with reasoning", _reason(chat, "closed", [USER])),
        ]
        findings.append(_finding("thinking", cases))
    return findings


def _reason(
    chat: ChatTokens, think: Think, tail: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return why messages behind one of the model cannot be continued; empty if they can."""
    try:
        context = chat.begin([ASKED], tools, 1 << 20)
        found = chat.follow(context.shape, think, context.opened, tail)
    except ChatRenderError as error:
        return str(error)
    return WHY[found] if isinstance(found, str) else ""


def _finding(name: str, cases: Sequence[tuple[str, str]], notes: Sequence[str] = ()) -> TemplateFinding:
    """Return a finding from the reasons against each of several cases."""
    against = [f"{case}: {reason}" for case, reason in cases if reason]
    fine = [case for case, reason in cases if not reason]
    words = [f"exact: {', '.join(fine)}"] if fine else []
    return TemplateFinding(name, not against, "; ".join([*words, *against, *notes]))


def _system(chat: ChatTokens) -> TemplateFinding:
    if not chat.takes_system:
        return TemplateFinding("system messages", False, "the template refuses them or leaves them out")
    cases = [("at the beginning", ""), ("after the model's message", _reason(chat, "none", [SYSTEM, USER]))]
    return _finding("system messages", cases)


def _tools(chat: ChatTokens) -> TemplateFinding:
    if chat.tools_problem:
        return TemplateFinding("tools", False, chat.tools_problem)
    cases = [
        ("a reply", _reason(chat, "none", [REPLY], [TOOL])),
        ("several replies", _reason(chat, "none", [REPLY, REPLY], [TOOL])),
        ("a user's message after it", _reason(chat, "none", [REPLY, USER], [TOOL])),
    ]
    return _finding("tools", cases, [f"calls are read as {chat.call_format} writes them", *chat.notes])
