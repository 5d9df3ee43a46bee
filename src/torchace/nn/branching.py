"""Members that share the lower part of a model and have copies of the upper part."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchace import _checks
from torchace.nn.ensemble import Ensemble

# steps that only read the input's shape need no trunk
SHAPE_STEPS = (getattr, operator.getitem, "size", "dim")
IN_PLACE_OPERATORS = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow, operator.setitem)
ADVICE = (
    "Move code that depends on values or on the mode into a layer, or build the parts: Ensemble(members, trunk=...)."
)


def branch(
    model: nn.Module,
    num_members: int,
    *,
    at: str,
    reinitialize: bool | Callable[[], nn.Module] = False,
    link: str = "softmax",
) -> Ensemble:
    """Make K members that share all layers of a model before one layer, and have copies of the layers from there on.

    Split at its first layer, the model gives separate members; at its last layer, SMOC. The shared part is computed
    once and receives the mean of the members' gradients. Parameters keep their names; the model is not changed.

    Members that start equal and see the same samples stay equal for every λ (without dropout): use `reinitialize`
    unless each has its own samples. The forward of the model, and of the modules around the layer, is traced
    (`torch.fx`): it must call its layers in the same order for every input. Optional arguments keep their defaults.

    Args:
        model: The model to split, trained or not; it returns logits `(N, C, ...)`.
        num_members: K.
        at: The name of the first layer of the members, such as `"fc"` or `"stage3.0"`.
        reinitialize: True: draw every member's weights with the layers' `reset_parameters`. A function that returns a
            model: copy every member's weights from a new one, for models with their own initialization (timm's,
            `cifar_resnet`).
        link: `"softmax"`, `"sigmoid"` for binary and multi-label outputs, `"identity"` for regression.

    Returns:
        An `Ensemble`; its `trunk` is None if nothing is computed before the layer.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = branch(model, 5, at="2", reinitialize=True)
        >>> ensemble(torch.zeros(6, 4)).shape
        torch.Size([5, 6, 3])
        >>> [name for name, _ in ensemble.trunk.named_parameters()]
        ['0.weight', '0.bias']
        >>> [name for name, _ in ensemble[0].named_parameters()]
        ['2.weight', '2.bias', '4.weight', '4.bias']
    """
    _checks.check_module(model)
    _checks.check_count(num_members, "num_members")
    if isinstance(reinitialize, nn.Module):
        raise TypeError("Expected `reinitialize` to be a bool or a function that returns a model, but got a model.")
    at = _find_layer(model, at)
    before, after = _split(model, _trace(model, at), at)
    if any(node.op.startswith("call") and node.target not in SHAPE_STEPS for node in before.nodes):
        member, trunk = _SubModel(model, after), copy.deepcopy(_SubModel(model, before))
        ensemble = Ensemble([copy.deepcopy(member) for _ in range(num_members)], trunk, link)
    else:
        ensemble = Ensemble([copy.deepcopy(model) for _ in range(num_members)], link=link)
    ensemble.training = ensemble.members.training = model.training
    if hasattr(model, "architecture"):
        vars(ensemble)["branched"] = {"architecture": copy.deepcopy(model.architecture), "at": at}
    for one in ensemble if reinitialize else ():
        if callable(reinitialize):
            _load_weights(one, reinitialize())
        else:
            _reset_parameters(one)
    return ensemble


class _Tracer(fx.Tracer):
    """Trace `forward` down to one layer; modules that do not contain it are single steps."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.modes = _global_modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not self.at.startswith(module_qualified_name + ".")

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Any:
        if kind == "placeholder" and args:  # an argument with a default value, on which `if` statements may depend
            return args[0]
        if _global_modes() != self.modes:
            raise ValueError("it switches gradients or autocast on or off, which a split forward would not repeat")
        return super().create_proxy(kind, target, args, kwargs, *rest, **named)


def _global_modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


class _SubModel(fx.GraphModule):
    """Some steps of a model and the layers they call, with the model's modes and non-persistent buffers."""

    def __init__(self, root: nn.Module, graph: fx.Graph, class_name: str = "SubModel") -> None:
        super().__init__(root, graph, class_name)
        for name, module in self.named_modules():
            module.training = root.get_submodule(name).training
        # GraphModule makes every tensor that is not a parameter a persistent buffer
        saved = root.state_dict()
        for name in {str(node.target) for node in graph.nodes if node.op == "get_attr"} - set(saved):
            owner, _, field = name.rpartition(".")
            self.get_submodule(owner).register_buffer(field, self.get_buffer(name), persistent=False)

    def _deepcopy_init(self) -> Callable[..., None]:
        return _SubModel.__init__


def _find_layer(model: nn.Module, at: str) -> str:
    """Return the first name of the layer `at`."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if at == "" or at not in modules:
        names = ", ".join(repr(name) for name in modules if name and name.count(".") <= str(at).count("."))
        raise ValueError(f"Expected `at` to name a layer of the model, but got {at!r}. It has {names or 'none'}.")
    return next(str(name) for name, module in model.named_modules() if module is modules[at])


def _trace(model: nn.Module, at: str) -> fx.Graph:
    """Return the steps of the model's forward; refuse one that differs between training and evaluation."""
    graphs = []
    for training in (True, False):
        try:
            graphs.append(_Tracer(at).trace(copy.deepcopy(model).train(training)))
        except Exception as error:
            raise ValueError(
                f"Cannot follow the forward of {type(model).__name__} down to {at!r} ({type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else 'no message'}). {ADVICE}"
            ) from error
    where = f"The forward of {type(model).__name__}, or of a module around {at!r},"
    if str(graphs[0]) != str(graphs[1]):
        raise ValueError(
            f"{where} differs between training and evaluation, so it cannot be split. Use layers that follow the "
            f"mode (nn.Dropout for F.dropout, nn.BatchNorm2d for F.batch_norm). {ADVICE}"
        )
    # fx's name for tensors that the model does not hold
    if any(node.op == "get_attr" and "_tensor_constant" in str(node.target) for node in graphs[0].nodes):
        raise ValueError(
            f"{where} creates a tensor that depends on no input (torch.arange, torch.rand, ...): it would be constant. "
            f"Keep it as a buffer (register_buffer). {ADVICE}"
        )
    return graphs[0]


def _split(model: nn.Module, graph: fx.Graph, at: str) -> tuple[fx.Graph, fx.Graph]:
    """Split the steps at the first call of a layer; the first part returns the inputs of the second."""
    nodes = list(graph.nodes)
    cut = next((i for i, node in enumerate(nodes) if node.op == "call_module" and node.target == at), None)
    if cut is None:
        raise ValueError(
            f"The model's forward never calls the layer {at!r}. A list of layers is not called itself: name one of its "
            f"layers, such as '{at}.0'."
        )
    result = nodes[-1].args[0]
    if not isinstance(result, fx.Node) or isinstance(result.target, type):  # a container, or an object
        raise TypeError(
            f"Expected {type(model).__name__} to return one tensor of logits, but it returns several or an object. "
            "Wrap it in a module that returns the logits."
        )
    first, rest = nodes[:cut], nodes[cut:]
    later = set(rest)
    # parameters are read where they are used; other values cross the split
    crossing = [node for node in first if node.op != "get_attr" and later & set(node.users)]
    before, after = fx.Graph(), fx.Graph()

    copies: dict[fx.Node, fx.Node] = {}
    for node in first:
        if node.op != "get_attr" or not set(node.users) <= later:
            copies[node] = before.node_copy(node, copies.__getitem__)
    before.output(copies[crossing[0]] if len(crossing) == 1 else tuple(copies[node] for node in crossing))

    shared = after.placeholder("shared")
    if any(_is_in_place(model, node) for node in rest):
        shared = after.call_function(_clone, (shared,))
    copies = {}
    for i, node in enumerate(crossing):
        copies[node] = shared if len(crossing) == 1 else after.call_function(operator.getitem, (shared, i))
    for node in first:
        if node.op == "get_attr" and later & set(node.users):
            copies[node] = after.node_copy(node)
    for node in rest:
        copies[node] = after.node_copy(node, copies.__getitem__)

    late = _tensor_names(model, after)
    for key, name in _tensor_names(model, before).items():
        if key in late:
            raise ValueError(
                f"{name!r} is used both before and after the split at {at!r}: it can be neither shared nor copied. "
                "Choose a layer before its first use."
            )
    return before, after


def _is_in_place(model: nn.Module, node: fx.Node) -> bool:
    """Whether a step may change its input."""
    if node.op == "call_module":
        return any(getattr(layer, "inplace", False) for layer in model.get_submodule(str(node.target)).modules())
    name = str(getattr(node.target, "__name__", node.target))
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or node.target in IN_PLACE_OPERATORS or bool(node.kwargs.get("inplace"))


def _clone(shared: Any) -> Any:
    """Clone the shared tensors for a member that may change them in place."""
    if isinstance(shared, Tensor):
        return shared.clone()
    return tuple(_clone(value) for value in shared) if type(shared) is tuple else shared


def _tensor_names(model: nn.Module, graph: fx.Graph) -> dict[int, str]:
    """Return the names of a graph's parameters and buffers, by the tensors' ids."""
    names: dict[int, str] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            names[id(operator.attrgetter(str(node.target))(model))] = str(node.target)
        elif node.op == "call_module":
            layer = model.get_submodule(str(node.target))
            for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
                names[id(tensor)] = f"{node.target}.{name}"
    return names


def _reset_parameters(member: nn.Module) -> None:
    """Draw new weights for every layer; inner layers first, so that an outer layer's rule wins."""
    for name, module in reversed(list(member.named_modules())):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        own = ", ".join(repr(f"{name}.{own}".lstrip(".")) for own, _ in module.named_parameters(recurse=False))
        if callable(reset):
            reset()
        elif own:
            raise ValueError(
                f"Cannot re-initialize {own}: {type(module).__name__} has no reset_parameters. "
                "Give a function that returns a new model: branch(..., reinitialize=function)."
            )


def _load_weights(member: nn.Module, fresh: nn.Module) -> None:
    """Copy a member's weights and buffers from a new model of the same architecture."""
    try:
        state = fresh.state_dict()
        member.load_state_dict({name: state[name] for name in member.state_dict()})
    except (AttributeError, KeyError, RuntimeError) as error:
        message = f"Expected `reinitialize` to return a model of the same architecture, but it did not: {error}"
        raise ValueError(message) from error
