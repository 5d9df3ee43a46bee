"""File formats to fuzz: how each is written and read."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import math
import random
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.fuzzing.changes import mutate_json
from tests.lab.cli.command_line import pets, write_table
from tests.lab.data.writers import cifar_files, mnist_files, pack, small_cifar, small_mnist
from tests.lab.sweeps.small_sweeps import small
from tests.lab.tables.small_fits import fitted
from tests.lab.training.small_trainings import batches, make_group, train_config
from tests.support.saved_models import KINDS, bits
from tests.support.weights import weights_digest
from torchace import _model_files
from torchace._files import PathError, json_digest
from torchace.diagnosis import diagnose_file
from torchace.lab.data import DataError, infer_schema, load, read_table
from torchace.lab.data.image_files import SOURCES
from torchace.lab.report import ResultFileError, markdown, read_results, rich_table
from torchace.lab.store import RunStoreError
from torchace.lab.sweeps.config import ConfigError, load_experiment
from torchace.lab.sweeps.sweep import Sweep
from torchace.lab.training.checkpoint import CheckpointError, Checkpoints
from torchace.lab.training.loop import CheckpointPolicy, fit
from torchace.saving import ModelFileError, load_model, save_model
from torchace.saving.kinds import unstack

Forge = Callable[[Path, random.Random], None]


@dataclass(frozen=True)
class Subject:
    """A format.

    Attributes:
        write: Writes files into an empty folder.
        read: Reads them; what it returns is compared where the files have checksums.
        errors: What may be raised, one sentence each.
        files: Which of the files are changed, as a pattern; all unless given.
        is_text: Whether numbers and brackets in the files mean something.
        has_checksum: Whether values that were changed must be noticed.
        forge: Changes a file as someone would who knows the format: its checksums fit.
    """

    write: Callable[[Path], None]
    read: Callable[[Path], object]
    errors: tuple[type[Exception], ...]
    files: str = "**/*"
    is_text: bool = False
    has_checksum: bool = False
    forge: Forge | None = None


# -- models -----------------------------------------------------------------------------------------------------------


def _model(kind: str) -> Subject:
    def write(folder: Path) -> None:
        torch.manual_seed(0)
        save_model(
            folder / "model", KINDS[kind][1](), diversity=0.5, class_names=list("abcde"), extra={"note": [1, 2.5]}
        )

    def read(folder: Path) -> object:
        ensemble = load_model(folder / "model")
        values = sorted(bits(tensor)[2] for tensor in unstack(ensemble).state_dict().values())
        return values, json.dumps(ensemble.manifest, sort_keys=True)

    return Subject(write, read, (ModelFileError,), is_text=True, has_checksum=True, forge=_forge_manifest)


def _forge_manifest(folder: Path, rng: random.Random) -> None:
    file = folder / "model" / "manifest.json"
    with contextlib.suppress(ValueError, RecursionError):  # what cannot be sealed stays as it was
        manifest = mutate_json(json.loads(file.read_text()), rng)
        manifest["sha256"] = _model_files.manifest_digest(manifest)
        file.write_text(json.dumps(manifest))


@cache
def _table_model() -> Any:
    return fitted(pets(40), "pet", diversity=None, epochs=2)


def _read_table_model(folder: Path) -> object:
    from torchace.lab.cli import table_commands
    from torchace.lab.tables.model import TableModel

    with contextlib.redirect_stdout(io.StringIO()):
        table_commands.show(folder / "model")
    return TableModel.load(folder / "model").predict(pets(5)).to_json()


# -- trainings --------------------------------------------------------------------------------------------------------


def _write_checkpoint(folder: Path) -> None:
    saving = CheckpointPolicy(Checkpoints(folder / "checkpoint"), 7, None)
    fit(
        make_group([5, 6]),
        batches(),
        train_config(steps=8),
        diversities=[0.0, 0.5],
        seeds=[5, 6],
        checkpoint_policy=saving,
    )


def _read_checkpoint(folder: Path) -> object:
    if not (folder / "checkpoint" / "manifest.json").exists():
        raise CheckpointError("There is no checkpoint, so nothing of it can be wrong.")
    network = make_group([5, 6])
    saving = CheckpointPolicy(Checkpoints(folder / "checkpoint"), None, None)
    done = fit(
        network, batches(), train_config(steps=9), diversities=[0.0, 0.5], seeds=[5, 6], checkpoint_policy=saving
    )
    return weights_digest(network, 0), weights_digest(network, 1), str(done.history)


def _forge_checkpoint(folder: Path, rng: random.Random) -> None:
    file = folder / "checkpoint" / "manifest.json"
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(file.read_text())
        del content["sha256"]
        if rng.random() < 0.3:
            content["state"]["file"] = rng.choice(
                ["/dev/zero", "../../outside", "manifest.json", "state-7.safetensors"]
            )
            content["state"]["bytes"] = rng.choice([0, 1 << 40, -1, None])
        else:
            content = mutate_json(content, rng)
        file.write_text(json.dumps({**content, "sha256": json_digest(content)}))


def _experiment() -> Any:
    return small(train={"steps": 2}, sweep={"diversities": [0.0, 0.5], "seeds": [0, 1], "group_size": 2})


def _write_runs(folder: Path) -> None:
    Sweep(_experiment(), folder / "run").run()
    (folder / "run" / "lock").unlink()


def _read_runs(folder: Path) -> object:
    problems = []
    try:
        results = read_results(folder / "run")
        rich_table(results)
        markdown(results)
    except ResultFileError as error:
        problems.append(error)
    Sweep(_experiment(), folder / "run").run()
    if problems:
        raise problems[0]
    return None


TOML = """
title = "A mutated one"
[data]
limit = 200
[model]
hidden = [4, 8]
num_members = 2
[train]
steps = 12
batch_size = 50
schedule = "step"
milestones = [3, 6]
[sweep]
diversities = [0.0, 0.5]
seeds = [0, 1, 2]
[[arms]]
name = "one"
baseline = true
train = { learning_rate = 0.01 }
[[arms]]
name = "two"
diversities = [0.25]
[paper]
table = "1"
rows = [{ num_members = 2, diversity = 0.5, accuracy = 0.9 }]
"""


# -- data -------------------------------------------------------------------------------------------------------------


def _table(suffix: str, has_checksum: bool = False) -> Subject:
    def write(folder: Path) -> None:
        table = pets(60)
        if suffix == ".csv.gz":
            with gzip.open(folder / "t.csv.gz", "wt") as file:
                table.to_csv(file, index=False)
        elif suffix == ".packed.npz":
            np.savez_compressed(folder / "t.npz", x=np.arange(120.0).reshape(60, 2), pet=np.array(["a", "b"] * 30))
        else:
            write_table(table, folder / f"t{suffix}")

    def read(folder: Path) -> object:
        name = {".packed.npz": "t.npz"}.get(suffix, f"t{suffix}")
        frame = read_table(folder / name)
        target = "pet" if "pet" in frame.columns else str(frame.columns[-1])
        infer_schema(frame, target)
        return frame.to_json()

    return Subject(write, read, (DataError,), is_text=suffix == ".csv", has_checksum=has_checksum)


@cache
def _sources() -> None:
    """Small data sets whose content is known, in the place of the official ones."""
    mnist, cifar = small_mnist(), small_cifar()
    content = {name: data[4 + 4 * data[3] :] for name, data in mnist_files().items()}
    train, test = (
        tuple(replace(file, content=hashlib.sha256(content[file.name]).hexdigest()) for file in files)
        for files in (mnist.train, mnist.test)
    )
    SOURCES["mnist"] = replace(mnist, train=train, test=test)
    batches = {name: hashlib.sha256(data).hexdigest() for name, data in cifar_files().items()}
    SOURCES["cifar10"] = replace(cifar, batches=batches)


def _images(name: str, files: Callable[[], dict[str, bytes]]) -> Subject:
    def write(folder: Path) -> None:
        _sources()
        for file, data in files().items():
            (folder / file).write_bytes(data)

    def read(folder: Path) -> object:
        data = load(name, directory=folder, download=False)
        return [bits(tensor)[2] for tensor in (data.train.x, data.train.y, data.test.x, data.test.y)]

    return Subject(write, read, (DataError,), has_checksum=True)


def _archive() -> dict[str, bytes]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in cifar_files().items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return {"cifar-10-binary.tar.gz": buffer.getvalue()}


# -- predictions ------------------------------------------------------------------------------------------------------


def _predictions(suffix: str) -> Subject:
    def write(folder: Path) -> None:
        rng = np.random.default_rng(0)
        arrays = {"logits": rng.normal(size=(3, 40, 4)), "target": rng.integers(0, 4, 40)}
        if suffix == ".safetensors":
            save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, folder / "p.safetensors")
        else:
            save = np.savez if suffix == ".npz" else np.savez_compressed
            save(folder / "p.npz", **arrays, class_names=np.array(list("abcd")), member_weights=np.full(3, 1 / 3))

    def read(folder: Path) -> object:
        found = diagnose_file(folder / ("p.safetensors" if suffix == ".safetensors" else "p.npz"))
        assert all(math.isfinite(value) for value in found.numbers.values() if isinstance(value, float))
        return str(found.numbers)

    return Subject(write, read, (ValueError,))


SUBJECTS: dict[str, Subject] = {
    **{
        f"model, {kind}": _model(kind)
        for kind in ("different members", "low-rank smoc", "stacked", "branched", "converted")
    },
    "model of a table": Subject(
        lambda folder: _table_model().save(folder / "model"),
        _read_table_model,
        (ModelFileError, DataError),
        is_text=True,
        has_checksum=True,
    ),
    "checkpoint": Subject(
        _write_checkpoint,
        _read_checkpoint,
        (CheckpointError,),
        has_checksum=True,
        is_text=True,
        forge=_forge_checkpoint,
    ),
    "run directory": Subject(
        _write_runs, _read_runs, (ResultFileError, RunStoreError, PathError), files="run/**/*.*", is_text=True
    ),
    "TOML": Subject(
        lambda folder: (folder / "e.toml").write_text(TOML) and None,
        lambda folder: load_experiment(str(folder / "e.toml")),
        (ConfigError,),
        is_text=True,
    ),
    "CSV": _table(".csv"),
    "packed CSV": _table(".csv.gz", has_checksum=True),
    "Parquet": _table(".parquet"),
    "NPZ": _table(".npz", has_checksum=True),
    "packed NPZ": _table(".packed.npz", has_checksum=True),
    "idx": _images("mnist", lambda: {f"{name}.gz": pack(data) for name, data in mnist_files().items()}),
    "unpacked idx": _images("mnist", mnist_files),
    "CIFAR-10, binary": _images("cifar10", cifar_files),
    "CIFAR-10, archive": _images("cifar10", _archive),
    "predictions, NPZ": _predictions(".npz"),
    "predictions, packed NPZ": _predictions(".packed.npz"),
    "predictions, safetensors": _predictions(".safetensors"),
}
