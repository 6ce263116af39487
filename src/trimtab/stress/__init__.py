"""How far each objective can be pushed before it breaks: the same run under rising stress."""

from trimtab.stress.command import show_stress
from trimtab.stress.grid import StressTest, parse_axis

__all__ = ["StressTest", "parse_axis", "show_stress"]
