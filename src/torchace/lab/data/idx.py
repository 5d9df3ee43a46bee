"""The idx format of MNIST and Fashion-MNIST: a magic number, the dimensions, then the bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from torchace._files import check_gzip
from torchace.lab.data.errors import damaged
from torchace.lab.data.files import opened

_UNSIGNED_BYTE = 0x08
_LARGEST = 1 << 30  # bytes; a header that promises more is not believed


def read_idx(path: Path, *, shape: Sequence[int | None]) -> NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes, gzipped or not (its first bytes tell, not its name).

    Args:
        path: The file.
        shape: The dimensions it must have; None for any.

    Raises:
        DataError: The file cannot be read, is cut short, is too long, or is something else.
    """
    with opened(path) as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not packed:
            return _parsed(file, path, shape)
        check_gzip(path)
        try:
            # GzipFile is a file as far as reading goes, but typeshed does not call it one.
            return _parsed(gzip.GzipFile(fileobj=file), path, shape)  # type: ignore[arg-type]
        except EOFError:
            raise damaged(path, "is cut short: its gzip stream has no end") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise damaged(path, f"is not a whole gzip file ({error})") from None


def _parsed(file: BinaryIO, path: Path, shape: Sequence[int | None]) -> NDArray[np.uint8]:
    magic = file.read(4)
    if not magic:
        raise damaged(path, "is empty")
    if magic.lstrip()[:1] == b"<":
        raise damaged(path, "holds a web page, not data")
    if len(magic) < 4 or magic[:2] != b"\0\0":
        raise damaged(path, f"is not an idx file: it starts with {magic.hex(' ')}, not with 00 00")
    if magic[2] != _UNSIGNED_BYTE:
        raise damaged(path, f"holds idx type 0x{magic[2]:02x}, not unsigned bytes (0x08)")
    if magic[3] != len(shape):
        hint = " (labels in the place of images, or the other way round?)" if {magic[3], len(shape)} == {1, 3} else ""
        raise damaged(path, f"holds an array of {magic[3]} dimensions, not {len(shape)}{hint}")
    header = file.read(4 * len(shape))
    if len(header) < 4 * len(shape):
        raise damaged(path, "is cut short within its header")
    found: tuple[int, ...] = struct.unpack(f">{len(shape)}I", header)
    if any(want not in (None, have) for want, have in zip(shape, found, strict=True)):
        wanted = " x ".join("any" if want is None else str(want) for want in shape)
        raise damaged(path, f"holds an array of {' x '.join(map(str, found))}, not {wanted}")
    size = math.prod(found)
    if not 0 < size <= _LARGEST:
        raise damaged(path, f"holds an array of {' x '.join(map(str, found))}, which is not possible")
    data = file.read(size + 1)  # one more than there should be: to find trailing bytes, and gzip's checksum at the end
    if len(data) != size:
        amount = f"only {len(data)}" if len(data) < size else "more"
        raise damaged(path, f"holds {amount} bytes of data where its header promises {size}")
    return np.frombuffer(data, np.uint8).reshape(found)
