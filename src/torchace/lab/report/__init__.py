"""Tables, statistics, plots and the page of a run directory; reads result files alone, never imports torch."""

from importlib import import_module
from typing import Any

from torchace.lab.report._fields import ReportError
from torchace.lab.report.page import write_report
from torchace.lab.report.render import markdown, rich_table
from torchace.lab.report.results import Results, read_results

__all__ = ["ReportError", "Results", "markdown", "read_results", "rich_table", "write_report"]


def __getattr__(name: str) -> Any:
    # A name of this package by the design; it works on tensors, and nothing here does, so it lives by itself.
    if name == "diagnose":
        return import_module("torchace.diagnosis").diagnose
    raise AttributeError(f"module 'torchace.lab.report' has no attribute {name!r}")
