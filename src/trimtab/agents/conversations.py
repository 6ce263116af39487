"""The other side of the conversations of one `sample` call: messages in, replies out, both as tokens."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trimtab.agents.call_formats import ParsedCall, parse_calls
from trimtab.agents.dialogue import Answered, Dialogue
from trimtab.agents.reply_template import ReplyTemplate
from trimtab.agents.tool_set import ToolSet
from trimtab.agents.types import Conversation, Limits, Message
from trimtab.data import Problem

if TYPE_CHECKING:  # the samplers import torch
    from trimtab.data import Reply, Response


class Conversations:
    """The conversations of one `sample` call; implements `trimtab.data.Turns`. `answered`: see `Dialogue`."""

    def __init__(
        self,
        problems: Sequence[Problem],
        samples: int,
        tools: ToolSet,
        template: ReplyTemplate,
        limits: Limits,
        answered: Answered | None = None,
    ) -> None:
        self.tools, self.template, self.limits = tools, template, limits
        self.max_observed_tokens = (limits.max_turns - 1) * (limits.max_observation_tokens + template.markup_tokens)
        self._dialogues = [[Dialogue(problem, tools, limits, answered) for _ in range(samples)] for problem in problems]
        self._ready: queue.SimpleQueue[tuple[int, int, list[int] | None, BaseException | None]] = queue.SimpleQueue()
        self._pending = 0  # messages without a reply yet

    def submit(self, prompt: int, sample: int, tokens: Sequence[int]) -> None:
        """Take the newest message of a conversation, which ends with an end token. Returns at once."""
        dialogue = self._dialogues[prompt][sample]
        # Here and not in a thread: the tokenizer is the caller's, who may use it in this thread meanwhile.
        text, raw = self.template.read(tokens)
        calls = parse_calls(raw, self.template.call_format, dialogue.tools.schemas)
        self._pending += 1
        if dialogue.hear(text, raw, calls):
            message = list(tokens)
            self.tools.in_thread(lambda: self._answer(prompt, sample, message, calls))
        else:
            self._ready.put((prompt, sample, None, None))

    def _answer(self, prompt: int, sample: int, message: list[int], calls: list[ParsedCall]) -> None:
        """Run the calls of a message and put the reply into the queue; runs in a thread."""
        try:
            tokens, error = self._reply(self._dialogues[prompt][sample], message, calls), None
        except BaseException as raised:  # ours, or a module of the user's that cannot be loaded: for the run to see
            tokens, error = None, raised
        self._ready.put((prompt, sample, tokens, error))

    def _reply(self, dialogue: Dialogue, message: list[int], calls: list[ParsedCall]) -> list[int] | None:
        told = dialogue.run(calls)
        if told is None:
            return None
        rendered = self.template.render(message, told, self.limits.max_observation_tokens)
        dialogue.tell(rendered.texts)
        dialogue.conversation.observation_tokens += len(rendered.tokens)
        return rendered.tokens

    def replies(self, block: bool) -> list[Reply]:
        """Return the replies that have come, in any order; with `block` wait until there is at least one."""
        from trimtab.data import Reply

        replies: list[Reply] = []
        while self._pending:
            try:
                prompt, sample, tokens, error = self._ready.get(block and not replies)
            except queue.Empty:
                break
            self._pending -= 1
            if error is not None:
                raise error
            replies.append(Reply(prompt, sample, tokens))
        return replies

    def finish(self, groups: Sequence[Sequence[Response]]) -> list[list[Conversation]]:
        """End all conversations and return them, by prompt and sample; call it once, after sampling.

        The responses tell what was cut by the budget of tokens; environments say their rewards here at the latest.
        """
        for dialogues, group in zip(self._dialogues, groups, strict=True):
            for dialogue, response in zip(dialogues, group, strict=True):
                if dialogue.conversation.ended is None:
                    cut = response.tokens[response.observed[-1][1] if response.observed else 0 :]
                    if cut and not response.finished:  # an ended one was submitted
                        text, _ = self.template.read(cut, ended=False)
                        dialogue.conversation.messages.append(Message("assistant", text))
                    dialogue.end("tokens")
        return [[dialogue.finished() for dialogue in dialogues] for dialogues in self._dialogues]

    def of(self, prompt: int, sample: int) -> Conversation:
        """Return a conversation."""
        return self._dialogues[prompt][sample].conversation
