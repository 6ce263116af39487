"""A user's own agent in verl: `+trimtab.agent=...`, and `trimtab_agent` as `rollout.agent.default_agent_loop`.

Each process of verl's agent loops has an endpoint over verl's rollout server, and processes in which the agent runs. A
rollout's branches are rows of verl's batch: verl knows them as the outputs of one session.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from trimtab.agents import Access, AgentWorker, ChatTokens, Endpoint, EndpointLimits
from trimtab.data import Problem, Request, Response
from trimtab.engines import AGENT_STATS, LAST_MESSAGE, OWN_AGENT_LOOP
from trimtab.engines.verl.options import shared_options

if TYPE_CHECKING:
    from trimtab.engines.agents import AgentRollout

_log = logging.getLogger(__name__)
_hosts: dict[str, AgentHost] = {}  # of this process, by the sampling parameters


@register(OWN_AGENT_LOOP)
class TrimtabAgentLoop(AgentLoopBase):
    """One rollout of the user's agent; its branches are the outputs."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        section = self.config.get("trimtab")
        self.options = shared_options(OmegaConf.to_container(section, resolve=True) if section else {})

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """Run the agent for a row of the data; raise if there is nothing to train on, and verl counts it as missing."""
        from trimtab.engines.agents import problem_of

        graded = row.get("reward_model")
        truth = graded.get("ground_truth", "") if isinstance(graded, Mapping) else ""
        source, extra = str(row.get("data_source", "")), row.get("extra_info") or {}
        host = self._host(sampling_params)
        rollout = await host.rollout(problem_of(row["raw_prompt"], truth, "math", source, extra))
        if rollout.error:
            raise RuntimeError(f"trimtab: this rollout is not trained on: {rollout.error}")
        return self._outputs(rollout, host.version, bool(sampling_params.get("logprobs")))

    def _host(self, sampling_params: Mapping[str, Any]) -> AgentHost:
        """Return what runs agents in this process, with this kind of sampling (training, or validation)."""
        kind = repr(sorted(sampling_params.items()))
        if kind not in _hosts:
            _hosts[kind] = AgentHost(self, sampling_params)
        return _hosts[kind]

    def _outputs(self, rollout: AgentRollout, version: Any, with_logp: bool) -> list[AgentLoopOutput]:
        """Return a rollout as verl wants it."""
        from trimtab.engines.agents import sampled_mask, spread_logp

        outputs = []
        for branch in rollout.branches:
            output = AgentLoopOutput(
                prompt_ids=list(branch.prompt),
                response_ids=branch.response.tokens.tolist(),
                response_mask=sampled_mask(branch),
                response_logprobs=spread_logp(branch) if with_logp else None,
                reward_score=rollout.reward,
                num_turns=len(branch.messages),
                metrics=AgentLoopMetrics(generate_sequences=rollout.ended.seconds),
                extra_fields={LAST_MESSAGE: rollout.text, "min_global_steps": version, "max_global_steps": version},
            )
            if rollout.reward is not None:  # as verl's manager does for a reward that is a number
                output.extra_fields["reward_extra_info"] = {"acc": rollout.reward}
            outputs.append(output)
        outputs[0].extra_fields[AGENT_STATS] = rollout.fields
        return outputs


class AgentHost:
    """An endpoint over verl's rollout server, and the processes of the agent, for all rollouts of a process of verl."""

    def __init__(self, loop: TrimtabAgentLoop, sampling_params: Mapping[str, Any]) -> None:
        from trimtab.engines.agents import start_agents  # it imports the trainer, which no other agent loop needs

        rollout = loop.rollout_config
        self.options, self.server = loop.options, loop.server_manager
        self.sampling_params = {**sampling_params, "logprobs": True}  # of every token that is trained
        self.max_new_tokens = int(rollout.response_length)
        self.end_tokens = end_tokens(loop.config.actor_rollout_ref.model.path, loop.tokenizer)
        self.version: Any = None  # of the weights that sampled last
        self._loop = asyncio.get_running_loop()
        self._servers: WeakKeyDictionary[Request, str] = WeakKeyDictionary()
        self._pool = start_agents(self.options)
        self._threads = ThreadPoolExecutor(self.options.agent_concurrency, "trimtab-agents")
        self._idle: SimpleQueue[AgentWorker] = SimpleQueue()
        for _ in range(self.options.agent_concurrency):
            self._idle.put(AgentWorker(self._pool))
        limits = EndpointLimits(
            max_tokens=int(rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length),
            temperature=float(sampling_params.get("temperature", 1.0)),
            top_p=float(sampling_params.get("top_p", 1.0)),
        )
        self.endpoint = Endpoint(ChatTokens(loop.tokenizer, end_tokens=self.end_tokens), limits)
        threading.Thread(target=self._serve, name="trimtab-requests", daemon=True).start()

    async def rollout(self, problem: Problem) -> AgentRollout:
        """Run the agent for a problem, when a process is free."""
        return await self._loop.run_in_executor(self._threads, self._rollout, problem)

    def _rollout(self, problem: Problem) -> AgentRollout:
        from trimtab.engines.agents import agent_rollout

        seed = int.from_bytes(uuid4().bytes[:8], "little", signed=True)  # verl's server draws as it likes anyway
        worker = self._idle.get()
        session = self.endpoint.open(seed, self.max_new_tokens)
        try:
            run = worker.run(problem, Access(self.endpoint.url, session.api_key, seed))
        finally:
            sealed = session.seal()
            self._idle.put(worker)
        return agent_rollout(run, sealed, self.options)

    def _serve(self) -> None:
        """Hand requests on as they come; verl's server batches them. Runs in a thread."""
        while (taken := self.endpoint.requests.take(block=True)) is not None:
            for request in taken:
                asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)

    async def _answer(self, request: Request) -> None:
        try:
            response = await self._sampled(request)
        except Exception:
            _log.exception("verl's rollout server has failed; the rollout is not trained on")
            response = Response([], [], False)  # refused by the endpoint, as a failure of the sampler's
        self.endpoint.requests.answer(request, response)

    async def _sampled(self, request: Request) -> Response:
        # A request that goes on from another one goes to the same server, which may have its KV cache.
        server = self._servers.get(request.follows) if request.follows is not None else None
        server = self._servers[request] = server or uuid4().hex
        output = await self.server.generate(
            request_id=server,
            prompt_ids=list(request.prompt),
            sampling_params={**self.sampling_params, "max_tokens": request.max_new_tokens},
        )
        self.version = output.extra_fields.get("global_steps", self.version)
        tokens = list(output.token_ids)
        if output.log_probs is None or len(output.log_probs) != len(tokens):
            raise RuntimeError("the rollout server returned no log-probabilities, which a rollout of an agent needs")
        end = request.stop(tokens) if request.stop is not None else None
        tokens = tokens[: len(tokens) if end is None else end]
        finished = end is not None or (bool(tokens) and tokens[-1] in self.end_tokens)
        return Response(tokens, output.log_probs[: len(tokens)], finished)


def end_tokens(model: str, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a message, by the model's generation config and the tokenizer."""
    from transformers import GenerationConfig

    try:
        configured = GenerationConfig.from_pretrained(model, trust_remote_code=False).eos_token_id
    except (OSError, ValueError):  # it has none, or is not here: the servers have a copy of their own
        configured = None
    listed = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in (*listed, tokenizer.eos_token_id) if token is not None)
