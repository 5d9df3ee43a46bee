"""Report of a run directory; reads result files, never imports torch."""

from torchace.lab.report.page import markdown, rich_table, summary_sentences, write_report
from torchace.lab.report.results import Results, read_results
from torchace.lab.schema.reading import ResultFileError

__all__ = ["ResultFileError", "Results", "markdown", "read_results", "rich_table", "summary_sentences", "write_report"]
