"""Training step: batch → logits → loss → gradients → new weights; eager, or as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from torchace.lab.data.splits import Inputs, input_tensors, map_inputs
from torchace.lab.training.config import TrainConfig
from torchace.lab.training.run_group import RunGroup, all_finite, first_nonfinite
from torchace.lab.training.tasks import compute_objective, ensemble_predictions, member_predictions, partial_mixture


class StepResult(NamedTuple):
    """Losses and scores of this rank; ranks add up to the whole step."""

    losses: Tensor  # (R, K): training loss of each member
    score: Tensor  # (R,): of the ensemble if members share a batch, else mean over members
    nonfinite: Tensor | None  # (R,): see `first_nonfinite`; None: all finite


class TrainStep:
    """One step of every run, on this rank's members and samples, without transfers from the device."""

    def __init__(
        self,
        network: RunGroup,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        label_smoothing: Tensor | None = None,  # (R,); None: the configuration's
    ) -> None:
        self.network, self.optimizer, self.config = network, optimizer, config
        self.label_smoothing = label_smoothing
        self.forward = network.ranks.data_parallel(network)
        self.parameters = [p for p in network.parameters() if p.requires_grad]

    def __call__(
        self,
        x: Inputs,  # (R, B, ...), or (R, K, B, ...) with own batches
        y: Tensor,  # (R, B) or (R, K, B); (..., M) for numbers and labels
        weight: Tensor | None,  # first axes of y, or (R, K, B); relative to the training set's mean
        diversity: Tensor,  # (R,)
        active: Tensor,  # (R,): False for stopped runs
    ) -> StepResult:
        """Update the weights on one batch."""
        network, ranks, config = self.network, self.network.ranks, self.config
        own = config.batches != "shared"
        axis = 2 if own else 1
        batch_size = y.shape[axis]
        x, y, weight = ranks.shard_samples(axis, x, y, weight)
        others = self._others_mixture(x, y.shape[1:3]) if config.batches == "exchanged" else None
        if own and ranks.members > 1:
            x = map_inputs(lambda t: t[:, network.local_members], x)
            y, weight, others = (t if t is None else t[:, network.local_members] for t in (y, weight, others))  # type: ignore[assignment]

        with autocast(y.device, config):
            logits = self.forward(x, own=own)  # (R, K, B, C)
        mixture = self._mixture(logits.detach(), others, weight)
        losses, score, gradient = compute_objective(
            logits.detach(),
            y,
            weight,
            diversity,
            active,
            mixture,
            config,
            num_members=network.total_members,
            batch_size=batch_size,
            label_smoothing=self.label_smoothing,
        )
        for parameter in self.parameters:
            parameter.grad = None
        # DistributedDataParallel divides by the number of ranks; the mean over samples is a sum of shares
        logits.backward(gradient if ranks.data == 1 else gradient * ranks.data)
        nonfinite = None
        if not all_finite([logits.detach(), losses, *(p.grad for p in self.parameters)]):
            nonfinite = first_nonfinite(network, logits.detach(), losses)
        self.optimizer.step()
        if not own and ranks.members > 1:
            score = score / ranks.members  # each rank has the whole ensemble's score
        return StepResult(losses, score, nonfinite)

    def _mixture(self, logits: Tensor, others: Tensor | None, weight: Tensor | None) -> Tensor | None:
        """Ensemble's prediction, if the loss cannot compute it from the logits."""
        network, ranks = self.network, self.network.ranks
        if weight is not None and weight.ndim == 3 and self.config.batches == "shared":
            return partial_mixture(logits, weight > 0, self.config)  # of the members that train on the sample
        if others is not None:
            # own share in training mode (dropout, batch statistics), as in the gradient
            return others.add(member_predictions(logits, self.config) / network.total_members).flatten(1, 2)
        if ranks.members == 1 or self.config.batches != "shared":
            return None
        share = network.num_members / network.total_members
        return ranks.sum_over_members(share * ensemble_predictions(logits, self.config))  # (R, B, C)

    @torch.no_grad()
    def _others_mixture(self, x: Inputs, batches: torch.Size) -> Tensor:
        """Other members' share of the prediction on each member's batch, `(R, K, B, C)`: Σ_{j≠k} q^j / K."""
        network = self.network
        network.eval()  # keep others' samples out of batch statistics
        with autocast(self.parameters[0].device, self.config):
            logits = network(map_inputs(lambda t: t.flatten(1, 2), x))
        network.train()
        q = member_predictions(logits, self.config).unflatten(2, batches)  # (R, K of this rank, K, B, C)
        q[:, :, network.local_members].diagonal(dim1=1, dim2=2).zero_()  # excludes the member itself
        return network.ranks.sum_over_members(q.sum(1) / network.total_members)


def autocast(device: torch.device, config: TrainConfig) -> AbstractContextManager[object]:
    """Precision context of the network's computation."""
    if config.precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


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
