"""The HTML file: template, style, scripts and data in one, with nothing to fetch.

The content security policy allows exactly the joined script, by its hash. The data of the microscope comes last in the
file, one block per response, and is parsed on demand, so that the curves are painted first.
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

# Joined in this order; the last one starts the page.
SCRIPTS = (
    "text.js", "data.js", "colors.js", "chart.js", "curves.js", "control_panel.js", "heat_maps.js", "replay_panel.js",
    "tokens.js", "turns.js", "filters.js", "token_pane.js", "microscope.js", "stress.js", "main.js",
)  # fmt: skip


def page(title: str, data: Mapping[str, Any], blocks: Iterable[str]) -> Iterator[str]:
    """Yield the page in pieces; `blocks` are the responses of the microscope as `safe_json`, in the order of `data`."""
    script = joined_script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {
        "title": html.escape(visible(title)),
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "style": asset("page.css"),
    }
    template, after = asset("page.html").split("{{scripts}}")
    # In one pass, since a value may contain {{...}} itself.
    yield re.sub(r"\{\{(\w+)\}\}", lambda mark: values[mark[1]], template)
    yield _block("data", safe_json(data))
    yield f"<script>{script}</script>\n"
    for number, block in enumerate(blocks):
        yield _block(f"response-{number}", block)
    yield after


@cache
def joined_script() -> str:
    """Return all scripts as one, inside a function so that nothing is global."""
    scripts = "\n".join(asset(name) for name in SCRIPTS)
    return f'(function () {{\n"use strict";\n{scripts}}})();\n'


@cache
def asset(name: str) -> str:
    """Return the text of one of the page's source files."""
    return (resources.files("trimtab.insight.report") / "page" / name).read_text(encoding="utf-8")


def _block(name: str, text: str) -> str:
    return f'<script type="application/json" id="{name}">{text}</script>\n'
