"""Where kernels are tried at all."""

import importlib.util

import pytest
import torch

from torchace.kernels.available import _known, runs_kernels


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with an H200, Triton and a CUDA build of torch, by what it says of itself."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return monkeypatch


def answer() -> bool:
    _known.cache_clear()
    try:
        return runs_kernels(torch.device("cuda"))
    finally:
        _known.cache_clear()


def test_a_gpu_that_triton_knows(gpu: pytest.MonkeyPatch) -> None:
    assert answer()


def test_what_kernels_do_not_run_on(gpu: pytest.MonkeyPatch) -> None:
    assert not runs_kernels(torch.device("cpu"))
    assert not runs_kernels(torch.device("mps"))
    with gpu.context() as changed:
        changed.setattr(torch.version, "hip", "7.0")  # an AMD GPU says cuda too
        assert not answer()
    with gpu.context() as changed:
        changed.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not answer()
    with gpu.context() as changed:
        changed.setattr(importlib.util, "find_spec", lambda name: None)
        assert not answer()


def test_the_compiler_takes_the_answer_as_it_is() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def asked(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if runs_kernels(x.device) else x - 1

    assert asked(torch.zeros(())) == -1
