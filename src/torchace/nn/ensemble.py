"""Several models as one: any members, with or without a shared trunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, overload

from torch import Tensor, nn

from torchace import _checks
from torchace.nn.base import (
    BATCHES,
    EnsembleModule,
    as_list,
    average_shared_gradients,
    check_own_batches,
    check_shared_parameters,
    check_unchanged,
    shared_tensors,
    stack_outputs,
    tensor_versions,
)
from torchace.nn.checkpoints import MakeModel, PathLike, load_members


class Ensemble(EnsembleModule):
    """Any members, of one architecture or many, computed one after another.

    With a `trunk`, the members receive its output; it is computed once and gets the mean of the members' gradients.
    Without one, the members receive the input (the paper's Algorithm 1).

    Args:
        members: Modules that return logits `(N, C, ...)`, the same shape for all. They may share frozen parameters and
            constant buffers, but no trained parameter: what is trained together is the `trunk`.
        trunk: What the members share, if anything.
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
        for k, member in enumerate(members):
            if not isinstance(member, nn.Module):
                raise TypeError(f"Expected members to be modules, but member {k} is {type(member).__name__}.")
        shares = check_shared_parameters(members, trunk)
        super().__init__(len(members), link)
        self._shares = shares  # frozen parameters or buffers, which must stay as they are
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
        """An ensemble of models that were trained before, each from a file of its weights.

        A file is `.safetensors`, or one of `torch.save` (`.pt`, `.pth`, `.ckpt`, ...), read with `weights_only=True`: a
        state dict, or a checkpoint that has one, Lightning's for one. A directory that `save_model` wrote for an
        `Ensemble` of one member will do as well. Names may start with what a wrapper adds (`model.`, `module.`,
        `_orig_mod.`). Names and shapes must be the model's, all of them; whole pickled models are refused.

        Args:
            make_model: Makes one model, whose weights are then replaced; or a list of such functions, one for each
                path, for models of several architectures.
            paths: One file a member.
            trunk: What the members share, if anything, with its weights.
            link: `"softmax"`, `"sigmoid"` for binary and multi-label outputs, `"identity"` for regression.
            state_key: Under which key of a file the state dict is, where it has several.
            prefix: What stands before the model's names, where a file has weights beside the model's.

        Returns:
            The ensemble; its members are in evaluation mode.

        Raises:
            ModelFileError: A file cannot be read, or does not fit; one sentence that names the file and the weight.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     paths = [f"{folder}/{seed}.pt" for seed in range(3)]
            ...     for path in paths:
            ...         torch.save(nn.Linear(4, 2).state_dict(), path)
            ...     ensemble = Ensemble.from_checkpoints(lambda: nn.Linear(4, 2), paths)
            >>> x, y = torch.randn(50, 4), torch.randint(2, (50,))  # held out
            >>> ensemble.set_member_weights(fit_member_weights(ensemble(x).log_softmax(2), y))
            >>> ensemble.predict_proba(x).shape
            torch.Size([50, 2])
        """
        return cls(load_members(make_model, paths, state_key=state_key, prefix=prefix), trunk, link)

    def forward(self, *args: Any, batches: str = "shared", **kwargs: Any) -> Tensor:
        """The members' logits, `(K, N, C, ...)`.

        Args:
            *args: What the trunk, or each member, takes.
            batches: `"shared"`: all members see one input. `"separate"`: one batch a member, `(K, N, ...)`.
            **kwargs: Likewise.
        """
        _checks.check_choice(batches, "batches", BATCHES)
        compute = self._forward_separate if batches == "separate" else self._forward_shared
        if not self._shares or not _checks.is_eager():
            return compute(*args, **kwargs)
        check_shared_parameters(list(self.members), self.trunk)  # they may have been unfrozen
        shared = shared_tensors(list(self.members), self.trunk)
        before = {name: tensor_versions([tensor]) for name, tensor in shared.items()}
        logits = compute(*args, **kwargs)
        for name, tensor in shared.items():
            if tensor_versions([tensor]) != before[name]:
                raise ValueError(
                    f"Expected constant buffers where members share them, but {name} changed in the forward "
                    "(BatchNorm's statistics do in training mode). Put the shared layer in evaluation mode "
                    "(layer.eval()), give it as trunk=, or give each member its own copy (copy.deepcopy)."
                )
        return logits

    def _forward_shared(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.trunk is not None:
            args, kwargs = (average_shared_gradients(self.trunk(*args, **kwargs), self.num_members),), {}
        seen = [*args, *kwargs.values()]
        before = tensor_versions(seen)
        outputs = []
        for k, member in enumerate(self.members):
            outputs.append(member(*args, **kwargs))
            if k < self.num_members - 1:
                check_unchanged(seen, before, k)
        return stack_outputs(outputs)

    def _forward_separate(self, x: Tensor, **kwargs: Any) -> Tensor:
        check_own_batches(x, self.num_members)
        if self.trunk is None:
            return stack_outputs([member(own, **kwargs) for member, own in zip(self.members, x, strict=True)])
        # one pass of the trunk over all batches, so that it is computed once here too
        shared = average_shared_gradients(self.trunk(x.flatten(0, 1), **kwargs), self.num_members)
        if not isinstance(shared, Tensor):
            raise TypeError(
                f"Expected the trunk to return one tensor with batches='separate', but got {type(shared).__name__}."
            )
        own_shared = shared.unflatten(0, x.shape[:2])
        return stack_outputs([member(own) for member, own in zip(self.members, own_shared, strict=True)])

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
