"""Files that are there whole or not at all; see `torchace._files`."""

from torchace._files import PARTIAL, flush_directory, remove_abandoned, remove_partial, whole_file, write_whole

__all__ = ["PARTIAL", "flush_directory", "remove_abandoned", "remove_partial", "whole_file", "write_whole"]
