"""The training step as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchace.lab.training.step import StepResult, TrainStep

EAGER_STEPS = 3  # real steps before the capture: they warm up cuDNN, cuBLAS and the optimizer's state

Step = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor], StepResult]


def graph_on_gpu(step: TrainStep) -> Step:
    """Return the step as a CUDA graph if it runs on a single GPU, else the step itself."""
    on_gpu = step.parameters[0].device.type == "cuda"
    return GraphedStep(step) if on_gpu and step.network.ranks.size == 1 else step


class GraphedStep:
    """A step that is captured after a few calls and replayed from then on."""

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor | None] = []
        self._result: StepResult | None = None

    def __call__(self, *inputs: Tensor | None) -> StepResult:
        self._calls += 1
        if self._calls <= EAGER_STEPS:  # on a side stream, as a capture requires
            device = self.step.parameters[0].device
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                result = self.step(*inputs)  # type: ignore[arg-type]
            torch.cuda.current_stream(device).wait_stream(stream)
            return result
        if self._graph is None:
            self._inputs = [None if value is None else value.clone() for value in inputs]
            self._graph = torch.cuda.CUDAGraph()
            self.step.optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(self._graph):
                self._result = self.step(*self._inputs)  # type: ignore[arg-type]
        for held, given in zip(self._inputs, inputs, strict=True):
            if held is not None and given is not None:
                held.copy_(given)
        self._graph.replay()
        assert self._result is not None
        return self._result
