"""`torchace.sweep`: a sweep of a user's own network on the user's own data."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError
from torch import nn

from torchace.lab.schema.experiment import DataSection, Experiment, ModelSection, Section, SweepSection, TrainSection
from torchace.lab.schema.hyperparameters import to_python
from torchace.lab.schema.reading import GIVEN, capitalize, describe_error, did_you_mean
from torchace.lab.store import RunStoreError
from torchace.lab.sweeps.callbacks import make_callbacks
from torchace.lab.sweeps.config import Components, ConfigError, check_arguments, import_object
from torchace.lab.sweeps.executor import make_executor, process_group
from torchace.lab.sweeps.fingerprint import object_name
from torchace.lab.sweeps.result import SweepResult
from torchace.lab.sweeps.sweep import Sweep
from torchace.lab.training.distributed import all_gather, is_launched
from torchace.lab.training.loop import Interrupted

MAX_SEEDS = 10_000  # as a number; a longer list is possible
_SECTIONS: dict[str, type[Section]] = {
    "sweep": SweepSection,
    "train": TrainSection,
    "data": DataSection,
    "model": ModelSection,
}
_BUILTIN = {"factory", "file", "test_file", "validation_file", "test", "name"}  # of built-in data and networks
_BUILTIN |= {"network", "hidden", "dropout", "depth", "width", "head_scale"}
# settings with their section of a TOML file
_SETTINGS = {key: name for name, section in _SECTIONS.items() for key in section.model_fields if key not in _BUILTIN}


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
    device: str | int | torch.device = "auto",
    out: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> SweepResult:
    """Train an ensemble for every λ and seed, all as one stacked network, and compare them.

    All λ of a seed start from the same weights and see the same batches, so that their differences are paired.

    Args:
        member: Function that returns one new member: a module that maps inputs `(N, ...)` to logits `(N, C)`; or its
            name, `"package.module:function"`. For kind `"smoc"` and `"branch"` it may return a whole ensemble.
        train: Training data `(X, y)` as tensors or arrays, a DataFrame (see `target`), or a map-style `Dataset`.
        test: Test data of the same kind. It takes no part in training.
        num_members: K, the members of each ensemble.
        diversities: The values of λ in [0, 1]; 0 is a deep ensemble.
        seeds: Number of seeds (0, 1, ...), or a list of seeds.
        epochs: Passes over the training data; alternatively `steps`, the number of optimizer steps.
        steps: Optimizer steps.
        batch_size: Samples in a batch.
        optimizer: `"adam"`, `"adamw"`, `"sgd"`, a `torch.optim` class, or a function of the parameters.
        learning_rate: Learning rate, or a list of values, which adds an axis to the sweep.
        kind: What members share: `"separate"` nothing, `"branch"` the layers before `at`, `"adapters"` all but small
            adapters, `"smoc"` all but the last layer.
        task: `"classification"`, `"multilabel"` or `"regression"`.
        batches: `"shared"`, `"separate"` (λ=0 only) or `"exchanged"`.
        validation: Validation data, or a fraction of the training samples; for `best()` and early stopping.
        metrics: Further metrics: functions of logits `(K, N, C)` and target, or torchmetrics metrics.
        callbacks: Callbacks, and trackers by name: `"csv"`, `"tensorboard"`, `"mlflow"` or `"wandb"`.
        device: `"cpu"`, `"cuda"`, `"cuda:N"` or its number, or `"auto"`.
        out: Run directory, from which a later call resumes. By default a temporary one, removed with the result.
        **settings: `arguments` of `member`; `at`, `rank`, `adapter`, `layers`, `freeze`, `head` of the kind; `target`
            (column or key), `num_classes`, `transform`, `limit` and `stream` of the data; `weight_decay`, `schedule`,
            `patience` and others of the training; `group_size`, `keep_weights`, `ray`, `parallel`, `name`, `title`.
            The guides on sweeps and experiments describe them.

    Returns:
        The results of all runs.

    Example:
        >>> x, y = torch.randn(200, 4), torch.randint(3, (200,))
        >>> result = sweep(lambda: nn.Linear(4, 3), (x, y), (x, y), diversities=[0, 0.5], seeds=2, epochs=1)
        >>> result.to_frame()[["diversity", "seed"]].values.tolist()
        [[0.0, 0.0], [0.0, 1.0], [0.5, 0.0], [0.5, 1.0]]
    """
    where = {name: settings.pop(name, None) for name in ("ray", "parallel")}
    for name, value in {"out": out, **where}.items():
        if value is not None and (not isinstance(value, str | os.PathLike) or not os.fspath(value)):
            raise TypeError(f"Expected `{name}` to be {'a path' if name == 'out' else 'text'}, but got {value!r}.")
    settings |= {
        "num_members": num_members,
        "diversities": diversities,
        "seeds": seeds,
        "epochs": epochs,
        "steps": steps,
    }
    settings |= {"batch_size": batch_size, "learning_rate": learning_rate, "kind": kind, "task": task}
    validation = to_python(validation) if getattr(validation, "ndim", None) == 0 else validation
    is_fraction = validation is None or isinstance(validation, Real)
    settings |= {"batches": batches, "validation": validation if is_fraction else None}
    data = (train, test) if is_fraction else (train, validation, test)
    components = _make_components(member, data, optimizer, _as_list(metrics), settings)
    return _run(_parse(settings, components), components, _as_list(callbacks), out, device=device, **where)


def _make_components(
    member: Any, data: tuple[Any, ...], optimizer: Any, metrics: list[Any], settings: dict[str, Any]
) -> Components:
    """Return the objects of a sweep, and replace them in the settings by their names."""
    if isinstance(member, str):
        member = import_object(member, "member")
    if isinstance(member, nn.Module) or not callable(member):
        raise TypeError(
            f"Expected `member` to be a function that returns a new module, but got {type(member).__name__}. Use "
            "lambda: ..., so that every member starts with its own weights."
        )
    arguments = settings.get("arguments")
    check_arguments(member, {} if arguments is None else arguments, "arguments")
    if settings.get("target") is not None and all(isinstance(part, tuple) for part in data):
        raise ConfigError(
            "Expected a DataFrame or a Dataset for `target`, its column or key, but got (X, y). Leave `target` out."
        )
    transform = settings.get("transform")
    metrics = [import_object(m, "metrics") if isinstance(m, str) and ":" in m else m for m in metrics]
    for metric in metrics:
        if not callable(metric):
            raise TypeError(
                f"Expected `metrics` to be a list of functions, but got {metric!r} in it. Use functions of logits "
                "(K, N, C) and target, or names such as 'package.module:function'."
            )
    if isinstance(optimizer, str) and ":" in optimizer:
        optimizer = import_object(optimizer, "optimizer")
    if not isinstance(optimizer, str) and not callable(optimizer):
        kind = type(optimizer).__name__
        use = f"{kind} with optimizer_arguments" if isinstance(optimizer, torch.optim.Optimizer) else "'adam'"
        raise TypeError(
            f"Expected `optimizer` to be a class, a function of the parameters or a name, but got an object of type "
            f"{kind}. Use {use}."
        )
    settings["optimizer"] = optimizer if isinstance(optimizer, str) else object_name(optimizer)
    settings["metrics"] = [object_name(metric) for metric in metrics]
    settings["transform"] = None if transform is None else object_name(transform)
    return Components(member, data, None if isinstance(optimizer, str) else optimizer, tuple(metrics), transform)


def _parse(settings: dict[str, Any], components: Components) -> Experiment:
    """Return the experiment; errors have the names of the arguments of `sweep`."""
    content: dict[str, Any] = {key: settings.pop(key) for key in ("name", "title") if key in settings}
    content = {"name": "sweep", **content, **{section: {} for section in _SECTIONS}}
    for key, value in settings.items():
        if key not in _SETTINGS:
            hint = did_you_mean({"lr": "learning_rate"}.get(key, key), [*_SETTINGS, *(sweep.__kwdefaults__ or ())])
            raise TypeError(f"sweep() got an unexpected keyword argument {key!r}.{hint}")
        if value is not None or key in ("batch_size", "diversities", "learning_rate", "seeds"):  # these need a value
            content[_SETTINGS[key]][key] = to_python(value)
    content["data"]["name"], content["model"]["factory"] = GIVEN, object_name(components.member)
    kind, runs = settings["kind"], content["sweep"]
    for name, kinds in {"at": ("branch",), "adapter": ("adapters",), "head": ("smoc", "adapters")}.items():
        if name in content["model"] and kind not in kinds:
            raise ConfigError(f"`{name}` needs kind={' or '.join(map(repr, kinds))}, but got kind={kind!r}.")
    for name, one in {"diversities": float, "seeds": int}.items():
        value = runs[name]
        if isinstance(value, bool) or not isinstance(value, list | int | one):
            what = "a whole number" if one is int else "a number"
            raise ConfigError(f"Expected {name} to be {what} or a list, but got {value!r}.")
    if isinstance(runs["diversities"], int | float):
        runs["diversities"] = [runs["diversities"]]
    if isinstance(runs["seeds"], int):
        if not 1 <= runs["seeds"] <= MAX_SEEDS:
            raise ConfigError(f"Expected 1 to {MAX_SEEDS} seeds, but got seeds={runs['seeds']}.")
        runs["seeds"] = list(range(runs["seeds"]))
    try:
        experiment = Experiment.model_validate(content)
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


def _run(
    experiment: Experiment,
    components: Components,
    callbacks: list[Any],
    out: str | os.PathLike[str] | None,
    *,
    device: str | int | torch.device,
    ray: str | None,
    parallel: str | None,
) -> SweepResult:
    """Train the sweep; warn about failed runs."""
    if parallel is not None and not is_launched():
        raise ConfigError(f"parallel={parallel!r} needs several processes: torchrun --nproc-per-node=N script.py.")
    with process_group(parallel) as rank:  # None: a single process
        directory = Path(tempfile.mkdtemp(prefix="torchace-sweep-") if out is None else out)
        result = SweepResult(directory, components, temporary=out is None)
        try:
            with make_executor(experiment, device, ray=ray, parallel=parallel, rank=rank) as executor:
                directory = Path(executor.broadcast(str(directory)))
                callback = make_callbacks(() if rank else callbacks, directory, experiment)
                with _stop_on_interrupt() as stop:
                    failures = Sweep(experiment, directory, executor, components).run(callback, stop)
                executor.broadcast(None)  # the other ranks wait until all files are written
                if out is not None:
                    result.directory = directory
                elif rank:
                    shutil.copytree(directory, result.directory, dirs_exist_ok=True)
                if rank is not None:
                    all_gather([])  # the first rank may remove its directory from here on
        except (ConfigError, RunStoreError) as error:
            text = re.sub(rf"^({'|'.join(_SECTIONS)})\.", "", str(error).replace("--out", "`out`"))
            raise type(error)(re.sub("--(parallel|ray) ", r"\1=", text)) from error
    if failures:
        names = ", ".join(f"λ={run.diversity:g} with seed {run.seed}" for run in list(failures)[:5])
        more = ", ..." if len(failures) > 5 else ""
        reason = next(iter(failures.values())).message
        warnings.warn(f"{len(failures)} runs failed ({reason}): {names}{more}.", stacklevel=3)
    return result


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after Ctrl-C, to write a checkpoint; a second Ctrl-C ends at once."""
    received = threading.Event()

    def receive(number: int, frame: Any) -> None:
        if received.is_set():
            raise KeyboardInterrupt
        received.set()

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, receive)
    try:
        yield received.is_set
    except Interrupted:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if received.is_set():
        raise KeyboardInterrupt


def _as_list(value: Any) -> list[Any]:
    """Return one value or several as a list."""
    if value is None:
        return []
    is_one = isinstance(value, str) or callable(value) or not isinstance(value, Iterable)
    return [value] if is_one else list(value)
