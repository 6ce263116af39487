"""The other side of the conversations of one `sample` call: messages in, replies out."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trimtab.conversation.call_formats import MAX_CALLS, ParsedCall, parse_calls, without_reasoning
from trimtab.conversation.reply_template import ReplyTemplate
from trimtab.conversation.tool_results import ToolResult
from trimtab.conversation.tool_set import OpenTools, ToolSet
from trimtab.conversation.types import Call, Conversation, Ended, Limits, Message
from trimtab.tasks import Problem
from trimtab.text import shorten

if TYPE_CHECKING:  # the samplers import torch
    from trimtab.rollout import Reply, Response

Answered = Callable[[Problem, str], bool]
REWARD_SECONDS = 60.0
MAX_KEPT = 4_000  # characters of a result, in records


@dataclass
class _State:
    """A conversation with its tools; `over` is the work after its last message, if there is any."""

    conversation: Conversation
    tools: OpenTools
    seconds: float = 0.0  # of its calls
    over: Future[None] | None = field(default=None, repr=False)


class Conversations:
    """The conversations of one `sample` call; implements `trimtab.rollout.Turns`.

    `answered` tells whether a message without a call holds an answer; without it every text that is not empty does.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        samples: int,
        tools: ToolSet,
        template: ReplyTemplate,
        limits: Limits,
        answered: Answered | None = None,
    ) -> None:
        self.problems, self.tools, self.template, self.limits = problems, tools, template, limits
        self.answered = answered
        self.max_observed_tokens = (limits.max_turns - 1) * (limits.max_observation_tokens + template.markup_tokens)
        self._states = [[_State(Conversation(), tools.open(problem)) for _ in range(samples)] for problem in problems]
        self._ready: queue.SimpleQueue[tuple[int, int, list[int] | None, BaseException | None]] = queue.SimpleQueue()
        self._pending = 0  # messages without a reply yet

    def submit(self, prompt: int, sample: int, tokens: Sequence[int]) -> None:
        """Take the newest message of a conversation, which ends with an end token. Returns at once."""
        state = self._states[prompt][sample]
        # Here and not in a thread: the tokenizer is the caller's, who may use it in this thread meanwhile.
        text, raw = self.template.read(tokens)
        state.conversation.messages.append(Message("assistant", text))
        calls = parse_calls(raw, self.template.call_format, state.tools.schemas)
        self._pending += 1
        ended = self._ended(prompt, state.conversation, raw, calls)
        if ended is not None:
            self._end(state, ended)
            self._ready.put((prompt, sample, None, None))
        else:
            message = list(tokens)
            self.tools.in_thread(lambda: self._answer(prompt, sample, message, calls))

    def _ended(self, prompt: int, conversation: Conversation, raw: str, calls: list[ParsedCall]) -> Ended | None:
        """Return how a conversation ends with its newest message; None where a tool is to reply."""
        if not calls:
            answer = without_reasoning(raw).strip()
            if answer and (self.answered is None or self.answered(self.problems[prompt], conversation.last_message)):
                return "answer"
            conversation.void_turns += 1
            return "void"
        conversation.void_turns += all(call.problem for call in calls)
        return "turns" if conversation.turns >= self.limits.max_turns else None

    def _answer(self, prompt: int, sample: int, message: list[int], calls: list[ParsedCall]) -> None:
        """Run the calls of a message and put the reply into the queue; runs in a thread."""
        try:
            tokens, error = self._reply(self._states[prompt][sample], message, calls), None
        except BaseException as raised:  # ours, or a module of the user's that cannot be loaded: for the run to see
            tokens, error = None, raised
        self._ready.put((prompt, sample, tokens, error))

    def _reply(self, state: _State, message: list[int], calls: list[ParsedCall]) -> list[int] | None:
        conversation, told = state.conversation, []
        for call in calls[:MAX_CALLS]:
            if state.tools.failed is not None and self.tools.is_environments(call.tool):
                self._end(state, "environment")
                return None
            left = self.limits.deadline - state.seconds
            if left <= 0:
                self._end(state, "deadline")
                return None
            result = self._run(state.tools, call, min(self.limits.timeout, left))
            state.seconds += result.seconds
            conversation.error = conversation.error or result.error
            text, turn = shorten(result.text, MAX_KEPT), conversation.turns - 1
            conversation.calls.append(Call(call.tool, dict(call.arguments), result.outcome, result.seconds, text, turn))
            if state.tools.reset_failed:
                self._end(state, "environment")
                return None
            told.append((call.tool, result.text))
        if len(calls) > MAX_CALLS:
            told[-1] = (told[-1][0], f"{told[-1][1]}\nFurther calls were not run: a message may have {MAX_CALLS}.")
        rendered = self.template.render(message, told, self.limits.max_observation_tokens)
        conversation.messages += [Message("tool", text, tool) for tool, text in rendered.texts]
        conversation.observation_tokens += len(rendered.tokens)
        return rendered.tokens

    def _run(self, tools: OpenTools, call: ParsedCall, timeout: float) -> ToolResult:
        if call.problem:
            return ToolResult("malformed", f"Error: {call.problem}")
        result = tools.call(call.tool, call.arguments, timeout)
        # A lone half of a surrogate pair can be neither encoded nor recorded.
        text = result.text.encode("utf-8", "replace").decode()
        if result.gone:
            text += "\nThe environment has ended. Answer without its tools."
        return replace(result, text=text)

    def _end(self, state: _State, ended: Ended) -> None:
        """End a conversation; what its environment says of it is asked beside the sampling."""
        state.conversation.ended = ended
        if self.tools.has_reward or state.tools.started or state.tools.failed is not None:
            state.over = self.tools.in_thread(lambda: self._settle(state))

    def _settle(self, state: _State) -> None:
        conversation = state.conversation
        try:
            died_in_call = state.tools.failed is not None and not state.tools.reset_failed
            if died_in_call and (self.tools.has_reward or conversation.ended == "environment"):
                conversation.reward = 0.0  # nothing is paid for a call that ended the environment
            elif self.tools.has_reward:
                reward = state.tools.reward(conversation, REWARD_SECONDS)
                if isinstance(reward, ToolResult):
                    conversation.ended = "environment"
                    conversation.error = conversation.error or reward.error or reward.text
                else:
                    conversation.reward = reward
        finally:
            state.tools.close()

    def replies(self, block: bool) -> list[Reply]:
        """Return the replies that have come, in any order; with `block` wait until there is at least one."""
        from trimtab.rollout import Reply

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
        for states, group in zip(self._states, groups, strict=True):
            for state, response in zip(states, group, strict=True):
                if state.conversation.ended is None:
                    cut = response.tokens[response.observed[-1][1] if response.observed else 0 :]
                    if cut:
                        text, _ = self.template.read(cut, ended=False)
                        state.conversation.messages.append(Message("assistant", text))
                    self._end(state, "tokens")
        for states in self._states:
            for state in states:
                if state.over is not None:
                    state.over.result()
        return [[state.conversation for state in states] for states in self._states]

    def of(self, prompt: int, sample: int) -> Conversation:
        """Return a conversation."""
        return self._states[prompt][sample].conversation
