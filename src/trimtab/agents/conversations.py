"""The other side of conversations: messages of the model in, what tools reply to them out, as text and as tokens."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from trimtab.agents.call_formats import MAX_CALLS, ParsedCall, parse_calls, without_reasoning
from trimtab.agents.reply_template import ReplyTemplate
from trimtab.agents.tool_set import ToolResult, ToolSet
from trimtab.agents.types import Call, Conversation, Ended, Limits, Message
from trimtab.data import Problem, Reply, Response
from trimtab.text import shorten

REWARD_SECONDS = 60.0
MAX_KEPT = 4_000  # characters of a result, in records


class Dialogue:
    """One conversation and its tools, from the first message of the model to what its environment says of it."""

    def __init__(self, problem: Problem, tools: ToolSet, limits: Limits) -> None:
        self.limits = limits
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
        elif without_reasoning(raw).strip():
            self.end("answer")
        else:
            conversation.void_turns += 1
            self.end("void")
        return False

    def run(self, calls: Sequence[ParsedCall]) -> list[tuple[str, str]] | None:
        """Run the calls of a message; return tool and text of each reply, or None if the conversation is over."""
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


class Conversations:
    """The conversations of one `sample` call; implements `trimtab.data.Turns`."""

    def __init__(
        self, problems: Sequence[Problem], samples: int, tools: ToolSet, template: ReplyTemplate, limits: Limits
    ) -> None:
        self.tools = tools
        self.template = template
        self.limits = limits
        self.max_observed_tokens = (limits.max_turns - 1) * (limits.max_observation_tokens + template.markup_tokens)
        self._dialogues = [[Dialogue(problem, tools, limits) for _ in range(samples)] for problem in problems]
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
                    cut = response.tokens[response.observed[-1][1] if response.observed else 0 :].tolist()
                    if cut and not response.finished:  # an ended one was submitted
                        text, _ = self.template.read(cut, ended=False)
                        dialogue.conversation.messages.append(Message("assistant", text))
                    dialogue.end("tokens")
        return [[dialogue.finished() for dialogue in dialogues] for dialogues in self._dialogues]
