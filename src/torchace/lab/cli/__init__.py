"""The command line: parse, call, print."""

from torchace.lab.cli.app import main

__all__ = ["main"]
