"""One conversation and its tools: messages of the model in, what tools reply to them out, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from trimtab.agents.call_formats import MAX_CALLS, ParsedCall, without_reasoning
from trimtab.agents.tool_results import ToolResult
from trimtab.agents.tool_set import ToolSet
from trimtab.agents.types import Call, Conversation, Ended, Limits, Message
from trimtab.data import Problem
from trimtab.text import shorten

Answered = Callable[[Problem, str], bool]
REWARD_SECONDS = 60.0
MAX_KEPT = 4_000  # characters of a result, in records


class Dialogue:
    """One conversation and its tools, from the first message of the model to what its environment says of it.

    `answered` tells whether a message without a call holds an answer; without it every text that is not empty does.
    """

    def __init__(self, problem: Problem, tools: ToolSet, limits: Limits, answered: Answered | None = None) -> None:
        self.problem, self.limits, self.answered = problem, limits, answered
        self.conversation = Conversation()
        self.tools = tools.open(problem)
        self._all_tools = tools
        self._seconds = 0.0  # of its calls
        self._over: Future[None] | None = None  # the work after its last message, if there is any

    def hear(self, text: str, raw: str, calls: Sequence[ParsedCall]) -> bool:
        """Take the model's newest message; return whether its calls are to be run. If not, the conversation is over.

        `raw` is the message with its special tokens and reasoning.
        """
        conversation = self.conversation
        conversation.messages.append(Message("assistant", text))
        if calls:
            conversation.void_turns += all(call.problem for call in calls)
            if conversation.turns < self.limits.max_turns:
                return True
            self.end("turns")
        elif without_reasoning(raw).strip() and (self.answered is None or self.answered(self.problem, text)):
            self.end("answer")
        else:
            conversation.void_turns += 1
            self.end("void")
        return False

    def run(self, calls: Sequence[ParsedCall]) -> list[tuple[str, str]] | None:
        """Run the calls of a message; return tool and text of each reply, or None where the conversation is over."""
        conversation, told = self.conversation, []
        for call in calls[:MAX_CALLS]:
            if self.tools.failed is not None and self._all_tools.is_environments(call.tool):
                self.end("environment")
                return None
            left = self.limits.deadline - self._seconds
            if left <= 0:
                self.end("deadline")
                return None
            result = self._run(call, min(self.limits.timeout, left))
            self._seconds += result.seconds
            conversation.error = conversation.error or result.error
            text, turn = shorten(result.text, MAX_KEPT), conversation.turns - 1
            conversation.calls.append(Call(call.tool, dict(call.arguments), result.outcome, result.seconds, text, turn))
            if self.tools.reset_failed:
                self.end("environment")
                return None
            told.append((call.tool, result.text))
        if len(calls) > MAX_CALLS:
            told[-1] = (told[-1][0], f"{told[-1][1]}\nFurther calls were not run: a message may have {MAX_CALLS}.")
        return told

    def _run(self, call: ParsedCall, timeout: float) -> ToolResult:
        if call.problem:
            return ToolResult("malformed", f"Error: {call.problem}")
        result = self.tools.call(call.tool, call.arguments, timeout)
        # A lone half of a surrogate pair can be neither encoded nor recorded.
        text = result.text.encode("utf-8", "replace").decode()
        if result.gone:
            text += "\nThe environment has ended. Answer without its tools."
        return replace(result, text=text)

    def tell(self, replies: Sequence[tuple[str, str]]) -> None:
        """Note replies as the model sees them: tool and text of each."""
        self.conversation.messages += [Message("tool", text, tool) for tool, text in replies]

    def end(self, ended: Ended) -> None:
        """End the conversation; what its environment says of it is asked in another thread."""
        self.conversation.ended = ended
        if self._all_tools.has_reward or self.tools.started or self.tools.failed is not None:
            self._over = self._all_tools.in_thread(self._settle)

    def _settle(self) -> None:
        conversation = self.conversation
        try:
            died_in_call = self.tools.failed is not None and not self.tools.reset_failed
            if died_in_call and (self._all_tools.has_reward or conversation.ended == "environment"):
                conversation.reward = 0.0  # nothing is paid for a call that ended the environment
            elif self._all_tools.has_reward:
                reward = self.tools.reward(conversation, REWARD_SECONDS)
                if isinstance(reward, ToolResult):
                    conversation.ended = "environment"
                    conversation.error = conversation.error or reward.error or reward.text
                else:
                    conversation.reward = reward
        finally:
            self.tools.close()

    def finished(self) -> Conversation:
        """Return the conversation once its environment has spoken."""
        if self._over is not None:
            self._over.result()
        return self.conversation
