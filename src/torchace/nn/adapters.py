"""Members that share all weights of a network and differ by a small adapter at each layer."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from torchace import _checks
from torchace._files import StrPath, error_reason
from torchace._model_files import ModelFileError
from torchace.nn.adapter_files import FACTORS, fingerprint, read_adapter, save_members
from torchace.nn.adapter_layers import (
    ADAPTER,
    Adapter,
    LowRankAdapter,
    MultiplicativeAdapter,
    Target,
    attach_adapter,
    choose_targets,
    copy_for_members,
    find_adapted_head,
    layer_name,
    layer_shape,
    mark_shared,
    merge_member,
    set_own,
)
from torchace.nn.base import EnsembleModule
from torchace.nn.conversion import find_class_axis, find_logits, refuse_labels
from torchace.nn.stacked import StackedEnsemble
from torchace.nn.stacked_state import shared_names, take_members
from torchace.nn.stacking import Decision

ADAPTERS = ("multiplicative", "low_rank")
RANK, ALPHA = 8, 8  # peft's defaults


def adapt(
    model: nn.Module,
    num_members: int,
    *,
    adapter: str = "multiplicative",
    rank: int = RANK,
    alpha: float | None = None,
    layers: str | Sequence[str] | None = None,
    freeze: bool = False,
    head: str | None = None,
    trained: bool | None = None,
    link: str = "softmax",
) -> AdaptedEnsemble:
    r"""Make K members that share all weights of a model and differ by a small adapter at each layer.

    A layer of member k computes, with shared W,

    $$y = ((x \circ r_k) W) \circ s_k + b_k \quad \text{("multiplicative": BatchEnsemble, TabM)}$$
    $$y = x \left(W + \tfrac{\alpha}{\text{rank}} B_k A_k\right) + b \quad \text{("low_rank": LoRA)}$$

    All members are computed in one pass. Shared weights receive the mean of their gradients. Each member has its own
    BatchNorm layers; other layers without an adapter are shared. The model is copied.

    A model that is not `trained` starts with random signs as $r_k$ of the first adapted layer, ones elsewhere (as
    `tabm`), and new heads; a trained one with factors from N(1, 0.1²) and copies of its head. For new classes, use
    `freeze=True, trained=False`. $A_k$ is drawn as in peft, $B_k$ is zero.

    Args:
        model: A network that returns logits `(N, C, ...)`, or an object or tuple with them.
        num_members: K.
        adapter: `"multiplicative"` or `"low_rank"`.
        rank: Rank of the low-rank adapters, at most the layer's smaller size.
        alpha: Scale of the low-rank adapters; 8 if None, as in peft.
        layers: Adapted layers: a list of names, one name, or a pattern such as `"*.attention.*"`; `"encoder"` is all
            layers inside it, `"query"` all named so. None: all linear and convolutional layers but the head.
            `"first"`: the inputs of the first layer alone, as TabM's mini variant.
        freeze: Train adapters and heads alone.
        head: Layer of which each member has its own, by default the last linear one; `"shared"`: no own head.
        trained: Whether the model with its head is trained; by default the value of `freeze`.
        link: `"softmax"`, `"sigmoid"` for binary and multi-label outputs, `"identity"` for regression.

    Returns:
        An ensemble of the model's inputs, except `labels`, that returns logits `(K, N, C, ...)`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = adapt(model, 5)
        >>> ensemble(torch.zeros(6, 4)).shape
        torch.Size([5, 6, 3])
        >>> ensemble.stacked[2].weight.shape, ensemble.stacked[2].adapter.r.shape, ensemble.stacked[4].weight.shape
        (torch.Size([8, 8]), torch.Size([5, 8]), torch.Size([5, 3, 8]))
    """
    _checks.check_module(model)
    if isinstance(model, EnsembleModule):
        raise TypeError(
            f"Expected `model` to be one network, but got the ensemble {type(model).__name__}. Adapt a member."
        )
    _checks.check_count(num_members, "num_members")
    sizes = _adapter_sizes(adapter, rank, alpha)
    trained = freeze if trained is None else trained
    host = copy.deepcopy(model)
    if freeze:
        host.requires_grad_(False)
    mark_shared(host)
    head_names, head_name = find_adapted_head(host, head)
    targets = choose_targets(host, layers, excluded=head_names if layers is None else head_names * (head != "shared"))
    for i, (name, target) in enumerate(targets.items()):
        if not sizes:
            start = "normal" if trained or freeze else "signs" if i == 0 else "ones"
            _add_multiplicative(target, num_members, start, inputs_only=layers == "first")
        elif layers is not None or target.shape.has_low_rank:
            _add_low_rank(name, target, num_members, **sizes)
    names = layers if layers is None or isinstance(layers, str) else list(layers)
    options: dict[str, Any] = {"adapter": adapter, "layers": names, "head": head, "freeze": freeze, **sizes}
    classes = layer_shape(host.get_submodule(head_name)) if head_name is not None else None
    if head != "shared" and head_name is not None:
        copy_for_members(host.get_submodule(head_name).requires_grad_(), num_members, redraw=not trained)
    for layer in filter(lambda module: isinstance(module, _NormBase), host.modules()):
        copy_for_members(layer, num_members)
    return AdaptedEnsemble(host, num_members, link, getattr(classes, "outputs", None), options)


def _adapter_sizes(adapter: str, rank: int, alpha: float | None) -> dict[str, Any]:
    """Return rank and alpha of low-rank adapters, empty for other adapters."""
    _checks.check_choice(adapter, "adapter", ADAPTERS)
    if adapter != "low_rank" and (alpha is not None or rank != RANK):
        warnings.warn("`rank` and `alpha` have no effect: they belong to adapter='low_rank'.", stacklevel=3)
    alpha = ALPHA if alpha is None else alpha
    _checks.check_fraction(alpha, "alpha", largest=1e9, kind="a number", interval="[0, 1e9]")
    return {"rank": rank, "alpha": alpha} if adapter == "low_rank" else {}


def _add_low_rank(name: str, target: Target, num_members: int, rank: int, alpha: float) -> None:
    _checks.check_count(rank, "rank")
    shape, weight = target.shape, target.layer.get_parameter(target.weight)
    if not shape.has_low_rank:
        raise ValueError(
            f"Expected linear layers and convolutions with groups=1 for low-rank adapters, but {name!r} is a grouped "
            "or transposed convolution. Leave it out of `layers`, or use adapter='multiplicative'."
        )
    largest = min(shape.outputs, shape.inputs * math.prod(shape.kernel))
    if rank > largest:
        raise ValueError(
            f"Expected `rank` of at most {largest}, the size of the layer {name!r}, but got {rank}. Use a smaller "
            "rank, or leave the layer out of `layers`."
        )
    kind = {"device": weight.device, "dtype": weight.dtype}
    attach_adapter(target, LowRankAdapter(shape, num_members, rank, alpha, **kind))


def _add_multiplicative(target: Target, num_members: int, start: str, *, inputs_only: bool) -> None:
    layer, weight = target.layer, target.layer.get_parameter(target.weight)
    bias = None if inputs_only else layer._parameters.get(target.bias)
    kind = {"device": weight.device, "dtype": weight.dtype}
    own_bias = bias if target.reader is None else None  # a module that reads the weight reads the bias too
    adapter = MultiplicativeAdapter(target.shape, num_members, own_bias, inputs_only=inputs_only, **kind)
    if start != "ones":
        adapter.draw(start)
    attach_adapter(target, adapter)
    if target.reader is not None and bias is not None and target.bias in shared_names(layer):
        set_own(layer, target.bias, bias.expand(num_members, *bias.shape).clone())
        layer.get_parameter(target.bias).requires_grad_()


class AdaptedEnsemble(StackedEnsemble):
    """The ensemble of `adapt`: one network whose adapters, heads and BatchNorm layers have a member axis, `(K, ...)`.

    Attributes:
        stacked: The network. Its shared parameters have the shapes they have in the model.
        options: The arguments of `adapt`.
        class_axis: The axis of the classes in a member's logits of more than two axes, 1 or -1. The first unambiguous
            forward sets it; set it yourself if both axes fit.
    """

    def __init__(
        self, stacked: nn.Module, num_members: int, link: str, num_classes: int | None, options: dict[str, Any]
    ) -> None:
        EnsembleModule.__init__(self, num_members, link)
        self.num_classes, self.options = num_classes, options
        self.class_axis: int | None = None
        self._set_stacked(stacked, stacked.training)

    def forward(self, *args: Any, batches: str = "shared", **kwargs: Any) -> Tensor:
        """Return the members' logits, `(K, N, C, ...)`; see `StackedEnsemble.forward`."""
        refuse_labels(kwargs)
        return super().forward(*args, batches=batches, **kwargs)

    def _decision(self, *args: Any, **kwargs: Any) -> Decision | None:
        """Return the decision as `StackedEnsemble` makes it, after attaching adapters where weights are used."""
        known = len(self._decisions)
        decision = super()._decision(*args, **kwargs)
        if decision is not None and len(self._decisions) > known and self._attach_to_readers(decision):
            self._decisions.clear()
            decision = super()._decision(*args, **kwargs)
        return decision

    def _attach_to_readers(self, decision: Decision) -> bool:
        """Attach adapters of layers that the forward reads without a call to the module around them."""
        called, moved = {node.layer for node in decision}, False
        for name, layer in self.stacked.named_modules():
            adapter = layer._modules.get(ADAPTER)
            if called and name not in called and isinstance(adapter, Adapter) and adapter.detach(layer):
                reader = name
                while reader and reader not in called:
                    reader = reader.rpartition(".")[0]
                adapter.attach_weight(self.stacked.get_submodule(reader), layer)
                moved = True
        return moved

    def select_output(self, output: Any) -> Tensor:
        """Return the logits: graphs cannot return the output objects of transformers."""
        return find_logits(output)

    def _logits(self, output: Any) -> Tensor:
        logits = self.select_output(output)
        if logits.ndim < 4 or self.num_classes is None:
            return logits
        axis = find_class_axis(logits.shape[1:], self.num_classes, self.class_axis)
        if axis is None:
            return logits
        self.class_axis = 1 if axis == 1 else -1
        return logits.movedim(axis + 1, 2)

    @property
    def head(self) -> str | None:
        """The name of the layer that computes the logits, own or shared; None if it is not known."""
        name = self.options["head"]
        return find_adapted_head(self.stacked, "shared")[1] if name in (None, "shared") else name

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that build an ensemble like this one from another network `stacked`."""
        return {"num_members": self.num_members, "link": self.link, "num_classes": self.num_classes} | {
            "options": self.options
        }

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The adapters by the names of their layers."""
        found = {}
        for name, module in self.stacked.named_modules():
            if isinstance(module, Adapter):
                found[layer_name(name)] = module
        return found

    def save_adapters(self, folder: StrPath) -> list[Path]:
        """Save each member as an adapter that peft loads: `PeftModel.from_pretrained(model, folder)`.

        The ensemble has low-rank adapters on a frozen model. Heads and BatchNorm layers are saved with the adapters
        (peft's `modules_to_save`). peft is not needed; `load_adapters` makes an ensemble of such folders.

        Args:
            folder: Parent of the folders `member_0`, `member_1`, ...

        Returns:
            The members' folders.
        """
        return save_members(self.stacked, self.adapters, self.num_members, folder)

    @torch.no_grad()
    def _set_members(self, values: Mapping[str, Tensor]) -> set[str]:
        """Set the members' factors and own tensors, `(K, ...)`, under peft's names; return the names of own tensors."""
        own = dict(values)
        for name, adapter in self.adapters.items():
            for kind, end in FACTORS.items():
                factor = getattr(adapter, kind)
                factor.copy_(own.pop(name + end).view_as(factor))
        for name, tensor in own.items():
            path, _, field = name.rpartition(".")
            layer = self.stacked.get_submodule(path)
            shape = getattr(layer, field).shape
            if tensor.shape[1:] != (shape if field in shared_names(layer) else shape[1:]):
                raise ValueError(f"{name!r} has shape {tuple(tensor.shape[1:])}")
            set_own(layer, field, tensor)
            if field in layer._parameters:
                layer.get_parameter(field).requires_grad_()
        return set(own)

    def merge(self, member: int) -> nn.Module:
        """Return a member as a plain model, with its adapters merged into the weights.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            >>> ensemble = adapt(model, 5)
            >>> plain = ensemble.merge(2)
            >>> list(plain.state_dict()) == list(model.state_dict())
            True
            >>> torch.allclose(plain(torch.ones(6, 4)), ensemble(torch.ones(6, 4))[2], atol=1e-6)
            True
        """
        _checks.check_count(member, "member", least=0)
        if member >= self.num_members:
            raise ValueError(f"Expected `member` below {self.num_members}, but got {member}.")
        return merge_member(self.stacked, member)

    def take(self, members: slice) -> AdaptedEnsemble:
        """Return a copy with some of the members."""
        taken = copy.deepcopy(self)
        taken.stacked = take_members(self.stacked, members)
        taken.num_members, taken.member_weights = len(range(self.num_members)[members]), None
        return taken

    def extra_repr(self) -> str:
        """Return the options."""
        return ", ".join([super().extra_repr(), *(f"{name}={value!r}" for name, value in self.options.items())])


def load_adapters(model: nn.Module, folders: Sequence[StrPath], *, link: str = "softmax") -> AdaptedEnsemble:
    """Make one ensemble of low-rank adapters in the format of peft, computed in one pass.

    The adapters belong to `model`, have the same rank, alpha and layers; each may have its own head or
    other own layers (peft's `modules_to_save`). The model is copied and frozen; adapters and own layers can be trained
    further. DoRA, rsLoRA and other variants of LoRA raise an error. peft is not needed.

    Args:
        model: The model on which the adapters were trained, with the weights it had then.
        folders: A folder for each member, as written by `AdaptedEnsemble.save_adapters` or peft's `save_pretrained`.
        link: `"softmax"`, `"sigmoid"` for binary and multi-label outputs, `"identity"` for regression.

    Raises:
        ModelFileError: A folder has no such adapter, it was altered, or it does not fit the model or the others.

    Example:
        >>> import tempfile
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = ace.adapt(model, 5, adapter="low_rank", rank=2, freeze=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = load_adapters(model, ensemble.save_adapters(folder))
        >>> torch.equal(again(torch.ones(6, 4)), ensemble(torch.ones(6, 4)))
        True
    """
    if isinstance(folders, str | Path):
        raise TypeError(f"Expected `folders` to be a list with a folder for each member, but got {str(folders)!r}.")
    files = [read_adapter(folder, model) for folder in folders]
    if not files:
        raise ValueError("Expected at least one folder, but got none.")
    first, shapes = files[0], [{(name, t.shape) for name, t in file.tensors.items()} for file in files]
    for file, own_shapes in zip(files, shapes, strict=True):
        if (file.rank, file.alpha) != (first.rank, first.alpha):
            raise ModelFileError(
                f"{file.folder} has another rank or alpha than {first.folder}; use the same for all adapters."
            )
        if differ := own_shapes ^ shapes[0]:
            name, _ = min(differ)
            raise ModelFileError(
                f"{name!r} is not in both {first.folder} and {file.folder} with the same shape; adapt the same layers."
            )
    values = {name: torch.stack([file.tensors[name] for file in files]) for name in first.tensors}
    layers = sorted(name.removesuffix(FACTORS["A"]) for name in values if name.endswith(FACTORS["A"]))
    sizes: dict[str, Any] = {"rank": first.rank, "alpha": first.alpha}
    try:
        ensemble = adapt(
            model, len(files), adapter="low_rank", layers=layers, freeze=True, head="shared", link=link, **sizes
        )
        own = ensemble._set_members(values)
    except (ValueError, RuntimeError, LookupError, AttributeError) as error:
        raise ModelFileError(
            f"{first.folder} does not fit the model ({error_reason(error)}); give the model on which it was trained."
        ) from error
    if f"{ensemble.head}.weight" in own:
        ensemble.options["head"] = ensemble.head
    base = fingerprint(ensemble.stacked, own)
    for file in files:
        dtype = base.partition(":")[0]
        if file.base is not None and file.base.startswith(f"{dtype}:") and file.base != base:
            raise ModelFileError(f"{file.folder} was trained on a model with other weights; give that model.")
    return ensemble
