"""Whether a network fits into memory, asked before it is built."""

from __future__ import annotations

import torch
from torch import nn

from torchace._files import available_memory


def check_memory(parameters: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """Refuse a network whose weights and gradients alone take more memory than there is.

    Args:
        parameters: How many it has.
        dtype: Their type.
        device: Where it is trained.
    """
    needed, device = 2 * parameters * dtype.itemsize, torch.device(device)
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if available is not None and needed > available:
        raise ValueError(
            f"Expected networks that fit into the {available / 2**30:.3g} GiB of memory that are available, but "
            f"{parameters:,} parameters take {needed / 2**30:.3g} GiB with their gradients. Use fewer members, smaller "
            "layers or fewer runs at a time."
        )


def count_parameters(network: nn.Module) -> int:
    """The number of a network's parameters."""
    return sum(parameter.numel() for parameter in network.parameters())
