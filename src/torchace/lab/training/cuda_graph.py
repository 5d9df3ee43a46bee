"""Training step as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchace.lab.data.inputs import Inputs, input_tensors, map_inputs
from torchace.lab.training.step import StepResult, TrainStep

EAGER_STEPS = 3  # warm up cuDNN, cuBLAS and the optimizer's state before the capture

Step = Callable[[Inputs, Tensor, Tensor | None, Tensor, Tensor], StepResult]


def graph_on_gpu(step: TrainStep) -> Step:
    """Step as a CUDA graph on a single GPU with a built-in optimizer, else the step itself."""
    on_gpu = step.parameters[0].device.type == "cuda"
    is_builtin = isinstance(step.config.optimizer, str)
    return GraphedStep(step) if on_gpu and is_builtin and step.network.ranks.size == 1 else step


class GraphedStep:
    """Step that is captured after `EAGER_STEPS` calls and then replayed; not captured if the network cannot be."""

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._fails = False  # whether the capture failed
        self._inputs: Inputs = ()
        self._result: StepResult | None = None

    def __call__(self, *inputs: Inputs) -> StepResult:
        """Run, capture or replay the step; results are overwritten by the next call."""
        self._calls += 1
        if self._calls <= EAGER_STEPS:  # on a side stream, required before a capture
            device = self.step.parameters[0].device
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                result = self.step(*inputs)
            torch.cuda.current_stream(device).wait_stream(stream)
            return result
        if self._graph is None and not self._fails:
            self._capture(inputs)
        if self._graph is None:
            return self.step(*inputs)
        for buffer, value in zip(input_tensors(self._inputs), input_tensors(inputs), strict=True):
            if buffer is not None:
                buffer.copy_(value)
        self._graph.replay()
        assert self._result is not None
        return self._result

    def _capture(self, inputs: Inputs) -> None:
        """Capture the step; a network that reads values back from the GPU cannot be captured."""
        self._inputs = map_inputs(lambda value: None if value is None else value.clone(), inputs)
        self.step.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._result = self.step(*self._inputs)
        except RuntimeError:
            self._fails = True
            torch.cuda.synchronize()
        else:
            self._graph = graph
