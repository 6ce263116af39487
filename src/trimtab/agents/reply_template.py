"""Replies as tokens: what the chat template writes around them, and text of tools, in which markup stays text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from trimtab.agents.call_formats import CALL_FORMATS, CallFormat, format_of, instructions
from trimtab.agents.template_delta import NAME, TemplateDelta, find_delta, renderer
from trimtab.agents.tool_set import ToolSet
from trimtab.data import Problem
from trimtab.text import LEFT_OUT, cut_middle, shown
from trimtab.workers import template_of

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
        # The name is the model's if there is no such tool, and then it is left out.
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
