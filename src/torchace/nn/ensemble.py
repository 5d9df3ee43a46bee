"""Ensembles of any members, with or without a shared trunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, overload

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from torchace import _checks
from torchace.nn.base import (
    BATCHES,
    EnsembleModule,
    as_list,
    average_shared_gradients,
    call_members,
    check_modules,
    check_own_batches,
    check_shared_parameters,
    separate_features,
    stack_outputs,
    tensor_versions,
)

if TYPE_CHECKING:
    from torchace.nn.checkpoints import MakeModel, PathLike


class Ensemble(EnsembleModule):
    """Members of one or several architectures, computed one after another.

    With a `trunk`, the members receive its output; it is computed once and receives the mean of the members' gradients.
    Without one, the members receive the input (the paper's Algorithm 1).

    Args:
        members: Modules that return logits `(N, C, ...)` of one shape. They may share frozen parameters and constant
            buffers; trained parameters are shared through `trunk` alone.
        trunk: The part that the members share, if any.
        link: `"softmax"`, `"sigmoid"` for binary and multi-label outputs, `"identity"` for regression.

    Example:
        >>> ensemble = Ensemble([nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))])
        >>> ensemble(torch.zeros(5, 4)).shape, ensemble.predict_proba(torch.zeros(5, 4)).shape
        (torch.Size([2, 5, 3]), torch.Size([5, 3]))
        >>> len(ensemble), ensemble[0]
        (2, Linear(in_features=4, out_features=3, bias=True))
    """

    def __init__(self, members: Iterable[nn.Module], trunk: nn.Module | None = None, link: str = "softmax") -> None:
        members = as_list(members)
        check_modules(dict(enumerate(members)))
        shared = check_shared_parameters(members, trunk)
        super().__init__(len(members), link)
        self._has_shared_tensors = bool(shared)  # frozen parameters or buffers, which must stay constant
        self.trunk = trunk
        self.members = nn.ModuleList(members)

    @classmethod
    def from_checkpoints(
        cls,
        make_model: MakeModel | Sequence[MakeModel],
        paths: Iterable[PathLike],
        *,
        trunk: nn.Module | None = None,
        link: str = "softmax",
        state_key: str | None = None,
        prefix: str | None = None,
    ) -> Self:
        """Build an ensemble of trained models, each from a file of its weights.

        Reads `.safetensors` and files of `torch.save` (with `weights_only=True`) that are or contain a state dict, such
        as Lightning's checkpoints. Prefixes that wrappers add (`model.`, `module.`, `_orig_mod.`) are removed; then all
        names and shapes must match the model's.

        Args:
            make_model: Returns a model, whose weights are then replaced; or a list of such functions, one per path.
            paths: One file for each member.
            trunk: The part that the members share, if any, with its weights.
            link: `"softmax"`, `"sigmoid"` for binary and multi-label outputs, `"identity"` for regression.
            state_key: The key of the state dict in a file that has several.
            prefix: The prefix of the model's names in a file that also has other weights.

        Returns:
            The ensemble; its members are in evaluation mode.

        Raises:
            ModelFileError: A file cannot be read or does not match; the message names the file and the weight.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     paths = [f"{folder}/{seed}.pt" for seed in range(3)]
            ...     for path in paths:
            ...         torch.save(nn.Linear(4, 2).state_dict(), path)
            ...     ensemble = Ensemble.from_checkpoints(lambda: nn.Linear(4, 2), paths)
            >>> ensemble.predict_proba(torch.randn(50, 4)).shape
            torch.Size([50, 2])
        """
        from torchace.nn.checkpoints import load_members  # lazy: slow to import

        return cls(load_members(make_model, paths, state_key=state_key, prefix=prefix), trunk, link)

    def forward(self, *args: Any, batches: str = "shared", **kwargs: Any) -> Tensor:
        """Return the members' logits, `(K, N, C, ...)`.

        Args:
            *args: Input of the trunk, or of each member.
            batches: `"shared"`: one input for all members. `"separate"`: one batch for each member, `(K, N, ...)`.
            **kwargs: Further input.
        """
        _checks.check_choice(batches, "batches", BATCHES)
        compute = self._forward_separate if batches == "separate" else self._forward_shared
        if not self._has_shared_tensors or not _checks.is_eager():
            return compute(*args, **kwargs)
        shared = check_shared_parameters(list(self.members), self.trunk)  # they may have been unfrozen
        before = tensor_versions(shared.values())
        logits = compute(*args, **kwargs)
        if tensor_versions(shared.values()) != before:
            raise ValueError(
                f"Expected constant buffers where members share them, but {next(iter(shared))} or another changed in "
                "the forward, as BatchNorm's statistics do. Use layer.eval(), trunk=..., or a copy for each member."
            )
        return logits

    def _forward_shared(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.trunk is not None:
            args, kwargs = (average_shared_gradients(self.trunk(*args, **kwargs), self.num_members),), {}
        return call_members(dict(enumerate(self.members)), args, kwargs)

    def _forward_separate(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.trunk is not None:
            args, kwargs = (separate_features(self.trunk, args, self.num_members, **kwargs),), {}
        check_own_batches(args, self.num_members)
        own = [tree_map(lambda x, k=k: x[k] if isinstance(x, Tensor) else x, args) for k in range(self.num_members)]
        return stack_outputs([member(*inputs, **kwargs) for member, inputs in zip(self.members, own, strict=True)])

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.members)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> nn.ModuleList: ...
    def __getitem__(self, index: int | slice) -> nn.Module:
        return self.members[index]
