"""Random draws that are functions of their keys alone.

Nothing here has a state: the draw for (seed, epoch, step, purpose) can be made at any time, in any process, on any
device, and is always the same. So a run resumes bit for bit without a stored random state, and every λ of one seed sees
the same batches.

Keys are hashed by SHA-256 to 64 bits; the draws of one key are SplitMix64 (Steele, Lea, Flood, 2014) at the counters
0, 1, 2, … from there, in integer arithmetic that depends neither on torch's version nor on device or threads.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

Key = int | str

# SplitMix64's constants, as signed numbers: torch computes modulo 2^64 in int64.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def hashed_key(seed: int, *keys: Key) -> int:
    """Hash a seed and keys to 64 bits, as a signed number, from which all draws of these keys start.

    Args:
        seed: The run's seed.
        keys: Whole numbers and words that distinguish draws: epoch, step, purpose.

    Example:
        >>> hashed_key(0, "order", 3) == hashed_key(0, "order", 3)
        True
        >>> hashed_key(0, "order", 3) == hashed_key(0, "order", 4)
        False
    """
    digest = hashlib.sha256()
    for key in (seed, *keys):
        if isinstance(key, str):
            word = key.encode()
            digest.update(b"s%d:" % len(word) + word)  # length first: ("ab", "c") is not ("a", "bc")
        elif isinstance(key, bool):
            raise TypeError(f"Expected keys that are whole numbers or words, but got {key}. Use int({key}).")
        else:
            digest.update(b"i%d:" % operator.index(key))
    return int.from_bytes(digest.digest()[:8], "little", signed=True)


def random_bits(keys: Sequence[int], count: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Draw `count` times 64 random bits for each hashed key, `(len(keys), count)` of int64; no two in a row are equal.

    Example:
        >>> random_bits([0], 2)
        tensor([[-2152535657050944081,  7960286522194355700]])
    """
    start = torch.tensor(keys, dtype=torch.int64, device=device)[:, None]
    z = start + torch.arange(1, count + 1, dtype=torch.int64, device=device) * _GAMMA
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def random_integers(keys: Sequence[int], count: int, high: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Draw `count` integers in [0, high) for each hashed key, `(len(keys), count)`; uniform to within high / 2^32."""
    return _shift_right(random_bits(keys, count, device=device), 32) * high >> 32


def permutations(keys: Sequence[int], count: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Random permutation of 0, …, count - 1 for each hashed key, `(len(keys), count)`.

    The bits of one key are all different (SplitMix64 is one-to-one in its counter): sorting them has one result.
    """
    return random_bits(keys, count, device=device).argsort(dim=1)


def permutation(seed: int, *keys: Key, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Random permutation of 0, …, count - 1, a function of the keys alone.

    Example:
        >>> permutation(0, "example", count=5)
        tensor([4, 0, 1, 3, 2])
    """
    return permutations([hashed_key(seed, *keys)], count, device=device)[0]


def _shift_right(z: Tensor, by: int) -> Tensor:
    """Shift the bits of z as an unsigned number."""
    return (z >> by) & ((1 << (64 - by)) - 1)
