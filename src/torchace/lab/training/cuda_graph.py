"""The training step as one CUDA graph; on other devices the step itself."""

from __future__ import annotations

import torch
from torch import Tensor

from torchace.lab.training.config import TrainConfig
from torchace.lab.training.run_group import RunGroup
from torchace.lab.training.step import StepResult, train_step

EAGER_STEPS = 3  # real steps before the capture: they warm up cuDNN, cuBLAS and the optimizer's state


class Stepper:
    """Calls `train_step`; on a GPU captures it after a few steps and replays it from then on."""

    def __init__(self, network: RunGroup, optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
        self.network, self.optimizer, self.config = network, optimizer, config
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor | None, ...] = ()
        self._result: StepResult | None = None

    def __call__(self, x: Tensor, y: Tensor, weight: Tensor | None, diversity: Tensor, active: Tensor) -> StepResult:
        inputs = (x, y, weight, diversity, active)
        if x.device.type != "cuda":
            return train_step(self.network, self.optimizer, *inputs, self.config)
        self._calls += 1
        if self._calls <= EAGER_STEPS:
            # on a side stream, as a capture asks for
            stream = torch.cuda.Stream(x.device)
            stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(stream):
                result = train_step(self.network, self.optimizer, *inputs, self.config)
            torch.cuda.current_stream(x.device).wait_stream(stream)
            return result
        if self._graph is None:
            self._capture(inputs)
        for held, given in zip(self._inputs, inputs, strict=True):
            if held is not None and given is not None:
                held.copy_(given)
        assert self._graph is not None
        assert self._result is not None
        self._graph.replay()
        return self._result

    def _capture(self, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]) -> None:
        x, y, weight, diversity, active = inputs
        held = (x.clone(), y.clone(), None if weight is None else weight.clone(), diversity.clone(), active.clone())
        self._inputs = held
        self._graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self._graph):
            self._result = train_step(self.network, self.optimizer, *held, self.config)
