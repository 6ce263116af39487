"""A sampler that holds prepared conversations: one list of messages for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from helpers.train.scripted import scripted_trainer
from trimtab.data import FixedTask, PromptTokens, Response, SamplingOptions, Turns
from trimtab.trainer.config import Config
from trimtab.trainer.model import Policy
from trimtab.trainer.train.conversations import build_tool_use, build_tools
from trimtab.trainer.train.trainer import Trainer


@dataclass
class ScriptedTurns:
    """Every sample writes the messages of its script, the next one when the tool has replied."""

    policy: Policy
    scripts: Sequence[Sequence[str]]
    prompts: list[PromptTokens] = field(default_factory=list)

    def sample(
        self, prompts: Sequence[PromptTokens], step: int, options: SamplingOptions, turns: Turns | None = None
    ) -> list[list[Response]]:
        assert turns is not None
        self.prompts += prompts
        tokens: dict[tuple[int, int], list[int]] = {}
        observed: dict[tuple[int, int], list[tuple[int, int]]] = {}
        left = {(p, s): list(script) for p in range(len(prompts)) for s, script in enumerate(self.scripts)}

        def write(key: tuple[int, int]) -> None:
            message = self.policy.encode_solution(left[key].pop(0))
            tokens.setdefault(key, []).extend(message)
            turns.submit(*key, message)

        for key in left:
            write(key)
        waiting = len(left)
        while waiting:
            for reply in turns.replies(block=True):
                key = reply.prompt, reply.sample
                if reply.tokens is None:
                    waiting -= 1
                    continue
                start = len(tokens[key])
                tokens[key] += reply.tokens
                observed.setdefault(key, []).append((start, len(tokens[key])))
                write(key)
        return [
            [self._response(tokens[p, s], observed.get((p, s), []), s) for s in range(len(self.scripts))]
            for p in range(len(prompts))
        ]

    def _response(self, tokens: list[int], observed: list[tuple[int, int]], sample: int) -> Response:
        sampled = len(tokens) - sum(end - start for start, end in observed)
        return Response(tokens, [-1.0] * sampled, True, sample, tuple(observed))


def trainer_with_tools(policy: Policy, config: Config, scripts: Sequence[Sequence[str]], task: FixedTask) -> Trainer:
    """A trainer whose policy writes these messages; close it."""
    trainer = scripted_trainer(policy, ScriptedTurns(policy, scripts), config, task)
    trainer.tool_use = build_tool_use(config, policy, build_tools(config))
    return trainer
