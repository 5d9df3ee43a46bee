"""Random draws as functions of their keys: against plain Python integers, across processes, and in distribution."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchace.lab.data import hashed_key, permutation
from torchace.lab.data.rng import permutations, random_bits, random_integers

MASK = (1 << 64) - 1


def splitmix64(key: int, count: int) -> list[int]:
    """The published generator, in integers of any size."""
    state, out = key & MASK, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        out.append(z ^ (z >> 31))
    return out


@settings(max_examples=50, deadline=None)
@given(keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3), count=st.integers(1, 40))
def test_bits_are_splitmix64(keys, count):
    bits = random_bits(keys, count)
    assert bits.tolist() == [[z - (1 << 64) if z >> 63 else z for z in splitmix64(key, count)] for key in keys]
    assert permutations(keys, count).tolist() == [sorted(range(count), key=row.__getitem__) for row in bits.tolist()]
    high = 9
    expected = [[(z >> 32) * high >> 32 for z in splitmix64(key, count)] for key in keys]
    assert random_integers(keys, count, high).tolist() == expected


def order(seed: int, epoch: int, num_samples: int, stream: int = 0) -> torch.Tensor:
    """Order of the samples in an epoch, as `Batches` draws it."""
    return permutation(seed, "order", epoch, stream, count=num_samples)


def test_different_keys_hash_differently():
    keys = [(0,), (1,), (-1,), (0, 0), (0, "0"), (0, ""), (0, "", ""), (0, "ab", "c"), (0, "a", "bc"), (0, 1, 2),
            (0, 12), (0, "i1:"), (2**70,), (0, "é")]  # fmt: skip
    hashed = [hashed_key(*key) for key in keys]
    assert len(set(hashed)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in hashed)
    assert hashed_key(np.int64(3), np.int32(4)) == hashed_key(3, 4)


@pytest.mark.parametrize("key", [1.0, None, b"x", torch.tensor(1.5)])
def test_other_keys_are_refused(key):
    with pytest.raises(TypeError):
        hashed_key(0, key)


def test_orders_are_permutations_that_differ():
    orders = [order(seed, epoch, 100, stream=stream) for seed, epoch, stream in itertools.product(range(3), repeat=3)]
    assert all(sorted(each.tolist()) == list(range(100)) for each in orders)
    assert len({tuple(each.tolist()) for each in orders}) == 27


def test_orders_are_uniform():
    """All 24 orders of four samples, and every sample at every place of a long one, about equally often."""
    many = permutations([hashed_key(seed) for seed in range(24_000)], 4)
    _, counts = many.unique(dim=0, return_counts=True)
    assert len(counts) == 24
    # chi-square of 23 degrees of freedom: mean 23, standard deviation 6.8; six of these above the mean
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 23 + 6 * 6.8
    mean_place = permutations([hashed_key(seed) for seed in range(2_000)], 200).argsort(1).double().mean(0)
    assert float((mean_place - 99.5).abs().max()) < 5 * 57.7 / 2_000**0.5  # 57.7 is the deviation of one place


def test_integers_are_uniform():
    counts = torch.bincount(random_integers([hashed_key(5)], 90_000, 9)[0], minlength=9)
    assert len(counts) == 9
    assert float(((counts - 10_000) ** 2 / 10_000).sum()) < 8 + 6 * 4  # chi-square of 8 degrees of freedom


def test_the_global_generator_is_not_used():
    before = torch.random.get_rng_state()
    permutation(0, count=3)
    assert torch.equal(before, torch.random.get_rng_state())


PROGRAM = """
import hashlib, torch
from torchace.lab.data import Batches, CropFlip, Split, hashed_key, permutation
digest = hashlib.sha256()
digest.update(str(hashed_key(7, "purpose", 3)).encode())
digest.update(permutation(7, "order", 3, 0, count=1000).numpy().tobytes())
split = Split((torch.arange(50 * 3 * 64) % 251).to(torch.uint8).view(50, 3, 8, 8), torch.arange(50) % 10)
batches = Batches(split, 8, seed=3, normalize=((100.0,), (50.0,)), augment=CropFlip(2))
for tensor in (*batches.batch(4, 2), *batches.batch_many([0, 9], 1, 5, streams=[2, 0])):
    digest.update(tensor.numpy().tobytes())
print(digest.hexdigest())
"""


def test_the_same_in_every_process():
    def run(**environment: str) -> str:
        options = {**os.environ, **environment}
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], env=options, capture_output=True, text=True, check=True
        ).stdout.strip()

    digests = {run(PYTHONHASHSEED="1", OMP_NUM_THREADS="1"), run(PYTHONHASHSEED="2", OMP_NUM_THREADS="2")}
    assert len(digests) == 1


def test_fixed_values():
    """Values written down once: a change of these changes every result."""
    assert hashed_key(0) == HASHED_0
    assert order(0, 0, 10).tolist() == ORDER_0
    assert hashlib.sha256(order(1, 2, 60_000, stream=3).numpy().tobytes()).hexdigest() == ORDER_1


HASHED_0 = -1515659476153859754
ORDER_0 = [0, 2, 1, 9, 3, 6, 5, 4, 8, 7]
ORDER_1 = "03220dcbbdca7b59298e83510b90bf33f1d134c1ff8f744a72a06c2350811d82"
