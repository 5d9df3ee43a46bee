"""Names that the docstrings' examples use without importing them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchace


@pytest.fixture(autouse=True)
def _example_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update({name: getattr(torchace, name) for name in torchace.__all__})
    doctest_namespace.update(torch=torch, nn=nn, F=F, ace=torchace)
