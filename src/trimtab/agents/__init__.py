"""Conversations of a policy with tools: calls are read, run within limits, and answered in tokens. Imports no torch."""

from trimtab.agents.agent_pool import Access, AgentPool, AgentRun, AgentWorker
from trimtab.agents.call_formats import CALL_FORMATS, CallFormat, ParsedCall, read_json_call
from trimtab.agents.chat_tokens import ChatTokens
from trimtab.agents.conversations import Conversations, Dialogue
from trimtab.agents.endpoint import Endpoint
from trimtab.agents.endpoint_limits import EndpointLimits
from trimtab.agents.reply_template import ReplyTemplate
from trimtab.agents.sealed_rollout import NEW_ROOTS, Branch, RolloutStats, SealedRollout
from trimtab.agents.session import Session
from trimtab.agents.template_check import check_template
from trimtab.agents.tool_set import BUILT_IN, ToolCatalog, ToolSet
from trimtab.agents.types import ENDED, OUTCOMES, Call, Conversation, Limits, Message

__all__ = [
    "BUILT_IN", "CALL_FORMATS", "ENDED", "NEW_ROOTS", "OUTCOMES", "Access", "AgentPool", "AgentRun", "AgentWorker",
    "Branch", "Call", "CallFormat", "ChatTokens", "Conversation", "Conversations", "Dialogue", "Endpoint",
    "EndpointLimits", "Limits", "Message", "ParsedCall", "ReplyTemplate", "RolloutStats", "SealedRollout", "Session",
    "ToolCatalog", "ToolSet", "check_template", "read_json_call",
]  # fmt: skip
