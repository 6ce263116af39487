"""The search of the site, in a real browser: what one looks for is on the first page that it lists."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest

from helpers.thorough import slow_but

QUESTIONS = {
    "staleness": "off-policy.html",
    "out of memory": "memory.html",
    "own reward": "own-reward.html",
    "entropy collapse": "acting-on-an-alarm.html",
    "several GPUs": "several-gpus.html",
    "LoRA": "lora.html",
    "own environment": "tools.html",
    "own data": "own-data.html",
}


def found(page: Any, address: str, question: str) -> list[str]:
    """Type a question into the search field and return the pages that it lists, best first."""
    page.goto(f"{address}/index.html?q={question.replace(' ', '%20')}")
    page.wait_for_selector(".md-search-result__item")
    links = page.locator(".md-search-result__item .md-search-result__link:first-child")
    paths = [urlsplit(link.get_attribute("href")).path.rpartition("/")[2] for link in links.all()]
    return list(dict.fromkeys(paths))


@pytest.mark.parametrize("question", slow_but([*QUESTIONS][:3], QUESTIONS))
def test_the_search_finds_the_right_page_first(page: Any, address: str, question: str) -> None:
    assert found(page, address, question)[0] == QUESTIONS[question]
