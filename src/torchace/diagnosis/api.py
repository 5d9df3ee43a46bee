"""Diagnosis of tensors and prediction files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from torchace import _checks
from torchace._files import error_reason, read_npz
from torchace.diagnosis.diagnosis import Diagnosis
from torchace.diagnosis.findings import derive_findings
from torchace.diagnosis.measures import Measures

ARRAYS = ("logits", "target", "train_logits", "train_target", "member_weights", "class_names")


def diagnose(
    logits: Tensor,
    target: Tensor,
    *,
    train_logits: Tensor | None = None,
    train_target: Tensor | None = None,
    member_weights: Tensor | Sequence[float] | None = None,
    class_names: Sequence[str] | None = None,
    num_parameters: int | None = None,
) -> Diagnosis:
    """Diagnose an ensemble from its members' predictions, with findings, numbers and figures.

    The checks: collapse and copies, members at chance level, co-adaptation (members accurate only together), a dominant
    member, no gain over the best member, diversity on the training data only, calibration, classes with low recall.
    Warnings are beyond sampling noise.

    Args:
        logits: Members' logits on test samples, `(K, N, C)`.
        target: Class indices, `(N,)`.
        train_logits: Members' logits on training samples, `(K, M, C)`, in evaluation mode.
        train_target: Their class indices, `(M,)`.
        member_weights: The paper's α, `(K,)`; uniform if None.
        class_names: A name for each class.
        num_parameters: Number of parameters of one member of an ensemble trained with λ=0; with the logits of all
            training samples, adds whether a search for λ is worth it (`advise_diversity`).

    Returns:
        A `Diagnosis`: `print` it, read its `findings` and `numbers`, or `save` it with its figures.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> target = torch.randint(3, (500,), generator=g)
        >>> member = 2 * F.one_hot(target, 3) + torch.randn(500, 3, generator=g)
        >>> diagnosis = diagnose(torch.stack([member, member]), target)
        >>> diagnosis["copies"].severity, diagnosis["copies"].numbers["pairs"]
        ('warning', [[0, 1]])
        >>> diagnosis
        Diagnosis(2 members, 500 samples, accuracy 0.8720, warnings: collapse, copies, calibration)
    """
    if (train_logits is None) != (train_target is None):
        raise ValueError("Expected both `train_logits` and `train_target`, or neither, but got one of them.")
    _checks.check_class_names(class_names)
    measures, train = Measures(logits, target, member_weights), None
    if class_names is not None and len(class_names) != measures.num_classes:
        raise ValueError(
            f"Expected {measures.num_classes} `class_names`, one for each class, but got {len(class_names)}."
        )
    names = tuple(class_names or ())
    if train_logits is not None and train_target is not None:
        train = Measures(train_logits, train_target, member_weights, name="train_logits")
        if (train.num_members, train.num_classes) != (measures.num_members, measures.num_classes):
            raise ValueError(
                f"Expected `train_logits` of {measures.num_members} members and {measures.num_classes} classes, "
                f"but got shape {tuple(train_logits.shape)}."
            )
    if num_parameters is not None and train is None:
        raise ValueError("`num_parameters` needs `train_logits` and `train_target` of all training samples.")
    findings = derive_findings(measures, train, names, num_parameters)
    return Diagnosis(findings, _summarize(measures, train), measures, train, names)


def diagnose_file(path: str | os.PathLike[str]) -> Diagnosis:
    """Diagnose a `.npz` or `.safetensors` file of predictions; a damaged one is a `ValueError`.

    Its arrays are `logits` `(K, N, C)` and `target` `(N,)`; optional are `train_logits` and `train_target`,
    `member_weights` `(K,)` and, in a `.npz` file, `class_names`. Nothing is unpickled.

    Example:
        >>> import numpy as np, tempfile
        >>> target = np.arange(60) % 3
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/predictions.npz", logits=4.0 * np.eye(3)[None, target], target=target)
        ...     diagnose_file(f"{folder}/predictions.npz").numbers["accuracy"]
        1.0
    """
    file = Path(path)
    if file.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"Expected a .npz or .safetensors file, but got {file}.")
    if not file.is_file():
        raise ValueError(f"There is no file {file}; check the path.")
    try:
        arrays: dict[str, Any] = dict(load_file(file)) if file.suffix == ".safetensors" else _read_npz(file)
    except Exception as error:
        reason = f"not a {file.suffix} file of plain arrays that can be read ({error_reason(error)}); write it again"
        raise ValueError(f"{file} is {reason}.") from error
    for name in ("logits", "target"):
        if name not in arrays:
            raise ValueError(f"Expected arrays `logits` (K, N, C) and `target` (N,) in {file}, but it has no `{name}`.")
    try:
        return diagnose(**{name: arrays[name] for name in ARRAYS if name in arrays})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


def _read_npz(file: Path) -> dict[str, Any]:
    """Return the known arrays as tensors, and the class names as a list."""
    arrays: dict[str, Any] = {}
    for name, array in read_npz(file, ARRAYS).items():
        if name == "class_names":
            arrays[name] = array.tolist()
            continue
        # copied to native byte order and to types that torch has
        dtype = {"f": np.float64, "i": np.int64, "u": np.int64}.get(array.dtype.kind, array.dtype)
        arrays[name] = torch.from_numpy(np.array(array, dtype=dtype, order="C"))
    return arrays


def _summarize(m: Measures, train: Measures | None) -> dict[str, Any]:
    """Return all scores as JSON types."""
    numbers: dict[str, Any] = {
        "samples": m.samples,
        "num_members": m.num_members,
        "num_classes": m.num_classes,
        "chance": m.chance,
        **_mean_scores(m),
        "member_weights": m.member_weights.tolist(),
        "member_accuracy": m.member_correct.mean(1).tolist(),
        "member_cross_entropy": m.member_cross_entropy.mean(1).tolist(),
        "accuracy_without": m.without.mean(1).tolist(),
        "accuracy_of_half": float(m.half.mean()) if m.num_members > 1 else None,
        "divergence": m.divergence.tolist(),
    }
    if train is not None:
        numbers["train_samples"] = train.samples
        numbers |= {f"train_{name}": value for name, value in _mean_scores(train).items()}
    return numbers


def _mean_scores(m: Measures) -> dict[str, float]:
    names = ("cross_entropy", "brier", "disagreement", "mutual_information", "ambiguity", "entropy")
    return {
        "accuracy": float(m.correct.mean()),
        "calibration_error": float(np.abs(m.bins[2] - m.bins[1]).sum() / m.samples),
        "member_accuracy_mean": float(m.member_correct.mean()),
        "member_cross_entropy_mean": float(m.member_cross_entropy.mean()),
        **{name: float(getattr(m, name).mean()) for name in names},
    }
