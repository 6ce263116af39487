"""verl's tool agent loop with two repairs: `actor_rollout_ref.rollout.agent.default_agent_loop=trimtab_tool_agent`.

Reward functions get the last assistant message as `extra_info["last_message"]`: verl itself hands them the text of the
whole response, so the reply of a tool could earn the reward. Chat markup in a reply stays text.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from trimtab.engines.turns import AGENT_LOOP, LAST_MESSAGE, ReplyText, last_sampled


@register(AGENT_LOOP)
class TrimtabToolAgentLoop(ToolAgentLoop):
    """verl's `tool_agent`, with the last message for reward functions and replies of tools as plain text."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reply_text = ReplyText(self.tokenizer)

    async def run(self, sampling_params: dict[str, Any], **options: Any) -> Any:
        """Run a conversation."""
        output = await super().run(sampling_params, **options)
        ids = last_sampled(output.response_ids, output.response_mask)
        output.extra_fields[LAST_MESSAGE] = self.tokenizer.decode(ids, skip_special_tokens=True)
        return output

    async def _call_tool(self, *args: Any, **options: Any) -> Any:
        response, reward, metrics = await super()._call_tool(*args, **options)
        if response.text:
            response.text = self._reply_text(response.text)
        return response, reward, metrics
