"""Crop and flip against a version that moves one pixel at a time."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import augment as reference
from torchace.lab.data import CropFlip

DTYPES = [torch.uint8, torch.float32, torch.float64, torch.bfloat16, torch.int64]


def make(n, c, height, width, dtype):
    return torch.randint(1, 200, (n, c, height, width), generator=torch.Generator().manual_seed(0)).to(dtype)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 4),
    c=st.integers(1, 3),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    padding=st.integers(0, 4),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_against_reference(n, c, height, width, padding, dtype, data):
    x = make(n, c, height, width, dtype)
    place = st.integers(0, 2 * padding)
    offsets = data.draw(st.lists(st.tuples(place, place), min_size=n, max_size=n))
    flips = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    cropped = reference.crop(x, padding, offsets)
    where = torch.tensor(offsets)
    both = CropFlip(padding)(x, where[:, 0], where[:, 1], torch.tensor(flips))
    assert both.dtype == dtype
    assert torch.equal(both, reference.flip(cropped, flips))


def test_input_is_not_changed():
    x = make(4, 1, 4, 4, torch.float32)
    before = x.clone()
    CropFlip(1)(x, *torch.zeros(2, 4, dtype=torch.int64), torch.ones(4, dtype=torch.bool))
    assert torch.equal(x, before)
