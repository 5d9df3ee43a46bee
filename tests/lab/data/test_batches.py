"""Batches: every one a function of (seed, epoch, step, stream)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchace.lab.data.batches as batches_module
from tests.reference import augment as reference
from torchace.lab.data import Batches, CropFlip, Split, chunks

NORMALIZE = ((120.0, 100.0, 80.0), (60.0, 50.0, 40.0))


@pytest.fixture
def split() -> Split:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (50, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return Split(x, torch.arange(50))  # the label says which sample it is


OPTIONS = [{}, {"augment": CropFlip(4)}, {"augment": CropFlip(2), "dtype": torch.float64}, {"dtype": torch.bfloat16}]


@pytest.mark.parametrize("options", OPTIONS)
def test_an_epoch_goes_through_all_samples(split, options):
    batches = Batches(split, 8, seed=1, normalize=NORMALIZE, **options)
    parts = [batches.batch(0, step) for step in range(batches.steps_per_epoch)]
    seen = torch.cat([y for _, y in parts]).tolist()
    assert len(parts) == 6
    assert len(seen) == len(set(seen)) == 48
    assert all(x.shape == (len(y), 3, 8, 8) and x.dtype == options.get("dtype", torch.float32) for x, y in parts)


@pytest.mark.parametrize("options", OPTIONS)
def test_batches_can_be_read_in_any_order(split, options):
    """Asked for in another order, by another object, one batch has the same bits: a run resumes anywhere."""
    batches = Batches(split, 8, seed=3, normalize=NORMALIZE, **options)
    steps = range(batches.steps_per_epoch)
    straight = {(epoch, step): batches.batch(epoch, step) for epoch in range(3) for step in steps}
    for epoch, step in reversed(straight):
        resumed = Batches(split, 8, seed=3, normalize=NORMALIZE, **options).batch(epoch, step)
        for ours, theirs, again in zip(straight[epoch, step], resumed, batches.batch(epoch, step), strict=True):
            assert torch.equal(ours, theirs)
            assert torch.equal(ours, again)


@pytest.mark.parametrize("options", OPTIONS)
def test_many_seeds_at_once(split, options):
    """Bit for bit the stack of the single ones, streams and repeated seeds included."""
    seeds, streams = [5, 0, 5, 9], [0, 1, 2, 1]
    many = Batches(split, 8, seed=77, normalize=NORMALIZE, **options)
    for epoch, step in [(0, 0), (0, 5), (1, 5), (0, 0), (2, many.steps_per_epoch - 1)]:
        singles = [
            Batches(split, 8, seed=seed, normalize=NORMALIZE, **options).batch(epoch, step, stream=stream)
            for seed, stream in zip(seeds, streams, strict=True)
        ]
        for ours, theirs in zip(
            many.batch_many(seeds, epoch, step, streams=streams), zip(*singles, strict=True), strict=True
        ):
            assert torch.equal(ours, torch.stack(theirs))
    shared = many.batch_many([1, 2], 0, 0, streams=1)[1]
    assert torch.equal(shared, many.batch_many([1, 2], 0, 0, streams=[1, 1])[1])


def test_seeds_epochs_and_streams_differ(split):
    batches = Batches(split, 25, seed=0)
    drawn = [batches.batch(0, 0)[1], batches.batch(0, 1)[1], batches.batch(1, 0)[1], batches.batch(0, 0, stream=1)[1]]
    drawn.append(Batches(split, 25, seed=1).batch(0, 0)[1])
    assert len({tuple(y.tolist()) for y in drawn}) == 5


def test_normalizing_against_float64(split):
    x, y = Batches(split, 8, normalize=NORMALIZE, dtype=torch.float64).batch(0, 0)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in NORMALIZE)
    expected = (split.x[y].double() - mean) / std
    assert torch.equal(x, expected)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rounded = Batches(split, 8, normalize=NORMALIZE, dtype=dtype).batch(0, 0)[0]
        # one rounding of the difference, one of the quotient, one of the result
        torch.testing.assert_close(rounded.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert torch.equal(Batches(split, 8).batch(0, 0)[0], split.x[y].float())
    single = Batches(split, 8, normalize=((0.0,), (255.0,)), dtype=torch.float64).batch(0, 0)[0]
    assert torch.equal(single, split.x[y].double() / 255)


def test_augmentation_against_reference():
    """Some offsets and flips explain every image of a batch, and they cover what they should."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(1, 256, (50, 1, 5, 5), generator=generator, dtype=torch.uint8)
    split = Split(images, torch.arange(50))
    known = {
        (row, column, mirrored): reference.flip(reference.crop(images, 2, [(row, column)] * 50), [mirrored] * 50)
        for row in range(5)
        for column in range(5)
        for mirrored in (False, True)
    }
    batches = Batches(split, 50, seed=4, augment=CropFlip(2))
    x, y = batches.batch(0, 0)
    found = set()
    for image, label in zip(x, y.tolist(), strict=True):
        matches = [drawn for drawn, moved in known.items() if torch.equal(moved[label].float(), image)]
        assert len(matches) == 1
        found.update(matches)
    assert {row for row, _, _ in found} == {column for _, column, _ in found} == set(range(5))
    assert {mirrored for _, _, mirrored in found} == {False, True}
    assert not torch.equal(batches.batch(1, 0)[0].sort(0).values, x.sort(0).values)  # drawn again every epoch


def test_augmentation_does_not_move_the_order(split):
    plain, augmented = Batches(split, 8, seed=2), Batches(split, 8, seed=2, augment=CropFlip())
    assert torch.equal(plain.batch(3, 1)[1], augmented.batch(3, 1)[1])


def test_samples_are_not_changed(split):
    before = split.x.clone()
    batches = Batches(split, 8, normalize=NORMALIZE, augment=CropFlip())
    batches.batch(0, 0)
    assert batches.split.x is split.x
    assert batches.split.x.dtype == torch.uint8
    real = Split(torch.rand(6, 3), torch.zeros(6))
    kept = real.x.clone()
    for x, _ in chunks(real, 4, normalize=((0.5,), (2.0,))):
        assert not torch.equal(x, kept[: len(x)])
    Batches(real, 3, normalize=((0.5,), (2.0,))).batch(0, 0)
    assert torch.equal(real.x, kept)
    assert torch.equal(split.x, before)


def test_locating_a_step(split):
    batches = Batches(split, 8)
    steps = batches.steps_per_epoch
    assert [batches.locate(step) for step in (0, steps - 1, steps, 2 * steps + 3)] == [
        (0, 0),
        (0, steps - 1),
        (1, 0),
        (2, 3),
    ]


@pytest.mark.parametrize("size", [1, 7, 50, 99])
def test_chunks_are_everything_in_order(split, size):
    parts = list(chunks(split, size, normalize=NORMALIZE, dtype=torch.float64))
    assert torch.cat([y for _, y in parts]).tolist() == list(range(50))
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in NORMALIZE)
    assert torch.equal(torch.cat([x for x, _ in parts]), (split.x.double() - mean) / std)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: Batches(s, 0), ValueError, "at least 1"),
        (lambda s: Batches(s, 51), ValueError, "at most 50"),
        (lambda s: Batches(Split(s.x.flatten(1), s.y), 8, augment=CropFlip()), ValueError, "images"),
        (lambda s: Batches(s, 8).batch(0, 6), ValueError, "locate"),
        (lambda s: Batches(s, 8).batch(0, -1), ValueError, "locate"),
        (lambda s: Batches(s, 8).batch_many([1, 2], 0, 0, streams=[0]), ValueError, "shorter"),
    ],
)
def test_errors(split, call, error, message):
    with pytest.raises(error, match=message):
        call(split)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype
@pytest.mark.parametrize("options", OPTIONS)
def test_the_same_on_a_gpu(split, options):
    here, there = (Batches(split, 8, seed=3, device=device, **options) for device in ("cpu", "cuda"))
    assert there.split.x.device.type == "cuda"
    for ours, theirs in zip(here.batch_many([0, 4], 2, 3), there.batch_many([0, 4], 2, 3), strict=True):
        assert theirs.device.type == "cuda"
        assert torch.equal(ours, theirs.cpu())  # whole numbers: no rounding in between
    normalized = Batches(split, 8, seed=3, device="cuda", normalize=NORMALIZE, **options)
    there.batch(0, 0)
    normalized.batch(0, 0)
    try:
        torch.cuda.set_sync_debug_mode("error")  # a step reads nothing back
        normalized.batch(0, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"normalize": ([3.0], [2.0])}])
def test_samples_put_in_order_at_once_are_the_same(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split(torch.arange(84, dtype=torch.uint8).view(21, 1, 2, 2), torch.arange(21))
    at_once = Batches(split, 4, **options)
    monkeypatch.setattr(batches_module, "GATHER_BYTES", 0)
    batch_by_batch = Batches(split, 4, **options)
    for epoch in (0, 3):
        for step in range(at_once.steps_per_epoch):
            for ours, theirs in zip(
                at_once.batch_many([1, 1, 5], epoch, step, streams=[0, 1, 0]),
                batch_by_batch.batch_many([1, 1, 5], epoch, step, streams=[0, 1, 0]),
                strict=True,
            ):
                assert torch.equal(ours, theirs)
                assert ours.dtype == theirs.dtype
                assert ours.is_contiguous()


def test_a_batch_is_a_copy() -> None:
    split = Split(torch.arange(10.0).view(10, 1), torch.arange(10))
    batches = Batches(split, 4)
    x, y = batches.batch(0, 1)
    expected = x.clone(), y.clone()
    x.zero_()
    y.zero_()
    again = batches.batch(0, 1)
    assert torch.equal(again[0], expected[0])
    assert torch.equal(again[1], expected[1])
    assert torch.equal(split.x[:, 0], torch.arange(10.0))
