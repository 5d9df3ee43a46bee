"""Checkpoints: complete or missing, and never wrong."""

import errno
import json
import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.lab.training.small_trainings import batches, make_group, train_config
from tests.support.weights import weights_digest
from torchace import _files as files
from torchace._files import write_atomic
from torchace.lab.training.checkpoint import CheckpointError, Checkpoints
from torchace.lab.training.config import make_optimizer
from torchace.lab.training.loop import CheckpointPolicy, fit
from torchace.lab.training.run_group import RunGroup
from torchace.nn import Ensemble

PROGRESS: dict[str, Any] = {"step": 1, "seconds": 0.5, "stopped": [False], "history": [], "failures": {}}
PROGRESS |= {"sums": ["nan"], "weights": [1.0]}
ARGUMENTS: dict[str, Any] = {"diversities": [0.5], "seeds": [5]}


def save_one(directory: Path, steps: int = 3) -> None:
    """A checkpoint after some steps."""
    policy = CheckpointPolicy(Checkpoints(directory), steps, None)
    fit(make_group([5]), batches(), train_config(steps=steps + 1), **ARGUMENTS, checkpoint_policy=policy)


def load_one(directory: Path, optimizer: str = "adam") -> tuple[RunGroup, dict[str, Any] | None]:
    network = make_group([5])
    return network, Checkpoints(directory).load(
        network, make_optimizer(train_config(optimizer=optimizer), list(network.parameters()))
    )


def test_save_and_load(tmp_path: Path) -> None:
    expected = make_group([5])
    fit(expected, batches(), train_config(steps=3), **ARGUMENTS)
    save_one(tmp_path)
    network, progress = load_one(tmp_path)
    assert progress is not None
    assert progress["step"] == 3
    assert weights_digest(network, 0) == weights_digest(expected, 0)


def test_optimizer_state_is_restored(tmp_path: Path) -> None:
    for name in ("adam", "sgd"):
        network = make_group([5])
        optimizer = make_optimizer(train_config(optimizer=name), list(network.parameters()))
        network(torch.ones(1, 2, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        Checkpoints(tmp_path / name).save(network, optimizer, PROGRESS)
        other = make_optimizer(train_config(optimizer=name), list(network.parameters()))
        Checkpoints(tmp_path / name).load(network, other)
        ours, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
        assert ours.keys() == theirs.keys()
        for index, state in ours.items():
            assert {k for k, v in state.items() if v is not None} == set(theirs[index])
            assert all(value.equal(state[key]) for key, value in theirs[index].items())


def test_there_is_one_checkpoint_at_a_time(tmp_path: Path) -> None:
    checkpoint_policy = CheckpointPolicy(Checkpoints(tmp_path), 1, None)
    fit(make_group([5]), batches(), train_config(steps=5), **ARGUMENTS, checkpoint_policy=checkpoint_policy)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "state-4.safetensors"]


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert load_one(tmp_path)[1] is None
    assert load_one(tmp_path / "not there")[1] is None


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    save_one(tmp_path)
    (tmp_path / ".state-9.safetensors.123.partial").write_bytes(b"half")
    (tmp_path / "state-9.safetensors").write_bytes(b"written, but its manifest was not")
    assert load_one(tmp_path)[1]["step"] == 3  # type: ignore[index]
    assert not list(tmp_path.glob("*.partial"))
    save_one(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "state-5.safetensors"]


def test_removed_with_its_folders(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints" / "main-0"
    save_one(directory)
    (directory / ".state-9.safetensors.123.partial").write_bytes(b"half")
    (tmp_path / "checkpoints" / "main-1").mkdir()
    Checkpoints(directory).remove()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["main-1"]  # another job's
    Checkpoints(tmp_path / "checkpoints" / "main-1").remove()
    assert list(tmp_path.iterdir()) == []
    Checkpoints(directory).remove()  # nothing is there, and that is what was asked for


# -- damaged files ----------------------------------------------------------------------------------------------------


def flip_bit(file: Path, place: int, bit: int) -> bytes:
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << bit
    return bytes(data)


@pytest.mark.parametrize("name", ["manifest.json", "state-3.safetensors"])
def test_a_flipped_bit_is_never_loaded(name: str, tmp_path: Path) -> None:
    save_one(tmp_path)
    file = tmp_path / name
    whole, good = file.read_bytes(), weights_digest(load_one(tmp_path)[0], 0)
    draw = random.Random(0)
    refusals = []
    for _ in range(150):
        file.write_bytes(flip_bit(file, draw.randrange(len(whole)), draw.randrange(8)))
        try:
            network, progress = load_one(tmp_path)
        except CheckpointError as error:
            refusals.append(str(error))
        else:  # a space that became another white space, say
            assert weights_digest(network, 0) == good
            assert progress is not None
            assert progress["step"] == 3
        file.write_bytes(whole)
    assert len(refusals) >= 148
    assert all("\n" not in said and str(tmp_path) in said for said in refusals)


@pytest.mark.parametrize("name", ["manifest.json", "state-3.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_cut_file_is_refused(name: str, share: float, tmp_path: Path) -> None:
    save_one(tmp_path)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(share * len(data))])
    with pytest.raises(CheckpointError, match=r"is damaged .* Remove that folder"):
        load_one(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [*(("manifest.json", text) for text in ("[]", "{}", "\x00\xff")), ("state-3.safetensors", None)],
)
def test_a_file_that_is_missing_or_something_else_is_named(name: str, text: str | None, tmp_path: Path) -> None:
    save_one(tmp_path)
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_text(text, "latin-1")
    with pytest.raises(CheckpointError, match=f"{name} was changed or truncated"):
        load_one(tmp_path)


def test_another_networks_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    save_one(tmp_path)
    network = make_group([5, 6])
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path).load(network, make_optimizer(train_config(), list(network.parameters())))
    assert "\n" not in str(caught.value)


OWNER = {"runs": [["main", 0.5, 5]], "config_sha256": "00"}


@pytest.mark.parametrize("other", [None, {**OWNER, "runs": [["main", 0.0, 5]]}, {**OWNER, "config_sha256": "01"}])
def test_a_checkpoint_of_others_is_refused_or_removed(other: dict[str, Any] | None, tmp_path: Path) -> None:
    network = make_group([5])
    optimizer = make_optimizer(train_config(), list(network.parameters()))
    Checkpoints(tmp_path / "a", owner=OWNER).save(network, optimizer, PROGRESS)
    theirs = Checkpoints(tmp_path / "a", owner=other)
    with pytest.raises(CheckpointError, match=r"belongs to other runs or to another configuration\. Remove") as caught:
        theirs.load(network, optimizer)
    assert "\n" not in str(caught.value)
    assert not Checkpoints(tmp_path / "a", owner=OWNER).remove_foreign()
    assert Checkpoints(tmp_path / "a", owner=OWNER).load(network, optimizer) == PROGRESS
    assert theirs.remove_foreign()
    assert theirs.load(network, optimizer) is None


def test_a_damaged_checkpoint_is_not_removed_as_that_of_others(tmp_path: Path) -> None:
    save_one(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    assert not Checkpoints(tmp_path, owner=OWNER).remove_foreign()
    with pytest.raises(CheckpointError, match="is damaged"):
        load_one(tmp_path)


def test_manifests_are_json_without_nan(tmp_path: Path) -> None:
    network = make_group([5, 6])
    with torch.no_grad():
        next(network.parameters())[0] = torch.nan
    policy = CheckpointPolicy(Checkpoints(tmp_path), 8, None)
    fit(network, batches(), train_config(steps=9), diversities=[0.5] * 2, seeds=[5, 6], checkpoint_policy=policy)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    manifest = json.loads((tmp_path / "manifest.json").read_text(), parse_constant=refuse)
    assert manifest["progress"]["history"][0]["score"][0] is None
    assert manifest["progress"]["failures"]["0"]["step"] == 0


# -- full disks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 2, 4, 7])
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_disk_that_fills_up_at_any_moment(
    call: int, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_group([5])
    fit(expected, batches(), train_config(steps=6), **ARGUMENTS)

    real, calls = getattr(os, function), 0

    def full(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    checkpoint_policy = CheckpointPolicy(Checkpoints(tmp_path), 1, None)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, function, full)
        with pytest.raises(OSError, match="No space left") as caught:
            fit(make_group([5]), batches(), train_config(steps=6), **ARGUMENTS, checkpoint_policy=checkpoint_policy)
    assert str(tmp_path) in str(caught.value.filename)
    assert not list(tmp_path.glob(".*.partial"))
    network = make_group([5])
    fit(network, batches(), train_config(steps=6), **ARGUMENTS, checkpoint_policy=checkpoint_policy)
    assert weights_digest(network, 0) == weights_digest(expected, 0)


def test_a_failed_write_keeps_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result.json"
    write_atomic(file, b"old")

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device.*result.json"):
        write_atomic(file, b"new")
    assert file.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_files_have_the_users_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "a" / "result.json", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "result.json").stat().st_mode) == 0o640


def test_moments_keep_the_memory_format_of_their_parameters(tmp_path: Path) -> None:
    """A fused optimizer on a GPU refuses a channels-last weight whose momentum is laid out otherwise."""

    def training() -> tuple[RunGroup, torch.optim.Optimizer]:
        torch.manual_seed(0)
        network = RunGroup([Ensemble([nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))])])
        network = network.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        network(torch.ones(1, 2, 3, 8, 8)).sum().backward()
        optimizer.step()
        return network, optimizer

    network, optimizer = training()
    Checkpoints(tmp_path).save(network, optimizer, PROGRESS)
    again, fresh = training()
    assert Checkpoints(tmp_path).load(again, fresh) == PROGRESS
    for parameter in again.parameters():
        moment = fresh.state[parameter]["momentum_buffer"]
        assert moment.stride() == parameter.stride()
    assert any(not parameter.is_contiguous() for parameter in again.parameters())
