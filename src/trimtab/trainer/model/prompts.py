"""From chat messages to text and tokens and back, within limits of time and memory.

A chat template comes with a model, and prompts with a data set: neither is to be trusted.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trimtab.trainer.model.pretrained import one_line
from trimtab.workers import RENDER, WorkerLimits, call_worker, special_tokens, start_worker, template_of

SECONDS, CPU_SECONDS = 40.0, 10.0  # for one call; a prompt takes less than a millisecond
MAX_PROMPTS, MAX_CHARS = 256, 1 << 20  # of one call, unless a single prompt is longer
PIECE = 1 << 16  # characters that are tokenized at a time: up to 1 KB of memory for each
# A cut in the middle of a word or token adds at most this many tokens.
CUT_TOKENS = 256
# Of a prompt that is compared with what its tokens say: letters of a piece, characters looked at, share to be found.
KEPT_LETTERS, KEPT_CHARS, LEAST_KEPT = 4, 2000, 0.5

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


def check_survival(
    tokenizer: Any, conversations: Sequence[Conversation], texts: Sequence[str], ids: Sequence[Sequence[int]]
) -> None:
    """Raise ValueError for a prompt that is not in its text by the chat template, or not in its tokens.

    A tokenizer may change letters (lower case, other forms of them) and miss a few, but not half of them.
    """
    for messages, text, tokens in zip(conversations, texts, ids, strict=True):
        decoded = tokenizer.decode(list(tokens), skip_special_tokens=True)
        for message in messages:
            content, role = message["content"], message.get("role")
            # A template may drop the reasoning of earlier answers.
            if role == "assistant" or _kept_share(content, decoded) >= LEAST_KEPT:
                continue
            if _kept_share(content, text) < LEAST_KEPT:
                raise ValueError(
                    f"the model's chat template leaves out the {role} message {content[:40]!r}; repair "
                    "chat_template.jinja or tokenizer_config.json, or set model.chat=false"
                )
            raise ValueError(
                f"the model's tokenizer loses the prompt {content[:40]!r}: encoded and decoded again, it is "
                f"{decoded[:80]!r}. Is tokenizer.json missing or damaged, or of another model? Download or save the "
                "model again, with its tokenizer"
            )


def _kept_share(content: str, whole: str) -> float:
    """Return the share of a text's pieces of a few letters that occur in another text; 1 for one without any."""
    letters, within = _letters(content[:KEPT_CHARS]), _letters(whole)
    length = min(KEPT_LETTERS, len(letters))
    pieces = {letters[start : start + length] for start in range(len(letters) - length + 1)} if length else set()
    return sum(piece in within for piece in pieces) / len(pieces) if pieces else 1.0


def _letters(text: str) -> str:
    # Without spaces, accents and case, which some tokenizers do not keep; signs count if there is nothing else.
    plain = "".join(unicodedata.normalize("NFKD", text).casefold().split())
    return "".join(character for character in plain if character.isalnum()) or plain


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


def encode_batch(tokenizer: Any, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    """Return the tokens of each text, as `tokenizer.encode` does."""
    if not texts or not _uses_shared_methods(tokenizer, ("encode", "__call__", "_encode_plus")):
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def decode_batch(tokenizer: Any, responses: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each response without special tokens, as `tokenizer.decode` does."""
    if _uses_shared_methods(tokenizer, ("decode", "_decode")) and not _cleans_up_spaces(tokenizer):
        # Not tokenizer.batch_decode: it goes through all tokens in Python and then decodes one response at a time.
        lists = [tokens if isinstance(tokens, list) else list(tokens) for tokens in responses]
        texts: list[str] = tokenizer.backend_tokenizer.decode_batch(lists, skip_special_tokens=True)
        return texts
    return [tokenizer.decode(list(tokens), skip_special_tokens=True) for tokens in responses]


def _uses_shared_methods(tokenizer: Any, methods: Sequence[str]) -> bool:
    """Return whether this is a fast tokenizer that overrides none of the methods."""
    from transformers import PreTrainedTokenizerFast as Fast

    if not isinstance(tokenizer, Fast):
        return False
    return all(getattr(getattr(tokenizer, name), "__func__", None) is getattr(Fast, name) for name in methods)


def _cleans_up_spaces(tokenizer: Any) -> bool:
    """Return whether `decode` removes spaces before punctuation, which the Rust core does not."""
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    # transformers ignores the flag above for BPE unless this one forces it; a version without this one may not.
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    return forced or type(tokenizer.backend_tokenizer.model).__name__ != "BPE"
