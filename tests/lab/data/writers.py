"""Small files in the official formats, written byte by byte."""

from __future__ import annotations

import gzip
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchace.lab.data.datasets import SOURCES, Source

MNIST, CIFAR10 = SOURCES["mnist"], SOURCES["cifar10"]

TRAIN, TEST = 20, 10  # samples in the small MNIST
COUNT = 3  # images in a batch of the small CIFAR-10


def small_mnist() -> Source:
    """MNIST with 20 training and 10 test images; no known content."""
    train, test = (
        tuple(replace(file, shape=(size, *file.shape[1:]), content=None) for file in files)
        for files, size in ((MNIST.train, TRAIN), (MNIST.test, TEST))
    )
    return replace(MNIST, train=train, test=test)


def small_cifar() -> Source:
    """CIFAR-10 with batches of three images; no known content."""
    return replace(CIFAR10, count=COUNT, batches=dict.fromkeys(CIFAR10.batches, ""))


def images(count: int, shape: tuple[int, ...] = (28, 28), seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def labels(count: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 10, count, dtype=np.uint8)


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def pack(data: bytes) -> bytes:
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
        (folder / f"{name}.gz").write_bytes(pack(data))


def cifar_arrays(number: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return images(COUNT, (3, 32, 32), seed=number), labels(COUNT, seed=number)


def binary_batch(number: int) -> bytes:
    pixels, classes = cifar_arrays(number)
    return np.concatenate([classes[:, None], pixels.reshape(COUNT, -1)], 1).tobytes()


def cifar_files() -> dict[str, bytes]:
    """The six files of `small_cifar`."""
    return {name: binary_batch(i) for i, name in enumerate(CIFAR10.batches, 1)}


def write_cifar(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in cifar_files().items():
        (folder / name).write_bytes(data)
