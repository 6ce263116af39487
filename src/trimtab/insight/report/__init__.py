"""The report: one HTML file about one run or several, with the token microscope. See docs/report.md."""

from trimtab.insight.report.page_data import COMPARED_OBJECTIVES
from trimtab.insight.report.write import try_report, write_report

__all__ = ["COMPARED_OBJECTIVES", "try_report", "write_report"]
