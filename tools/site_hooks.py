"""What the site adds to docs/ while it is built: notebooks as pages, the gallery, and files that the docs link to."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "tools"))  # mkdocs loads this file by its path

import gallery  # noqa: E402
import notebooks  # noqa: E402
import trimtab  # noqa: E402

OUTSIDE = re.compile(r"\]\((?:\.\./)+([\w./-]+)\)")  # a link from a page of docs/ to a file outside of it
NOTEBOOK = re.compile(r"(\]\([\w./-]+)\.ipynb\)(?!\{)")  # but for the button that downloads it
LAZY_TORCH = "trimtab.objectives.lazy_torch"  # where modules import torch from, which is nothing to a reader
CHANGELOG = 'href="changelog.html"'  # in the footer
PROGRAMS = {".py", ".sh", ".toml"}
# The search leaves out common words, of which "own" is one: "own reward" is to find the guide, not the reference.
BOOSTED = {"own-reward.md": 3, "several-gpus.md": 3}  # and scaling.md has "several GPUs" in its title
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "bash"}


def on_config(config: Any) -> Any:
    """Show the version on every page and, where GitHub builds the site, link to the repository."""
    config.copyright = f"trimtab {trimtab.__version__} (<a {CHANGELOG}>changelog</a>), Apache-2.0"
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        config.repo_url = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
        config.repo_name = repository
    return config


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Lead the footer's link to the changelog from pages in folders too: the site also opens from a disk."""
    output = output.replace(f'title="{LAZY_TORCH}.', 'title="torch.')
    return output.replace(CHANGELOG, f'href="{get_relative_url("changelog.html", page.url)}"')


def changelog() -> str:
    """Return CHANGELOG.md as a page of the site."""
    text = (ROOT / "CHANGELOG.md").read_text()
    return re.sub(r"\]\((?!docs/|https?:)", "](../", text).replace("](docs/", "](")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made while the site is built."""
    for path in sorted(DOCS.glob("notebooks/*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebooks.page(path)))
    files.append(File.generated(config, "changelog.md", content=changelog()))
    for name, content in gallery.pages().items():
        files.append(File.generated(config, f"gallery/{name}.html", content=content))
    # Linked files get a page each, so that the site stands by itself.
    for path in sorted({found for page in DOCS.glob("*.md") for found in OUTSIDE.findall(page.read_text())}):
        files.append(File.generated(config, f"source/{path}.md", content=source_page(ROOT / path, path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to notebooks, and to files outside of docs/, to their pages; say what the search should prefer."""
    if page.file.src_uri in BOOSTED:
        page.meta["search"] = {"boost": BOOSTED[page.file.src_uri]}
    if page.file.src_uri.startswith(("notebooks/", "source/")):
        return markdown
    return OUTSIDE.sub(r"](source/\1.md)", NOTEBOOK.sub(r"\1.md)", markdown))


def source_page(path: Path, name: str) -> str:
    """Return a page that the search leaves out: a file, or the programs of a folder and the names of its data."""
    if not path.exists():
        raise FileNotFoundError(f"the docs link to {name}, which does not exist")
    text = f"---\ntitle: {name}\nsearch: {{ exclude: true }}\n---\n\n# `{name}`\n\n"
    for each in [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file()):
        if path.is_dir() and each.suffix not in PROGRAMS:
            text += f"- `{each.name}`, {each.stat().st_size / 1000:.0f} kB\n"
            continue
        heading = "" if path.is_file() else f"## `{each.name}`\n\n"
        # Four backticks: a file may hold a block of three.
        text += f"{heading}````{LANGUAGES.get(each.suffix, 'text')}\n{each.read_text().rstrip()}\n````\n\n"
    return text
