"""The idx format of MNIST and Fashion-MNIST: magic number, dimensions, bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchace._files import check_gzip
from torchace.lab.data.errors import damaged_file
from torchace.lab.data.files import open_data


def read_idx(path: Path, *, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes with the expected shape; gzip is detected by its first bytes."""
    with open_data(path) as file:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream: Any = gzip.GzipFile(fileobj=file) if is_packed else file
        try:
            if is_packed:
                check_gzip(path)
            header = stream.read(4 + 4 * len(shape))
            _check_header(header, path, shape)
            # one extra byte: finds trailing bytes and triggers gzip's checksum
            data = stream.read(math.prod(shape) + 1)
        except EOFError:
            raise damaged_file(path, "is truncated: its gzip stream has no end") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise damaged_file(path, f"is not a complete gzip file ({error})") from None
    if len(data) != math.prod(shape):
        amount = f"only {len(data)}" if len(data) < math.prod(shape) else "more"
        raise damaged_file(path, f"holds {amount} bytes of data but its header says {math.prod(shape)}")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _check_header(header: bytes, path: Path, shape: tuple[int, ...]) -> None:
    if not header:
        raise damaged_file(path, "is empty")
    if header[:4].lstrip()[:1] == b"<":
        raise damaged_file(path, "is a web page, not data")
    if len(header) < 4 or header[:2] != b"\0\0":
        raise damaged_file(path, f"is not an idx file: it starts with {header[:4].hex(' ')}, not with 00 00")
    if header[2] != 0x08:
        raise damaged_file(path, f"holds idx type 0x{header[2]:02x}, not unsigned bytes (0x08)")
    if header[3] != len(shape):
        hint = " (images and labels swapped?)" if {header[3], len(shape)} == {1, 3} else ""
        raise damaged_file(path, f"holds an array of {header[3]} dimensions, not {len(shape)}{hint}")
    if len(header) < 4 + 4 * len(shape):
        raise damaged_file(path, "is truncated within its header")
    found = struct.unpack(f">{len(shape)}I", header[4:])
    if found != shape:
        raise damaged_file(path, f"holds an array of {' x '.join(map(str, found))}, not {' x '.join(map(str, shape))}")
