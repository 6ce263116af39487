"""The same run under several objectives and seeds, and in a stress test under rising stress: `compare` and `stress`."""

from trimtab.experiments.grid.command import ended_before, show_grid
from trimtab.experiments.grid.plan import Axis, Grid, GridRun, RunOutcome, parse_axis, plan_run
from trimtab.experiments.grid.pool import ProcessPool
from trimtab.experiments.grid.stress import AxisTable, RunFigures, held_out_end, read_stress, run_figures

__all__ = [
    "Axis", "AxisTable", "Grid", "GridRun", "ProcessPool", "RunFigures", "RunOutcome", "ended_before", "held_out_end",
    "parse_axis", "plan_run", "read_stress", "run_figures", "show_grid",
]  # fmt: skip
