"""Conversations of a policy with tools: calls are read, run within limits, and answered in tokens. Imports no torch."""

from trimtab.conversation.call_formats import CALL_FORMATS, CallFormat, ParsedCall, read_json_call
from trimtab.conversation.conversations import Conversations
from trimtab.conversation.dialogue import Dialogue
from trimtab.conversation.reply_template import ReplyTemplate
from trimtab.conversation.tool_catalog import BUILT_IN, ToolCatalog
from trimtab.conversation.tool_set import ToolSet
from trimtab.conversation.types import ENDED, OUTCOMES, Call, Conversation, Ended, Limits, Message, Outcome

__all__ = [
    "BUILT_IN",
    "CALL_FORMATS",
    "ENDED",
    "OUTCOMES",
    "Call",
    "CallFormat",
    "Conversation",
    "Conversations",
    "Dialogue",
    "Ended",
    "Limits",
    "Message",
    "Outcome",
    "ParsedCall",
    "ReplyTemplate",
    "ToolCatalog",
    "ToolSet",
    "read_json_call",
]
