"""The command line: parse, call, print."""

from torchace.lab.cli.main import main

__all__ = ["main"]
