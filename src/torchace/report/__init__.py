"""Tables, statistics, plots and the page of a run directory; reads result files alone, never imports torch."""

from torchace.report._fields import ReportError
from torchace.report.page import write_report
from torchace.report.render import markdown, rich_table
from torchace.report.results import Results, read_results

__all__ = ["ReportError", "Results", "markdown", "read_results", "rich_table", "write_report"]
