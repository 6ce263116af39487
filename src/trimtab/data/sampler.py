"""The interface of every sampler (prompts and sampling options in, responses out), and the carrier of a response."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from trimtab.data.problems import Problem

if TYPE_CHECKING:
    import numpy as np

    from trimtab.agents import Conversation
    from trimtab.data.kept_tokens import KeptTokens
    from trimtab.grading import Verdict


@dataclass(frozen=True)
class SamplingOptions:
    """How to sample: `samples` responses per prompt, at most `batch_size` sequences at one time.

    `temperature` 0 is greedy and `top_k` 0 keeps the whole vocabulary. A response depends only on (seed, step,
    prompt number, sample number), not on what else is in the batch.
    """

    samples: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    batch_size: int = 1024

    def __post_init__(self) -> None:
        for name in ("samples", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be 1 or more")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: it must be 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"top_p={self.top_p}, top_k={self.top_k}: set 0 < top_p <= 1 and top_k >= 0")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: it must fit into a signed 64-bit integer")

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p leave out tokens."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True)
class PromptTokens:
    """A prompt as token ids, and the number that seeds the random numbers of its samples."""

    ids: Sequence[int]
    number: int


def check_prompts(prompts: Sequence[PromptTokens], vocab_size: int) -> None:
    """Raise ValueError for an empty prompt or a token id outside of the vocabulary."""
    for number, prompt in enumerate(prompts):
        if not prompt.ids:
            raise ValueError(f"prompt {number} has no tokens: give at least one, such as the BOS token")
        # On a GPU an index outside of the embedding is a device-side assert, which ends the process.
        for token in (min(prompt.ids), max(prompt.ids)):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"prompt {number} holds token {token}, but the model's vocabulary is 0 to {vocab_size - 1}: "
                    "use the model's own tokenizer, or resize the embedding for tokens that were added"
                )


@dataclass(frozen=True, eq=False)
class Response:
    """A sampled response: its tokens, their log-probabilities under the sampler, and its index within its group.

    Give `tokens` and `logp` as lists or arrays; they become arrays of int64 and float32. `finished` is True if it ended
    with an end token, False if it was cut at `max_new_tokens`. The response of a conversation has all of its messages
    and the replies between them: `observed` are the [start, end) ranges of `tokens` that the policy did not sample, and
    `logp` has sampled tokens only. `moments`, (4, sampled tokens), are those of every token's distribution before top-k
    and top-p, in the order of `objectives.Moments`, if a sampler was asked for them. `versions` are the weights that
    sampled it, where a run keeps them (`rollout.max_lag`): (sampled tokens, steps that the weights were trained for).
    `kept` are the tokens that top-k and top-p left to choose from at each sampled token, if a sampler was asked for
    them; `moments` are then those of the distribution over these alone.

    Example: `Response(tokens=[12, 7, 2], logp=[-0.1, -1.2, -0.3], finished=True)`.
    """

    tokens: np.ndarray  # (tokens,)
    logp: np.ndarray  # (sampled tokens,)
    finished: bool
    sample: int = 0
    observed: tuple[tuple[int, int], ...] = ()
    moments: np.ndarray | None = None
    versions: tuple[tuple[int, int], ...] = ()
    kept: KeptTokens | None = None

    def __init__(
        self,
        tokens: Sequence[int] | np.ndarray,
        logp: Sequence[float] | np.ndarray,
        finished: bool,
        sample: int = 0,
        observed: tuple[tuple[int, int], ...] = (),
        moments: np.ndarray | None = None,
        versions: tuple[tuple[int, int], ...] = (),
        kept: KeptTokens | None = None,
    ) -> None:
        import numpy as np  # here: what only parses a recipe imports this module too

        ids = np.asarray(tokens)
        # Anything but whole numbers is left as it is for `OwnSampler` to refuse.
        ids = ids.astype(np.int64, copy=False) if ids.dtype.kind in "iu" or not ids.size else ids
        values = {"tokens": ids, "logp": np.asarray(logp, dtype=np.float32), "finished": finished}
        values |= {"sample": sample, "observed": observed, "moments": moments, "versions": versions, "kept": kept}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Response):
            return NotImplemented
        one, two = (
            (r.tokens.tolist(), r.logp.tolist(), r.finished, r.sample, r.observed, r.versions) for r in (self, other)
        )
        return one == two

    __hash__ = None  # type: ignore[assignment]

    @property
    def sampled_tokens(self) -> np.ndarray:
        """The tokens that the policy sampled, in order."""
        import numpy as np

        return np.concatenate(self.messages) if self.observed else self.tokens

    @property
    def num_sampled(self) -> int:
        """How many tokens the policy sampled."""
        return len(self.tokens) - sum(end - start for start, end in self.observed)

    @property
    def messages(self) -> list[np.ndarray]:
        """The tokens that were sampled between two replies, message by message."""
        starts = [0, *(end for _, end in self.observed)]
        ends = [*(start for start, _ in self.observed), len(self.tokens)]
        return [self.tokens[start:end] for start, end in zip(starts, ends, strict=True)]


@dataclass(frozen=True)
class Reply:
    """The reply to a message: the tokens up to and including the opening of the next one; None ends the conversation.

    `prompt` is the index of the prompt in the call of `sample`, `sample` the index of the response in its group.
    """

    prompt: int
    sample: int
    tokens: list[int] | None


class Turns(Protocol):
    """The other side of the conversations of one call of `sample`: takes messages and returns replies.

    `max_observed_tokens` is the most tokens that all replies of one conversation may have together.
    """

    @property
    def max_observed_tokens(self) -> int: ...  # noqa: D102

    def submit(self, prompt: int, sample: int, tokens: Sequence[int]) -> None:
        """Take the newest message of a conversation, which ended with an end token; return at once."""
        ...

    def replies(self, block: bool) -> list[Reply]:
        """Return the replies that have come, in any order; with `block` wait until there is at least one."""
        ...


@dataclass(eq=False)
class Request:
    """A message that somebody asks for: its context as token ids, and how many tokens it may have.

    `key` is that of its random numbers, a signed 64-bit integer. `stop` is called with the tokens sampled so far; it
    returns after how many of them the message is over, or None: not yet. With `begun` the answer goes on from those
    tokens: it has them too, and they count for `max_new_tokens`.
    """

    prompt: Sequence[int]
    key: int
    max_new_tokens: int
    follows: Request | None = None  # one whose prompt and answer this prompt begins with: its KV cache may be kept
    stop: Callable[[Sequence[int]], int | None] | None = None
    cancelled: bool = False  # set by another thread: nobody waits for it any more, and it is dropped unanswered
    begun: Response | None = None
    # Set in `answer` to another request: it is answered after its present token, or not at all if it does not run yet.
    halted: bool = False


class Requests(Protocol):
    """Where a sampler takes requests from while it runs: they come in any order and at any time.

    `max_tokens` is the most tokens that a prompt and its answer may have together.
    """

    @property
    def max_tokens(self) -> int: ...  # noqa: D102

    def take(self, block: bool) -> list[Request] | None:
        """Return the requests that have come; with `block` wait for one. None: there will be no more."""
        ...

    def answer(self, request: Request, response: Response) -> None:
        """Take the answer: it is finished if an end token or `stop` ended it."""
        ...


class Sampler(Protocol):
    """Samples responses from a policy."""

    def sample(
        self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, turns: Turns | None = None
    ) -> list[list[Response]]:
        """Return `options.samples` responses for each prompt, in order.

        With `turns` a response is a conversation: a message that ends with an end token is submitted, and sampling goes
        on after the reply until there is none, or until `options.max_new_tokens` tokens have been sampled in all. A
        message that this budget cuts is not submitted.
        """
        ...

    def serve(self, requests: Requests, options: SamplingOptions) -> None:
        """Answer requests until there are no more.

        Of `options` only temperature, top_p, top_k and batch_size count: a request brings the rest.
        """
        ...


@dataclass(eq=False)
class Sample:
    """One response to a problem. The sampler, the graders and the rewards fill it in; training and records read it.

    What is not known yet is None or has its default: a rule that grades a text by itself gets a sample without a
    `response`, and a trainer outside of trimtab records samples without log-probabilities.
    """

    problem: Problem
    text: str = ""  # what is graded: the response as text, of a conversation its last message
    # From the sampler.
    prompt: Sequence[int] = ()  # token ids
    response: Response = None  # type: ignore[assignment]
    group: int = 0  # number of the prompt in the stream of prompts, shared by all its samples
    conversation: Conversation | None = None
    branch: int | None = None  # which branch of an agent's rollout; None: it is not an agent's
    # From the graders.
    verdict: Verdict = None  # type: ignore[assignment]  # always the grader's own, also if the reward is another's
    failed: bool = False  # the task's rule or that of a term has crashed
    # From the rewards.
    reward: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)  # each of several rewards by name, before its weight
    excluded: bool = False  # not trained on; its reward means nothing
    flipped: bool = False  # it has the reward of the opposite verdict (`reward.noise`)

    def __len__(self) -> int:
        """Return the number of tokens of prompt and response."""
        return len(self.prompt) + len(self.response.tokens)

    def to_train(self) -> Sample:
        """Return what planning and training read of it, for other processes."""
        nothing = Problem((), "", "", "")
        kept = {"branch": self.branch, "reward": self.reward, "excluded": self.excluded}
        return Sample(nothing, "", self.prompt, self.response, self.group, **kept)  # type: ignore[arg-type]

    @property
    def named(self) -> str:
        """Where it comes from and how it begins, for an error."""
        start = self.text[:60] + ("..." if len(self.text) > 60 else "")
        return f"{self.problem.location + ', ' if self.problem.location else ''}the response {start!r}"

    @property
    def has_void_turn(self) -> bool:
        """Whether some message of the conversation has neither a call nor an answer."""
        if self.conversation is None:
            return False
        ended_without = self.conversation.ended == "answer" and self.verdict.kind == "no_answer"
        return self.conversation.void_turns > 0 or ended_without


Group = list[Sample]  # the responses to one prompt


def by_rollout(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the responses of each rollout: the branches of an agent's run, or any other response."""
    rollouts: dict[int | tuple[int, int], list[Sample]] = {}
    for number, sample in enumerate(samples):
        key = number if sample.branch is None else (sample.group, sample.response.sample)
        rollouts.setdefault(key, []).append(sample)
    return list(rollouts.values())


def rollout_ids(groups: Iterable[int | str], samples: Iterable[int]) -> list[int]:
    """Return ids of the rollouts that responses belong to: those of one sample of one group."""
    ids: dict[tuple[int | str, int], int] = {}
    return [ids.setdefault(pair, len(ids)) for pair in zip(groups, samples, strict=True)]
