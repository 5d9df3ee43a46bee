"""No test here touches the user's cache or the network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.lab.data.writers import small_cifar, small_mnist
from torchace.lab.data.datasets import SOURCES

REAL_DATA = os.environ.get("TORCHACE_DATA", "")


@pytest.fixture(autouse=True)
def _isolated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHACE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr("pooch.retrieve", _no_network)


def _no_network(*args: object, **options: object) -> str:
    raise AssertionError("a test that should not have tried to download")


@pytest.fixture
def small_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """MNIST and CIFAR-10 reduced to a few images, of unknown content."""
    monkeypatch.setitem(SOURCES, "mnist", small_mnist())
    monkeypatch.setitem(SOURCES, "cifar10", small_cifar())


@pytest.fixture
def real_data() -> Path:
    """The folder of real data that the tests were started with."""
    if not REAL_DATA:
        pytest.skip("TORCHACE_DATA is not set")
    return Path(REAL_DATA)
