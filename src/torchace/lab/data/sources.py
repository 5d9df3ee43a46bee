"""Official files of each data set, read from `sources.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class IdxFile:
    """One idx file; `sha256` is of the downloaded .gz, `content` of the array (None: not compared)."""

    name: str
    shape: tuple[int, ...]
    sha256: str
    content: str | None = None


@dataclass(frozen=True)
class Source:
    """Data set with `folders` to search under `$TORCHACE_DATA`."""

    name: str
    title: str
    class_names: tuple[str, ...]
    folders: tuple[str, ...]
    urls: tuple[str, ...]


@dataclass(frozen=True)
class IdxSource(Source):
    """Data set of four idx files: images and labels for training and testing."""

    train: tuple[IdxFile, IdxFile]
    test: tuple[IdxFile, IdxFile]


@dataclass(frozen=True)
class CifarSource(Source):
    """CIFAR-10 in six batches of `count` images, the last for testing."""

    archive: str
    sha256: str  # of the archive
    count: int
    batches: dict[str, str] = field(repr=False)  # file name: SHA-256


def _load_sources() -> dict[str, IdxSource | CifarSource]:
    sources: dict[str, IdxSource | CifarSource] = {}
    for name, content in tomllib.loads(Path(__file__).with_name("sources.toml").read_text()).items():
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
        }
        if "batches" in fields:
            sources[name] = CifarSource(name, **fields)
        else:
            for part in ("train", "test"):
                fields[part] = tuple(IdxFile(**{**file, "shape": tuple(file["shape"])}) for file in fields[part])
            sources[name] = IdxSource(name, **fields)
    return sources


SOURCES = _load_sources()
