"""The LaTeX commands and words that the parser knows, and those that only math-verify's grammar does."""

from __future__ import annotations

import re

CONSTANTS = {"pi": "pi", "infty": "oo", "inf": "oo", "infinity": "oo", "oo": "oo"}
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lg asin acos atan max min gcd lcm".split()
)
FUNCTION_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
SYMBOLS = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar odot".split()
)
_FOREIGN = frozenset(
    "hat vec bar tilde widehat widetilde overrightarrow sum prod int iint oint lim partial nabla det mathbf mathcal "
    "Re Im mod bmod pmod star dagger choose operatorname".split()
)
_STRUCTURE = frozenset(
    "frac sqrt binom cdot times pm mp left right circ degree text cup in le ge lfloor rfloor lceil rceil begin end "
    "langle rangle emptyset ldots overline angle dot".split()
)
_KNOWN = _FOREIGN | _STRUCTURE | FUNCTIONS | SYMBOLS | CONSTANTS.keys()


def has_foreign_commands(text: str) -> bool:
    """Return whether a text has LaTeX that only math-verify's grammar knows (sums, integrals, vectors)."""
    commands = set(re.findall(r"\\([a-zA-Z]+)", text))
    # A command that neither grammar knows, a relation, minutes, a ratio or a product of vectors would be guessed at.
    if {"times", "vec"} <= commands or re.search(r"[=<>;:']", text):
        return False
    return bool(commands & _FOREIGN) and commands <= _KNOWN
