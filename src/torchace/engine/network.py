"""The runs that are trained together, as one network: inputs `(R, B, ...)`, logits `(R, K, B, C)`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchace.nn import StackedEnsemble
from torchace.nn.base import EnsembleModule
from torchace.nn.chain import Chain


class Network(nn.Module):
    """R runs of K members each. Runs share nothing: whatever happens to one leaves the others as they are."""

    def __init__(self, num_runs: int, num_members: int) -> None:
        super().__init__()
        self.num_runs, self.num_members = num_runs, num_members

    def forward(self, x: Tensor, *, own: bool = False) -> Tensor:
        """Logits `(R, K, B, C)`.

        Args:
            x: A batch a run, `(R, B, ...)`; with `own`, a batch a member, `(R, K, B, ...)`.
            own: Whether every member has a batch of its own.
        """
        raise TypeError(f"{type(self).__name__} does not say how it computes logits.")

    def predict(self, x: Tensor) -> Tensor:
        """Logits `(R, K, B, C)` of one input `(B, ...)` for all runs."""
        raise TypeError(f"{type(self).__name__} does not say how it predicts.")

    def ensemble(self, run: int) -> EnsembleModule:
        """One run's ensemble, by itself."""
        raise TypeError(f"{type(self).__name__} does not give its ensembles.")


class Cohort(Network):
    """Runs whose members are separate models of one architecture: all R·K of them are one stack."""

    def __init__(self, members: Sequence[Sequence[nn.Module]]) -> None:
        super().__init__(len(members), len(members[0]))
        self.stack = StackedEnsemble(member for run in members for member in run)
        self._chain = Chain.of(self.stack.stacked)  # found once: the stack itself looks again at every call

    def forward(self, x: Tensor, *, own: bool = False) -> Tensor:
        if own:
            x = x.flatten(0, 1)
        if self._chain is not None and self._chain.takes(x, own=True):
            logits = self._chain(x, own=True)
        else:
            logits = self.stack(x, batches="separate" if own else "grouped")
        return cast(Tensor, logits.unflatten(0, (self.num_runs, self.num_members)))

    def predict(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.stack(x).unflatten(0, (self.num_runs, self.num_members)))

    def ensemble(self, run: int) -> EnsembleModule:
        first = run * self.num_members
        mine: dict[int, Any] = {}
        for p in self.stack.parameters():
            part = p.detach()[first : first + self.num_members].clone()
            mine[id(p)] = nn.Parameter(part, requires_grad=p.requires_grad)
        for b in self.stack.buffers():
            mine[id(b)] = b[first : first + self.num_members].clone()
        ensemble = copy.deepcopy(self.stack, mine)  # deepcopy takes what is in its memo as the copy
        ensemble.num_members = self.num_members
        return ensemble


class SideBySide(Network):
    """Runs that are computed each by itself; on a GPU in streams of their own.

    Captured in a CUDA graph, the streams become parallel branches: a network too small to fill the GPU, of which every
    step is bound by launch latency, shares it with the others. The backward runs on the streams of the forward.
    """

    def __init__(self, ensembles: Sequence[EnsembleModule]) -> None:
        super().__init__(len(ensembles), ensembles[0].num_members)
        self.ensembles = nn.ModuleList(ensembles)
        self._streams: list[Any] = []

    def forward(self, x: Tensor, *, own: bool = False) -> Tensor:
        batches = "separate" if own else "shared"
        return self._each([lambda e=e, i=i: e(i, batches=batches) for e, i in zip(self.ensembles, x, strict=True)], x)

    def predict(self, x: Tensor) -> Tensor:
        return self._each([lambda e=e: e(x) for e in self.ensembles], x)

    def _each(self, calls: list[Any], x: Tensor) -> Tensor:
        if x.device.type != "cuda" or len(calls) == 1:
            return torch.stack([call() for call in calls])
        if not self._streams:
            self._streams = [torch.cuda.Stream(x.device) for _ in calls]
        current = torch.cuda.current_stream(x.device)
        outputs = []
        for call, stream in zip(calls, self._streams, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                outputs.append(call())
        for stream, output in zip(self._streams, outputs, strict=True):
            current.wait_stream(stream)
            output.record_stream(current)
        return torch.stack(outputs)

    def ensemble(self, run: int) -> EnsembleModule:
        return cast(EnsembleModule, self.ensembles[run])
