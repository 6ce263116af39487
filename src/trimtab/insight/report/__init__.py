"""The report: one HTML file about one run or several, with the token microscope. See docs/report.md."""

from trimtab.insight.report.write import report_after, write_report

__all__ = ["report_after", "write_report"]
