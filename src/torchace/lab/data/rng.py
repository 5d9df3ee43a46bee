"""Random draws that are functions of their keys alone, on any device and in any process.

Runs resume bit for bit without a stored random state, and all λ of one seed see the same batches. Keys are hashed by
SHA-256; draws are SplitMix64 (Steele, Lea, Flood, 2014) in integer arithmetic, independent of torch's version.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

Key = int | str

# SplitMix64's constants as signed numbers: int64 arithmetic is modulo 2^64
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def hashed_key(seed: int, *keys: Key) -> int:
    """Hash a seed and keys (epoch, step, purpose) to a signed 64-bit number, the start of their draws."""
    digest = hashlib.sha256()
    for key in (seed, *keys):
        if isinstance(key, str):
            word = key.encode()
            digest.update(b"s%d:" % len(word) + word)  # length first: ("ab", "c") is not ("a", "bc")
        else:
            digest.update(b"i%d:" % operator.index(key))
    return int.from_bytes(digest.digest()[:8], "little", signed=True)


def random_bits(keys: Sequence[int], count: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Draw `count` distinct 64-bit numbers for each hashed key, `(len(keys), count)` of int64."""
    start = torch.tensor(keys, dtype=torch.int64, device=device)[:, None]
    z = start + torch.arange(1, count + 1, dtype=torch.int64, device=device) * _GAMMA
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def random_integers(keys: Sequence[int], count: int, high: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Draw `count` integers in [0, high) for each hashed key, `(len(keys), count)`; uniform to within high / 2^32."""
    return _shift_right(random_bits(keys, count, device=device), 32) * high >> 32


def permutations(keys: Sequence[int], count: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Random permutation of 0, …, count - 1 for each hashed key, `(len(keys), count)`."""
    # no ties: SplitMix64 is one-to-one in its counter
    return random_bits(keys, count, device=device).argsort(dim=1)


def permutation(seed: int, *keys: Key, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Random permutation of 0, …, count - 1, a function of the keys alone."""
    return permutations([hashed_key(seed, *keys)], count, device=device)[0]


def seed_generators(key: int, device: torch.device | str = "cpu") -> None:
    """Seed the global generators of torch, on the CPU and on a device, of NumPy and of Python with a hashed key."""
    torch.default_generator.manual_seed(key)
    if torch.device(device).type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(key)
    np.random.seed(key % 2**32)  # noqa: NPY002, the generator that data sets use
    random.seed(key)


def generator_states(device: torch.device | str = "cpu") -> tuple[bytes, ...]:
    """Return the states of the global generators, to compare them."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    on_gpu = torch.device(device).type == "cuda"
    return (
        torch.cuda.get_rng_state(device).numpy().tobytes() if on_gpu else b"",
        torch.default_generator.get_state().numpy().tobytes(),
        repr((numpy_state[1].tobytes(), *numpy_state[2:])).encode(),
        repr(random.getstate()).encode(),
    )


@contextmanager
def preserve_generators(device: torch.device | str = "cpu") -> Iterator[None]:
    """Restore the states of the global generators afterwards."""
    on_gpu = torch.device(device).type == "cuda"
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[device] if on_gpu else []):
            yield
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


@contextmanager
def use_seed(key: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the global generators with a hashed key inside the block; restore their states afterwards."""
    with preserve_generators(device):
        seed_generators(key, device)
        yield


def _shift_right(z: Tensor, by: int) -> Tensor:
    """Shift the bits of z as an unsigned number."""
    return (z >> by) & ((1 << (64 - by)) - 1)
