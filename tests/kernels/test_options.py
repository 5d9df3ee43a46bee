"""Conditions under which kernels are used."""

import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from torchace.kernels import options
from torchace.kernels.options import runs_kernels

GPU = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with an H200, Triton and a CUDA build of torch, by what it says of itself."""
    monkeypatch.setattr(options, "TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    options._is_new.cache_clear()
    yield monkeypatch
    options._is_new.cache_clear()


def test_a_gpu_supported_by_triton(gpu: pytest.MonkeyPatch) -> None:
    assert runs_kernels(GPU)


@pytest.mark.parametrize("device", ["cpu", "mps", "meta"])
def test_other_devices(gpu: pytest.MonkeyPatch, device: str) -> None:
    assert not runs_kernels(torch.device(device))


def test_an_old_gpu(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert not runs_kernels(GPU)


def test_no_triton(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(options, "TRITON", False)
    assert not runs_kernels(GPU)


def test_the_choice_of_a_kernel_can_be_compiled(gpu: pytest.MonkeyPatch) -> None:
    @cache
    def kernel_by_default(device: torch.device) -> bool:
        raise AssertionError("not while compiling")

    gpu.setattr(options, "_is_new", kernel_by_default)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def kernel_on_request(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if runs_kernels(GPU) and not runs_kernels(x.device) else x - 1

    assert kernel_on_request(torch.zeros(())) == 1


def test_the_package_is_imported_without_compiler_and_triton() -> None:
    """They take seconds, which those who use neither should not wait."""
    code = "import sys, torchace.functional; print([m for m in ('torch._dynamo', 'triton') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
