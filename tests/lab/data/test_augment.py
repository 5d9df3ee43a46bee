"""Crop and flip against a version that moves one pixel at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import augment as reference
from torchace.lab.data import CropFlip, random_crop, random_flip

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
    assert torch.equal(random_crop(x, padding, offsets=where), cropped)
    assert torch.equal(random_flip(x, flips=torch.tensor(flips)), reference.flip(x, flips))
    both = CropFlip(padding)(x, where[:, 0], where[:, 1], torch.tensor(flips))
    assert both.dtype == dtype
    assert torch.equal(both, reference.flip(cropped, flips))
    unflipped = CropFlip(padding, flip=False)(x, where[:, 0], where[:, 1], torch.tensor(flips))
    assert torch.equal(unflipped, cropped)


def test_draws_follow_the_generator():
    x = make(64, 3, 8, 8, torch.uint8)

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        return random_flip(random_crop(x, 4, generator=generator), generator=generator)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def test_probability_of_a_flip():
    x = make(16, 1, 4, 4, torch.uint8)
    assert torch.equal(random_flip(x, probability=0.0), x)
    assert torch.equal(random_flip(x, probability=1.0), x.flip(3))


def test_input_is_left_alone():
    x = make(4, 1, 4, 4, torch.float32)
    before = x.clone()
    random_crop(x, 2)
    random_flip(x)
    CropFlip(1)(x, *torch.zeros(2, 4, dtype=torch.int64), torch.ones(4, dtype=torch.bool))
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: random_crop(x[0], 1), r"\(N, C, H, W\)"),
        (lambda x: random_flip(x[0]), r"\(N, C, H, W\)"),
        (lambda x: random_crop(x, -1), "at least 0"),
        (lambda x: random_crop(x, 1, offsets=torch.zeros(3, 2, dtype=torch.int64)), r"\(4, 2\)"),
        (lambda x: random_flip(x, flips=torch.zeros(3, dtype=torch.bool)), r"\(4,\)"),
        (lambda x: random_flip(x, probability=1.5), r"\[0, 1\]"),
        (lambda x: CropFlip(-1), "at least 0"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(make(4, 1, 4, 4, torch.uint8))
