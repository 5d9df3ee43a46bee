"""Fit a model for a table: search λ, train the ensemble, publish the model directory in one rename.

The working directory `NAME.work` beside it lets a killed fit resume.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from torchace._files import PARTIAL, fsync_directory, json_digest, read_json, write_atomic
from torchace.lab.data import Split
from torchace.lab.data.folds import MIN_FOLD_ROWS, NUM_FOLDS, FoldSplit, assign_folds, number_blocks
from torchace.lab.schema.results import ExperimentResult, RunKey, RunResult
from torchace.lab.store import OUTPUT_FILES, RunStore, RunStoreError, describe_differences, finite
from torchace.lab.sweeps.config import hardware, versions
from torchace.lab.tables.baselines import compare_with_baselines
from torchace.lab.tables.model import TableModel, sample_hashes
from torchace.lab.tables.table import Table
from torchace.lab.training.checkpoint import Checkpoints
from torchace.lab.training.evaluate import evaluate
from torchace.lab.training.loop import CheckpointPolicy, Progress
from torchace.lab.training.members import MemberPlan, TrainedGroup, fit_run_temperature, left_out_logits, train_members
from torchace.lab.training.run_group import chunk_rows
from torchace.lab.training.scaling import assemble_ensemble
from torchace.lab.tuning.grid_search import GridSearch, TunedDiversity
from torchace.lab.tuning.search import SearchCache, SearchCallback, SearchProblem
from torchace.saving import ModelFileError

SAVE_EVERY = 30.0  # seconds


class TrainingError(ValueError):
    """The training ended in NaN or Inf."""


class FitCallback(SearchCallback):
    """No-op callback; override what you need."""

    def on_step(self, progress: Progress) -> None:
        """Called while the model is trained."""


@dataclass(frozen=True)
class TableFit:
    """The fit of a model for a table."""

    table: Table
    plan: MemberPlan
    diversity: float | None  # None: search λ
    out: Path
    settings: dict[str, Any]  # of the table, for the record
    seed: int = 0
    device: str = "cpu"
    overwrite: bool = False  # replace another model, or train this one again
    baselines: bool = True  # train baselines too, for the report

    @property
    def work(self) -> Path:
        """The working directory."""
        return self.out.with_name(f"{self.out.name}.work")

    @property
    def _model(self) -> Path:
        return self.work / "model"

    @property
    def _request_file(self) -> Path:
        return self.work / "fit.json"

    def request(self) -> dict[str, Any]:
        """Return the identity of this fit: equal requests give equal models."""
        plan = {**asdict(self.plan), "hidden": list(self.plan.hidden)}
        del plan["network"]  # the command line has none
        return {
            "data": {"name": self.table.name, "sha256": self.table.sha256},
            "table": self.settings,
            "plan": plan,
            "diversity": "auto" if self.diversity is None else self.diversity,
            "seed": self.seed,
            "baselines": self.baselines,
        }

    # -- directories --------------------------------------------------------------------------------------------------

    def is_finished(self) -> bool:
        """Whether the model directory is complete; refuse one with other content."""
        if not os.path.lexists(self.out):
            return False
        if self.out.is_dir() and not self.out.is_symlink() and not any(self.out.iterdir()):
            if os.path.ismount(self.out):  # rename would fail
                raise RunStoreError(
                    f"{self.out} is a mount point. Choose a directory in it: --out {self.out / 'model'}."
                )
            return False
        try:
            record = TableModel.load(self.out).record
        except (ModelFileError, OSError):
            record = {}
        if self.overwrite and record:
            return False
        if (before := record.get("fit")) != self.request():
            if not record:
                raise RunStoreError(f"{self.out} already holds other files. Choose another --out, or remove it.")
            how = describe_differences(before, self.request())
            raise RunStoreError(
                f"{self.out} holds another model{how}. Replace it with --overwrite, or choose another --out."
            )
        return True

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the working directory; refuse one of another fit."""
        self._check_work()  # before the lock file is written
        with RunStore(self.work).lock():
            self._check_work()
            if self._request_file.exists() and self._stored_request() != self.request():  # checked: to be overwritten
                self._remove_files(keep=("lock",))
            if self.is_finished():
                self.remove_work()
                raise RunStoreError(f"Another process has finished {self.out}. Repeat the command to show it.")
            if not self._request_file.exists():
                started = datetime.now(UTC).isoformat(timespec="seconds")
                content = {"request": self.request(), "started": started}
                write_atomic(self._request_file, json.dumps(content, indent=1).encode())
            yield

    def _check_work(self) -> None:
        """Refuse a working directory with other content, because it is removed at the end."""
        if self._request_file.exists():
            before = self._stored_request()
            if before != self.request() and not self.overwrite:
                how = describe_differences(before, self.request())
                raise RunStoreError(
                    f"{self.work} holds another fit, unfinished{how}. Add --overwrite, or choose another --out."
                )
        elif self.work.is_dir():
            # a killed process may leave its lock and a partial fit.json
            foreign = [name for name in sorted(os.listdir(self.work)) if name != "lock" and not name.endswith(PARTIAL)]
            if foreign:
                raise RunStoreError(
                    f"{self.work}, the working directory of this fit, already holds other files ({foreign[0]!r}). "
                    "Choose another --out."
                )

    def _stored_request(self) -> Any:
        try:
            return read_json(self._request_file)["request"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def publish(self) -> None:
        """Move model, results and report to the model directory."""
        for name in ("experiment.json", "runs", "report"):
            source, copy = self.work / name, self._model / name
            if source.is_dir():
                # a leading dot marks partial files of a killed process
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)
            elif source.exists():
                shutil.copyfile(source, copy)
        for folder, _, files in os.walk(self._model):
            for file in files:
                with open(Path(folder) / file, "rb") as stream:
                    os.fsync(stream.fileno())
            fsync_directory(Path(folder))
        old = self.work / "replaced"
        if self.overwrite and self.out.exists():
            os.rename(self.out, old)
        os.rename(self._model, self.out)
        fsync_directory(self.out.parent)
        if old.exists():
            shutil.rmtree(old)
        self.remove_work()

    def remove_work(self) -> None:
        """Remove the working directory if it belongs to this fit."""
        try:
            self._check_work()
        except ValueError:
            return
        with contextlib.suppress(OSError):
            self._remove_files()
            self.work.rmdir()

    def _remove_files(self, keep: Collection[str] = ()) -> None:
        last = (self._request_file.name, "lock")  # last: the request marks the rest as ours
        names = [path.name for path in self.work.glob(f".*{PARTIAL}")] + list(OUTPUT_FILES)
        for name in (*(name for name in names if name not in last), *last):
            path = self.work / name
            if name not in keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, callback: FitCallback | None = None, stop: Callable[[], bool] = lambda: False) -> None:
        """Search λ, train and score the model, and write the result files; `Interrupted` if `stop` returns True."""
        callback, start = callback or FitCallback(), time.monotonic()
        store = RunStore(self.work)
        for leftover in self.work.glob(f".{self._model.name}.*{PARTIAL}"):  # of a killed process
            shutil.rmtree(leftover)
        store.clean([])
        train, validation, test = self.table.parts(self.plan, self.device)
        tuned, diversity = None, self.diversity
        if diversity is None:
            tuned = self._search(train, validation, test).run(callback, stop)
            diversity = tuned.diversity
        run = RunKey("model", diversity, self.seed)
        owner = {"runs": [[run.arm, run.diversity, run.seed]], "config_sha256": json_digest(self.request())}
        checkpoints = Checkpoints(self.work / "checkpoints" / "model", owner=owner)
        if not store.is_finished(run) or not self._model.exists():
            folds = self._fold_split(train, validation, diversity)
            trained = train_members(
                self.plan,
                train if folds is None else folds.train,
                self.table.num_outputs,
                diversities=[diversity],
                seeds=[self.seed],
                validation=validation if folds is None else folds.validation,
                left_out=None if folds is None else folds.left_out,
                checkpoint_policy=CheckpointPolicy(checkpoints, None, SAVE_EVERY),
                on_progress=callback.on_step,
                stop=stop,
            )
            comparison = self._save(store, run, trained, tuned, validation, folds)
        else:
            comparison = TableModel.load(self._model).record.get("comparison")
        checkpoints.remove()
        store.write_experiment(self._experiment(run, tuned, comparison, time.monotonic() - start))

    def _fold_split(self, train: Split, validation: Split, diversity: float) -> FoldSplit | None:
        """Training and validation rows for members that leave out folds; None: stop on the validation rows.

        Every row is left out by the same number of members, so that its scores are those of an ensemble.
        """
        plan = self.plan
        whole = plan.num_members % NUM_FOLDS == 0 and not plan.has_shared_weights and plan.batches == "shared"
        whole = whole and len(train) + len(validation) >= MIN_FOLD_ROWS and len(self.table.test) > 0
        if plan.patience is None or diversity != 0 or train.weight is not None or not whole:
            return None
        samples = Split(torch.cat([train.x, validation.x]), torch.cat([train.y, validation.y]))
        folds = assign_folds(number_blocks(samples.x.double()), samples.y, seed=self.seed)
        return FoldSplit.make(samples, folds, plan.num_members)

    def _search(self, train: Split, validation: Split, test: Split) -> GridSearch:
        # seed + 1: the search must not use the model's seed
        return GridSearch(
            SearchProblem(self.plan, train, validation, self.table.num_outputs, self.seed + 1),
            test=test if len(test) else None,
            score_scale=self.table.target_variance,
            cache=SearchCache(self.work / "search", SAVE_EVERY),
            end_early=True,
        )

    def _save(
        self,
        store: RunStore,
        run: RunKey,
        trained: TrainedGroup,
        tuned: TunedDiversity | None,
        validation: Split,
        folds: FoldSplit | None,
    ) -> dict[str, Any] | None:
        """Save the model, then its result file, which marks the run as finished; return the comparison."""
        if (failure := trained.failure(0)) is not None:
            member = "" if failure.member is None else f", member {failure.member}"
            raise TrainingError(
                f"The model's training (λ={run.diversity:g}, seed {run.seed}{member}) ended at step {failure.step} "
                f"with {failure.message}. Try a smaller --learning-rate."
            )
        table, fitted = self.table, trained.fitted
        temperature = 1.0
        if self.plan.has_temperature:
            left_out = None if folds is None else folds.left_out
            temperature = fit_run_temperature(trained, validation if folds is None else folds.validation, left_out)
        ensemble = assemble_ensemble(table.encoding.encoder(), trained.ensemble(0), table.target_scaler, temperature)
        scores, arrays = self._evaluate(trained, temperature, folds)
        record = {
            "fit": self.request(),
            "search": None if tuned is None else tuned.to_dict(),
            "scores": scores,
            "folds": None if folds is None else NUM_FOLDS,
            "temperature": temperature,
            "best_epoch": None if fitted.best_epochs is None else fitted.best_epochs[0],
            "rows": {"train": len(table.train), "validation": len(table.validation), "test": len(table.test)},
            "row_hashes": sample_hashes(torch.cat([table.raw["train"], table.raw["validation"]])),
        }
        comparison = None
        if self.baselines:
            options: dict[str, Any] = {"seed": self.seed, "device": self.device, "seconds": fitted.seconds}
            compared = compare_with_baselines(ensemble, table, self.plan, **options)
            comparison = compared.model_dump(mode="json")
            # equal fits have equal manifests: no seconds
            record["comparison"] = compared.model_dump(mode="json", exclude={"models": {"__all__": {"seconds"}}})
        if self._model.exists():  # of a killed process
            shutil.rmtree(self._model)
        TableModel(ensemble, table.encoding, run.diversity, finite(record)).save(self._model)
        metric = "train_cross_entropy" if table.task == "classification" else "train_mse"
        content = {
            "run": run.id,
            "arm": run.arm,
            "diversity": run.diversity,
            "seed": run.seed,
            "num_members": self.plan.num_members,
            "batches": self.plan.batches,
            "status": "finished",
            "metrics": scores,
            "history": [
                {"epoch": entry["epoch"], "step": entry["step"], metric: entry["score"][0]} for entry in fitted.history
            ],
            "steps": trained.train_config.steps,
            "seconds": fitted.seconds,
            "parameters": sum(p.numel() for p in ensemble.parameters()),
            "job": run.arm,
            "versions": versions(),
            **hardware(self.device),
        }
        store.write_result(RunResult.model_validate(content), arrays)
        return comparison

    def _evaluate(
        self, trained: TrainedGroup, temperature: float, folds: FoldSplit | None
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return scores by part, in the target's units (several targets stay scaled), and the arrays of the last part.

        With folds, a validation row is predicted by the members that left it out.
        """
        stacked = trained.ensemble(0).cpu().double()
        table, scores, arrays = self.table, {}, {}
        parts = {"validation": (table.validation, table.validation_rows), "test": (table.test, table.test_rows)}
        for name, (part, rows) in parts.items():
            if not len(part):
                continue
            y, scaler = part.y, table.target_scaler
            with torch.no_grad():
                if folds is not None and name == "validation":
                    rows_of_part = slice(len(table.train), None)
                    x, left_out = folds.validation.x[rows_of_part], folds.left_out[:, rows_of_part]
                    logits = left_out_logits(trained, x, left_out)
                else:
                    logits = map(stacked, part.x.split(chunk_rows(stacked, stacked.num_members)))
                logits = (chunk / temperature for chunk in logits)
                if scaler is not None and table.num_outputs == 1:
                    logits, y = map(scaler.inverse_transform, logits), scaler.inverse_transform(y).squeeze(1)
                evaluation = evaluate(logits, y, task=table.task)
            scores[name], arrays = evaluation.metrics, evaluation.arrays
            if "disputed_index" in arrays:
                arrays["disputed_row"] = rows[arrays["disputed_index"]] + 1  # from 1, as in the file
        return scores, arrays

    def _experiment(
        self, run: RunKey, tuned: TunedDiversity | None, comparison: dict[str, Any] | None, seconds: float
    ) -> ExperimentResult:
        table, plan, target = self.table, self.plan, self.table.schema.target
        widths = [table.train.x.shape[1], *plan.hidden, table.num_outputs]
        parameters = sum(p.numel() for p in TableModel.load(self._model).ensemble.parameters())
        arm = {
            "name": run.arm,
            "label": "the model",
            "role": "model",
            "num_members": plan.num_members,
            "batches": plan.batches,
            "network": "MLP " + "-".join(map(str, widths)),
            "parameters": parameters,
            "diversities": [run.diversity],
        }
        content = {
            "name": self.out.name,
            "title": f"{target.name}, from {table.name}",
            "description": f"{plan.num_members} networks trained jointly to predict {target.name}.",
            "task": table.task,
            "data": {
                "name": table.name,
                "train": len(table.train),
                "validation": len(table.validation),
                "test": len(table.test),
                "classes": target.class_names,
                "schema": table.description,
            },
            "arms": [arm],
            "seeds": [run.seed],
            "search": None if tuned is None else tuned.to_dict(),
            "comparison": comparison,
            "hardware": hardware(self.device),
            "versions": versions(),
            "config": self.request(),
            "started": read_json(self._request_file)["started"],
            "seconds": seconds,
        }
        return ExperimentResult.model_validate(content)
