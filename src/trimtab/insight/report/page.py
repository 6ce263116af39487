"""The page itself: one HTML file made of a skeleton, a style, a few scripts and the data, with nothing to fetch.

The content security policy lets exactly the joined script run, by its hash. A reader sees the curves first: the data of
the microscope stands last in the file, one block per response, and is parsed when it is asked for.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from trimtab.insight.report.embed import safe_json, visible

# In this order; each is a few functions, and the last one calls them.
SCRIPTS = (
    "text.js", "data.js", "colors.js", "chart.js", "curves.js", "planes.js", "others.js", "tokens.js", "filters.js",
    "microscope.js", "main.js",
)  # fmt: skip


def page(title: str, data: Mapping[str, Any], blocks: Iterable[str]) -> Iterator[str]:
    """The page in pieces; `blocks` are the responses of the microscope as `safe_json`, in the order of `data`."""
    script = joined_script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    marks = {
        "title": html.escape(visible(title)),
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "style": asset("page.css"),
    }
    skeleton, after = asset("page.html").split("{{scripts}}")
    before = re.sub(r"\{\{(\w+)\}\}", lambda mark: marks[mark[1]], skeleton)  # once: what is put in may hold marks
    yield before
    yield _block("data", safe_json(data))
    yield f"<script>{script}</script>\n"
    for number, block in enumerate(blocks):
        yield _block(f"response-{number}", block)
    yield after


@cache
def joined_script() -> str:
    """All scripts as one, in a function of their own."""
    parts = "\n".join(asset(name) for name in SCRIPTS)
    return f'(function () {{\n"use strict";\n{parts}}})();\n'


@cache
def asset(name: str) -> str:
    """A file of the page."""
    return (resources.files("trimtab.insight.report") / name).read_text(encoding="utf-8")


def _block(name: str, text: str) -> str:
    return f'<script type="application/json" id="{name}">{text}</script>\n'
