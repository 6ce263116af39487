"""The report: one HTML file about one run or several, with the token microscope. See docs/report.md."""

from trimtab.insight.report.page import try_report, write_report
from trimtab.insight.report.page_data import COMPARED_OBJECTIVES

__all__ = ["COMPARED_OBJECTIVES", "try_report", "write_report"]
