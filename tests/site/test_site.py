"""The site is built without a warning, stands by itself, and no link in it is dead."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

import site_hooks
import trimtab
from helpers.site.building import ROOT, Page, dead_links


def test_every_link_leads_somewhere(site: Path) -> None:
    assert dead_links(site) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="b.html#there">1</a><a href="c.html">2</a><a href="#no">3</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there"><a href="a.html#here">4</a><img src="no.png">')
    assert sorted(dead_links(tmp_path)) == ["a.html: #no", "a.html: c.html", "b.html: no.png"]


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert [load for load in Page(path).loads if urlsplit(load).scheme not in {"", "data"}] == [], path


def test_every_page_of_docs_is_on_the_site(site: Path) -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        assert (site / path.relative_to(ROOT / "docs").with_suffix(".html")).exists(), path


def test_every_page_names_the_version_and_leads_to_the_changelog(site: Path) -> None:
    for page in (site / "index.html", site / "notebooks/first-run.html"):
        assert f"trimtab {trimtab.__version__}" in page.read_text()
        assert any("changelog.html" in link for link in Page(page).links)
    assert "STAPO" in (site / "changelog.html").read_text()


def test_the_types_of_the_api_are_named_as_torch_names_them(site: Path) -> None:
    page = (site / "api.html").read_text()
    assert 'title="torch.Tensor"' in page
    assert "lazy_torch" not in page


def test_what_a_newcomer_needs_stands_first() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    start, guides = (navigation.partition(f"- {tab}:\n")[2].partition("\n  - ")[0] for tab in ("Start", "Guides"))
    assert [line.strip(" -") for line in start.splitlines()[:3]] == ["index.md", "install.md", "start.md"]
    assert guides.splitlines()[0].strip() == "- Which method: choosing.md"
    for page in ("troubleshooting.md", "coming-from.md", "first-settings.md", "logging.md"):
        assert page in guides


def test_the_repository_is_linked_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/trimtab")
    config = site_hooks.on_config(SimpleNamespace())
    assert (config.repo_url, config.repo_name) == ("https://github.com/someone/trimtab", "someone/trimtab")
    monkeypatch.delenv("GITHUB_REPOSITORY")
    assert not hasattr(site_hooks.on_config(SimpleNamespace()), "repo_url")
