"""Render chat templates, in a worker process.

A template is a program in Jinja that comes with a model. transformers' sandbox keeps it from files and modules, but not
from running or growing without end, so it runs where time and memory are limited (`trimtab.rewards.call_worker`).
"""

from __future__ import annotations

from typing import Any


def render(
    template: str,
    conversations: list[list[dict[str, Any]]],
    special_tokens: dict[str, Any],
    tools: list[list[dict[str, Any]]] | None = None,
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
        except Exception as error:  # whatever the template does
            return {"error": f"{type(error).__name__}: {error}"[:500], "conversation": number}
        texts += rendered[0]
    return {"texts": texts}


def warm_up() -> None:
    """Import what rendering needs, once for all calls."""
    from transformers.utils import chat_template_utils  # noqa: F401
