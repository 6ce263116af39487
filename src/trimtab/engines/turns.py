"""What the adapters do with the turns of a conversation: replies of tools stay text, and the last message is graded.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Key of verl's `extra_info` in which a reward function finds the text to grade.
LAST_MESSAGE = "last_message"
# verl's name for the agent loop that puts it there, and the setting to choose it with.
AGENT_LOOP, AGENT_LOOP_KEY = "trimtab_tool_agent", "actor_rollout_ref.rollout.agent.default_agent_loop"


class ReplyText:
    """Turns the tokens of chat markup in a tool's reply into plain text.

    Engines tokenize a reply together with the chat template around it, so `<|im_end|>` in a reply would end the turn,
    and a tool could write a message in the policy's name.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
        added |= dict.fromkeys(map(str, tokenizer.all_special_tokens), True)
        # Some vocabularies have added tokens for words or for runs of spaces, which are no markup.
        words = [word for word, special in added.items() if special or any(_is_sign(character) for character in word)]
        marks = sorted((word for word in words if len(word.strip()) > 1), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks))) if marks else None

    def __call__(self, text: str) -> str:
        """Return the text with a space behind the first character of every mark."""
        # Again while one is left: a space can complete another mark, if hardly ever.
        for _ in range(8):
            if self._marks is None or self._marks.search(text) is None:
                return text
            text = self._marks.sub(lambda mark: f"{mark[0][0]} {mark[0][1:]}", text)
        return text


def _is_sign(character: str) -> bool:
    return not (character.isalnum() or character.isspace())


def last_message(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last assistant message of a completion, for reward functions.

    The last message of a conversation can be a tool's: TRL leaves it there if no room was left for an answer.
    """
    if isinstance(completion, str):
        return completion
    last = completion[-1] if completion else {}
    # Nothing is earned with an earlier message: the policy has not answered after the tool spoke.
    content = last.get("content") if last.get("role") == "assistant" else ""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")


def last_sampled(ids: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Return the tokens after the last one that the policy did not sample: its last message."""
    end = min(len(ids), len(sampled))
    start = end
    while start and sampled[start - 1]:
        start -= 1
    return list(ids[start:end])
