"""Attachments: rules and penalties that can be added to any method, by name (`"sspo + s2t"`) or by keyword."""

from __future__ import annotations

from collections.abc import Callable

from trimtab.objectives.methods.registry import ATTACHMENTS, entry
from trimtab.objectives.plan_builder import TokenRule
from trimtab.objectives.rules.corrections import icepop, mis, tis
from trimtab.objectives.rules.entropy import entropy_bonus, top_entropy
from trimtab.objectives.rules.penalties import Penalty, kl
from trimtab.objectives.rules.s2t import s2t
from trimtab.objectives.rules.stare import stare
from trimtab.objectives.rules.trim import trim

# With the paper of each. Listed here and not by decorators, so that the docs' order does not depend on imports.
_PAPERS: dict[Callable[..., TokenRule | Penalty], str] = {
    s2t: "2602.15620",
    stare: "2606.19236",
    top_entropy: "2506.01939",
    tis: "",
    icepop: "",
    mis: "",
    kl: "2402.03300",
    entropy_bonus: "2505.22312",
    trim: "",
}
ATTACHMENTS |= {build.__name__: entry(build, paper) for build, paper in _PAPERS.items()}
