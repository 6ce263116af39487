"""A user's own agent in TRL: `rollout_func=agent_rollouts("python:my_agent:solve")`, and its reward.

trimtab's sampler answers the agent's requests from TRL's own model. TRL has one row per completion, so a rollout is one
branch: see `agent_branches`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from trimtab.agents import ChatTokens, Endpoint, EndpointLimits
from trimtab.data import SamplingOptions
from trimtab.engines import LAST_MESSAGE
from trimtab.engines.agents import (
    AgentRollout,
    agent_rollout,
    most_have_failed,
    problem_of,
    rollout_metrics,
    sampled_mask,
    spread_logp,
    start_agents,
)
from trimtab.engines.options import EngineOptions, read_options
from trimtab.own_parts import module_folders
from trimtab.trainer.model import Policy
from trimtab.trainer.sampling import NativeSampler
from trimtab.trainer.train import AgentUse

if TYPE_CHECKING:
    from trimtab.engines.trl.trainer import TrimtabTrainer

REWARD, FAILED = "agent_reward", "agent_failed"  # what reward functions get of each rollout, besides `last_message`

# Settings of TRL's sampling that trimtab's sampler does not know: their defaults.
REFUSED: Mapping[str, Any] = {
    "use_vllm": False, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None,
    "chat_template_kwargs": None,
}  # fmt: skip


class AgentRollouts:
    """TRL's `rollout_func`: runs the agent for each prompt, and returns its rollouts as TRL's completions."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        start_agents(options).close()  # now: what is wrong with the agent would be an error of the first step
        self._use: AgentUse | None = None

    def __call__(self, prompts: Sequence[Any], trainer: TrimtabTrainer) -> dict[str, list[Any]]:
        """Return the rollouts of a process's prompts."""
        options, args = self.options, trainer.args
        if self._use is None:
            self._use = self._start(trainer)
        # By their place among the rows of all processes: so many processes sample the same as one.
        first = trainer.accelerator.process_index * len(trainer.rows)
        numbered = [(number, _problem(row), 0) for number, row in enumerate(trainer.rows, start=first)]
        sampling = SamplingOptions(
            samples=1,
            max_new_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k or 0,
            seed=args.seed,
        )
        step = trainer.rollouts_so_far if trainer.model.training else -1
        ended = self._use.run(self._sampler(trainer), numbered, step, sampling)
        rollouts = [agent_rollout(run, sealed, options) for run, sealed in ended]
        _check(rollouts)
        trainer.log_agents(rollout_metrics([rollout.fields for rollout in rollouts]))
        return _columns(rollouts, trainer)

    def _start(self, trainer: TrimtabTrainer) -> AgentUse:
        """Start the agent's processes and the endpoint; raise if TRL samples in a way that is not ours."""
        args, policy = trainer.args, _policy(trainer)
        wrong = [f"{name}={getattr(args, name)!r}" for name, value in REFUSED.items() if getattr(args, name) != value]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)} with agent_rollouts: trimtab's own sampler answers the agent's requests, and has "
                "no such setting: leave it out"
            )
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise ValueError(
                "agent_rollouts samples from the whole model in each process, which DeepSpeed and FSDP do not have: "
                "leave them out, or use verl or trimtab's own trainer"
            )
        limits = EndpointLimits(max_tokens=policy.context, temperature=args.temperature, top_p=args.top_p)
        chat = ChatTokens(policy.tokenizer, end_tokens=policy.eos_token_ids)
        return AgentUse(start_agents(self.options), Endpoint(chat, limits), self.options.agent_on_timeout)

    def _sampler(self, trainer: TrimtabTrainer) -> NativeSampler:
        policy = _policy(trainer)
        # The precision is the model's own: accelerate enters autocast in its `forward`.
        return NativeSampler(policy.model, policy.eos_token_ids, policy.pad_token_id, nullcontext)

    def close(self) -> None:
        """End the agent's processes and the endpoint."""
        if self._use is not None:
            self._use.close()
            self._use = None


def agent_rollouts(agent: str | None = None, **options: Any) -> AgentRollouts:
    """Return a `rollout_func=` that runs an agent: `agent_rollouts("python:my_agent:solve", agent_timeout=60.0)`.

    `options`: `agent_command` for a program instead, `agent_concurrency`, `agent_timeout`, `agent_on_timeout` and
    `agent_branches`.
    """
    read = read_options("trl", {"agent": agent, "tool_folders": module_folders(), **options})
    if not read.has_agent:
        raise ValueError('agent_rollouts: name an agent, "python:MODULE:NAME", or agent_command=["python", "agent.py"]')
    return AgentRollouts(read)


def agent_reward(agent_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """Return the rewards that the agent returned: `reward_funcs=[agent_reward, ...]`; None leaves it to the others."""
    return list(agent_reward)


def _policy(trainer: TrimtabTrainer) -> Policy:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return Policy(model, trainer.tokenizer_of_text, trainer.accelerator.device)


def _problem(row: Mapping[str, Any]) -> Any:
    """Return a row of TRL's data as a problem: its columns are in `extra`."""
    extra = {name: value for name, value in row.items() if name != "prompt"}
    return problem_of(row["prompt"], row.get("answer", ""), str(row.get("rule", "math")), "trl", extra)


def _check(rollouts: Sequence[AgentRollout]) -> None:
    """Raise for rollouts of several branches, and if most have failed."""
    failed = [rollout for rollout in rollouts if rollout.error]
    if 2 * len(failed) > len(rollouts):
        raise most_have_failed(len(failed), len(rollouts), f"The first error: {failed[0].error}")
    branches = max((len(rollout.branches) for rollout in rollouts), default=0)
    if branches > 1:
        raise ValueError(
            f"a rollout of the agent has {branches} branches, conversations that do not go on from each other, and TRL "
            "trains one row per completion. Add to one list of messages, set agent_branches='longest' to train the "
            "branch with the most sampled tokens only, or train in verl or with trimtab's own trainer, which take all"
        )


def _columns(rollouts: Sequence[AgentRollout], trainer: TrimtabTrainer) -> dict[str, list[Any]]:
    """Return rollouts as TRL wants them, and what reward functions get. A failed one has a token that is masked."""
    end = min(_policy(trainer).eos_token_ids)
    branches = [None if rollout.error else rollout.branches[0] for rollout in rollouts]
    if trainer.model.training and any(rollout.error for rollout in rollouts):
        failed = sum(bool(rollout.error) for rollout in rollouts)
        warnings.warn(f"{failed} rollouts of this step are not trained on, as the agent failed", stacklevel=2)
    return {
        "prompt_ids": [[end] if branch is None else list(branch.prompt) for branch in branches],
        "completion_ids": [[end] if branch is None else branch.response.tokens.tolist() for branch in branches],
        "logprobs": [[0.0] if branch is None else spread_logp(branch) for branch in branches],
        "env_mask": [[0] if branch is None else sampled_mask(branch) for branch in branches],
        REWARD: [rollout.reward for rollout in rollouts],
        LAST_MESSAGE: [rollout.text for rollout in rollouts],
        FAILED: [bool(rollout.error) for rollout in rollouts],
    }
