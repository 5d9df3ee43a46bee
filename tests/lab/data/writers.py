"""Small files in the official formats, written byte by byte."""

from __future__ import annotations

import gzip
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchace.lab.data.sources import CIFAR10, MNIST, CifarSource, IdxSource

TRAIN, TEST = 20, 10  # samples in the small MNIST
COUNT = 3  # images in a batch of the small CIFAR-10


def small_mnist() -> IdxSource:
    """MNIST with 20 training and 10 test images; no known content."""
    train, test = (
        tuple(replace(file, shape=(size, *file.shape[1:]), content=None) for file in files)
        for files, size in ((MNIST.train, TRAIN), (MNIST.test, TEST))
    )
    return replace(MNIST, train=train, test=test)


def small_cifar() -> CifarSource:
    """CIFAR-10 with batches of three images; no known content."""
    return replace(
        CIFAR10, count=COUNT, binary=dict.fromkeys(CIFAR10.binary, ""), python=dict.fromkeys(CIFAR10.python, "")
    )


def images(count: int, shape: tuple[int, ...] = (28, 28), seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def labels(count: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 10, count, dtype=np.uint8)


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def packed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def mnist_files() -> dict[str, bytes]:
    """The four files of `small_mnist`, unpacked."""
    return {
        "train-images-idx3-ubyte": idx(images(TRAIN)),
        "train-labels-idx1-ubyte": idx(labels(TRAIN)),
        "t10k-images-idx3-ubyte": idx(images(TEST, seed=1)),
        "t10k-labels-idx1-ubyte": idx(labels(TEST, seed=1)),
    }


def write_mnist(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in mnist_files().items():
        (folder / f"{name}.gz").write_bytes(packed(data))


def cifar_arrays(number: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return images(COUNT, (3, 32, 32), seed=number), labels(COUNT, seed=number)


def binary_batch(number: int) -> bytes:
    pixels, classes = cifar_arrays(number)
    return np.concatenate([classes[:, None], pixels.reshape(COUNT, -1)], 1).tobytes()


def text(value: bytes) -> bytes:
    """Python 2's str in a pickle."""
    return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    return b"M" + struct.pack("<H", value) if 0 <= value < 65536 else b"J" + struct.pack("<i", value)


def array(
    pixels: NDArray[np.uint8],
    *,
    shape: tuple[int, int] | None = None,
    dtype: bytes = b"u1",
    fortran: bytes = b"\x89",
    data: bytes | None = None,
    function: bytes = b"cnumpy.core.multiarray\n_reconstruct\n",
) -> bytes:
    """numpy's array as Python 2 pickled it: _reconstruct(ndarray, (0,), 'b'), then its state."""
    rows, columns = shape or (len(pixels), pixels[0].size)
    return (
        function + b"q\x07cnumpy\nndarray\nq\x08K\x00\x85" + text(b"b") + b"\x87Rq\x09"
        b"(K\x01" + number(rows) + number(columns) + b"\x86"
        b"cnumpy\ndtype\nq\x0a" + text(dtype) + b"K\x00K\x01\x87Rq\x0b"
        b"(K\x03" + text(b"|") + b"NNN" + number(-1) + number(-1) + b"K\x00tb"
        + fortran + text(pixels.tobytes() if data is None else data) + b"tb"
    )  # fmt: skip


def python_batch(
    batch: int, *, classes: bytes | None = None, pixels: bytes | None = None, extra: bytes = b"", end: bytes = b"u."
) -> bytes:
    """A batch of the Python version as Python 2's cPickle wrote it, protocol 2; parts can be put in its place."""
    x, y = cifar_arrays(batch)
    if classes is None:
        classes = b"]q\x05(" + b"".join(number(int(label)) for label in y) + b"e"
    names = b"]q\x0c(" + b"".join(text(b"image_s_%06d.png" % i) + b"q" + bytes([20 + i]) for i in range(COUNT)) + b"e"
    return (
        b"\x80\x02}q\x01("
        + text(b"batch_label") + b"q\x02" + text(b"training batch %d of 5" % batch) + b"q\x03"
        + text(b"labels") + b"q\x04" + classes
        + text(b"data") + b"q\x06" + (array(x) if pixels is None else pixels)
        + text(b"filenames") + names + extra + end
    )  # fmt: skip


def cifar_files(version: str) -> dict[str, bytes]:
    """The six files of `small_cifar`, "binary" or "python"."""
    if version == "binary":
        return {name: binary_batch(i) for i, name in enumerate(CIFAR10.binary, 1)}
    return {name: python_batch(i) for i, name in enumerate(CIFAR10.python, 1)}


def write_cifar(folder: Path, version: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in cifar_files(version).items():
        (folder / name).write_bytes(data)
