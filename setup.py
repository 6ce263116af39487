"""Make the README's links absolute: PyPI shows it away from the repository. All else is in pyproject.toml.

The address of the repository is known where GitHub builds a release. Elsewhere links become their text: none is dead.
"""

import os
import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^]]+)\]\((?!https?:)(?P<path>[^)]+)\)")


def readme(repository: str, commit: str) -> str:
    """Return the README with absolute links, or without links if the repository's address is not known."""

    def replace(link: re.Match[str]) -> str:
        if not repository:
            return link["text"]
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({repository}/{kind}/{commit}/{link['path']})"

    return LINK.sub(replace, (Path(__file__).parent / "README.md").read_text())


if __name__ == "__main__":
    known = os.environ.get("GITHUB_REPOSITORY")
    repository = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{known}" if known else ""
    pages = {"Source": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
    setup(
        long_description=readme(repository, os.environ.get("GITHUB_SHA", "main")),
        long_description_content_type="text/markdown",
        project_urls={name: repository + page for name, page in pages.items()} if repository else {},
    )
