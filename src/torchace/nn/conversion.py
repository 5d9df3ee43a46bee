"""Any classifier made SMOC: its last linear layer replaced by K of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map_only

from torchace import _checks
from torchace.functional import average_gradients
from torchace.nn.base import EnsembleModule
from torchace.nn.heads import make_head
from torchace.nn.probing import HeadOutput, changed_output, state_kept


def stack_classifiers(
    model: nn.Module, num_members: int, *, head: str | None = None, rank: int | None = None, link: str = "softmax"
) -> StackedClassifiers:
    """Replaces a model's last linear layer by K fresh ones; the rest, trained or not, becomes their shared trunk.

    The trunk is computed once, forward and backward, and receives the mean of the heads' gradients; each head keeps its
    own (the paper's Algorithm 2). The model given is not changed: what comes back holds a copy of it. The new heads
    have the old one's device and type, and a bias if it had one.

    Without `head`, the layer replaced is the model's own `get_classifier()` (timm); else the last linear layer with
    `config.num_labels` outputs (transformers); else the linear layer registered last. Where another layer makes the
    logits, the first forward says so.

    Linear heads on one feature vector that see the same samples contract onto each other for every λ < 1: compare
    `disagreement` before you credit diversity. `branch` parts the members earlier.

    Args:
        model: A classifier whose logits an `nn.Linear` makes: a plain `nn.Sequential`, a network of timm, an image or
            sequence classifier of transformers, your own. It may return them as a tensor, as the first element of a
            tuple, or as `logits` of an object or a dictionary.
        num_members: K.
        head: The dotted name of the linear layer to replace, such as `"classifier.out_proj"`.
        rank: Heads differ by a matrix of this rank instead of a full one (`LowRankStackedLinear`).
        link: `"softmax"`, `"sigmoid"` for binary and multi-label outputs, `"identity"` for regression.

    Returns:
        A module that takes what the model takes, less `labels`, and gives logits `(K, N, C, ...)`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = stack_classifiers(model, num_members=10)
        >>> ensemble(torch.zeros(5, 4)).shape, ensemble.predict_proba(torch.zeros(5, 4)).shape
        (torch.Size([10, 5, 3]), torch.Size([5, 3]))
        >>> ensemble.head, ensemble.host[0].weight.equal(model[0].weight)
        ('2', True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected `model` to be a module, but got {type(model).__name__}.")
    _checks.check_count(num_members, "num_members")
    if head is not None and not isinstance(head, str):
        raise TypeError(f"Expected `head` to be the name of a layer, but got {type(head).__name__}.")
    name = _find_head(model) if head is None else head
    names, linear = _check_head(model, name)
    stacked = make_head(
        linear.in_features,
        linear.out_features,
        num_members,
        rank,
        bias=linear.bias is not None,
        device=linear.weight.device,
        dtype=linear.weight.dtype,
    )
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
    """K heads inside a host: `(..., K·C)` from `(..., D)`; below it flows the mean of the members' gradients."""

    def __init__(self, stacked: nn.Module) -> None:
        super().__init__()
        self.stacked = stacked
        self.num_members = cast(int, stacked.num_members)
        # what hosts read of their own linear layer
        self.in_features = cast(int, stacked.in_features)
        self.out_features = self.num_members * cast(int, stacked.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.stacked.flat(average_gradients(x, self.num_members))  # type: ignore[operator]


class StackedClassifiers(EnsembleModule):
    """What `stack_classifiers` returns: a host whose head emits `(..., K·C)`, unfolded to `(K, N, C, ...)`.

    Attributes:
        host: The model, its head replaced.
        head: The name of the head in the host.
        num_classes: C.
        class_axis: Where the host's logits `(N, ...)` have their classes when they have more than two axes: 1 or -1.
            None until the first forward from which it can be told; set it yourself where it cannot.

    The first forward in training and the first in evaluation mode check that members stay apart behind the head (not
    under `torch.compile`, which cannot compare values).
    """

    def __init__(self, host: nn.Module, head: str, num_members: int, num_classes: int, link: str = "softmax") -> None:
        super().__init__(num_members, link)
        self.host = host
        self.head = head
        self.num_classes = num_classes
        self.class_axis: int | None = None
        self._checked_modes: set[bool] = set()  # modes (training or not) in which members were found to stay apart

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The members' logits, `(K, N, C)` or, for a host that classifies every token or pixel, `(K, N, C, d1, ...)`.

        Args:
            *args: What the host takes.
            **kwargs: Likewise, without `labels`.
        """
        if kwargs.pop("labels", None) is not None:
            raise TypeError(
                "Expected no `labels`: the host would compute a loss of its own over all members' classes at once. "
                "Give them to the loss: amended_cross_entropy(ensemble(**inputs), labels, diversity)."
            )
        if self.num_members == 1 or self.host.training in self._checked_modes or not _can_try():
            return self._members(self._run(args, kwargs))
        with HeadOutput(self.host.get_submodule(self.head)) as head_output:
            logits = self._run(args, kwargs)
            unchanged = head_output.is_returned_as(logits)
        members = self._members(logits)
        if not unchanged and type(members) is Tensor and not members.is_meta:
            self._check_members_stay_apart(args, kwargs)
        self._checked_modes.add(self.host.training)
        return members

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The host's logits, all members' classes on one axis."""
        try:
            return _logits(self.host(*args, **kwargs))
        except Exception as error:
            error.add_note(
                f"If this happened behind the layer {self.head!r}: stack_classifiers replaced it, and it gives "
                f"{self._width()} values now. {self._advice()}"
            )
            raise

    def _members(self, logits: Tensor) -> Tensor:
        """`(K, N, C, ...)` from the host's logits."""
        axis = self._find_class_axis(logits)
        members: Tensor = logits.unflatten(axis, (self.num_members, self.num_classes))
        return members.movedim((axis, axis + 1), (0, 2))

    @torch.no_grad()
    def _check_members_stay_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a host where a change of some heads' outputs moves the logits of other members."""

        def logits(changed: list[int]) -> Tensor:
            own_args, own_kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
            head = self.host.get_submodule(self.head)
            with state_kept(self.host), changed_output(head, changed):
                return self._members(self._run(own_args, own_kwargs))

        expected = logits([])
        finite = torch.where(expected.isfinite(), expected, 0).abs().max()
        # far below what a mixture moves, far above what a GPU's order of addition does
        tolerance = float(torch.finfo(expected.dtype).eps ** 0.5 * finite)
        for changed in _separating_sets(self.num_members):
            others = [k for k in range(self.num_members) if k not in changed]
            moved = logits(changed)
            if not torch.allclose(moved[others], expected[others], rtol=0, atol=tolerance, equal_nan=True):
                raise ValueError(
                    f"Expected a model that treats each class by itself behind its layer {self.head!r}, but a change "
                    "of one member's logits moved those of another: the model acts over all classes there (softmax, "
                    "normalize, a mean, ...), and they are all members' classes now. Let it return the output of "
                    f"{self.head!r} and do the rest with the ensemble's logits (K, N, C), or use branch(model, "
                    f"at={self.head!r}, num_members={self.num_members}), which copies everything behind that layer."
                )

    def _find_class_axis(self, logits: Tensor) -> int:
        """The axis of the host's logits that holds the K·C classes, counted from the front."""
        width = self.num_members * self.num_classes
        last = logits.ndim - 1
        if logits.ndim == 2 or self.class_axis is not None:
            axis = 1 if logits.ndim == 2 else cast(int, self.class_axis) % logits.ndim
            found = [axis] if logits.shape[axis] == width else []
        else:
            found = [axis for axis in (1, last) if logits.ndim > 2 and logits.shape[axis] == width]
        if not found:
            raise ValueError(
                f"Expected the host's logits to have {self._width()} classes on their last axis or on axis 1, but got "
                f"shape {tuple(logits.shape)}. {self._advice()}"
            )
        if len(found) == 2:
            raise ValueError(
                f"Axis 1 and the last axis of the logits {tuple(logits.shape)} both have {self._width()} elements: "
                "which holds the classes cannot be told. Say it: set `class_axis` of the ensemble to 1 or -1."
            )
        if logits.ndim > 2 and self.class_axis is None:
            # remembered: an input of another length or size may fit both
            self.class_axis = -1 if found[0] == last else 1
        return found[0]

    def _width(self) -> str:
        return f"{self.num_members}·{self.num_classes} = {self.num_members * self.num_classes}"

    def _advice(self) -> str:
        return (
            f"If {self.head!r} is not the layer that makes the logits, name that one: stack_classifiers(..., head=...)."
        )

    def extra_repr(self) -> str:
        return f"head={self.head!r}, num_members={self.num_members}, num_classes={self.num_classes}"


def _can_try() -> bool:
    """Whether values can be compared: nothing is compiled, transformed, traced or captured."""
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return _checks.is_eager() and not torch._C._get_tracing_state() and not captured


def _separating_sets(num_members: int) -> list[list[int]]:
    """Sets of members such that of any two members some set holds the first without the second: 2·log2(K) of them."""
    bits = range((num_members - 1).bit_length())
    sets = [[k for k in range(num_members) if (k >> bit & 1) == value] for bit in bits for value in (0, 1)]
    return [members for members in sets if members]


def _logits(output: Any) -> Tensor:
    """The logits in what a host returns."""
    found = output
    if not isinstance(output, Tensor):
        if isinstance(output, Mapping):
            found = output.get("logits")
        elif hasattr(output, "logits"):
            found = output.logits
        elif isinstance(output, (tuple, list)) and output:
            found = output[0]
    if not isinstance(found, Tensor):
        raise TypeError(
            "Expected the host to return a tensor of logits, a tuple that starts with them, or an object with `logits`,"
            f" but got {type(output).__name__}. Wrap the model in a module that returns the logits."
        )
    return found


def _find_head(model: nn.Module) -> str:
    """The name of the layer that makes the logits, as far as a model tells it without being run."""
    if callable(getattr(model, "get_classifier", None)):  # timm
        return _timm_head(model, model.get_classifier())  # type: ignore[operator]
    linears: dict[str, nn.Linear] = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if not linears:
        raise ValueError(
            f"Expected a model that ends in an nn.Linear, but {type(model).__name__} has none. "
            "For another kind of last layer, use branch(model, num_members, at=its name)."
        )
    num_labels = getattr(getattr(model, "config", None), "num_labels", None)  # transformers
    if isinstance(num_labels, int):
        labelled = [name for name, layer in linears.items() if layer.out_features == num_labels]
        if not labelled:
            raise ValueError(
                f"Expected {type(model).__name__} to have an nn.Linear with config.num_labels = {num_labels} outputs, "
                "but none has. Take the model with a classifier (...ForSequenceClassification, "
                "...ForImageClassification), or name the layer with `head`."
            )
        return labelled[-1]
    return list(linears)[-1]


def _timm_head(model: nn.Module, classifier: Any) -> str:
    if isinstance(classifier, (tuple, list)):
        raise ValueError(
            f"{type(model).__name__} has {len(classifier)} classifiers that make the logits together. Build it "
            "with one, or name the layer with `head` if one alone makes them."
        )
    name: str | None = next((name for name, module in model.named_modules() if module is classifier), None)
    if name is None or isinstance(classifier, nn.Identity):
        raise ValueError(
            f"Expected {type(model).__name__} to have a linear classifier, but its get_classifier() gives "
            f"{type(classifier).__name__}. Build the model with num_classes=C, or name the layer with `head`."
        )
    if not isinstance(classifier, nn.Linear):
        inner = [path for path, layer in classifier.named_modules() if isinstance(layer, nn.Linear)]
        return f"{name}.{inner[-1]}" if inner else name
    return name


def _check_head(model: nn.Module, name: str) -> tuple[list[str], nn.Linear]:
    """All names of the layer to replace, and the layer: a plain linear one that nothing else shares."""
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
    if isinstance(linear.weight, UninitializedParameter):
        raise ValueError(f"The classifier {name!r} has no shape yet. Run the model once on an example first.")
    if is_parametrized(linear) or linear._forward_pre_hooks or linear._forward_hooks:
        raise ValueError(
            f"The classifier {name!r} has a parametrization or hooks (weight norm, spectral norm, ...), which new "
            "heads would not have. Remove them first: torch.nn.utils.parametrize.remove_parametrizations."
        )
    if not _is_plain(linear):
        raise ValueError(
            f"The classifier {name!r} is a {type(linear).__qualname__} that computes something else than a linear "
            "layer does, and new heads would not. Replace it by an nn.Linear, or use branch, which copies any layer."
        )
    names = [path for path, module in modules.items() if module is linear]
    own = {f"{path}.weight".removeprefix(".") for path in names}
    shared = [
        path for path, p in model.named_parameters(remove_duplicate=False) if p is linear.weight and path not in own
    ]
    if shared:
        raise ValueError(
            f"The weight of the classifier {name!r} is tied to {shared[0]!r}, and K heads cannot all be tied to it. "
            "Untie it first: layer.weight = nn.Parameter(layer.weight.detach().clone())."
        )
    return names, linear


def _is_plain(linear: nn.Linear) -> bool:
    """Whether a layer computes what nn.Linear does, a subclass with a forward of its own (timm's) included."""
    if type(linear).forward is nn.Linear.forward or linear.weight.is_meta:
        return True
    x = torch.linspace(-1, 1, linear.in_features, device=linear.weight.device, dtype=linear.weight.dtype)[None]
    with torch.no_grad():
        return torch.allclose(copy.deepcopy(linear).eval()(x), F.linear(x, linear.weight, linear.bias), rtol=1e-3)
