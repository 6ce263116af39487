"""The contrast of text on a page, as WCAG defines it."""

from __future__ import annotations

# A script that returns the colours of text and background of all elements that a selector matches.
COLORS = """(selector) => [...document.querySelectorAll(selector)].map((node) => {
    const of = (text) => text.match(/[\\d.]+/g).map(Number);
    let at = node, back = null;
    while (at && (!back || back[3] === 0)) { back = of(getComputedStyle(at).backgroundColor); at = at.parentElement; }
    return [of(getComputedStyle(node).color), back];
})"""


def contrast(one: list[float], two: list[float]) -> float:
    """Return the contrast of two colours, from 1 to 21."""

    def light(color: list[float]) -> float:
        parts = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color[:3]]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    high, low = sorted((light(one), light(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)
