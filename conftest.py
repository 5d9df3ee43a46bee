"""Names that the docstrings' examples use without importing them."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchace

# Modules whose import needs a package that only comes with a GPU build of torch.
collect_ignore_glob = [] if find_spec("triton") else ["src/torchace/kernels/*_gpu.py"]
if not find_spec("transformers"):
    collect_ignore_glob.append("src/torchace/transformers.py")


@pytest.fixture(autouse=True)
def _example_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update({name: getattr(torchace, name) for name in torchace.__all__})
    doctest_namespace.update(torch=torch, nn=nn, F=F, ace=torchace)
