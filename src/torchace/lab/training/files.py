"""Files that are there whole or not at all; see `torchace._files`."""

from torchace._files import (
    CHECKSUM,
    PARTIAL,
    PathError,
    flush_directory,
    is_name,
    is_unchanged,
    json_digest,
    refuse_links,
    remove_abandoned,
    remove_partial,
    whole_file,
    with_checksum,
    write_whole,
)

__all__ = [
    "CHECKSUM",
    "PARTIAL",
    "PathError",
    "flush_directory",
    "is_name",
    "is_unchanged",
    "json_digest",
    "refuse_links",
    "remove_abandoned",
    "remove_partial",
    "whole_file",
    "with_checksum",
    "write_whole",
]
