"""Members that part anywhere: everything before a named layer is shared, everything from there on is each one's own."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchace import _checks
from torchace.nn.ensemble import Ensemble

# steps that only look at an input's shape: no reason for a trunk
LOOKS = (getattr, operator.getitem, "size", "dim")
IN_PLACE_OPERATORS = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow, operator.setitem)


def branch(
    model: nn.Module,
    num_members: int,
    *positional: object,
    at: str = "",
    reinitialize: bool | Callable[[], nn.Module] = False,
    example: Any = None,
    link: str = "softmax",
) -> Ensemble:
    """K members that share everything a model computes before a layer, and have copies from that layer on.

    At the model's first layer they are separate models, at its last one they are SMOC. The shared part is computed once
    and receives the mean of the members' gradients. Parameters keep the names they have in the model, which is not
    changed.

    Members that start from equal weights and see the same samples stay equal, whatever the diversity (but for dropout):
    unless each has samples of its own, ask for `reinitialize`.

    The model's `forward`, and that of the modules around the layer, is followed once (`torch.fx`), so it must call its
    layers in the same order whatever the input is; what happens inside other modules is free. Its arguments that have
    default values keep them. Layers that `forward` never calls are left out.

    Args:
        model: The model to part, trained or not; it returns logits `(N, C, ...)`.
        num_members: K.
        at: The name of the layer where the members part, such as `"fc"` or `"stage3.0"`.
        reinitialize: True: every member's layers draw new weights by their `reset_parameters`, torch's rule for each
            layer. A function that makes a new model: every member takes the weights of one, for models that have a rule
            of their own (timm's, `cifar_resnet`).
        example: An input, or a tuple of inputs, on which every member is compared with the model (in evaluation mode,
            before they are re-initialised).
        link: `"softmax"`, `"sigmoid"` for binary and multi-label outputs, `"identity"` for regression.

    Returns:
        An ensemble; its `trunk` is None where nothing is computed before the layer. For a network of `torchace.models`
        its `branched` tells `save_model` what it was made from.

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
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected `model` to be a module, but got {type(model).__name__}.")
    if positional:
        raise TypeError("Expected the name of the layer as a keyword. Write branch(model, num_members, at='fc').")
    _checks.check_count(num_members, "num_members")
    if not isinstance(reinitialize, bool) and (isinstance(reinitialize, nn.Module) or not callable(reinitialize)):
        got = type(reinitialize).__name__
        raise TypeError(f"Expected `reinitialize` to be True, False or a function that makes a model, but got {got}.")
    at = _check_layer(model, at)
    before, after = _split(model, _traced(model, at), at)
    _check_apart(model, before, after, at)
    if any(node.op.startswith("call") and node.target not in LOOKS for node in before.nodes):
        trunk, member = _Part(model, before), _Part(model, after)
        ensemble = Ensemble([copy.deepcopy(member) for _ in range(num_members)], copy.deepcopy(trunk), link)
    else:
        ensemble = Ensemble([copy.deepcopy(model) for _ in range(num_members)], link=link)
    ensemble.training = ensemble.members.training = model.training
    if hasattr(model, "architecture"):  # a network of torchace.models: what save_model writes down
        vars(ensemble)["branched"] = {"architecture": copy.deepcopy(model.architecture), "at": at}
    if example is not None:
        _check_outputs(model, ensemble, example if isinstance(example, tuple) else (example,), at)
    if reinitialize:
        for one in ensemble:
            if reinitialize is True:
                _reset(one)
            else:
                _take_weights(one, reinitialize())
    return ensemble


class _Tracer(fx.Tracer):
    """Follows `forward` down to one layer; every module that does not hold it is a step of its own."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.switches = _switches()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not self.at.startswith(module_qualified_name + ".")

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Any:
        if kind == "placeholder" and args:  # an argument with a default value, which `if` statements may ask for
            return args[0]
        if _switches() != self.switches:
            raise ValueError("it switches gradients or autocast on or off around a step, which its parts would not")
        return super().create_proxy(kind, target, args, kwargs, *rest, **named)


def _switches() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


class _Part(fx.GraphModule):
    """A part of a model: its steps, and those of its layers that they call, modes and saved names as in the model."""

    def __init__(self, root: nn.Module, graph: fx.Graph, class_name: str = "Part") -> None:
        super().__init__(root, graph, class_name)
        for name, module in self.named_modules():
            module.training = root.get_submodule(name).training
        # GraphModule makes a saved buffer of every tensor that is no parameter
        saved = root.state_dict()
        for name in {str(node.target) for node in graph.nodes if node.op == "get_attr"} - set(saved):
            owner, _, field = name.rpartition(".")
            self.get_submodule(owner).register_buffer(field, self.get_buffer(name), persistent=False)

    def _deepcopy_init(self) -> Callable[..., None]:
        return _Part.__init__


def _check_layer(model: nn.Module, at: str) -> str:
    """The first name of the layer that `at` names."""
    if not isinstance(at, str):
        raise TypeError(f"Expected `at` to be the name of a layer, but got {type(at).__name__}.")
    modules = dict(model.named_modules(remove_duplicate=False))
    if at == "" or at not in modules:
        parent = at.rpartition(".")[0]
        while parent not in modules:
            parent = parent.rpartition(".")[0]
        where = repr(parent) if parent else type(model).__name__
        has = ", ".join(repr(f"{parent}.{name}".lstrip(".")) for name, _ in modules[parent].named_children()) or "none"
        raise ValueError(f"Expected `at` to name a layer of the model, but got {at!r}. {where} has {has}.")
    return next(str(name) for name, module in model.named_modules() if module is modules[at])


def _traced(model: nn.Module, at: str) -> fx.Graph:
    """The steps of a model's forward, the same in training and evaluation."""
    advice = (
        "Move what depends on values or on the mode into a layer, or build the parts: Ensemble(members, trunk=...)."
    )
    graphs = []
    for training in (True, False):
        root = copy.deepcopy(model).train(training)
        try:
            graphs.append(_Tracer(at).trace(root))
        except Exception as error:
            raise ValueError(
                f"Cannot follow the forward of {type(model).__name__} down to {at!r} ({type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else 'no message'}). {advice}"
            ) from error
    if str(graphs[0]) != str(graphs[1]):
        raise ValueError(
            f"The forward of {type(model).__name__}, or of a module around {at!r}, does one thing in training and "
            "another in evaluation, which its parts could not. Use layers that know their mode (nn.Dropout for "
            f"F.dropout, nn.BatchNorm2d for F.batch_norm). {advice}"
        )
    names = {node.target for node in graphs[0].nodes if node.op == "get_attr"}
    if any("_tensor_constant" in str(name) for name in names):  # where fx keeps what it finds nowhere in the model
        raise ValueError(
            f"The forward of {type(model).__name__}, or of a module around {at!r}, makes a tensor that depends on no "
            "input (torch.arange, torch.zeros, torch.rand, ...), which would be frozen. Keep it as a buffer "
            f"(register_buffer). {advice}"
        )
    return graphs[0]


def _split(model: nn.Module, graph: fx.Graph, at: str) -> tuple[fx.Graph, fx.Graph]:
    """The steps before the first call of a layer, which return what the others need, and the steps from there on."""
    nodes = list(graph.nodes)
    cut = next((i for i, node in enumerate(nodes) if node.op == "call_module" and node.target == at), None)
    if cut is None:
        raise ValueError(
            f"The model's forward never calls the layer {at!r}. A list of layers is not called itself: name one of its "
            f"layers, such as '{at}.0'."
        )
    result = nodes[-1].args[0]
    if not isinstance(result, fx.Node) or isinstance(result.target, type):  # a container of values, or a class called
        raise TypeError(
            f"Expected {type(model).__name__} to return one tensor of logits, but it returns several or an object. "
            "Wrap it in a module that returns the logits."
        )
    first, rest = nodes[:cut], nodes[cut:]
    later = set(rest)
    # weights are read where they are used; they do not cross
    crossing = [node for node in first if node.op != "get_attr" and later & set(node.users)]
    before, after = fx.Graph(), fx.Graph()

    copies: dict[fx.Node, fx.Node] = {}
    for node in first:
        if node.op != "get_attr" or not set(node.users) <= later:
            copies[node] = before.node_copy(node, copies.__getitem__)
    before.output(copies[crossing[0]] if len(crossing) == 1 else tuple(copies[node] for node in crossing))

    shared = after.placeholder("shared")
    if any(_in_place(model, node) for node in rest):
        shared = after.call_function(_own, (shared,))
    copies = {}
    for i, node in enumerate(crossing):
        copies[node] = shared if len(crossing) == 1 else after.call_function(operator.getitem, (shared, i))
    for node in first:
        if node.op == "get_attr" and later & set(node.users):
            copies[node] = after.node_copy(node)
    for node in rest:
        copies[node] = after.node_copy(node, copies.__getitem__)
    return before, after


def _in_place(model: nn.Module, node: fx.Node) -> bool:
    """Whether a step may change its input."""
    if node.op == "call_module":
        return any(getattr(layer, "inplace", False) for layer in model.get_submodule(str(node.target)).modules())
    name = str(getattr(node.target, "__name__", node.target))
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or node.target in IN_PLACE_OPERATORS or bool(node.kwargs.get("inplace"))


def _own(shared: Any) -> Any:
    """A member's own copy of what it shares, where it may change it in place."""
    if isinstance(shared, Tensor):
        return shared.clone()
    return tuple(_own(value) for value in shared) if type(shared) is tuple else shared


def _tensors(model: nn.Module, graph: fx.Graph) -> dict[int, str]:
    """The names of the parameters and buffers that a graph's steps use, by identity."""
    found: dict[int, str] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            found[id(operator.attrgetter(str(node.target))(model))] = str(node.target)
        elif node.op == "call_module":
            layer = model.get_submodule(str(node.target))
            for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
                found[id(tensor)] = f"{node.target}.{name}"
    return found


def _check_apart(model: nn.Module, before: fx.Graph, after: fx.Graph, at: str) -> None:
    early, late = _tensors(model, before), _tensors(model, after)
    both = [name for key, name in early.items() if key in late]
    if both:
        raise ValueError(
            f"{both[0]!r} is used both before and after the members part at {at!r}: it can be neither shared nor each "
            "member's own. Part them before its first use."
        )


def _check_outputs(model: nn.Module, ensemble: Ensemble, inputs: tuple[Any, ...], at: str) -> None:
    """Every member, behind the trunk, gives what the model gives."""
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(*copy.deepcopy(inputs))
        outputs = copy.deepcopy(ensemble).eval()(*copy.deepcopy(inputs))
    for k, output in enumerate(outputs):
        try:
            torch.testing.assert_close(output, expected, equal_nan=True)
        except AssertionError as error:
            raise ValueError(
                f"Member {k} does not give what {type(model).__name__} gives on `example`: something in its forward "
                f"cannot be parted at {at!r}. Build the parts yourself: Ensemble(members, trunk=...)."
            ) from error


def _reset(member: nn.Module) -> None:
    """New weights for every layer, inner layers first, so that an outer one's rule has the last word."""
    for name, module in reversed(list(member.named_modules())):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        own = ", ".join(repr(f"{name}.{own}".lstrip(".")) for own, _ in module.named_parameters(recurse=False))
        if callable(reset):
            reset()
        elif own:
            raise ValueError(
                f"Cannot re-initialise {own}: {type(module).__name__} has no reset_parameters. "
                "Give a function that makes a new model: branch(..., reinitialize=function)."
            )


def _take_weights(member: nn.Module, fresh: nn.Module) -> None:
    """A member's weights and buffers from a new model of the same architecture."""
    if not isinstance(fresh, nn.Module):
        raise TypeError(f"Expected `reinitialize` to make a model, but it made {type(fresh).__name__}.")
    state = fresh.state_dict()
    try:
        member.load_state_dict({name: state[name] for name in member.state_dict()})
    except (KeyError, RuntimeError) as error:
        message = f"Expected `reinitialize` to make a model like the one given, but it made another: {error}"
        raise ValueError(message) from error
