"""Forward of a stacked module, whose tensors are `(K, ...)`: once for all members, or one by one."""

from __future__ import annotations

import copy
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_is_leaf, tree_map
from torch.utils.checkpoint import CheckpointFunction

from torchace import _checks
from torchace.functional import average_gradients
from torchace.nn.stacked_state import (
    all_shared_names,
    group_size,
    module_lock,
    named_tensors,
    replace_tensors,
    shared_names,
)
from torchace.nn.stacking.mode import (
    MARK,
    DataDependence,
    MemberRNG,
    StackingError,
    StackingMode,
    expand_groups,
    to_members,
)

CHECKPOINT = (
    "Expected members without reentrant activation checkpointing, which repeats one member's forward in the backward, "
    "not that of all. Use checkpoint(..., use_reentrant=False), or Ensemble(members)."
)


def run_stacked(
    stacked: nn.Module,
    mode: StackingMode,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    own: bool,
    layers: Iterable[nn.Module] | None = None,
) -> Any:
    """Run the module's forward once for all members; every returned tensor is `(K, ...)`.

    With `own`, `args` are `(G, ...)`, one per member or group of members; `kwargs` are shared. `layers` caches
    `stacked.modules()`.
    """
    buffers, replaced = [], []
    group = group_size(stacked)
    for module in stacked.modules() if layers is None else layers:
        shared = shared_names(module)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if name not in shared or group is not None:
                mode.mark(parameter)
            if name in shared and parameter.requires_grad and torch.is_grad_enabled():
                replaced.append((module, name, parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and (name not in shared or group is not None):
                buffers.append((module, name, mode.mark(buffer)))
                mode.buffers.add(id(buffer))
    if own:  # views: the caller's tensors stay unmarked
        args = [_mark(mode, x) if isinstance(x, Tensor) else tree_map(partial(_mark, mode), x) for x in args]
    try:
        for module, name, parameter in replaced:  # the weight, not activations: adapters keep their own gradients
            averaged = average_gradients(parameter, group or mode.num_members)
            module._parameters[name] = mode.mark(averaged) if group else averaged  # type: ignore[assignment]
        with mode, handle_checkpointing(mode, stacked):
            output = open_output(stacked(*args, **kwargs))
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter
    for module, name, buffer in buffers:
        now = module._buffers[name]
        if now is not buffer and now is not None:  # replaced instead of changed in place
            new = to_members(mode.to_stacked(now), mode.num_members).detach()
            if new.shape != buffer.shape:
                raise StackingError(f"the shape of buffer {name!r} changes")
            module._buffers[name] = buffer.copy_(new)
    return _unmark(mode, output) if isinstance(output, Tensor) else tree_map(partial(_unmark, mode), output)


def open_output(output: Any) -> Any:
    """Return the tensors in an object that `tree_map` would not open, such as the `logits` of a dataclass."""
    if isinstance(output, Tensor) or not tree_is_leaf(output):
        return output
    if isinstance(output, Mapping) and not hasattr(output, "logits"):
        return dict(output)
    return getattr(output, "logits", output)


def _mark(mode: StackingMode, value: Any) -> Any:
    return mode.mark(value[:]) if isinstance(value, Tensor) else value


def _unmark(mode: StackingMode, output: Any) -> Any:
    """Return an output as a plain tensor `(K, ...)`."""
    if not isinstance(output, Tensor):
        return output
    data = to_members(mode.to_stacked(output), mode.num_members)
    setattr(data, MARK, None)
    return data


def track_layers(module: nn.Module, mode: StackingMode) -> None:
    """Keep `mode.layer`, the name of the running layer, up to date; the hooks remain in the module."""
    running = [""]

    def enter(name: str, *_: Any) -> None:
        running.append(name)
        mode.layer = name

    def leave(*_: Any) -> None:
        running.pop()
        mode.layer = running[-1]

    for name, layer in module.named_modules():
        layer.register_forward_pre_hook(partial(enter, name), prepend=True)
        layer.register_forward_hook(leave, prepend=True)


# Followed forwards as one node of a `torch.compile` graph

_ensembles: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_tokens = itertools.count()


def register_ensemble(ensemble: nn.Module) -> int:
    """Return a token that identifies this ensemble in graphs and marks."""
    token = next(_tokens)
    if token == 0:  # not at import: it imports the compiler
        torch.compiler.allow_in_graph(run_stacked_in_graph)
        _follow_checkpoints()
    _ensembles[token] = ensemble
    return token


def run_stacked_in_graph(
    token: int,
    modes: tuple[bool, ...],
    own: bool,
    args: list[Any],
    kwargs: dict[str, Any],
    state: dict[str, Tensor],
    key: tuple[Tensor, Tensor, Tensor] | None,
) -> Any:
    """Call `run_stacked` as one node of a compiled graph; `key`: tensors of `MemberRNG`; new `modes` recompile."""
    ensemble = _ensembles[token]
    stacked, count = ensemble.stacked, ensemble.num_members
    rng = None if key is None else MemberRNG(*key)
    with module_lock(stacked):
        before = _numbers(stacked)
        decision = ensemble._decision(modes, args, kwargs, own=own)
        with replace_tensors(stacked, state):
            if decision is None or decision.call_by_call:
                output = run_stacked(stacked, StackingMode(count, token, rng), args, kwargs, own=own)
            else:
                output = _run_one_by_one_in_graph(stacked, count, args, kwargs, own, rng, decision.reason)
        changed = [name for name, value in _numbers(stacked).items() if before.get(name, value) != value]
    if changed and _checks.is_compiling():
        warnings.warn(
            f"The forward changes {changed[0]!r}, but a compiled graph keeps the number of its compilation. Make it a "
            "buffer (register_buffer).",
            stacklevel=2,
        )
    return ensemble.select_output(output)


def _numbers(stacked: nn.Module) -> dict[str, float]:
    """Return the unregistered numbers of all layers."""
    layers = stacked.named_modules()
    return {f"{n}.{a}".lstrip("."): v for n, layer in layers for a, v in vars(layer).items() if type(v) in (int, float)}


def _run_one_by_one_in_graph(
    stacked: nn.Module, num_members: int, args: Any, kwargs: Any, own: bool, rng: Any, reason: str
) -> Any:
    """Call `run_one_by_one`; a graph cannot depend on values."""
    found = DataDependence()  # type: ignore[no-untyped-call]
    try:
        with found:
            output = run_one_by_one(stacked, num_members, args, kwargs, own=own, rng=rng)
    except Exception as error:
        raise StackingError(reason) from error
    if found.any:
        raise StackingError(reason)
    return output


def run_one_by_one(
    stacked: nn.Module,
    num_members: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    own: bool,
    rng: MemberRNG | None = None,
) -> Any:
    """Run the forward of each member, with the arguments of `run_stacked`, where it cannot run once for all."""
    if own:
        args = tree_map(lambda x: expand_groups(x, num_members) if isinstance(x, Tensor) else x, list(args))
    parameters, buffers = named_tensors(stacked, "parameters"), named_tensors(stacked, "buffers")
    shared: dict[str, Tensor] = {}
    group = group_size(stacked)
    for name in all_shared_names(stacked):
        if name in parameters:
            shared[name] = average_gradients(parameters.pop(name), group or num_members)
        elif name in buffers:
            shared[name] = buffers.pop(name)
    outputs = []
    no_seeds: AbstractContextManager[list[int]] = nullcontext([])
    with handle_checkpointing(None), no_seeds if rng is None else rng.member_seeds() as seeds:
        for k in range(num_members):
            if seeds:
                torch.manual_seed(seeds[k])
            inputs = tree_map(lambda x, k=k: x[k] if own and isinstance(x, Tensor) else x, list(args))
            own_buffers = {name: buffer[k] for name, buffer in buffers.items()}
            state = {name: tensor[k // group] if group else tensor for name, tensor in shared.items()}
            state |= {name: parameter[k] for name, parameter in parameters.items()} | own_buffers
            outputs.append(open_output(functional_call(stacked, state, tuple(inputs), kwargs, tie_weights=False)))
            for name, buffer in own_buffers.items():
                if state[name] is not buffer:  # replaced instead of changed in place; set by functional_call
                    buffer.copy_(state[name].detach())
    return tree_map(lambda *parts: torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0], *outputs)


# Activation checkpointing inside the network

_local = threading.local()  # `start`: what `checkpoint` calls in this thread, within the forward of an ensemble
_start = torch.utils.checkpoint._checkpoint_without_reentrant_generator
_apply: Any = CheckpointFunction.apply


def _follow_checkpoints() -> None:
    """Let `checkpoint` call `_local.start`. For good: replaced for each call, threads would restore one another's."""

    def start(*args: Any, **kwargs: Any) -> Any:
        return (getattr(_local, "start", None) or _start)(*args, **kwargs)

    def apply(*args: Any) -> Any:
        return (_raise_checkpoint_error if getattr(_local, "start", None) else _apply)(*args)

    torch.utils.checkpoint._checkpoint_without_reentrant_generator = start
    CheckpointFunction.apply = apply  # type: ignore[method-assign]


@contextmanager
def handle_checkpointing(mode: TorchFunctionMode | None, module: nn.Module | None = None) -> Iterator[None]:
    """Let `checkpoint` recompute in a mode and with the tensors of this call; refuse reentrant ones, or all."""
    if not torch.is_grad_enabled() or _checks.is_compiling():
        yield
        return
    before = getattr(_local, "start", None)
    tensors: dict[str, Tensor] = {}

    def start_in_mode(function: Any, preserve: bool, context_fn: Any, *rest: Any, **kwargs: Any) -> Any:
        if module is not None and not tensors:
            tensors.update(named_tensors(module))
        start = _copy_mode(mode)
        marks = [getattr(value, MARK, None) for value in (*rest, *kwargs.values())]

        def contexts() -> tuple[Any, Any]:
            forward, recompute = context_fn()
            return forward, _Recomputation(
                lambda: (recompute, replace_tensors(module, tensors) if module else nullcontext(), _copy_mode(start))
            )

        def compute(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            for value, mark in zip(values, marks[len(marks) - len(values) :], strict=True):
                if mark is not None:  # hooks of saved tensors lose it
                    setattr(value, MARK, mark)
            return function(*args, **kwargs)

        return (before or _start)(compute, preserve, contexts, *rest, **kwargs)

    _local.start = _raise_checkpoint_error if mode is None else start_in_mode
    try:
        yield
    finally:
        _local.start = before


class _Recomputation:
    """Contexts that are made anew at every entry: each backward through a retained graph recomputes."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self.make, self.entered = make, ExitStack()

    def __enter__(self) -> None:
        for context in self.make():
            self.entered.enter_context(context)

    def __exit__(self, *error: Any) -> None:
        self.entered.__exit__(*error)


def _copy_mode(mode: Any) -> Any:
    """Return a copy that draws the same random numbers as the mode from here on."""
    copied = copy.copy(mode)
    if isinstance(copied, StackingMode):
        copied.rng = copy.copy(copied.rng)
    return copied


def _raise_checkpoint_error(*_: Any, **__: Any) -> Any:
    raise ValueError(CHECKPOINT)
