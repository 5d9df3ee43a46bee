"""How many samples are predicted at once: a chunk is a number of bytes, whatever members and classes there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

BYTES = 1 << 25  # of the widest layer of all members on a chunk; logits take a few times that while they are scored
ROWS = 8192  # in a chunk, at most


def chunk_rows(network: nn.Module, num_members: int, *, itemsize: int = 8, most: int = ROWS) -> int:
    """The number of samples in a chunk.

    Args:
        network: All members. The last two axes of a weight are what a linear layer gives and takes: the widest layer
            may be the inputs, the classes or a hidden one.
        num_members: How many networks are computed at once, of all runs.
        itemsize: Bytes of a number.
        most: Samples in a chunk, at most.

    Example:
        >>> head = nn.Linear(64, 2000)
        >>> chunk_rows(head, num_members=10), chunk_rows(nn.Linear(64, 3), num_members=10)
        (209, 6553)
    """
    width = max((max(p.shape[-2:]) for p in network.parameters() if p.ndim > 1), default=1)
    return max(1, min(most, BYTES // (itemsize * num_members * width)))


def collect_chunks(chunks: Iterable[Tensor], count: int, *functions: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Apply functions to chunks of logits `(K, n, C)` and join each one's results for all `count` samples.

    The result is written in place: collected in a list it would be in memory twice, and keep the chunks' memory apart.

    Example:
        >>> logits = torch.arange(6.0).view(1, 6, 1)
        >>> collect_chunks(logits.split(4, 1), 6, lambda z: z.mean((0, 2)))
        [tensor([0., 1., 2., 3., 4., 5.])]
    """
    found: list[Tensor] = []
    done = 0
    for logits in chunks:
        rows = slice(done, done + logits.shape[1])
        for place, function in enumerate(functions):
            values = function(logits)  # (n, ...)
            if done == 0:
                found.append(values.new_empty(count, *values.shape[1:]))
            found[place][rows] = values
        done = rows.stop
    return found
