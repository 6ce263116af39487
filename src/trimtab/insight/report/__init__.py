"""The report: one HTML file about one run or several, with the token microscope. See docs/report.md."""

from trimtab.insight.report.assemble import BESIDE
from trimtab.insight.report.write import try_report, write_report

__all__ = ["BESIDE", "try_report", "write_report"]
