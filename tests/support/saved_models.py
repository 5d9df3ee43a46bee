"""One ensemble of every kind that can be saved, and what tests of model directories share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchace.models import cifar_resnet, mlp
from torchace.nn import SMOC, Ensemble
from torchace.nn.base import EnsembleModule
from torchace.nn.branching import branch
from torchace.nn.conversion import stack_classifiers
from torchace.nn.stacked import StackedEnsemble
from torchace.saving import ModelFileError, save_model


def small_resnet(num_classes: int | None = 5) -> nn.Module:
    return cifar_resnet(8, num_classes, width=4)


def make_branched(model: nn.Module, at: str, num_members: int) -> Ensemble:
    ensemble = branch(model, num_members, at=at)
    assert ensemble.branched == {"architecture": model.architecture, "at": at}
    with torch.no_grad():
        for k, member in enumerate(ensemble):
            for parameter in member.parameters():
                parameter.add_(k)
    return ensemble


VECTORS, IMAGES = (3, 6), (3, 3, 16, 16)
KINDS: dict[str, tuple[str, Callable[[], EnsembleModule], tuple[int, ...]]] = {
    "different members": ("ensemble", lambda: Ensemble([mlp(6, 4, 5), mlp(6, (8, 3), 5), mlp(6, (), 5)]), VECTORS),
    "members on a trunk": ("ensemble", lambda: Ensemble([mlp(8, (), 5), mlp(8, 4, 5)], mlp(6, 8, None)), VECTORS),
    "mixed members": ("ensemble", lambda: Ensemble([mlp(768, 4, 5), small_resnet()]), IMAGES),
    "resnet trunk": ("ensemble", lambda: Ensemble([mlp(16, 4, 5), mlp(16, 3, 5)], small_resnet(None)), IMAGES),
    "dropout": ("ensemble", lambda: Ensemble([mlp(6, 4, 5, dropout=0.5)]), VECTORS),
    "sigmoid": ("ensemble", lambda: Ensemble([mlp(6, 4, 5)], link="sigmoid"), VECTORS),
    "regression": ("stacked", lambda: StackedEnsemble([mlp(6, 4, 1), mlp(6, 4, 1)], link="identity"), VECTORS),
    "stacked": ("stacked", lambda: StackedEnsemble([mlp(6, (4, 3), 5) for _ in range(4)]), VECTORS),
    "stacked resnets": ("stacked", lambda: StackedEnsemble([small_resnet() for _ in range(2)]), IMAGES),
    "smoc": ("smoc", lambda: SMOC(mlp(6, 8, None), 8, 5, num_members=10), VECTORS),
    "smoc on a resnet": ("smoc", lambda: SMOC(small_resnet(None), 16, 5, num_members=3), IMAGES),
    "low-rank smoc": ("smoc", lambda: SMOC(mlp(6, 8, None), 8, 5, num_members=3, rank=2), VECTORS),
    "branched": ("branched", lambda: make_branched(mlp(6, (8, 7), 5), "linear2", 3), VECTORS),
    "branched at the input": ("branched", lambda: make_branched(mlp(6, (8, 7), 5), "flatten", 3), VECTORS),
    "branched resnet": ("branched", lambda: make_branched(small_resnet(), "stage3", 3), IMAGES),
    "branched inside a stage": ("branched", lambda: make_branched(cifar_resnet(14, 5, width=4), "stage2.1", 2), IMAGES),
    "converted": ("converted", lambda: stack_classifiers(mlp(6, 8, 5), 3), VECTORS),
    "converted resnet": ("converted", lambda: stack_classifiers(small_resnet(), 3, head="fc"), IMAGES),
    "converted, low rank": ("converted", lambda: stack_classifiers(small_resnet(), 3, rank=2), IMAGES),
    "converted, another link": ("converted", lambda: stack_classifiers(mlp(6, 8, 5), 3, link="sigmoid"), VECTORS),
}


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes()


def state(module: nn.Module) -> dict[str, Any]:
    return {name: bits(tensor) for name, tensor in module.state_dict().items()}


def train_model(ensemble: EnsembleModule, shape: tuple[int, ...]) -> EnsembleModule:
    """After two steps of plain gradient descent, so that weights and batch-norm statistics are those of a training."""
    ensemble.train()
    for seed in range(2):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        ensemble.zero_grad()
        ensemble(x.to(next(ensemble.parameters()).dtype)).square().mean().backward()
        with torch.no_grad():
            for parameter in ensemble.parameters():
                parameter -= 0.1 * parameter.grad
    return ensemble


def one_sentence(error: BaseException) -> str:
    assert type(error) is ModelFileError
    text = str(error)
    assert "\n" not in text
    assert text.endswith(".")
    assert text.count(". ") == 0
    assert "; " in text  # what is wrong; what to do
    return text


def save_example(path: Path) -> EnsembleModule:
    torch.manual_seed(0)
    ensemble = Ensemble([mlp(4, 3, 2), mlp(4, (5, 3), 2)])
    ensemble.set_member_weights([0.25, 0.75])
    save_model(path, ensemble, diversity=0.5, class_names=["a", "b"], extra={"epochs": 3})
    return ensemble
