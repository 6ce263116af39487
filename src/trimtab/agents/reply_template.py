"""Replies as tokens: what the chat template writes around them, and text of tools, in which markup stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from trimtab.agents.call_formats import CALL_FORMATS, CallFormat, format_of, instructions
from trimtab.agents.tool_set import ToolSet
from trimtab.data import Problem
from trimtab.text import LEFT_OUT, cut_middle, shorten, shown
from trimtab.workers import RENDER, WorkerLimits, call_worker, special_tokens, template_of

OPENING_SECONDS = 60.0  # for an environment's `reset`, before the first message
LEAST_SHARE = 16  # tokens; if several replies would have less each, they are given as one


class ObservedText:
    """Encodes text without ever producing a special token, or another token that stands for markup.

    transformers' `split_special_tokens=True` is not enough: it concerns tokens that are marked as special, and Qwen's
    <tool_call> and <think> are not. So the tokenizer's core is used without such tokens. It may be called from many
    threads, since nothing in it changes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.markup = {number for number, token in added.items() if _is_markup(token.content, token.special)}
        self.markup |= set(tokenizer.all_special_ids)
        self._core: Any = None
        self._markup_core: Any = None
        if hasattr(tokenizer, "backend_tokenizer"):
            self._core, self._markup_core = _cores(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of text from outside; what the vocabulary can only say by a special token is left out."""
        # A lone half of a surrogate pair cannot be encoded at all.
        text = text.encode("utf-8", "replace").decode()
        if self._core is not None:
            ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        else:
            ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        # A vocabulary of words or of sentence pieces holds its special tokens too, and unknown text becomes one.
        return [number for number in ids if number not in self.markup]

    def encode_markup(self, text: str) -> list[int]:
        """Return the tokens of what the chat template writes, markup included."""
        if self._markup_core is not None:
            ids: list[int] = self._markup_core.encode(text, add_special_tokens=False).ids
            return ids
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _cores(tokenizer: Any) -> tuple[Any, Any]:
    """Return the core without tokens of markup, and one with them if the tokenizer itself would add spaces."""
    from tokenizers import Tokenizer, models

    backend = tokenizer.backend_tokenizer
    # The parts before the model, alone: all of Qwen's tokenizer as JSON and back takes seconds.
    shell = Tokenizer(models.BPE())
    shell.normalizer, shell.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    described = json.loads(shell.to_str())
    before = described["normalizer"], described["pre_tokenizer"]
    after = tuple(map(_without_prefix, before))
    described["normalizer"], described["pre_tokenizer"] = after
    kept = [token for token in tokenizer.added_tokens_decoder.values() if not _is_markup(token.content, token.special)]
    if not kept:
        parts = Tokenizer.from_str(json.dumps(described))
        core = Tokenizer(backend.model)  # shared, not copied
        core.normalizer, core.pre_tokenizer = parts.normalizer, parts.pre_tokenizer
    if kept or before != after:
        # Added tokens have numbers of their own, which only the whole description keeps.
        whole = json.loads(backend.to_str())
        whole["normalizer"], whole["pre_tokenizer"], whole["truncation"], whole["padding"] = *after, None, None
        markup_core = Tokenizer.from_str(json.dumps(whole)) if before != after else None
        whole["added_tokens"] = [
            token for token in whole["added_tokens"] if not _is_markup(token["content"], token["special"])
        ]
        return Tokenizer.from_str(json.dumps(whole)), markup_core
    return core, None


def _is_markup(content: str, special: bool) -> bool:
    """Return whether an added token is markup: special, or with signs in it; words and runs of spaces are none."""
    return special or not all(character.isalnum() or character.isspace() for character in content)


def _without_prefix(part: Any) -> Any:
    """Return a normalizer or pre-tokenizer that puts no space before the text: it is not the beginning of anything."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    changed = {
        key: [_without_prefix(each) for each in value] if isinstance(value, list) else value
        for key, value in part.items()
    }
    if part.get("type") == "Metaspace":
        changed["prepend_scheme"] = "never"
    if part.get("type") == "ByteLevel":
        changed["add_prefix_space"] = False
    return changed


@dataclass(frozen=True)
class RenderedReply:
    """A reply as tokens, and the texts of its messages as the model saw them."""

    tokens: list[int]
    texts: list[tuple[str, str]]  # tool and text


class ReplyTemplate:
    """How calls are written and replies are given with one tokenizer.

    `chat`: the model has a chat template, and it is used. `call_format` is found in it, or given. `notes` are sentences
    for the user before the first step: where the template cannot be continued as it would render the whole anew.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: ToolSet,
        *,
        chat: bool = True,
        call_format: CallFormat | Literal["auto"] = "auto",
    ) -> None:
        if call_format not in ("auto", *CALL_FORMATS):
            raise ValueError(f"the format {shown(call_format)} must be one of auto, {', '.join(CALL_FORMATS)}")
        self.tokenizer, self.tools = tokenizer, tools
        self.notes: list[str] = []
        self.text = ObservedText(tokenizer)
        template = template_of(tokenizer) if chat else None
        if template is None and chat and getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"{type(tokenizer).__name__} renders chats in a way of its own, which cannot be continued: use a "
                "tokenizer with a chat template, or set model.chat=false"
            )
        self.call_format: CallFormat = format_of(template) if call_format == "auto" else call_format
        self.chat, self.writes_tools, self.takes_system = template is not None, False, True
        if template is None:
            separator = next((each for each in ("\n", " ") if self.text.encode(each)), "")
            self.delta = TemplateDelta(separator, None, separator, str)
        else:
            self._ask(template)
        self._markup = lru_cache(4096)(self._encode_markup)  # pieces by tool
        self.markup_tokens = max(len(self._pieces([name])[0]) for name in [*tools.names, ""])

    def _ask(self, template: str) -> None:
        """Find out what the template writes, and what is to be said about it."""
        render = renderer(template, self.tokenizer, self.tools.schemas())
        self.delta = find_delta(render, "<think>" in template)
        question = [{"role": "user", "content": "Qquestion"}]
        without = renderer(template, self.tokenizer, [])
        own = self.call_format in (format_of(template), "fenced" if "```python" in template else "")
        self.writes_tools = own and render(question) != without(question)
        system = without([{"role": "system", "content": "Qsystem"}, *question])
        self.takes_system = system is not None and "Qsystem" in system
        if not self.writes_tools:
            self.notes.append(
                "the chat template does not write these tools down: their signatures, and how to call them, go into "
                f"the {'system' if self.takes_system else 'first'} message"
            )
        if self.delta.role == "user":
            self.notes.append("the chat template has no messages of tools: replies are given as the user's messages")
        if self.delta.changed:
            self.notes.append(
                f"the chat template rewrites {self.delta.changed} once others follow. The policy is sampled and "
                "trained on its tokens as they were sampled; a server that renders the whole conversation anew will "
                "show it something else. Serve it with tokens, or give it a chat_template.jinja that keeps messages"
            )

    def prompt_tools(self, problem: Problem | None = None) -> list[dict[str, Any]]:
        """Return the schemas for the chat template's `tools=`; empty if `prompts` writes them down."""
        return self.tools.schemas(problem) if self.writes_tools else []

    def prompts(self, problems: Sequence[Problem]) -> list[list[Mapping[str, str]]]:
        """Return the messages of each prompt: with what the environment's `reset` says of the problem.

        Where the chat template does not write the tools down, a system message does.
        """
        openings = self.tools.openings(problems, OPENING_SECONDS)
        return [self._prompt(problem, opening) for problem, opening in zip(problems, openings, strict=True)]

    def _prompt(self, problem: Problem, opening: str | None) -> list[Mapping[str, str]]:
        messages = [dict(message) for message in problem.prompt]
        schemas = self.tools.schemas(problem)
        if opening:
            messages[-1]["content"] += f"\n\n{opening}"
        if self.chat and not self.writes_tools and schemas:
            words = instructions(schemas, self.call_format)
            if messages[0]["role"] == "system" or not self.takes_system:
                messages[0]["content"] = f"{words}\n\n{messages[0]['content']}"
            else:
                messages.insert(0, {"role": "system", "content": words})
        return list(messages)

    def read(self, tokens: Sequence[int], ended: bool = True) -> tuple[str, str]:
        """Return a message's text, and the same with its special tokens, in which calls are looked for."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        body = list(tokens[:-1] if ended else tokens)
        return text, str(self.tokenizer.decode(body, skip_special_tokens=False))

    def render(self, message: Sequence[int], replies: Sequence[tuple[str, str]], limit: int) -> RenderedReply:
        """Return the replies (tool, text) to a message as tokens, up to and including the opening of the next one.

        Their texts have at most `limit` tokens together with what stands between them. What was sampled stays as it
        is: where it ends with the token that the template ends a message with, this is not written twice.
        """
        if len(replies) > 1 and (self.delta.between is None or self._share(replies, limit) < LEAST_SHARE):
            replies = [(replies[0][0], "\n".join(text for _, text in replies))]
        share = self._share(replies, limit)
        texts = [(tool, self._cut(text, share)) for tool, text in replies]
        _, pieces = self._pieces([tool for tool, _ in texts])
        ids = list(pieces[0])
        if ids and message and ids[0] == message[-1]:
            del ids[0]
        for (_, text), piece in zip(texts, pieces[1:], strict=True):
            ids += self.text.encode(self.delta.transform(text)) + piece
        return RenderedReply(ids, texts)

    def _share(self, replies: Sequence[tuple[str, str]], limit: int) -> int:
        """Return how many tokens each of several replies may have."""
        between = sum(map(len, self._pieces([tool for tool, _ in replies])[1][1:-1]))
        return max(limit - between, 0) // len(replies)

    def _pieces(self, tools: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Return the tokens of the markup for replies of these tools: all in one list, and piece by piece."""
        pieces = [self._markup(self.delta.before, tools[0])]
        pieces += [self._markup(self.delta.between or "", tool) for tool in tools[1:]]
        pieces.append(self._markup(self.delta.after, tools[-1]))
        return [number for piece in pieces for number in piece], pieces

    def _encode_markup(self, piece: str, tool: str) -> list[int]:
        # A name that no tool has was made up by the model, and is left out.
        text = piece.replace(NAME, tool if tool in self.tools.names else "")
        return self.text.encode_markup(text) if self.chat else self.text.encode(text)

    def _cut(self, text: str, limit: int) -> str:
        """Return a text of at most so many tokens: the middle of a longer one is left out, and it says so."""

        def size(some: str) -> int:
            return len(self.text.encode(self.delta.transform(some)))

        whole = size(text)
        if whole <= limit:
            return text
        brief = size(LEFT_OUT.format(len(text))) > limit // 2
        # In proportion, and then a little less until it fits: tokens are not equally long everywhere.
        kept = int(len(text) * limit / whole)
        while kept := kept * 9 // 10:
            shortened = cut_middle(text, kept, "[...]" if brief else LEFT_OUT)
            if size(shortened) <= limit:
                return shortened
        return "[...]" if size("[...]") <= limit else ""


# PyPI's `renderers` has the markup of some thirty families by hand; for all other templates (Qwen2.5's, SmolLM2's, a
# user's own) it cannot continue a conversation, and it needs tiktoken, openai and a pre-release of a configuration
# library. Asking the template itself, with contents that can be told apart, works for each that can be continued.
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
