"""Conversion of a classifier to SMOC: K heads replace its last linear layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map_only

from torchace import _checks
from torchace.functional import average_gradients
from torchace.nn.base import EnsembleModule, tensor_versions
from torchace.nn.heads import MemberHeads, make_head


def stack_classifiers(
    model: nn.Module, num_members: int, *, head: str | None = None, rank: int | None = None, link: str = "softmax"
) -> StackedClassifiers:
    """Replace a model's last linear layer with K new ones; the rest, trained or not, becomes their shared trunk.

    The trunk is computed once, forward and backward, and receives the mean of the heads' gradients (the paper's
    Algorithm 2). The model is copied, not changed. The new heads have the old head's device and type, and a bias if it
    had one. Such heads converge to each other for every λ < 1 (see `SMOC`); members of `branch` differ in more layers.

    The default `head` is the model's `get_classifier()` (timm), else the last linear layer with `config.num_labels`
    outputs (transformers), else the linear layer registered last. If it does not compute the logits, the first forward
    raises an error.

    Args:
        model: A classifier whose logits an `nn.Linear` computes. It returns them as a tensor, as the first element of a
            tuple, or as `logits` of an object or a dictionary.
        num_members: K.
        head: The dotted name of the linear layer to replace, such as `"classifier.out_proj"`.
        rank: Rank of the matrix by which heads differ (`LowRankStackedLinear`); full rank if None.
        link: `"softmax"`, `"sigmoid"` for binary and multi-label outputs, `"identity"` for regression.

    Returns:
        A module that takes the model's inputs, except `labels`, and returns logits `(K, N, C, ...)`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = stack_classifiers(model, num_members=10)
        >>> ensemble(torch.zeros(5, 4)).shape, ensemble.predict_proba(torch.zeros(5, 4)).shape
        (torch.Size([10, 5, 3]), torch.Size([5, 3]))
        >>> ensemble.head, ensemble.host[0].weight.equal(model[0].weight)
        ('2', True)
    """
    _checks.check_module(model)
    _checks.check_count(num_members, "num_members")
    name = find_head(model) if head is None else head
    names, linear = check_head(model, name)
    options = {"bias": linear.bias is not None, "device": linear.weight.device, "dtype": linear.weight.dtype}
    stacked = make_head(linear.in_features, linear.out_features, num_members, rank, **options)
    flat = FlatHead(stacked).train(linear.training)
    host = copy.deepcopy(model)
    for path in names:
        if path == "":  # the model is the layer
            host = flat
        else:
            parent, _, child = path.rpartition(".")
            setattr(host.get_submodule(parent), child, flat)
    return StackedClassifiers(host, name, num_members, linear.out_features, link)


class FlatHead(nn.Module):
    """K heads inside a host, `(..., D)` to `(..., K·C)`; the input receives the mean of the members' gradients."""

    def __init__(self, stacked: MemberHeads) -> None:
        super().__init__()
        self.stacked = stacked
        self.num_members = stacked.num_members
        # attributes of nn.Linear that hosts may read
        self.in_features = stacked.in_features
        self.out_features = stacked.num_members * stacked.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return all members' logits on one axis."""
        return self.stacked.flat(average_gradients(x, self.num_members))


class StackedClassifiers(EnsembleModule):
    """The ensemble of `stack_classifiers`: a host whose head returns `(..., K·C)`, unfolded to `(K, N, C, ...)`.

    The first forward in each mode checks that no layer after the head mixes members (not under `torch.compile`).

    Attributes:
        class_axis: The axis of the classes in host logits of more than two axes, 1 or -1. The first unambiguous forward
            sets it; set it yourself if both axes fit.
    """

    def __init__(self, host: nn.Module, head: str, num_members: int, num_classes: int, link: str = "softmax") -> None:
        super().__init__(num_members, link)
        self.host = host
        self.head = head
        self.num_classes = num_classes
        self.class_axis: int | None = None
        self._checked_modes: set[bool] = set()  # of `host.training`

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of the host's inputs, `(K, N, C)`; `(K, N, C, d1, ...)` for tokens or pixels."""
        refuse_labels(kwargs)
        if self.num_members == 1 or self.host.training in self._checked_modes or not _checks.can_compare():
            return self._unfold(self._host_logits(self.host, args, kwargs))
        outputs: list[tuple[Tensor, list[int]]] = []  # of the head, with the number of in-place changes

        def record(head: nn.Module, inputs: Any, output: Tensor) -> None:
            outputs.append((output, tensor_versions([output])))

        with self.host.get_submodule(self.head).register_forward_hook(record):
            logits = self._host_logits(self.host, args, kwargs)
        is_last = any(logits is output and tensor_versions([logits]) == versions for output, versions in outputs)
        members = self._unfold(logits)
        if not is_last and type(members) is Tensor and not members.is_meta:
            self._check_members_are_separate(args, kwargs)
        self._checked_modes.add(self.host.training)
        return members

    def _host_logits(self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the host's logits, with all members' classes on one axis."""
        try:
            return find_logits(host(*args, **kwargs))
        except Exception as error:
            error.add_note(
                f"If this happened after the layer {self.head!r}: stack_classifiers replaced it, and it returns "
                f"{self._width()} values now. {self._advice()}"
            )
            raise

    def _unfold(self, logits: Tensor) -> Tensor:
        """Return `(K, N, C, ...)` from the host's logits."""
        axis = self._find_class_axis(logits)
        members: Tensor = logits.unflatten(axis, (self.num_members, self.num_classes))
        return members.movedim((axis, axis + 1), (0, 2))

    @torch.no_grad()
    def _check_members_are_separate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a host where a change of the first or last member's head output changes the logits of others."""
        host = copy.deepcopy(self.host)
        devices = {p.device.index for p in host.parameters() if p.device.type == "cuda"}

        def perturb(member: int | None) -> Tensor:
            def change(head: nn.Module, inputs: Any, output: Tensor) -> Tensor:
                """Move every second class of the member up, the others down: enough to change their order."""
                logits = output.unflatten(-1, (self.num_members, -1)).clone()  # (..., K, C)
                signs = 1 - 2 * (torch.arange(logits.shape[-1], device=logits.device) % 2).to(logits.dtype)
                if member is not None:
                    logits[..., member, :] += signs * (1 + 2 * torch.nan_to_num(output).abs().max())
                return logits.flatten(-2)

            own_args, own_kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
            with torch.random.fork_rng(sorted(devices)), host.get_submodule(self.head).register_forward_hook(change):
                torch.manual_seed(0)  # the same dropout masks
                return self._unfold(self._host_logits(host, own_args, own_kwargs))

        expected = perturb(None)
        largest = torch.where(expected.isfinite(), expected, 0).abs().max()
        # far below the effect of mixing, far above that of a GPU's order of addition
        tolerance = float(torch.finfo(expected.dtype).eps ** 0.5 * largest)
        for member, others in ((0, slice(1, None)), (-1, slice(-1))):
            if not torch.allclose(perturb(member)[others], expected[others], rtol=0, atol=tolerance, equal_nan=True):
                raise ValueError(
                    f"Expected a model that treats each class separately after its layer {self.head!r}, but a change "
                    "of one member's logits changed those of another: the model acts over all classes there (softmax, "
                    "normalize, a mean, ...), which mixes the classes of all members. Let it return the output of "
                    f"{self.head!r} and do the rest with the ensemble's logits (K, N, C), or use branch(model, "
                    f"{self.num_members}, at={self.head!r}), which copies all layers from there on."
                )

    def _find_class_axis(self, logits: Tensor) -> int:
        """Return the non-negative axis of the host's logits that holds the K·C classes."""
        axis = find_class_axis(logits.shape, self.num_members * self.num_classes, self.class_axis, self._width())
        if axis is None:
            raise ValueError(
                f"Expected the host's logits to have {self._width()} classes on their last axis or on axis 1, but got "
                f"shape {tuple(logits.shape)}. {self._advice()}"
            )
        if logits.ndim > 2 and self.class_axis is None:
            self.class_axis = -1 if axis == logits.ndim - 1 else 1  # an input of another size may fit both
        return axis

    def _width(self) -> str:
        return f"{self.num_members}·{self.num_classes} = {self.num_members * self.num_classes}"

    def _advice(self) -> str:
        return f"If a layer other than {self.head!r} computes the logits, name it: stack_classifiers(..., head=...)."

    def extra_repr(self) -> str:
        """Return the head's name and the sizes."""
        return f"head={self.head!r}, num_members={self.num_members}, num_classes={self.num_classes}"


def refuse_labels(kwargs: dict[str, Any]) -> None:
    """Refuse `labels`, with which a host computes its own loss."""
    if kwargs.pop("labels", None) is not None:
        raise TypeError(
            "Expected no `labels`: the host would compute its own loss over all members' classes at once. "
            "Give them to the loss: amended_cross_entropy(ensemble(**inputs), labels, diversity)."
        )


def find_class_axis(shape: torch.Size, num_classes: int, class_axis: int | None, width: str = "") -> int | None:
    """Return the axis, 1 or the last, of logits `(N, C, ...)` or `(N, ..., C)`; None if neither has the classes."""
    last = len(shape) - 1
    candidates = ([1, last] if class_axis is None else [class_axis % len(shape)]) if last > 1 else [1] * last
    axes = [axis for axis in candidates if shape[axis] == num_classes]
    if len(axes) == 2:
        raise ValueError(
            f"Axis 1 and the last axis of the logits {tuple(shape)} both have {width or num_classes} elements, and "
            "either may hold the classes. Set `class_axis` of the ensemble to 1 or -1."
        )
    return axes[0] if axes else None


def find_logits(output: Any) -> Tensor:
    """Return the logits in a host's output."""
    logits = output
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif hasattr(output, "logits"):
        logits = output.logits
    elif isinstance(output, (tuple, list)) and output:
        logits = output[0]
    if not isinstance(logits, Tensor):
        raise TypeError(
            "Expected the host to return a tensor of logits, a tuple that starts with them, or an object with `logits`,"
            f" but got {type(output).__name__}. Wrap the model in a module that returns the logits."
        )
    return logits


def find_head(model: nn.Module) -> str:
    """Return the name of the layer that probably computes the logits."""
    if callable(getattr(model, "get_classifier", None)):  # timm
        return _find_timm_head(model, model.get_classifier())  # type: ignore[operator]
    linears: dict[str, nn.Linear] = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if callable(getattr(model, "get_output_embeddings", None)):  # language models of transformers
        output = model.get_output_embeddings()  # type: ignore[operator]
        if found := next((name for name, layer in linears.items() if layer is output), None):
            return found
    if not linears:
        raise ValueError(
            f"Expected a model that ends in an nn.Linear, but {type(model).__name__} has none. "
            "For another kind of last layer, use branch(model, num_members, at=its name)."
        )
    num_labels = getattr(getattr(model, "config", None), "num_labels", None)  # transformers
    if not isinstance(num_labels, int):
        return list(linears)[-1]
    labeled = [name for name, layer in linears.items() if layer.out_features == num_labels]
    if not labeled:
        raise ValueError(
            f"Expected {type(model).__name__} to have an nn.Linear with config.num_labels = {num_labels} outputs, "
            "but none has. Use the model with a classifier (...ForSequenceClassification, "
            "...ForImageClassification), or name the layer with `head`."
        )
    return labeled[-1]


def _find_timm_head(model: nn.Module, classifier: Any) -> str:
    name: str | None = next((name for name, module in model.named_modules() if module is classifier), None)
    if name is None or isinstance(classifier, nn.Identity):
        raise ValueError(
            f"Expected {type(model).__name__} to have one linear classifier, but its get_classifier() returns "
            f"{type(classifier).__name__}. Build the model with num_classes=C, or name the layer with `head`."
        )
    inner = [path for path, layer in classifier.named_modules() if isinstance(layer, nn.Linear)]
    return f"{name}.{inner[-1]}".rstrip(".") if inner else name


def check_head(model: nn.Module, name: str) -> tuple[list[str], nn.Linear]:
    """Return all names of the layer to replace, and the layer: a plain linear one whose weight is not tied."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if name not in modules:
        linears = ", ".join(repr(path) for path, layer in modules.items() if isinstance(layer, nn.Linear))
        raise ValueError(
            f"Expected `head` to name a linear layer of the model, but got {name!r}. It has {linears or 'none'}."
        )
    linear = modules[name]
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"Expected the classifier {name!r} to be an nn.Linear, but it is {type(linear).__name__}. "
            "Name another layer with `head`, or use branch(model, num_members, at=...), which copies any layer."
        )
    if is_lazy(linear.weight):
        raise ValueError(f"The classifier {name!r} has no shape yet. Run the model once on an example first.")
    if is_parametrized(linear) or linear._forward_pre_hooks or linear._forward_hooks or not _is_plain(linear):
        raise ValueError(
            f"Expected the classifier {name!r} to compute what an nn.Linear does, but it has a parametrization, hooks "
            "or another forward, which new heads would not have. Replace it with an nn.Linear, or use branch."
        )
    names = [path for path, module in modules.items() if module is linear]
    own = {f"{path}.weight".removeprefix(".") for path in names}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if parameter is linear.weight and path not in own:
            raise ValueError(
                f"The weight of the classifier {name!r} is tied to {path!r}, and K heads cannot all be tied to it. "
                "Untie it first: layer.weight = nn.Parameter(layer.weight.detach().clone())."
            )
    return names, linear


def _is_plain(linear: nn.Linear) -> bool:
    """Whether a layer computes the same as nn.Linear, although a subclass may override forward (timm's)."""
    if type(linear).forward is nn.Linear.forward or linear.weight.is_meta:
        return True
    x = torch.linspace(-1, 1, linear.in_features, device=linear.weight.device, dtype=linear.weight.dtype)[None]
    with torch.no_grad():
        return torch.allclose(copy.deepcopy(linear).eval()(x), F.linear(x, linear.weight, linear.bias), rtol=1e-3)
