"""verl's tool agent loop with trimtab's tools: `actor_rollout_ref.rollout.agent.default_agent_loop=trimtab_tool_agent`.

Reward functions get the last assistant message as `extra_info["last_message"]`: verl itself hands them the text of the
whole response, so the reply of a tool could earn the reward. Chat markup in a reply stays text. `+trimtab.tools` and
`+trimtab.environment` add tools to those of verl's own settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema

from trimtab.data import Problem
from trimtab.engines import AGENT_LOOP, LAST_MESSAGE
from trimtab.engines.conversations import ConversationTools, ReplyText, last_sampled
from trimtab.engines.verl import agents  # noqa: F401  (registers the loop of users' own agents)
from trimtab.engines.verl.options import shared_options


@register(AGENT_LOOP)
class TrimtabToolAgentLoop(ToolAgentLoop):
    """verl's `tool_agent` for one conversation, with trimtab's tools and the last message for reward functions."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._reply_text = ReplyText(self.tokenizer)
        section = self.config.get("trimtab")
        self._options = shared_options(OmegaConf.to_container(section, resolve=True) if section else {})
        self._messages: list[dict[str, Any]] = []

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Run a conversation."""
        prompt = list(row["raw_prompt"])
        tools = None
        if self._options.has_tools:
            tools = ConversationTools(self._options, _problem(row))
            self._add_tools(tools)
            opening = await asyncio.to_thread(tools.opening)
            prompt[-1] = {**prompt[-1], "content": prompt[-1]["content"] + opening}
        output = await super().run(sampling_params, **{**row, "raw_prompt": prompt})
        ids = last_sampled(output.response_ids, output.response_mask)
        last = self.tokenizer.decode(ids, skip_special_tokens=True)
        output.extra_fields[LAST_MESSAGE] = last
        if tools is not None and tools.tools.has_reward:
            said = self._messages[len(prompt) :]
            # verl does not add the message at which a conversation was cut.
            if not said or said[-1]["role"] != "assistant":
                said = [*said, {"role": "assistant", "content": last}]
            output.reward_score = await asyncio.to_thread(tools.reward, said)
            if output.reward_score is not None:  # as verl's manager does for a reward that is a number
                output.extra_fields["reward_extra_info"] = {"acc": output.reward_score}
        return output

    def _add_tools(self, tools: ConversationTools) -> None:
        """Add trimtab's tools to those of this conversation."""
        # Their replies have a limit of their own, which says what was left out; verl's default is 256 characters.
        verls: int = self.rollout_config.multi_turn.max_tool_response_length
        self.max_tool_response_length = max(verls, tools.options.tool_characters + 100)
        for schema in tools.tools.schemas(tools.problem):
            name = schema["function"]["name"]
            described = OpenAIFunctionToolSchema.model_validate(schema)
            self.tools[name] = FunctionTool(name, _caller(tools, name), described, is_async=True)
            self.tool_schemas.append(schema)

    async def _handle_pending_state(self, agent_data: Any, sampling_params: dict[str, Any]) -> Any:
        self._messages = agent_data.messages  # verl adds to this list
        return await super()._handle_pending_state(agent_data, sampling_params)

    async def _call_tool(self, *args: Any, **settings: Any) -> Any:
        response, reward, metrics = await super()._call_tool(*args, **settings)
        if response.text:
            response.text = self._reply_text(response.text)
        return response, reward, metrics


def _caller(tools: ConversationTools, name: str) -> Callable[..., Any]:
    """Return a function that calls a tool beside the event loop, which runs all conversations of a worker."""

    async def call(**arguments: Any) -> str:
        return await asyncio.wrap_future(tools.tools.in_thread(partial(tools.call, name, arguments)))

    return call


def _problem(row: Mapping[str, Any]) -> Problem:
    """Return a row of verl's data as a problem."""
    graded = row.get("reward_model")
    truth = graded.get("ground_truth", "") if isinstance(graded, Mapping) else ""
    prompt = tuple({"role": message["role"], "content": message["content"]} for message in row["raw_prompt"])
    extra = row.get("extra_info")
    return Problem(prompt, str(truth), "math", str(row.get("data_source", "")), extra=dict(extra or {}))
