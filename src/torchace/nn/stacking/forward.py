"""Forward of a stacked module, whose tensors are `(K, ...)`: followed call by call, or under `torch.func.vmap`."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointFunction

from torchace.functional import average_gradients
from torchace.nn.architecture import not_stackable
from torchace.nn.stacked_state import (
    all_shared_names,
    named_tensors,
    recomputed_names,
    replace_tensors,
    shared_names,
    take_members,
)
from torchace.nn.stacking.mode import MARK, StackingError, StackingMode
from torchace.nn.stacking.rng import MemberRNG
from torchace.nn.stacking.values import expand_groups, to_members

CHECKPOINT = (
    "activation checkpointing inside a member cannot be computed for all members at once; remove it and checkpoint "
    "the ensemble: torch.utils.checkpoint.checkpoint(ensemble, x, use_reentrant=False)"
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
    buffers, recomputed, replaced = [], [], []
    for module in stacked.modules() if layers is None else layers:
        shared = shared_names(module)
        if module._forward_pre_hooks:
            recomputed += [(module, name) for name in recomputed_names(module)]
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if name not in shared:
                mode.mark(parameter)
            elif parameter.requires_grad and torch.is_grad_enabled():
                replaced.append((module, name, parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in shared:
                buffers.append((module, name, mode.mark(buffer)))
                mode.buffers.add(id(buffer))
    if own:  # views: the caller's tensors stay unmarked
        args = [tree_map(lambda x: mode.mark(x[:]) if isinstance(x, Tensor) else x, x) for x in args]
    try:
        for module, name, parameter in replaced:  # the weight, not activations: adapters keep their own gradients
            module._parameters[name] = average_gradients(parameter, mode.num_members)  # type: ignore[assignment]
        with mode, _recompute_in(mode, stacked):
            output = stacked(*args, **kwargs)
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter
    for module, name in recomputed:  # valid during this call only
        vars(module)[name] = None
    for module, name, buffer in buffers:
        now = module._buffers[name]
        if now is not buffer and now is not None:  # replaced instead of changed in place
            new = to_members(mode.value_of(now), mode.num_members).detach()
            if new.shape != buffer.shape:
                raise StackingError(f"the shape of buffer {name!r} changes")
            module._buffers[name] = buffer.copy_(new)
    return _unmark(mode, output) if isinstance(output, Tensor) else tree_map(partial(_unmark, mode), output)


def _unmark(mode: StackingMode, output: Any) -> Any:
    """Return an output as a plain tensor `(K, ...)`."""
    if not isinstance(output, Tensor):
        return output
    data = to_members(mode.value_of(output), mode.num_members)
    setattr(data, MARK, None)
    return data


@contextmanager
def track_layers(module: nn.Module, mode: StackingMode) -> Iterator[None]:
    """Keep `mode.layer`, the name of the running layer, up to date."""
    names = {inner: name for name, inner in module.named_modules()}
    running = [""]

    def enter(inner: nn.Module, _: Any) -> None:
        running.append(names.get(inner, running[-1]))
        mode.layer = running[-1]

    def leave(*_: Any) -> None:
        running.pop()
        mode.layer = running[-1]

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# Followed forwards as one node of a `torch.compile` graph

_ensembles: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_tokens = itertools.count()
_allowed = False


def register_ensemble(ensemble: nn.Module) -> int:
    """Return a token that identifies this ensemble in graphs and marks."""
    global _allowed
    if not _allowed:
        torch.compiler.allow_in_graph(run_stacked_in_graph)
        _allowed = True
    token = next(_tokens)
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
    rng = None if key is None else MemberRNG(*key)
    with replace_tensors(ensemble.stacked, state):
        return run_stacked(ensemble.stacked, StackingMode(ensemble.num_members, token, rng), args, kwargs, own=own)


# Whole networks under `vmap`, for a forward that cannot be followed


def run_under_vmap(
    stacked: nn.Module, num_members: int, args: Sequence[Any], kwargs: dict[str, Any], *, own: bool
) -> Any:
    """Compute all members under `vmap`, with the arguments of `run_stacked`; name the layer that fails."""
    if own:
        args = tree_map(lambda x: expand_groups(x, num_members) if isinstance(x, Tensor) else x, list(args))
    try:
        return _vmap_members(stacked, num_members, args, kwargs, own=own)
    except Exception as error:
        stopped = type(error).__name__ == "_StopRecomputationError"  # from checkpointing around the call
        if torch.compiler.is_compiling() or stopped:
            raise
        raise _explain_failure(stacked, num_members, error, args, kwargs, own=own) from error


def _vmap_members(
    stacked: nn.Module, num_members: int, args: Sequence[Any], kwargs: dict[str, Any], *, own: bool
) -> Any:
    parameters, buffers = named_tensors(stacked, "parameters"), named_tensors(stacked, "buffers")

    def run_member(parameters: dict[str, Tensor], buffers: dict[str, Tensor], *args: Any) -> Any:
        state = {**parameters, **buffers}
        output = functional_call(stacked, state, args, kwargs, tie_weights=False)
        for name, before in buffers.items():
            if state[name] is not before:  # updated by functional_call
                raise _ReplacedBufferError(name)
        return output

    shared = set(all_shared_names(stacked))
    axes = [{name: None if name in shared else 0 for name in held} for held in (parameters, buffers)]
    parameters = {n: average_gradients(p, num_members) if n in shared else p for n, p in parameters.items()}
    in_dims = (*axes, *(0 if own and any(isinstance(v, Tensor) for v in tree_leaves(x)) else None for x in args))
    with _prepare_for_vmap(stacked):
        return vmap(run_member, in_dims=in_dims, randomness="different")(parameters, buffers, *args)


class _ReplacedBufferError(Exception):
    """A member replaced the named buffer instead of changing it in place."""


def _explain_failure(
    stacked: nn.Module, num_members: int, error: Exception, args: Sequence[Any], kwargs: dict[str, Any], *, own: bool
) -> Exception:
    """Return the first member's error, or one that names the layer that `vmap` cannot compute."""
    if isinstance(error, _ReplacedBufferError):
        layer, _, buffer = str(error).rpartition(".")
        return not_stackable(stacked, layer, f"it replaces its buffer {buffer!r} instead of changing it in place")
    try:
        take_members(stacked, 0)(
            *(tree_map(lambda x: x[0] if isinstance(x, Tensor) else x, list(args)) if own else args), **kwargs
        )
    except Exception as member_error:
        return member_error
    tracker = StackingMode(1, -1)
    try:
        with track_layers(stacked, tracker):
            _vmap_members(stacked, num_members, args, kwargs, own=own)
    except Exception:
        return not_stackable(stacked, tracker.layer, str(error).split("\n")[0].rstrip("."))
    return error


@contextmanager
def _prepare_for_vmap(stacked: nn.Module) -> Iterator[None]:
    if torch.compiler.is_compiling():
        yield
        return
    layers = list(stacked.modules())
    with ExitStack() as stack:
        for layer in layers:
            averages = isinstance(layer, _BatchNorm) and layer.training and layer.momentum is None
            if averages and layer.num_batches_tracked is not None:
                stack.enter_context(_cumulative_average(layer))
        stack.enter_context(refuse_checkpointing())
        try:
            yield
        finally:
            for layer in layers:  # valid during this call only
                for name in recomputed_names(layer):
                    vars(layer)[name] = None


@contextmanager
def _cumulative_average(layer: Any) -> Iterator[None]:
    """Set `momentum=None` to 1/count, because `vmap` cannot read a count."""
    counts = layer.num_batches_tracked.unique().tolist()
    if len(counts) > 1:
        raise ValueError(
            f"Expected members with the same number of batches in a BatchNorm layer with momentum=None, but got "
            f"{counts[0]} to {counts[-1]}. Call the layer's reset_running_stats(), or use Ensemble(members)."
        )

    def count(layer: Any, _: Any) -> None:  # a layer may be called several times
        counts[0] += 1
        layer.momentum = 1 / counts[0]

    hook = layer.register_forward_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()
        layer.momentum = None


# Activation checkpointing inside the network


@contextmanager
def _recompute_in(mode: StackingMode, stacked: nn.Module) -> Iterator[None]:
    """Let `checkpoint` recompute a part of the forward in the mode, with the tensors of this call."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        yield
        return
    apply = CheckpointFunction.apply
    start = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    tensors: dict[str, Tensor] = {}

    def start_in_mode(function: Any, preserve: bool, context_fn: Any, *args: Any, **kwargs: Any) -> Any:
        if not tensors:
            tensors.update({**named_tensors(stacked, "parameters"), **named_tensors(stacked, "buffers")})

        def contexts() -> tuple[Any, Any]:
            forward, recompute = context_fn()
            return forward, _enter(recompute, replace_tensors(stacked, tensors), mode)

        return start(function, preserve, contexts, *args, **kwargs)

    torch.utils.checkpoint._checkpoint_without_reentrant_generator = start_in_mode
    CheckpointFunction.apply = _raise_reentrant_error  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.utils.checkpoint._checkpoint_without_reentrant_generator = start
        CheckpointFunction.apply = apply  # type: ignore[method-assign]


@contextmanager
def _enter(*contexts: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _raise_reentrant_error(*_: Any) -> Any:
    raise StackingError("activation checkpointing inside a member needs use_reentrant=False")


@contextmanager
def refuse_checkpointing() -> Iterator[None]:
    """Make `checkpoint` raise an error: its backward would run the forward without the mode."""
    if not torch.is_grad_enabled():
        yield
        return
    hooks = torch._C._autograd
    enabled = hooks._saved_tensors_hooks_get_disabled_error_message() is None
    apply = CheckpointFunction.apply
    if enabled:
        hooks._saved_tensors_hooks_disable(CHECKPOINT, False)
    CheckpointFunction.apply = _raise_checkpoint_error  # type: ignore[method-assign]
    try:
        yield
    finally:
        CheckpointFunction.apply = apply  # type: ignore[method-assign]
        if enabled:
            hooks._saved_tensors_hooks_enable()


def _raise_checkpoint_error(*_: Any) -> Any:
    raise RuntimeError(CHECKPOINT)
