"""From chat messages to text, and the length of prompts, within limits of time and memory.

A chat template comes with a model, and prompts with a data set: neither is to be trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trimtab.chat_template import special_tokens, template_of
from trimtab.policy.pretrained import one_line
from trimtab.rewards import WorkerLimits, call_worker, start_worker

RENDER = "trimtab.chat_template:render"
SECONDS, CPU_SECONDS = 40.0, 10.0  # for one call; a prompt takes less than a millisecond
MAX_PROMPTS, MAX_CHARS = 256, 1 << 20  # of one call, unless a single prompt is longer
PIECE = 1 << 16  # characters that are tokenized at a time: up to 1 KB of memory for each
# A cut in the middle of a word or token adds at most this many tokens.
CUT_TOKENS = 256

Conversation = Sequence[Mapping[str, str]]
Schemas = Sequence[Mapping[str, Any]]  # of tools, in JSON


class LongPromptError(ValueError):
    """A prompt has more tokens than allowed; `number` is its place among those that were given."""

    def __init__(self, number: int, characters: int, limit: int) -> None:
        super().__init__(f"it has {characters:,} characters and more than {limit:,} tokens")
        self.number = number


def start_rendering(tokenizer: Any) -> None:
    """Start the process that renders the tokenizer's chat template, if it has one."""
    if template_of(tokenizer) is not None:
        start_worker(RENDER)


def render_prompts(
    tokenizer: Any, conversations: Sequence[Conversation], tools: Sequence[Schemas] | None = None
) -> list[str]:
    """Return conversations as text, by the chat template if there is one; `tools` are those of each conversation."""
    template = template_of(tokenizer)
    if template is None:
        if getattr(tokenizer, "chat_template", None):  # a tokenizer with a way of its own, which is no template
            options = {"add_generation_prompt": True, "tokenize": False}
            return [tokenizer.apply_chat_template(list(messages), **options) for messages in conversations]
        return ["\n".join(message["content"] for message in messages) for messages in conversations]
    tokens = special_tokens(tokenizer)
    texts: list[str] = []
    for batch in _batches(conversations):
        named = [list(map(dict, each)) for each in tools[len(texts) : len(texts) + len(batch)]] if tools else None
        texts += _render(template, batch, tokens, named)
    return texts


def check_lengths(tokenizer: Any, texts: Sequence[str], limit: int) -> None:
    """Raise LongPromptError for a long text of more than `limit` tokens, without tokenizing it whole."""
    # A text of ten megabytes takes gigabytes as tokens. Cutting it can only add tokens, a few at every cut.
    for number, text in enumerate(texts):
        tokens = 0
        for start in range(0, len(text), PIECE) if len(text) > PIECE else ():
            tokens += len(tokenizer.encode(text[start : start + PIECE], add_special_tokens=False)) - CUT_TOKENS
            if tokens > limit:
                raise LongPromptError(number, len(text), limit)


@contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Turn what a tokenizer raises into a ValueError in words."""
    try:
        yield
    except (ValueError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic in the Rust code of tokenizers is no Exception
        raise ValueError(
            f"the model's tokenizer fails on a prompt or response ({type(error).__name__}: {one_line(error)}); "
            "check its tokenizer.json"
        ) from None


def _batches(conversations: Sequence[Conversation]) -> Iterator[list[list[dict[str, str]]]]:
    """Split conversations into batches of bounded size."""
    batch: list[list[dict[str, str]]] = []
    chars = 0
    for messages in conversations:
        size = _chars(messages)
        if batch and (len(batch) == MAX_PROMPTS or chars + size > MAX_CHARS):
            yield batch
            batch, chars = [], 0
        batch.append([dict(message) for message in messages])
        chars += size
    if batch:
        yield batch


def _render(
    template: str,
    batch: list[list[dict[str, str]]],
    tokens: dict[str, Any],
    tools: list[list[dict[str, Any]]] | None = None,
) -> list[str]:
    chars = sum(map(_chars, batch)) + len(template) + len(str(tools or ""))
    # JSON has up to 12 bytes for a character, and some templates write a message several times.
    result, memory = (8 << 20) + 32 * chars, (256 << 20) + 128 * chars
    limits = WorkerLimits(SECONDS, CPU_SECONDS, memory, result)
    answer = call_worker(RENDER, (template, batch, tokens, tools), limits)
    advice = "repair chat_template.jinja or tokenizer_config.json, or set model.chat=false"
    if answer.outcome == "too_costly":
        raise ValueError(
            f"the model's chat template takes more than {CPU_SECONDS:.0f} s or {memory >> 20} MB, or writes more than "
            f"{result >> 20} MB, for {len(batch)} prompts; {advice}"
        )
    if answer.outcome != "done":
        raise ValueError(f"the model's chat template cannot be rendered: {one_line(ValueError(answer.error))}")
    if "error" in answer.value:
        start = str(batch[answer.value["conversation"]][-1]["content"])[:60]
        words = one_line(ValueError(answer.value["error"]))
        raise ValueError(f"the model's chat template fails on the prompt {start!r}: {words}; {advice}")
    texts: list[str] = answer.value["texts"]
    return texts


def _chars(messages: Conversation) -> int:
    return sum(len(message["content"]) for message in messages)
