"""Memory: whether a network fits, and how many samples are predicted at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from torchace._files import available_memory

CHUNK_BYTES = 1 << 25  # of the widest layer of all members on a chunk; logits take a few times that while scored
CHUNK_ROWS = 8192  # at most


def check_memory(num_parameters: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """Refuse a network, before it is built, whose weights and gradients take more than the available memory."""
    needed, device = 2 * num_parameters * dtype.itemsize, torch.device(device)
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if available is not None and needed > available:
        raise ValueError(
            f"Expected networks that fit into the {available / 2**30:.3g} GiB of memory that are available, but "
            f"{num_parameters:,} parameters take {needed / 2**30:.3g} GiB with their gradients. Use fewer members, "
            "smaller layers or fewer runs at a time."
        )


def count_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def chunk_rows(network: nn.Module, num_members: int, *, itemsize: int = 8, most: int = CHUNK_ROWS) -> int:
    """Number of samples in a chunk of bounded memory.

    Args:
        network: All members. The last two axes of a weight are the sizes of a linear layer: the widest layer may be
            the inputs, the classes or a hidden one.
        num_members: Number of networks that are computed at once, of all runs.
        itemsize: Bytes of a number.
        most: Largest number of samples.

    Example:
        >>> head = nn.Linear(64, 2000)
        >>> chunk_rows(head, num_members=10), chunk_rows(nn.Linear(64, 3), num_members=10)
        (209, 6553)
    """
    width = max((max(p.shape[-2:]) for p in network.parameters() if p.ndim > 1), default=1)
    return max(1, min(most, CHUNK_BYTES // (itemsize * num_members * width)))


def collect_chunks(chunks: Iterable[Tensor], count: int, *functions: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Apply functions to chunks of logits `(K, n, C)` and join each function's results for all `count` samples.

    Results are written in place: joined from a list they would be in memory twice.

    Example:
        >>> logits = torch.arange(6.0).view(1, 6, 1)
        >>> collect_chunks(logits.split(4, 1), 6, lambda z: z.mean((0, 2)))
        [tensor([0., 1., 2., 3., 4., 5.])]
    """
    results: list[Tensor] = []
    done = 0
    for logits in chunks:
        rows = slice(done, done + logits.shape[1])
        for place, function in enumerate(functions):
            values = function(logits)  # (n, ...)
            if done == 0:
                results.append(values.new_empty(count, *values.shape[1:]))
            results[place][rows] = values
        done = rows.stop
    return results
