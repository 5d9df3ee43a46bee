"""A model for a user's table: λ searched, the ensemble trained, everything put in place at once.

While it works, everything is in a directory beside the model's, `NAME.work`; killed at any moment, the same command
goes on there. The model's directory appears in one rename, when it is complete.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from torchace._files import PARTIAL, fsync_directory, json_digest, read_json, refuse_links, write_atomic
from torchace.lab.data import Split
from torchace.lab.store import FORMAT, OURS, Run, RunStore, RunStoreError, finite
from torchace.lab.sweeps.environment import hardware, versions
from torchace.lab.tables.model import TableModel, score
from torchace.lab.tables.table import Table, on_device, squared_scale
from torchace.lab.training.checkpoint import Checkpoints
from torchace.lab.training.chunks import chunk_rows
from torchace.lab.training.loop import CheckpointPolicy, Failure, Progress
from torchace.lab.training.members import MemberPlan, Trained, train_members
from torchace.lab.training.scaling import finished_ensemble
from torchace.lab.tuning.search_cache import Trials
from torchace.lab.tuning.tuning import Stage, TunedDiversity, tune_diversity
from torchace.saving import ModelFileError

SAVE_EVERY = 30.0  # seconds


class TrainingFailed(ValueError):
    """The model's own training ended in NaN or Inf."""


class FitWatcher:
    """Is told what a fit does; this one does not care."""

    def searched(self, stage: Stage, share: float) -> None:
        """This share of a stage of the search for λ is done."""

    def trained(self, progress: Progress) -> None:
        """Steps of the model's own training were made."""


@dataclass(frozen=True)
class TableFit:
    """One fit: a table, a plan, λ, and the directory of the model.

    Attributes:
        table: What is trained on.
        plan: What is trained, and how.
        diversity: λ; None for a search.
        out: The model's directory.
        settings: What the user said about the table, for the record.
        seed: Of the model's training and of the search.
        device: Where it is trained.
    """

    table: Table
    plan: MemberPlan
    diversity: float | None
    out: Path
    settings: dict[str, Any]
    seed: int = 0
    device: str = "cpu"

    @property
    def work(self) -> Path:
        """Where everything is until it is complete."""
        return self.out.with_name(f"{self.out.name}.work")

    @property
    def _kept(self) -> Path:
        return self.work / "model"

    @property
    def _begun(self) -> Path:
        return self.work / "fit.json"

    def request(self) -> dict[str, Any]:
        """What makes this fit this one: two with the same request give the same model."""
        plan = {**asdict(self.plan), "hidden": list(self.plan.hidden)}
        wanted = "auto" if self.diversity is None else self.diversity
        data = {"name": self.table.name, "sha256": self.table.sha256}
        return {"data": data, "table": self.settings, "plan": plan, "diversity": wanted, "seed": self.seed}

    def is_finished(self) -> bool:
        """Whether the model is there already; anything else in its place is refused, before anything is written."""
        if not os.path.lexists(self.out):
            return False
        if self.out.is_dir() and not self.out.is_symlink() and not any(self.out.iterdir()):
            if os.path.ismount(self.out):  # a directory is renamed to it in the end
                raise RunStoreError(
                    f"{self.out} is a mount point. Choose a directory in it: --out {self.out / 'model'}."
                )
            return False
        try:
            record = TableModel.load(self.out).record
        except (ModelFileError, OSError):
            record = {}
        if record.get("fit") != self.request():
            raise RunStoreError(f"{self.out} holds something else already. Choose another --out, or remove it.")
        return True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Claims the working directory, or refuses one that another fit has begun."""
        self._check_work()  # before the lock is written: what is there may be anybody's
        with RunStore(self.work).locked():
            self._check_work()
            if self.is_finished():
                self.clear()
                raise RunStoreError(f"Another process has just finished {self.out}. Repeat the command to see it.")
            if not self._begun.exists():
                started = datetime.now(UTC).isoformat(timespec="seconds")
                content = {"request": self.request(), "started": started}
                write_atomic(self._begun, json.dumps(content, indent=1).encode())
            yield

    def _check_work(self) -> None:
        """Refuses a working directory that this fit has not begun: it is removed in the end."""
        refuse_links(self.work.parent, [self.work.name])
        if self._begun.exists():
            try:
                before = read_json(self._begun)["request"]
            except (OSError, ValueError, KeyError, TypeError):
                before = None
            if before != self.request():
                raise RunStoreError(
                    f"{self.work} holds an unfinished fit of other data or settings. Remove it, or choose another "
                    "--out."
                )
        elif self.work.is_dir():
            # a process that was killed at its very start leaves its lock and half of fit.json at most
            foreign = [name for name in sorted(os.listdir(self.work)) if name != "lock" and not name.endswith(PARTIAL)]
            if foreign:
                raise RunStoreError(
                    f"{self.work}, where a fit would work, holds something else already ({foreign[0]!r}). "
                    "Choose another --out."
                )

    def train(self, watcher: FitWatcher | None = None, stop: Callable[[], bool] = lambda: False) -> None:
        """Searches λ, trains the model, scores it and writes down what a report shows.

        Raises:
            Interrupted: `stop` said yes; what was done is kept.
            TrainingFailed: The training ended in NaN or Inf.
        """
        watcher, began = watcher or FitWatcher(), time.monotonic()
        store = RunStore(self.work)
        for leftover in self.work.glob(f".{self._kept.name}.*{PARTIAL}"):  # of a process killed while it saved
            shutil.rmtree(leftover)
        store.clean([])
        train, validation, test = (on_device(part, self.plan, self.device) for part in self._parts())
        tuned = self._tuned(train, validation, test, watcher, stop) if self.diversity is None else None
        diversity = self.diversity if tuned is None else tuned.diversity
        assert diversity is not None
        run = Run("model", diversity, self.seed)
        if not store.is_finished(run) or not self._kept.exists():
            trained = train_members(
                self.plan,
                train,
                self.table.num_outputs,
                diversities=[diversity],
                seeds=[self.seed],
                validation=validation,
                checkpoint_policy=CheckpointPolicy(self._checkpoints(run), None, SAVE_EVERY),
                watch=watcher.trained,
                stop=stop,
            )
            self._keep(store, run, trained, tuned)
        self._checkpoints(run).remove()
        self._write_experiment(store, run, tuned, time.monotonic() - began)

    def publish(self) -> None:
        """Puts the complete model in place, with its results and its report."""
        for name in ("experiment.json", "runs", "report"):
            source, copy = self.work / name, self._kept / name
            if source.is_dir():
                # names with a point are files that a killed process was writing
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)
            elif source.exists():
                shutil.copyfile(source, copy)
        for folder, _, files in os.walk(self._kept):
            for file in files:
                with open(Path(folder) / file, "rb") as stream:
                    os.fsync(stream.fileno())
            fsync_directory(Path(folder))
        os.rename(self._kept, self.out)
        fsync_directory(self.out.parent)
        self.clear()

    def clear(self) -> None:
        """Removes the working directory, if it is this fit's."""
        try:
            self._check_work()
        except ValueError:
            return
        with contextlib.suppress(OSError):
            last = (self._begun, self.work / "lock")  # without the former the rest would be anybody's
            ours = [*self.work.glob(f".*{PARTIAL}"), *(self.work / name for name in OURS)]
            for path in (*(path for path in ours if path not in last), *last):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            self.work.rmdir()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _parts(self) -> tuple[Split, Split, Split]:
        return self.table.train, self.table.validation, self.table.test

    def _checkpoints(self, run: Run) -> Checkpoints:
        owner = {"runs": [[run.arm, run.diversity, run.seed]], "config_sha256": json_digest(self.request())}
        return Checkpoints(self.work / "checkpoints" / "model", owner=owner)

    def _tuned(
        self, train: Split, validation: Split, test: Split, watcher: FitWatcher, stop: Callable[[], bool]
    ) -> TunedDiversity:
        targets = self.table.targets
        return tune_diversity(
            self.plan,
            train,
            validation,
            self.table.num_outputs,
            check=test if len(test) else None,
            seed=self.seed + 1,  # the model's own seed takes no part
            score_scale=squared_scale(targets),
            store=Trials(self.work / "search", SAVE_EVERY),
            watch=watcher.searched,
            stop=stop,
        )

    def _keep(self, store: RunStore, run: Run, trained: Trained, tuned: TunedDiversity | None) -> None:
        """Saves the trained model, then writes it down as done."""
        if (failure := trained.failure(0)) is not None:
            raise TrainingFailed(_failed(failure, run))
        ensemble = finished_ensemble(trained.ensemble(0), self.table.encoder(), self.table.targets)
        scores, arrays = self._scores(trained)
        fitted = trained.fitted
        record = {
            "fit": self.request(),
            "search": None if tuned is None else tuned.to_json(),
            "scores": scores,
            "best_epoch": None if fitted.best_epochs is None else fitted.best_epochs[0],
            "rows": dict(zip(("train", "validation", "test"), map(len, self._parts()), strict=True)),
        }
        if self._kept.exists():  # of a process that was killed right here
            shutil.rmtree(self._kept)
        TableModel(ensemble, self.table.encoding, run.diversity, finite(record)).save(self._kept)
        metric = "train_cross_entropy" if self.table.task == "classification" else "train_mse"
        store.write_result(
            run,
            {
                "format": FORMAT,
                "run": run.id,
                "arm": run.arm,
                "diversity": run.diversity,
                "seed": run.seed,
                "num_members": self.plan.num_members,
                "batches": self.plan.batches,
                "status": "finished",
                "failure": None,
                "metrics": {"test": scores.get("test"), "validation": scores["validation"], "train": None},
                "history": [
                    {"epoch": entry["epoch"], "step": entry["step"], metric: entry["score"][0]}
                    for entry in fitted.history
                ],
                "steps": trained.train_config.steps,
                "seconds": fitted.seconds,
                "parameters": sum(p.numel() for p in ensemble.parameters()),
                "job": "model",
                "versions": versions(),
                **hardware(self.device),
            },
            arrays,
        )

    def _scores(self, trained: Trained) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """How the model does on what it was not trained on, in the target's units."""
        stacked = trained.ensemble(0).cpu().double()
        table, scores, arrays = self.table, {}, {}
        parts = {"validation": (table.validation, table.validation_rows), "test": (table.test, table.test_rows)}
        for name, (part, rows) in parts.items():
            if not len(part):
                continue
            y, targets = part.y, table.targets
            with torch.no_grad():
                logits = (stacked(x) for x in part.x.split(chunk_rows(stacked, stacked.num_members)))
                if targets is not None:
                    logits = (z * targets.std + targets.mean for z in logits)
                    y = (y * targets.std + targets.mean).squeeze(1)
                found = score(logits, y)
            scores[name], arrays = found.metrics, found.arrays
            if "disputed_index" in arrays:
                arrays["disputed_row"] = rows[arrays["disputed_index"]] + 1  # as a person counts them in the file
        return scores, arrays

    def _write_experiment(self, store: RunStore, run: Run, tuned: TunedDiversity | None, seconds: float) -> None:
        schema, plan = self.table.schema, self.plan
        widths = [self.table.train.x.shape[1], *plan.hidden, self.table.num_outputs]
        fit = read_json(self._begun)
        content = {
            "format": FORMAT,
            "name": self.out.name,
            "title": f"{schema.target.name}, from {self.table.name}",
            "description": f"{plan.num_members} networks trained jointly to predict {schema.target.name}.",
            "task": self.table.task,
            "data": {
                "name": self.table.name,
                "train": len(self.table.train),
                "validation": len(self.table.validation),
                "test": len(self.table.test),
                "classes": schema.target.class_names,
                "image_shape": None,
                "schema": self.table.described,
            },
            "arms": [
                {
                    "name": run.arm,
                    "label": "the model",
                    "role": "model",
                    "num_members": plan.num_members,
                    "batches": plan.batches,
                    "network": "MLP " + "-".join(map(str, widths)),
                    "parameters": plan.num_members * sum((i + 1) * o for i, o in itertools.pairwise(widths)),
                    "diversities": [run.diversity],
                    "baseline": False,
                    "seeds": [run.seed],
                }
            ],
            "seeds": [run.seed],
            "search": None if tuned is None else tuned.to_json(),
            "paper": None,
            "hardware": hardware(self.device),
            "versions": versions(),
            "config": self.request(),
            "started": fit["started"],
            "seconds": seconds,
        }
        store.write_experiment(content)


def _failed(failure: Failure, run: Run) -> str:
    member = "" if failure.member is None else f", member {failure.member}"
    return (
        f"The model's training (λ={run.diversity:g}, seed {run.seed}{member}) ended at step {failure.step} with "
        f"{failure.message}. Try a smaller --learning-rate."
    )
