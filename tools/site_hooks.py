"""What the site adds to docs/ while it is built: pages of the repository's files that the docs link to."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OUTSIDE = re.compile(r"\]\((?:\.\./)+([\w./-]+)\)")  # a link from a page to a file outside of docs/
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "bash"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file or folder outside of docs/ that a page links to: the site stands by itself."""
    linked = {path for page in DOCS.rglob("*.md") for path in OUTSIDE.findall(page.read_text())}
    for path in sorted(linked):
        files.append(File.generated(config, f"source/{path}.md", content=source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to files outside of docs/ to their pages."""
    up = "../" * page.file.src_uri.count("/")
    return OUTSIDE.sub(lambda found: f"]({up}source/{found[1]}.md)", markdown)


def source_page(name: str) -> str:
    """Return a page with a file, or with all files of a folder; the search leaves it out."""
    path = ROOT / normpath(name)
    if not path.exists():
        raise FileNotFoundError(f"the docs link to {name}, which does not exist")
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    parts = ["---", f"title: {name}", "search: { exclude: true }", "---", f"# `{name}`"]
    for each in files:
        parts += [] if len(files) == 1 else [f"## `{each.name}`"]
        parts += [f"````{LANGUAGES.get(each.suffix, 'text')}", each.read_text().rstrip(), "````"]
    return "\n\n".join(["\n".join(parts[:4]), *parts[4:]])
