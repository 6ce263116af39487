"""Render chat templates, in a worker process.

A template is a program in Jinja that comes with a model. transformers' sandbox keeps it from files and modules, but not
from running or growing without end, so it runs where time and memory are limited (`trimtab.workers.call_worker`).
"""

from __future__ import annotations

from typing import Any

RENDER = "trimtab.workers.chat_template:render"  # for `call_worker`
LARGEST_TEMPLATE = 1 << 18  # characters; the longest in use have some ten thousand


def render(
    template: str,
    conversations: list[list[dict[str, Any]]],
    special_tokens: dict[str, Any],
    tools: list[list[Any]] | None = None,
) -> dict[str, list[str] | str | int]:
    """Return the `texts` of conversations with the beginning of an answer; or an `error`, and its conversation.

    `tools` has the JSON schemas of the tools of each conversation.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    texts: list[str] = []
    for number, conversation in enumerate(conversations):
        try:
            rendered: Any = render_jinja_template(
                [conversation],
                tools=(tools[number] or None) if tools else None,
                chat_template=template,
                add_generation_prompt=True,
                **special_tokens,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template can do anything
            return {"error": f"{type(error).__name__}: {error}"[:500], "conversation": number}
        texts += rendered[0]
    return {"texts": texts}


def warm_up() -> None:
    """Import what rendering needs, once for all calls."""
    from transformers.utils import chat_template_utils  # noqa: F401


def template_of(tokenizer: Any) -> str | None:
    """Return the chat template; None if there is none, or if the tokenizer does not use it as transformers do."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    from transformers import PreTrainedTokenizerBase as Base

    method = getattr(getattr(tokenizer, "apply_chat_template", None), "__func__", None)
    if method is not Base.apply_chat_template:
        return None
    template = tokenizer.get_chat_template()
    if not isinstance(template, str):
        raise ValueError(
            f"the model's chat template is not text but {type(template).__name__}: see tokenizer_config.json"
        )
    if len(template) > LARGEST_TEMPLATE:
        raise ValueError(
            f"the model's chat template has {len(template):,} characters, and {LARGEST_TEMPLATE:,} are more than any "
            "needs: see chat_template.jinja or tokenizer_config.json"
        )
    return template


def special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Return the special tokens by name, as templates read them."""
    return {name: _plain(token) for name, token in tokenizer.special_tokens_map.items()}


def _plain(token: Any) -> Any:
    return list(map(str, token)) if isinstance(token, list | tuple) else str(token)
