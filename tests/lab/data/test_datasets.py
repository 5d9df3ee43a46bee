"""The data sets by name, on digits, on small files in every layout, and on the real files."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.lab.data import writers
from torchace.lab.data import DataError, Dataset, load
from torchace.lab.data.datasets import NAMES
from torchace.lab.data.splits import random_split


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


def test_digits(digits):
    from sklearn.datasets import load_digits

    assert digits.train.x.shape == (1297, 1, 8, 8)
    assert digits.test.x.shape == (500, 1, 8, 8)
    assert digits.train.x.dtype == torch.uint8
    assert digits.train.y.dtype == torch.int64
    original = load_digits()
    ours = torch.cat([digits.train.x, digits.test.x]).flatten(1).tolist()
    labels = torch.cat([digits.train.y, digits.test.y]).tolist()
    pairs = zip(original.data.astype(int).tolist(), original.target.tolist(), strict=True)
    assert sorted(zip(ours, labels, strict=True)) == sorted(pairs)
    assert digits.test.y.bincount().tolist() == [50, 51, 49, 51, 50, 51, 50, 50, 48, 50]
    x = digits.train.x.double()
    # the constants come from whole-number sums; numpy's rounding is what differs
    assert digits.mean == pytest.approx([x.mean().item()], rel=1e-12)
    assert digits.std == pytest.approx([x.std(correction=0).item()], rel=1e-12)


def test_the_split_of_digits_never_changes(digits):
    assert digest(digits.test.x) == DIGITS_TEST


DIGITS_TEST = "5abe1dcaa2bd6f302b3a3a935b5bcaa6ee134fc560d7128e00f8fb0403238c8a"


def test_validation_split(digits):
    train, validation = random_split(digits.train, 0.2, seed=1)
    assert (len(train), len(validation)) == (1038, 259)
    share = digits.train.y.bincount() * 259 / 1297
    assert float((validation.y.bincount() - share).abs().max()) < 1
    again, other = (random_split(digits.train, 0.2, seed=seed)[1] for seed in (1, 2))
    assert torch.equal(validation.x, again.x)
    assert not torch.equal(validation.y, other.y)


def test_normalization(digits):
    assert digits.normalization() == (digits.mean, digits.std)
    assert digits.normalization("unit") == ((0.0,), (16.0,))
    with pytest.raises(ValueError, match="'standard', 'unit'"):
        digits.normalization("minmax")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("minst", "'mnist'"), ("Fashion-MNIST", "'fashion_mnist'"), ("CIFAR-10", "'cifar10'"), ("", ""), (None, "")],
)
def test_unknown_names(name, hint):
    with pytest.raises(DataError, match="digits, mnist, fashion_mnist, cifar10") as error:
        load(name)
    assert hint in str(error.value)
    assert NAMES == ("digits", "mnist", "fashion_mnist", "cifar10")


def check_small_mnist(data: Dataset) -> None:
    assert np.array_equal(data.train.x.numpy()[:, 0], writers.images(writers.TRAIN))
    assert np.array_equal(data.train.y.numpy(), writers.labels(writers.TRAIN))
    assert np.array_equal(data.test.x.numpy()[:, 0], writers.images(writers.TEST, seed=1))
    assert data.image_shape == (1, 28, 28)
    data.train.x[0] = 0  # memory of our own


@pytest.mark.usefixtures("small_sources")
@pytest.mark.parametrize("form", ["gz", "plain", "dotted", "plain named gz", "gz named plain"])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "MNIST", "."])
def test_layouts_of_mnist(tmp_path, folder, form):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for name, data in writers.mnist_files().items():
        stored = name.replace("-idx", ".idx") if form == "dotted" else name + ".gz" * form.endswith("gz")
        (tmp_path / folder / stored).write_bytes(writers.pack(data) if form.startswith("gz") else data)
    check_small_mnist(load("mnist", directory=tmp_path, download=False))


@pytest.mark.usefixtures("small_sources")
def test_environment_then_cache(tmp_path, monkeypatch):
    cache = tmp_path / "xdg"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    writers.write_mnist(cache / "torchace" / "mnist")
    check_small_mnist(load("mnist"))
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setenv("TORCHACE_DATA", str(own))
    check_small_mnist(load("mnist"))  # nothing there: the cache has it
    (own / "mnist").mkdir()
    (own / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"")
    with pytest.raises(DataError, match="not an idx file"):  # damaged: never passed over
        load("mnist")


@pytest.mark.usefixtures("small_sources")
@pytest.mark.parametrize("folder", ["cifar10/cifar-10-batches-bin", "cifar-10-batches-bin", "cifar10", "."])
def test_layouts_of_cifar(tmp_path, folder):
    writers.write_cifar(tmp_path / folder)
    check_small_cifar(load("cifar10", directory=tmp_path, download=False))


@pytest.mark.usefixtures("small_sources")
def test_archive_of_cifar(tmp_path):
    write_archive(tmp_path / "cifar-10-binary.tar.gz", writers.cifar_files())
    check_small_cifar(load("cifar10", directory=tmp_path, download=False))
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-binary.tar.gz"]  # nothing was unpacked


def write_archive(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in {"readme.html": b"<html>", **files}.items():
            member = tarfile.TarInfo(f"cifar-10-batches/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def check_small_cifar(data: Dataset) -> None:
    x, y = (np.concatenate([writers.cifar_arrays(i)[part] for i in range(1, 6)]) for part in (0, 1))
    assert np.array_equal(data.train.x.numpy(), x)
    assert np.array_equal(data.train.y.numpy(), y)
    assert np.array_equal(data.test.x.numpy(), writers.cifar_arrays(6)[0])
    assert data.image_shape == (3, 32, 32)
    assert data.mean == pytest.approx(x.mean((0, 2, 3), dtype=np.float64), rel=1e-12)
    assert data.std == pytest.approx(x.std((0, 2, 3), dtype=np.float64), rel=1e-12)
    data.test.x[0] = 0


def test_constant_channels_can_be_normalized():
    from torchace.lab.data.datasets import channel_statistics

    assert channel_statistics(torch.full((3, 2, 4, 4), 7, dtype=torch.uint8)) == ((7.0, 7.0), (1.0, 1.0))


def test_imports_are_late():
    """torch and numpy alone, until something else is needed; pickle's loader never by us."""
    program = """
import sys, torchace
before = set(sys.modules)
import torchace.lab.data
print(*{'sklearn', 'pooch', 'rich', 'requests', 'scipy', 'pandas'} & (set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    package = Path(sys.modules["torchace.lab.data"].__file__).parent
    assert not [path for path in package.glob("*.py") if "import pickle\n" in path.read_text()]


@pytest.mark.extended
def test_real_mnist(real_data):
    mnist = load("mnist", directory=real_data, download=False)
    assert mnist.train.x.shape == (60_000, 1, 28, 28)
    assert mnist.test.x.shape == (10_000, 1, 28, 28)
    assert mnist.train.y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.test.y.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    # the well-known 0.1307 and 0.3081 of 255
    assert mnist.mean[0] / 255 == pytest.approx(0.1307, abs=5e-5)
    assert mnist.std[0] / 255 == pytest.approx(0.3081, abs=5e-5)


@pytest.mark.extended
def test_real_mnist_is_not_fashion_mnist(real_data, tmp_path):
    folder = next(path for path in (real_data / "mnist", real_data / "MNIST/raw", real_data) if path.is_dir())
    for path in folder.glob("*ubyte*"):
        (tmp_path / path.name).symlink_to(path)
    with pytest.raises(DataError, match="not the official file of Fashion-MNIST"):
        load("fashion_mnist", directory=tmp_path, download=False)


@pytest.fixture(scope="session")
def cifar_folder(tmp_path_factory) -> Path:
    """Real CIFAR-10: where TORCHACE_DATA has it, or unpacked by the script that lies there."""
    from tests.lab.data.conftest import REAL_DATA

    if not REAL_DATA:
        pytest.skip("TORCHACE_DATA is not set")
    script = Path(REAL_DATA) / "unpack_cifar10.py"
    if not script.exists():
        return Path(REAL_DATA)
    folder = tmp_path_factory.mktemp("cifar10")
    subprocess.run([sys.executable, script, folder], check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.mark.extended
def test_real_cifar(cifar_folder):
    cifar = load("cifar10", directory=cifar_folder, download=False)
    assert cifar.train.x.shape == (50_000, 3, 32, 32)
    assert cifar.train.y.bincount().tolist() == [5000] * 10
    assert cifar.test.y.bincount().tolist() == [1000] * 10
    assert cifar.train.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert cifar.mean == pytest.approx([125.30691805, 122.95039414, 113.86538318], abs=5e-9)
    assert cifar.std == pytest.approx([62.99321928, 62.08870764, 66.70489964], abs=5e-9)
    records = torch.cat([cifar.test.y.to(torch.uint8)[:, None], cifar.test.x.flatten(1)], 1).numpy()
    assert hashlib.md5(records.tobytes()).hexdigest() == "803d5f7f4d78ea53de84dbe85f74fb6d"


@pytest.mark.extended
def test_a_flipped_bit_in_real_cifar(cifar_folder, tmp_path):
    source = next(cifar_folder.rglob("data_batch_1.bin")).parent
    for path in source.glob("*.bin"):
        (tmp_path / path.name).symlink_to(path)
    altered = bytearray((source / "data_batch_1.bin").read_bytes())
    altered[5_000_000] ^= 1
    (tmp_path / "data_batch_1.bin").unlink()
    (tmp_path / "data_batch_1.bin").write_bytes(altered)
    with pytest.raises(DataError, match=r"data_batch_1\.bin is not the official CIFAR-10 batch"):
        load("cifar10", directory=tmp_path, download=False)
