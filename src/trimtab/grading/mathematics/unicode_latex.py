"""Write Unicode's mathematical characters as LaTeX: signs, Greek letters, fractions, raised and lowered digits."""

from __future__ import annotations

import re
import unicodedata

_SIGNS = {
    "−": "-", "‐": "-", "‑": "-", "‒": "-", "–": "-", "﹣": "-", "×": r"\times ", "✕": r"\times ", "·": r"\cdot ",
    "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/",
    "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "∛": r"\sqrt[3] ", "∪": r"\cup ", "∩": r"\cap ",
    "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "°": r"^\circ ", "º": r"^\circ ",
    "˚": r"^\circ ", "±": r"\pm ", "∓": r"\mp ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
    "θ": r"\theta ", "α": r"\alpha ",
    "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "λ": r"\lambda ", "ρ": r"\rho ",
    "σ": r"\sigma ", "τ": r"\tau ", "ω": r"\omega ", "φ": r"\phi ", "ϕ": r"\phi ", "ψ": r"\psi ", "μ": r"\mu ",
    "Δ": r"\Delta ", "Γ": r"\Gamma ", "Σ": r"\Sigma ", "Ω": r"\Omega ", "⟨": r"\langle ", "⟩": r"\rangle ",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "…": r"\ldots ", "。": ".",
    "\u2009": r"\,", "\u202f": r"\,",  # thin spaces, as between thousands
    "’": "'", "′": "'", "€": r"\euro ", "£": r"\pounds ", "℃": r"^\circ C", "℉": r"^\circ F",
}  # fmt: skip
_INVISIBLE = frozenset("\u00ad\u200b\u200c\u200d\u2060\ufeff")  # not those that turn the order of what is shown
_OVERLINE = "\u0305"  # combines with the digit before it
_OVERLINED, _ROOT = re.compile(f"(?:[0-9]{_OVERLINE})+"), re.compile(r"([√∛])\s?([0-9]+(?:\.[0-9]+)?)")
_TEMPERATURE = re.compile(r"\\(?:text|mathrm)\{\s?°\s?([CF]?)\s?\}")
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉"
_PLAIN = str.maketrans(_RAISED + _LOWERED, "0123456789+-n0123456789")
_RAISED_RUN, _LOWERED_RUN = re.compile(f"[{_RAISED}]+"), re.compile(f"[{_LOWERED}]+")


class _Translation(dict[int, str]):
    """The LaTeX of a character by its code point. What is not listed is not kept either: answers are untrusted."""

    def __missing__(self, code: int) -> str:
        return _to_latex(chr(code))


def unicode_to_latex(source: str) -> str:
    """Return a text with its mathematical characters written as LaTeX; what is not known is left as it is."""
    if source.isascii():
        return source
    source = _TEMPERATURE.sub(r"°\1", source)
    source = _OVERLINED.sub(lambda match: rf"\overline{{{match[0].replace(_OVERLINE, '')}}}", source)
    source = _ROOT.sub(r"\1{\2}", source)
    source = _RAISED_RUN.sub(lambda match: _script("^", match[0]), source)
    source = _LOWERED_RUN.sub(lambda match: _script("_", match[0]), source)
    return source.translate(_TRANSLATION)


def _script(mark: str, characters: str) -> str:
    plain = characters.translate(_PLAIN)
    return mark + (plain if len(plain) == 1 else f"{{{plain}}}")


def _to_latex(character: str) -> str:
    category, code = unicodedata.category(character), ord(character)
    if category == "Nd":  # a digit of any script, also a bold or wide one
        return str(unicodedata.decimal(character))
    if category == "Zs" or character in _INVISIBLE:  # it separates its neighbours
        return " "
    plain = unicodedata.normalize("NFKC", character)
    if fraction := re.fullmatch(r"(\d+)⁄(\d+)", plain):
        return rf"\frac{{{fraction[1]}}}{{{fraction[2]}}}"
    styled = 0xFF01 <= code < 0xFF5E or 0x1D400 <= code <= 0x1D7FF  # wide forms, letters in a style
    return _SIGNS.get(plain, plain) if styled else character


_TRANSLATION = _Translation({code: chr(code) for code in range(128)} | {ord(sign): _SIGNS[sign] for sign in _SIGNS})
