"""`torchace.sweep`: a sweep of a user's own network on the user's own data."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError
from torch import nn

from torchace.lab.schema.experiment import Experiment, TrainSection
from torchace.lab.schema.hyperparameters import to_python
from torchace.lab.schema.reading import GIVEN, capitalize, describe_error, did_you_mean
from torchace.lab.store import RunStoreError
from torchace.lab.sweeps.callbacks import make_callbacks
from torchace.lab.sweeps.config import Components, ConfigError, check_arguments, import_object
from torchace.lab.sweeps.executor import make_executor, process_group
from torchace.lab.sweeps.fingerprint import object_name
from torchace.lab.sweeps.result import SweepResult
from torchace.lab.sweeps.sweep import Sweep
from torchace.lab.training.distributed import is_launched
from torchace.lab.training.loop import Interrupted

_DATA_SETTINGS = ("stream", "num_workers", "limit", "normalize", "augment")  # of `[data]`
_SECTIONS = ("data", "model", "train", "sweep")


def sweep(
    member: Callable[..., nn.Module] | str,
    train: Any,
    test: Any,
    *,
    num_members: int = 5,
    diversities: float | Sequence[float] = (0.0, 0.1, 0.3, 0.5, 0.7),
    seeds: int | Sequence[int] = 5,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int = 128,
    optimizer: str | Callable[..., Any] = "adam",
    learning_rate: float | Sequence[float] = 1e-3,
    kind: str = "separate",
    task: str = "classification",
    batches: str = "shared",
    validation: Any = 0.0,
    metrics: Any = None,
    callbacks: Any = (),
    device: str | torch.device = "auto",
    out: str | os.PathLike[str] | None = None,
    arguments: Mapping[str, Any] | None = None,
    target: str | Sequence[str] | None = None,
    num_classes: int | None = None,
    transform: Callable[..., Any] | None = None,
    at: str | None = None,
    rank: int | None = None,
    adapter: str | None = None,
    layers: str | Sequence[str] | None = None,
    freeze: bool = False,
    head: str | None = None,
    group_size: int | None = None,
    keep_weights: bool | str = "auto",
    ray: str | None = None,
    parallel: str | None = None,
    name: str = "sweep",
    title: str = "",
    **settings: Any,
) -> SweepResult:
    """Train an ensemble for every λ and seed, all as one stacked network, and compare them.

    All λ of a seed start from the same weights and see the same batches, so that their differences are paired. With
    `out`, the sweep resumes after an interruption: finished runs are not trained again.

    Args:
        member: Function or class that returns one new member: a module that maps inputs `(N, ...)` to logits `(N, C)`.
            It is called once for every seed and member, with random numbers seeded by both. For kind `"smoc"` and
            `"branch"` it may return a whole ensemble. Text such as `"package.module:function"` is imported.
        train: Training data: inputs and targets `(X, y)` as tensors or arrays, a DataFrame (see `target`), or a
            map-style `torch.utils.data.Dataset`.
        test: Test data of the same kind. It takes no part in training.
        num_members: K, the members of each ensemble.
        diversities: The values of λ in [0, 1]; 0 is a deep ensemble.
        seeds: Number of seeds (0, 1, ...), or a list of seeds.
        epochs: Passes over the training data; alternatively `steps`.
        steps: Optimizer steps.
        batch_size: Samples in a batch.
        optimizer: `"adam"`, `"adamw"`, `"sgd"`, a `torch.optim` class, or a function of the parameters.
        learning_rate: Learning rate, or a list of values, which adds an axis to the sweep.
        kind: What members share: `"separate"` nothing, `"branch"` the layers before `at`, `"adapters"` all but small
            adapters, `"smoc"` all but the last layer.
        task: `"classification"`, `"multilabel"` or `"regression"`.
        batches: `"shared"`, `"separate"` (λ=0 only) or `"exchanged"`.
        validation: Validation data of the same kind, or a fraction of the training samples (stratified by class); for
            `best()` and early stopping.
        metrics: Further metrics: functions of logits `(K, N, C)` and target, or torchmetrics metrics.
        callbacks: Callbacks of the sweep, and trackers by name: `"csv"`, `"tensorboard"`, `"mlflow"` or `"wandb"`.
        device: `"cpu"`, `"cuda"`, `"cuda:N"`, or `"auto"`.
        out: Run directory. By default a temporary one, removed with the result.
        arguments: Keyword arguments of `member`.
        target: Target column of a DataFrame, or several; or key of the target in the items of a Dataset.
        num_classes: C, if some classes are missing from the data.
        transform: Function of a batch of inputs, called on the device, in training and evaluation; a parameter
            `training` says which.
        at: Name of the first layer of the members, for kind `"branch"`.
        rank: Rank of heads or adapters, for kind `"smoc"` and `"adapters"`.
        adapter: `"multiplicative"` or `"low_rank"`, for kind `"adapters"`. By default low rank if `rank` is given.
        layers: Names of the adapted layers, for kind `"adapters"`; see `adapt`.
        freeze: Whether to train adapters and heads alone, for kind `"adapters"`.
        head: Name of the layer that is not shared, for kind `"smoc"` and `"adapters"`; by default the last
            linear layer.
        group_size: Largest number of runs trained together.
        keep_weights: Whether to keep the weights for `SweepResult.ensemble`; `"auto"` keeps small ones.
        ray: Address of a Ray cluster, or `"auto"`.
        parallel: Under torchrun, what the processes split: `"data"` (the default), `"members"`, or `"MxD"` for both.
        name: Name of the experiment: lowercase letters, digits and underscores.
        title: Title of the report.
        **settings: Other settings of `[train]` in a TOML file: `optimizer_arguments`, `weight_decay`, `schedule`,
            `milestones`, `warmup_steps`, `label_smoothing`, `patience`, `precision`, `momentum`, ... And of `[data]`:
            `stream` (True to read a Dataset while training), `num_workers`, `limit`, `normalize`, `augment`.

    Returns:
        The results of all runs.

    Raises:
        ValueError: The settings, the network or the data cannot be used; the message says why.

    Example:
        >>> x, y = torch.randn(200, 4), torch.randint(3, (200,))
        >>> result = sweep(
        ...     lambda: nn.Linear(4, 3), (x[:150], y[:150]), (x[150:], y[150:]), num_members=3, diversities=[0, 0.5],
        ...     seeds=2, epochs=1, batch_size=50
        ... )
        >>> result.to_frame()[["diversity", "seed"]].values.tolist()
        [[0.0, 0.0], [0.0, 1.0], [0.5, 0.0], [0.5, 1.0]]
    """
    function = _check_member(member, arguments or {})
    metrics = [import_object(m, "metrics") if isinstance(m, str) and ":" in m else m for m in _as_list(metrics)]
    for metric in metrics:
        if not callable(metric):
            raise TypeError(f"Expected `metrics` to be a list of functions, but got {type(metric).__name__} in it.")
    _check_options(kind, optimizer, at=at, adapter=adapter, head=head)
    is_fraction = validation is None or isinstance(validation, Real)
    fraction = (validation or 0.0) if is_fraction else 0.0
    content: dict[str, Any] = {
        "name": name,
        "title": title,
        "data": {"name": GIVEN, "task": task, "validation": fraction, "target": target, "num_classes": num_classes},
        "model": {"factory": object_name(function), "arguments": dict(arguments or {}), "kind": kind, "freeze": freeze},
        "train": {"batch_size": batch_size, "batches": batches, "learning_rate": learning_rate},
        "sweep": {"group_size": group_size, "keep_weights": keep_weights},
    }
    for key, value in settings.items():
        content["data" if key in _DATA_SETTINGS else "train"][key] = value
    diversities, seeds = to_python(diversities), to_python(seeds)
    if isinstance(seeds, int) and seeds < 1:
        raise ConfigError(f"Expected at least 1 seed, but got seeds={seeds}.")
    content["sweep"]["diversities"] = [diversities] if isinstance(diversities, int | float) else diversities
    content["sweep"]["seeds"] = range(seeds) if isinstance(seeds, int) else seeds
    content["model"] |= _drop_none(num_members=num_members, at=at, rank=rank, adapter=adapter, layers=layers, head=head)
    content["train"] |= _drop_none(epochs=epochs, steps=steps)
    content["train"]["optimizer"] = optimizer if isinstance(optimizer, str) else object_name(optimizer)
    content["train"]["metrics"] = [object_name(metric) for metric in metrics]
    if transform is not None:
        content["data"]["transform"] = object_name(transform)
    experiment = _parse(content, settings)
    if isinstance(optimizer, str) and ":" in optimizer:
        optimizer = import_object(optimizer, "optimizer")
    components = Components(
        member=function,
        data=(train, test) if is_fraction else (train, validation, test),
        optimizer=None if isinstance(optimizer, str) else optimizer,
        metrics=tuple(metrics),
        transform=transform,
    )
    if parallel is not None and not is_launched():
        raise ConfigError(f"parallel={parallel!r} needs several processes: torchrun --nproc-per-node=N script.py.")
    with process_group(parallel) as process:  # None: a single process
        temporary = out is None and not process
        directory = Path(tempfile.mkdtemp(prefix="torchace-sweep-")) if temporary else Path(out or "")
        result = SweepResult(directory, components, temporary=temporary)
        try:
            with make_executor(
                experiment, directory, str(device), ray=ray, parallel=parallel, rank=process
            ) as executor:
                result.directory = directory = Path(executor.broadcast(str(directory)))
                listeners = make_callbacks(() if process else _as_list(callbacks), directory, experiment)
                with _stop_on_interrupt() as stop:
                    failures = Sweep(experiment, directory, executor, components).run(listeners, stop)
                executor.broadcast(None)  # the other ranks wait until all files are written
        except (ConfigError, RunStoreError) as error:
            text = re.sub(rf"^({'|'.join(_SECTIONS)})\.", "", str(error).replace("--out", "`out`"))
            raise type(error)(text.replace("--parallel ", "parallel=")) from error
    if failures:
        names = ", ".join(f"λ={run.diversity:g} with seed {run.seed}" for run in list(failures)[:5])
        more = ", ..." if len(failures) > 5 else ""
        reason = next(iter(failures.values())).message
        warnings.warn(f"{len(failures)} runs failed ({reason}): {names}{more}.", stacklevel=2)
    return result


def _check_member(member: Any, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the factory; refuse modules and arguments that do not fit."""
    if isinstance(member, str):
        member = import_object(member, "member")
    if isinstance(member, nn.Module):
        raise TypeError(
            f"Expected `member` to be a function that returns a new module, but got a {type(member).__name__}. Use "
            "lambda: ..., so that every member starts with its own weights."
        )
    if not callable(member):
        raise TypeError(f"Expected `member` to be a function that returns a module, but got {type(member).__name__}.")
    check_arguments(member, arguments, "arguments")
    function: Callable[..., Any] = member
    return function


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after Ctrl-C, to write a checkpoint; a second Ctrl-C ends at once."""
    received, started = list[int](), list[bool]()

    def receive(number: int, _: Any) -> None:
        if received or not started:
            raise KeyboardInterrupt
        received.append(number)

    def stop() -> bool:
        started[:] = [True]
        return bool(received)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, receive)
    try:
        yield stop
    except Interrupted:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if received:
        raise KeyboardInterrupt


def _check_options(kind: str, optimizer: Any, **options: Any) -> None:
    """Refuse an optimizer object, and options that another kind of ensemble uses."""
    if not isinstance(optimizer, str) and not callable(optimizer):
        raise TypeError(
            f"Expected `optimizer` to be a class, a function of the parameters or a name, but got an object of type "
            f"{type(optimizer).__name__}. Use {type(optimizer).__name__} with optimizer_arguments."
        )
    for name, kinds in {"at": ("branch",), "adapter": ("adapters",), "head": ("smoc", "adapters")}.items():
        if options[name] is not None and kind not in kinds:
            needed = " or ".join(f"kind={value!r}" for value in kinds)
            raise ConfigError(f"`{name}` needs {needed}, but got kind={kind!r}.")


def _as_list(value: Any) -> list[Any]:
    """Return one value or several as a list."""
    if value is None:
        return []
    is_one = isinstance(value, str) or callable(value) or not isinstance(value, Iterable)
    return [value] if is_one else list(value)


def _drop_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _parse(content: dict[str, Any], settings: Mapping[str, Any]) -> Experiment:
    """Return the experiment; errors have the names of the arguments of `sweep`."""
    known = {*TrainSection.model_fields, *_DATA_SETTINGS}
    for key in settings:
        if key not in known:
            hint = did_you_mean(key, [*known, *(sweep.__kwdefaults__ or ())])
            raise TypeError(f"sweep() got an unexpected keyword argument {key!r}.{hint}")
    try:
        experiment = Experiment.model_validate(to_python(content))
        experiment.model_dump_json()
        return experiment
    except PydanticSerializationError:
        raise ConfigError(
            "Expected `arguments` and `optimizer_arguments` of numbers, text, lists and dicts; give other values with "
            "functools.partial(member, ...)."
        ) from None
    except ValidationError as error:

        def argument(key: str) -> str:  # for a key such as `train.epochs`; none for a section
            return next((part for part in key.split(".") if part not in _SECTIONS), "")

        raise ConfigError(capitalize(describe_error(error, Experiment, name=argument))) from None
