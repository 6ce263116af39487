"""How far each objective can be pushed before it breaks: the same run under rising stress."""

from trimtab.experiments.stress.axis_table import AxisTable, held_out_end
from trimtab.experiments.stress.command import show_stress
from trimtab.experiments.stress.figures import RunFigures, survivors
from trimtab.experiments.stress.grid import StressTest, parse_axis
from trimtab.experiments.stress.read import StoredStressTest, read_stress
from trimtab.experiments.stress.sentences import describe, headline

__all__ = [
    "AxisTable", "RunFigures", "StoredStressTest", "StressTest", "describe", "headline", "held_out_end",
    "parse_axis", "read_stress", "show_stress", "survivors",
]  # fmt: skip
