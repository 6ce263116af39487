"""How calls are written and replies are given with one tokenizer: prompts, messages as text, replies as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from trimtab.agents.call_formats import CALL_FORMATS, CallFormat, format_of, instructions
from trimtab.agents.observed_text import ObservedText
from trimtab.agents.template_delta import NAME, TemplateDelta, find_delta, renderer
from trimtab.agents.tool_set import ToolSet
from trimtab.chat_template import template_of
from trimtab.data import Problem
from trimtab.text import LEFT_OUT, cut_middle, shown

OPENING_SECONDS = 60.0  # for an environment's `reset`, before the first message
LEAST_SHARE = 16  # tokens; where several replies would have less each, they are given as one


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
        """Return the schemas for the chat template's `tools=`; empty where `prompts` writes them down."""
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
        # The name is the model's where there is no such tool, and then it is left out.
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
