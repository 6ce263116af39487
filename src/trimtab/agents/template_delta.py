"""What a chat template writes around a tool's reply, found by rendering it with contents that can be told apart.

PyPI's `renderers` has such deltas by hand for some thirty families; for all other templates (Qwen2.5's, SmolLM2's, a
user's own) it cannot continue a conversation, and it needs tiktoken, openai and a pre-release of a configuration
library. Asking the template itself works for each that can be continued.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.text import shorten
from trimtab.workers import RENDER, WorkerLimits, call_worker, special_tokens

LIMITS = WorkerLimits(40.0, 10.0, 512 << 20, 32 << 20)
NAME = "\0name\0"  # stands for the tool's name in a piece of markup
# Words that no template writes by itself, and that trimming, JSON and URL quoting leave alone.
QUESTION, ANSWER, THOUGHT, CALL_ID = "Qquestion", "Qanswer", "Qthought", "Qcall0000"
PROBE = ' Qa "é<&>\\\n Qb\t '

Render = Callable[[Sequence[Mapping[str, Any]]], str | None]  # None if the template refuses

# What templates do to a reply's text. JSON is without its quotation marks: those are in the markup around it.
TRANSFORMS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    str.strip,
    str.lstrip,
    str.rstrip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
)


@dataclass(frozen=True)
class TemplateDelta:
    """The markup before, between and after replies, `before` from the end of the message that called on.

    `between` is None if a template has no way to give several. `changed` says how the template rewrites earlier
    messages once more follow, if it does.
    """

    before: str
    between: str | None
    after: str
    transform: Callable[[str], str]
    role: str = "tool"
    changed: str = ""


def renderer(template: str, tokenizer: Any, tools: list[dict[str, Any]]) -> Render:
    """Return a function that renders messages, with the beginning of the next answer, in a worker within limits."""
    tokens = special_tokens(tokenizer)

    def render(messages: Sequence[Mapping[str, Any]]) -> str | None:
        answer = call_worker(RENDER, (template, [list(messages)], tokens, [tools]), LIMITS)
        if answer.outcome != "done":
            why = "too costly" if answer.outcome == "too_costly" else shorten(answer.error, 300)
            raise ValueError(f"the model's chat template cannot be rendered: {why}")
        texts: list[str] | None = answer.value.get("texts")
        return texts[0] if texts else None

    return render


def find_delta(render: Render, thinks: bool) -> TemplateDelta:
    """Return what the template writes around replies; ValueError if a conversation cannot be continued at all.

    `thinks`: the template knows reasoning blocks, so what it does with earlier ones is looked at.
    """
    for role in ("tool", "user"):
        delta = _delta(render, role)
        if delta is not None:
            changed = _rewritten(render, delta, thinks)
            return TemplateDelta(delta.before, delta.between, delta.after, delta.transform, role, changed)
    raise ValueError(
        "the model's chat template cannot be continued: it writes neither a tool's nor a user's message after the "
        "model's own. Give the model a chat_template.jinja that does, or set model.chat=false"
    )


def _delta(render: Render, role: str) -> TemplateDelta | None:
    one = _around(render, role, 1)
    if one is None:
        return None
    before, after = one
    probed = render([*_asked(), *_replies(role, [PROBE])])
    if probed is None:
        return None
    # The names are those of the first reply in both.
    head, _, tail = (render([*_asked(), *_replies(role, ["Qreply0"])]) or "").partition("Qreply0")
    middle = probed[len(head) : len(probed) - len(tail)]
    if not probed.startswith(head) or not probed.endswith(tail):
        return None
    transform = next((each for each in TRANSFORMS if each(PROBE) == middle), None)
    if transform is None:
        return None
    three = _around(render, role, 3)
    between = three[1] if three is not None and (three[0], three[-1]) == (before, after) else None
    if three is not None and between != three[2]:
        between = None
    return TemplateDelta(before, between, after, transform)


def _around(render: Render, role: str, count: int) -> list[str] | None:
    """Return the pieces of markup around replies, from the end of the model's message on; None if it has none."""
    contents = [f"Qreply{number}" for number in range(count)]
    text = render([*_asked(), *_replies(role, contents)])
    if text is None or text.count(ANSWER) != 1:
        return None
    pieces = re.split("|".join(contents), text.partition(ANSWER)[2])
    if len(pieces) != count + 1 or CALL_ID in "".join(pieces):
        return None
    named = [piece.replace(f"Qname{number}", NAME) for number, piece in enumerate(pieces)]
    return None if "Qname" in "".join(named) else named


def _asked() -> list[dict[str, Any]]:
    return [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]


def _replies(role: str, contents: Sequence[str]) -> list[dict[str, Any]]:
    if role == "user":
        return [{"role": "user", "content": content} for content in contents]
    return [
        {"role": "tool", "content": content, "name": f"Qname{number}", "tool_call_id": CALL_ID}
        for number, content in enumerate(contents)
    ]


def _rewritten(render: Render, delta: TemplateDelta, thinks: bool) -> str:
    """Return how the template writes earlier messages differently once others follow; empty if it does not."""
    begun = render([{"role": "user", "content": QUESTION}]) or ""
    texts = [(ANSWER, "the beginning of a message")]
    if thinks:
        thought = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
        texts.append((thought, "the reasoning of a message"))
    role = delta.role
    for text, what in texts:
        sampled = text.removeprefix("<think>\n") if begun.endswith("<think>\n") else text
        first = {"role": "assistant", "content": text}
        messages = [{"role": "user", "content": QUESTION}, first, *_replies(role, ["Qreply0"]), first]
        messages += _replies(role, ["Qreply0"])
        reply = (delta.before + "Qreply0" + delta.after).replace(NAME, "Qname0")
        if render(messages) != begun + sampled + reply + sampled + reply:
            return what
    return ""
