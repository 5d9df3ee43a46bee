"""Decision how to compute a stacked module, by comparison of some stacked members with the same members alone."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from torchace import _checks
from torchace.nn.architecture import check_no_own_attributes
from torchace.nn.stacked_state import all_shared_names, group_size, named_tensors, replace_tensors, take_members
from torchace.nn.stacking.forward import handle_checkpointing, open_output, run_stacked, track_layers
from torchace.nn.stacking.mode import FIRST, RANDOM, RULES, ConstantRNG, Node, Stacked, StackingMode
from torchace.nn.stacking.random_rules import BODIES

HEADER = Node("layer", "function", "computed")
UNCHECKED = (
    "A StackedEnsemble was first called while it is exported, compiled, traced or captured, where its outputs could "
    "not be compared with those of single members. Call it once before."
)


@dataclass(frozen=True, repr=False)
class Decision:
    """How a stack is computed: a sequence of (layer, function, how), printed as a table.

    `how` is `"batched"` (all members at once), `"once"` (the same for all members), `"vmap"` or `"loop"` (member by
    member).
    """

    call_by_call: bool  # otherwise members run one by one
    reason: str = ""  # why not
    nodes: tuple[Node, ...] = ()  # calls of the forward
    largest: int = 0  # elements of the largest convolution's output, of one member
    has_nan: bool = False  # in outputs of members alone, which were not compared

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def counts(self) -> dict[str, int]:
        """Return the number of calls computed in each way."""
        return dict(Counter(node.how for node in self.nodes))

    def __repr__(self) -> str:
        if not self.call_by_call:
            return f"Members run one by one: {self.reason}."
        rows = [HEADER, *self.nodes]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join("  ".join(part.ljust(w) for part, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def decide(
    stacked: nn.Module, num_members: int, token: int, args: Sequence[Any], kwargs: dict[str, Any], *, own: bool
) -> Decision | None:
    """Compare members, outside of transforms and compilation; None where they cannot be compared.

    Tensors under `torch.func` transforms have their values, for `vmap` those of the first entry; inputs of a graph have
    random ones.
    """
    inputs, tensors = (list(args), kwargs), named_tensors(stacked)
    if _checks.can_compare():
        known = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) or x.is_meta for x in known):
            return None
        return _decide(stacked, num_members, token, *inputs, own=own)
    has_values = not any(isinstance(x, FakeTensor) or x.is_meta for x in tensors.values())
    if has_values and not _checks.is_eager():
        # members may fail on random values, such as an index
        with suppress(IndexError, RuntimeError), ExitStack() as stack:
            for context in (temporarily_clear_interpreter_stack, _disable_current_modes, _saved_tensor_hooks_enabled):
                stack.enter_context(context())
            stack.enter_context(replace_tensors(stacked, {name: _eager_value(x) for name, x in tensors.items()}))
            values = tree_map(lambda x: _eager_value(x) if isinstance(x, Tensor) else x, inputs)
            decision = _decide(stacked, num_members, token, *values, own=own)
            if not decision.has_nan:
                return decision
    warnings.warn(UNCHECKED, stacklevel=5)
    return None


def _decide(
    stacked: nn.Module, num_members: int, token: int, args: Sequence[Any], kwargs: dict[str, Any], *, own: bool
) -> Decision:
    """Compare outputs and gradients of some followed members with those alone, in float64 where members allow it."""
    devices = {parameter.device for parameter in stacked.parameters()}
    # checkpointing around the ensemble must not recompute this comparison; detached, as an output that its own node
    # saves would never be freed
    no_hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x)
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]), no_hooks:
        try:
            with ExitStack() as stack:
                for kind in {device.type for device in devices}:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                return _compare(
                    stacked, num_members, token, _to_double(list(args)), _to_double(kwargs), own, nn.Module.double
                )
        except Exception:  # members that need their own type, or fail in any
            pass
        return _compare(stacked, num_members, token, list(args), kwargs, own, lambda module: module)


@contextmanager
def _saved_tensor_hooks_enabled() -> Iterator[None]:
    """Allow hooks of saved tensors, which `torch.func.grad` disables."""
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    torch._C._autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        if message:
            torch._C._autograd._saved_tensors_hooks_disable(message)


def _eager_value(x: Tensor) -> Tensor:
    """Return the plain tensor inside a transformed one; numbers above 0 for a tensor without values."""
    plain, axes = x, []
    while torch._C._functorch.is_functorch_wrapped_tensor(plain):
        axes.append(torch._C._functorch.maybe_get_bdim(plain))
        plain = torch._C._functorch.get_unwrapped(plain)
    if isinstance(plain, (FakeTensor, FunctionalTensor)) or plain.is_meta:
        shape = [size if isinstance(size, int) else size.node.hint or 2 for size in x.shape]
        numbers = x.is_floating_point() or x.is_complex()
        values = torch.rand(shape, generator=torch.Generator().manual_seed(0)) if numbers else torch.ones(shape)
        return values.to(x.device, x.dtype)
    for axis in reversed(axes):
        plain = plain if axis < 0 else plain.select(axis, 0)
    return plain


def _to_double(value: Any) -> Any:
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, value)


def _compare(
    stacked: nn.Module, num_members: int, token: int, args: list[Any], kwargs: dict[str, Any], own: bool, cast: Any
) -> Decision:
    """Return the decision; raise the error of a member that fails alone."""
    sizes = [len(x) for x in tree_leaves(args) if isinstance(x, Tensor)] if own else []
    shares = num_members // min(sizes, default=num_members)  # members that share an input
    chosen = sorted({0, shares - 1, num_members - shares, num_members - 1})

    def select_inputs(index: Callable[[int], Any]) -> list[Any]:
        return tree_map(lambda x: x[index(len(x))] if own and isinstance(x, Tensor) else x, args)

    alone, buffers, members = [], [], [cast(take_members(stacked, k)) for k in chosen]
    for k, member in zip(chosen, members, strict=True):
        inputs = select_inputs(lambda size, k=k: k * size // num_members)  # type: ignore[misc]
        with _ConstantRandomness() as constant, handle_checkpointing(constant):
            output = open_output(member(*inputs, **kwargs))
        alone.append((tree_leaves(output), _gradients(output, member)))
        buffers.append(dict(member.named_buffers()))
    shared = set(all_shared_names(stacked)) if group_size(stacked) is None else set()
    _check_shared_buffers(buffers, shared)

    def one_by_one(reason: str) -> Decision:
        if len(members) > 1:
            members[-1](*inputs, **kwargs)  # a second time
            check_no_own_attributes(members[0], members[-1], reason)
        return Decision(False, reason)

    record: list[Node] = []
    mode = StackingMode(len(chosen), token, ConstantRNG(), record)
    together = cast(take_members(stacked, chosen))
    try:
        track_layers(together, mode)
        own_inputs = select_inputs(lambda size: sorted({k * size // num_members for k in chosen}))
        output = run_stacked(together, mode, own_inputs, kwargs, own=own)
        outputs, gradients = tree_leaves(output), _gradients(output, together)
    except Exception as error:
        reason = str(getattr(error, "reason", error)).split("\n")[0].rstrip(".")
        return one_by_one(reason or type(error).__name__)
    for name in shared & gradients.keys():  # the mean of the members' gradients
        mean = torch.stack([own_gradients[name] for _, own_gradients in alone]).mean(0)
        for _, own_gradients in alone:
            own_gradients[name] = mean
        gradients[name] = gradients[name].expand(len(alone), *mean.shape)
    for place, (own_outputs, own_gradients) in enumerate(alone):
        difference = _find_difference(place, outputs, gradients, own_outputs, own_gradients)
        if difference is not None:
            return one_by_one(difference)
    has_nan = any(isinstance(x, Tensor) and bool(x.isnan().any()) for own_outputs, _ in alone for x in own_outputs)
    return Decision(True, "", tuple(record), mode.largest, has_nan)


def _check_shared_buffers(members: list[dict[str, Tensor]], shared: set[str]) -> None:
    """Refuse a forward that writes other values into a shared buffer for each member."""
    first, last = members[0], members[-1]
    for name in shared & first.keys():
        if not torch.equal(first[name].nan_to_num(), last[name].nan_to_num()):
            raise ValueError(
                f"Members share the buffer {name!r}, but the forward writes values into it that differ between "
                "members. Put its layer in evaluation mode, or use StackedEnsemble, whose members have their own."
            )


def _gradients(output: Any, module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a bounded, smooth weighting of the output."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not outputs or not trained:
        return {}
    weights = [x.detach().tanh() + 0.5 for x in outputs]
    gradients = torch.autograd.grad(outputs, list(trained.values()), weights, allow_unused=True, materialize_grads=True)
    return dict(zip(trained, gradients, strict=True))


def _find_difference(
    place: int,
    outputs: list[Any],
    gradients: dict[str, Tensor],
    own_outputs: list[Any],
    own_gradients: dict[str, Tensor],
) -> str | None:
    """Describe how member `place` differs from the same member alone; None where it does not."""
    for ours, theirs in zip(outputs, own_outputs, strict=True):
        if not isinstance(theirs, Tensor) or theirs.isnan().any():
            continue
        if ours.shape[1:] != theirs.shape or not _is_close(ours[place], theirs, 1):
            return "the outputs differ from those of a member alone"
    # relative to all gradients too: a bias before BatchNorm has only rounding errors as gradient
    size = math.hypot(*(float(gradient.double().norm()) for gradient in own_gradients.values()))
    for name, gradient in own_gradients.items():
        if math.isfinite(size) and not _is_close(gradients[name][place], gradient, 10, size / 100):
            return f"the gradient of {name!r} differs from that of a member alone"
    return None


def _is_close(ours: Tensor, theirs: Tensor, factor: float, size: float = 0.0) -> bool:
    """Whether two tensors are equal up to amplified rounding; the error of a wrong rule is larger."""
    if theirs.dtype != ours.dtype:
        return False
    if not theirs.is_floating_point():
        return torch.equal(ours, theirs)
    autocast = torch.is_autocast_enabled(theirs.device.type)
    eps = torch.finfo(torch.get_autocast_dtype(theirs.device.type) if autocast else theirs.dtype).eps
    a, b = ours.double(), theirs.double()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return False
    a, b = a[finite], b[finite]
    return bool((a - b).norm() <= factor * eps**0.5 * (b.norm() + size) + eps)


class _ConstantRandomness(TorchFunctionMode):
    """Replace every random number of a member by a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = StackingMode(1, -1, ConstantRNG())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BODIES:
            with self:
                return BODIES[func](*args, **kwargs)
        random = func in RANDOM and kwargs.get("generator") is None
        if func is F.scaled_dot_product_attention:
            random = (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0)) > 0
        if func is Tensor.bernoulli_ and kwargs.get("generator") is None:
            RULES[func](self.mode, func, Stacked(args[0][None]), *args[1:], **kwargs)
            return args[0]
        if not random:
            return func(*args, **kwargs)
        result = RULES[func](self.mode, func, *args, **kwargs)
        if result is NotImplemented:
            result = self.mode.compute_without_rule(func, args, kwargs)
        return result.data[0] if isinstance(result, Stacked) and result.layout == FIRST else result
