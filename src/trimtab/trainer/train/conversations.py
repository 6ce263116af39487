"""The tools of a run: built once, asked by the conversations of every call of the sampler, closed with the trainer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from trimtab import failpoints
from trimtab.agents import OUTCOMES, Conversation, Conversations, Limits, ReplyTemplate, ToolSet
from trimtab.data import Group, Problem, PromptTokens, Reply, Response, Sample, Sampler, SamplingOptions
from trimtab.grading import Verdict, grade_samples, verdict_of
from trimtab.trainer.config import Config
from trimtab.trainer.model import Policy

MAX_ERRORS = 5  # of tools of the user's own that a run shows


def build_tools(config: Config) -> ToolSet | None:
    """Build the tools of a recipe; None where it has none."""
    if not config.has_tools:
        return None
    tools = config.tools
    return ToolSet(
        tools.use,
        environment=config.task.environment,
        workers=tools.workers,
        memory_mb=tools.memory_mb,
        sandbox_level=tools.sandbox_level,
    )


def build_tool_use(config: Config, policy: Policy, tools: ToolSet | None) -> ToolUse | None:
    """Return how a policy uses these tools; None without tools."""
    if tools is None:
        return None
    template = ReplyTemplate(policy.tokenizer, tools, chat=policy.chat, call_format=config.tools.format)
    return ToolUse(tools, template, config.conversation_limits)


@dataclass
class ToolUse:
    """The tools of a run, how replies are written for its model, and what one conversation may take.

    `errors` are those of the user's own code, until the run has shown them.
    """

    tools: ToolSet
    template: ReplyTemplate
    limits: Limits
    errors: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)
    _sampling: float = 0.0  # seconds since the times were taken
    _waiting: float = 0.0

    @property
    def max_observed_tokens(self) -> int:
        """The most tokens that the replies of one conversation have together; none follows the last message."""
        return (self.limits.max_turns - 1) * (self.limits.max_observation_tokens + self.template.markup_tokens)

    def prompts(self, problems: Sequence[Problem]) -> list[list[Mapping[str, str]]]:
        """Return the messages of prompts, with what the environment says of each problem."""
        return self.template.prompts(problems)

    def schemas(self, problems: Sequence[Problem]) -> list[list[dict[str, Any]]]:
        """Return the schemas that the chat template writes into each prompt."""
        return [self.template.prompt_tools(problem) for problem in problems]

    def sample(
        self,
        sampler: Sampler,
        problems: Sequence[Problem],
        prompts: Sequence[PromptTokens],
        step: int,
        options: SamplingOptions,
    ) -> tuple[list[list[Response]], list[Conversation]]:
        """Sample conversations; return their responses by prompt, and the conversations one after the other."""
        inner = Conversations(problems, options.samples, self.tools, self.template, self.limits)
        turns, start = TimedTurns(inner), time.perf_counter()
        groups = sampler.sample(prompts, step, options, turns)
        self._sampling += time.perf_counter() - start
        self._waiting += turns.waiting
        held = [conversation for group in inner.finish(groups) for conversation in group]
        for conversation in held:
            self._note_error(conversation.error)
        return groups, held

    def _note_error(self, error: str) -> None:
        kind = error.strip().rpartition("\n")[2].partition(":")[0]
        if kind and kind not in self._seen and len(self._seen) < MAX_ERRORS:
            self._seen.add(kind)
            self.errors.append(error)

    def take_errors(self) -> list[str]:
        """Return the errors that were not shown yet, of each kind the first of the run."""
        taken, self.errors = self.errors, []
        return taken

    def take_times(self) -> dict[str, float]:
        """Return the seconds and the share of sampling in which all conversations waited for tools, and start over."""
        waited, share = self._waiting, self._waiting / self._sampling if self._sampling else 0.0
        self._sampling = self._waiting = 0.0
        return {"time/tools": waited, "time/tools_wait_share": share}

    def close(self) -> None:
        """End the tools' processes."""
        self.tools.close()


@dataclass
class TimedTurns:
    """Conversations that measure how long the sampler waits for a reply."""

    conversations: Conversations
    waiting: float = 0.0  # seconds
    replied: bool = False

    @property
    def max_observed_tokens(self) -> int:
        """The most tokens that all replies of one conversation may have together."""
        return self.conversations.max_observed_tokens

    def submit(self, prompt: int, sample: int, tokens: Sequence[int]) -> None:
        """Take the newest message of a conversation; return at once."""
        self.conversations.submit(prompt, sample, tokens)

    def replies(self, block: bool) -> list[Reply]:
        """Return the replies that have come; with `block` wait until there is at least one."""
        start = time.perf_counter()
        replies = self.conversations.replies(block)
        self.waiting += time.perf_counter() - start if block else 0.0
        if replies and not self.replied:
            self.replied = True  # once, because how many replies come together depends on the clock
            failpoints.failpoint("conversations.replied")
        return replies


def sample_responses(
    policy: Policy,
    sampler: Sampler,
    problems: Sequence[tuple[int, Problem]],
    prompts: Sequence[PromptTokens],
    step: int,
    options: SamplingOptions,
    tool_use: ToolUse | None,
) -> list[Group]:
    """Sample responses to numbered problems; with tools they are conversations, whose last messages are graded."""
    if tool_use is None:
        return as_samples(policy, problems, prompts, sampler.sample(prompts, step, options))
    sampled, held = tool_use.sample(sampler, [problem for _, problem in problems], prompts, step, options)
    return as_samples(policy, problems, prompts, sampled, held)


def as_samples(
    policy: Policy,
    problems: Sequence[tuple[int, Problem]],
    prompts: Sequence[PromptTokens],
    sampled: Sequence[Sequence[Response]],
    conversations: Sequence[Conversation] | None = None,
) -> list[Group]:
    """Return the responses to numbered problems as samples; of conversations the last messages are graded."""
    if conversations is None:
        texts = policy.decode_batch([response.tokens.tolist() for responses in sampled for response in responses])
    else:
        texts = [conversation.last_message for conversation in conversations]
    texts_left, held = iter(texts), iter(conversations or ())
    return [
        [Sample(problem, next(texts_left), prompt.ids, response, number, next(held, None)) for response in responses]
        for (number, problem), prompt, responses in zip(problems, prompts, sampled, strict=True)
    ]


def set_verdicts(samples: Sequence[Sample]) -> None:
    """Set the verdict of each sample: its environment's or, without one, that of the task's rule."""
    for sample in samples:
        if sample.conversation is not None and (judged := environment_verdict(sample.conversation)) is not None:
            sample.verdict = judged
    # One call for all: the graders work on the list in parallel.
    rest = [sample for sample in samples if sample.verdict is None]
    for sample, verdict in zip(rest, grade_samples(rest), strict=True):
        sample.verdict = verdict


def environment_verdict(conversation: Conversation) -> Verdict | None:
    """Return what the environment says of a conversation; None where it leaves that to the task's rule."""
    if conversation.reward is not None:
        return verdict_of(conversation.reward)
    # Its reset or reward failed, which says nothing about the response.
    failed = conversation.ended == "environment"
    return Verdict("crashed", error=conversation.error or "the environment has ended") if failed else None


CONVERSATION_METRICS: dict[str, str] = {
    "conversation/called_share": "share of sampled conversations with a successful call",
    "conversation/observed_tokens_mean": "mean number of tokens per conversation that tools wrote, including markup",
    "conversation/out_of_turns_share": "share of conversations that ended with a call, which was not run",
    "conversation/turns_mean": "mean number of messages of the policy per conversation",
    "conversation/void_share": "share of conversations with a message that contains neither a call nor an answer",
    "eval/called_share": "share of held-out problems with a successful call",
    "eval/turns_mean": "mean number of messages of the policy per held-out problem",
    "time/tool_call": "mean seconds per call",
    "time/tools": "seconds in which the sampler only waited for tools",
    "time/tools_wait_share": "share of the sampling time in which the sampler only waited for tools",
    "tools/calls": "number of calls in the step",
    "tools/failed_share": "share of the calls whose outcome is not ok; logged only if there are calls",
    **{f"tools/{outcome}": f"number of calls with this outcome: {meaning}" for outcome, meaning in OUTCOMES.items()},
}


def called(conversation: Conversation) -> bool:
    """Return whether a conversation has a successful call."""
    return any(call.outcome == "ok" for call in conversation.calls)


def conversation_metrics(held: Sequence[Conversation], void: Sequence[bool]) -> dict[str, float]:
    """Return the metrics of a step's conversations; `void` says which of them have a void turn."""
    if not held:
        return {}
    outcomes = Counter(call.outcome for conversation in held for call in conversation.calls)
    calls = outcomes.total()
    metrics: dict[str, float] = {
        "conversation/turns_mean": fmean(conversation.turns for conversation in held),
        "conversation/called_share": fmean(map(called, held)),
        "conversation/void_share": fmean(void),
        "conversation/out_of_turns_share": fmean(conversation.ended == "turns" for conversation in held),
        "conversation/observed_tokens_mean": fmean(conversation.observation_tokens for conversation in held),
        "tools/calls": calls,
        **{f"tools/{outcome}": outcomes[outcome] for outcome in OUTCOMES},
    }
    if calls:
        metrics["time/tool_call"] = fmean(call.seconds for conversation in held for call in conversation.calls)
        metrics["tools/failed_share"] = 1 - outcomes["ok"] / calls
    return metrics


def evaluation_metrics(held: Sequence[Conversation]) -> dict[str, float]:
    """Return the metrics of the conversations on held-out problems."""
    if not held:
        return {}
    return {"eval/called_share": fmean(map(called, held)), "eval/turns_mean": fmean(each.turns for each in held)}


def conversation_text(conversation: Conversation) -> str:
    """Return a conversation for people: what the policy wrote, and what tools replied."""
    lines = [f"[{m.name or 'tool'}] {m.text}" if m.role == "tool" else m.text for m in conversation.messages]
    return "\n".join(lines)
