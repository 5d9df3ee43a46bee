"""Memory limits of networks and prediction chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from torchace._files import available_memory

CHUNK_BYTES = 1 << 25  # of the widest layer of all members on a chunk
CHUNK_ROWS = 8192


def check_memory(num_parameters: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """Raise an error if weights and gradients of a network exceed the available memory."""
    needed, device = 2 * num_parameters * dtype.itemsize, torch.device(device)
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if available is not None and needed > available:
        raise ValueError(
            f"Expected networks that fit into {available / 2**30:.3g} GiB of available memory, but "
            f"{num_parameters:,} parameters take {needed / 2**30:.3g} GiB with their gradients. Use fewer members, "
            "smaller layers or fewer runs at once."
        )


def count_parameters(network: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def chunk_rows(network: nn.Module, num_members: int, *, itemsize: int = 8, max_rows: int = CHUNK_ROWS) -> int:
    """Number of samples in a chunk of bounded memory, for `num_members` networks computed at once.

    The widest layer counts: the last two axes of a weight are the sizes of a linear layer.
    """
    width = max((max(p.shape[-2:]) for p in network.parameters() if p.ndim > 1), default=1)
    return max(1, min(max_rows, CHUNK_BYTES // (itemsize * num_members * width)))


def collect_chunks(chunks: Iterable[Tensor], count: int, *functions: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Apply functions to chunks of logits `(K, n, C)`; results `(count, ...)` are written in place to save memory."""
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
