"""Conversations of a policy with tools: calls are read, run within limits, and answered in tokens. Imports no torch."""

from trimtab.conversation.call_formats import CALL_FORMATS, CallFormat
from trimtab.conversation.conversations import Conversations
from trimtab.conversation.reply_template import ReplyTemplate
from trimtab.conversation.tool_set import BUILT_IN, ToolSet
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
    "Ended",
    "Limits",
    "Message",
    "Outcome",
    "ReplyTemplate",
    "ToolSet",
]
