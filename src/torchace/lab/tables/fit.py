"""Fit a model for a table: search λ, train the ensemble, publish the model directory in one rename.

The working directory `NAME.work` beside it lets a killed fit resume.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchace._files import PARTIAL, fsync_directory, json_digest
from torchace.lab.data.folds import MIN_FOLD_ROWS, NUM_FOLDS, assign_folds, number_blocks
from torchace.lab.schema.results import ExperimentResult, RunKey, RunResult
from torchace.lab.store import RunStore, RunStoreError, describe_differences, finite, read_record, write_record
from torchace.lab.sweeps.config import hardware, versions
from torchace.lab.tables.baselines import compare_with_baselines
from torchace.lab.tables.model import TableModel, sample_hashes
from torchace.lab.tables.table import Table
from torchace.lab.tables.training import FittedEnsemble, fit_ensemble
from torchace.lab.training.checkpoint import Checkpoints
from torchace.lab.training.evaluate import evaluate
from torchace.lab.training.loop import CheckpointPolicy
from torchace.lab.training.members import MemberPlan
from torchace.lab.training.run_group import chunk_rows
from torchace.lab.training.tasks import TASKS
from torchace.lab.tuning.auto import ZeroDiversity
from torchace.lab.tuning.grid_search import TunedDiversity
from torchace.lab.tuning.search import SearchCache, SearchCallback
from torchace.saving import ModelFileError

SAVE_EVERY = 30.0  # seconds


@dataclass(frozen=True)
class TableFit:
    """The fit of a model for a table."""

    table: Table
    plan: MemberPlan
    diversity: float | None  # None: search λ
    out: Path
    device: str = "cpu"
    overwrite: bool = False  # replace another model, or train this one again
    baselines: bool = True  # train baselines too, for the report

    @property
    def work(self) -> Path:
        """The working directory."""
        return self.out.with_name(f"{self.out.name}.work")

    @property
    def model(self) -> Path:
        """The model directory until it is published."""
        return self.work / "model"

    @property
    def seed(self) -> int:
        """Seed of the split and the training."""
        return self.table.settings.seed

    def request(self) -> dict[str, Any]:
        """Return the identity of this fit: equal requests give equal models."""
        content = {
            "data": {"name": self.table.name, "sha256": self.table.sha256},
            "table": asdict(self.table.settings),
            "plan": asdict(replace(self.plan, network=None)),
            "diversity": "auto" if self.diversity is None else self.diversity,
            "baselines": self.baselines,
        }
        return dict(json.loads(json.dumps(content)))

    # -- directories --------------------------------------------------------------------------------------------------

    def is_finished(self) -> bool:
        """Whether the model directory holds this model; refuse one with other content."""
        is_empty = self.out.is_dir() and not self.out.is_symlink() and not any(self.out.iterdir())
        if is_empty or not os.path.lexists(self.out):
            return False
        try:
            before = TableModel.load(self.out).record.get("fit")
        except (ModelFileError, OSError):
            raise RunStoreError(f"{self.out} already holds other files. Choose another --out, or remove it.") from None
        if self.overwrite:
            return False
        if before != self.request():
            how = describe_differences(before, self.request())
            raise RunStoreError(
                f"{self.out} holds another model{how}. Replace it with --overwrite, or choose another --out."
            )
        return True

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the working directory; refuse one of another fit."""
        self._stored_request()  # before the lock file is written
        with RunStore(self.work).lock():
            before = self._stored_request()
            if before not in (None, self.request()):
                if not self.overwrite:
                    how = describe_differences(before, self.request())
                    raise RunStoreError(
                        f"{self.work} holds another unfinished fit{how}. Replace it with --overwrite, or choose "
                        "another --out."
                    )
                self._clear_work(keep="lock")
                before = None
            if before is None:
                started = datetime.now(UTC).isoformat(timespec="seconds")
                write_record(self.work / "fit.json", {"request": self.request(), "started": started})
            yield

    def _stored_request(self) -> Any:
        """Request of the fit in the working directory, None if it is new; refuse other content."""
        if (self.work / "fit.json").exists():
            return read_record(self.work / "fit.json", str(self.work))["request"]
        # a killed process may leave its lock and a partial fit.json
        names = sorted(os.listdir(self.work)) if self.work.is_dir() else []
        if foreign := [name for name in names if name != "lock" and not name.endswith(PARTIAL)]:
            raise RunStoreError(
                f"{self.work}, the working directory of this fit, already holds other files ({foreign[0]!r}). "
                "Choose another --out."
            )
        return None

    def _clear_work(self, keep: str = "") -> None:
        names = [name for name in os.listdir(self.work) if name not in (keep, "fit.json")]
        for name in (*names, "fit.json"):  # last: it marks the rest as ours
            path = self.work / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)

    def publish(self) -> None:
        """Rename the finished directory, and remove the working directory."""
        if self.overwrite and self.out.exists():
            shutil.rmtree(self.work / "replaced", ignore_errors=True)
            os.rename(self.out, self.work / "replaced")
        os.rename(self.model, self.out)
        fsync_directory(self.out.parent)
        self.remove_work()

    def remove_work(self) -> None:
        """Remove the working directory if it belongs to this fit."""
        with suppress(RunStoreError):  # other content
            if self.work.is_dir() and self._stored_request() in (None, self.request()):
                self._clear_work()
                self.work.rmdir()

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, callback: SearchCallback | None = None, stop: Callable[[], bool] = lambda: False) -> None:
        """Search λ, train and score the model, and write the result files; `Interrupted` if `stop` returns True."""
        callback, start, search = callback or SearchCallback(), time.monotonic(), None
        diversity = self.diversity
        fitted = None
        if diversity is None:
            fitted = self._fit(0.0, callback, stop, scored=True)
            tuned = self._search(fitted, callback, stop)
            search, diversity = tuned.to_dict(), tuned.diversity
        run, store = RunKey("model", diversity, self.seed), RunStore(self.model)
        if store.is_finished(run):
            shutil.rmtree(self.model / "report", ignore_errors=True)  # of a killed process
            store.clean([])
            return
        shutil.rmtree(self.model, ignore_errors=True)
        if fitted is None or diversity > 0:
            fitted = self._fit(diversity, callback, stop)
        scores, arrays = self._evaluate(fitted)
        comparison = None
        if self.baselines:
            options: dict[str, Any] = {"device": self.device, "seconds": fitted.trained.fitted.seconds}
            comparison = compare_with_baselines(fitted.ensemble, self.table, self.plan, **options)
        best_epochs, table = fitted.trained.fitted.best_epochs, self.table
        record = {
            "fit": self.request(),
            "search": search,
            "scores": scores,
            "folds": None if fitted.left_out is None else NUM_FOLDS,
            "temperature": fitted.temperature,
            "best_epoch": None if best_epochs is None else best_epochs[0],
            "rows": {name: len(rows) for name, rows in table.rows.items()},
            "row_hashes": sample_hashes(torch.cat([table.raw["train"], table.raw["validation"]])),
        }
        if comparison is not None:  # equal fits have equal manifests: no seconds
            record["comparison"] = comparison.model_dump(mode="json", exclude={"models": {"__all__": {"seconds"}}})
        TableModel(fitted.ensemble, table.encoding, diversity, finite(record)).save(self.model)
        result, seconds = self._result(run, fitted, scores), time.monotonic() - start
        store.write_experiment(self._experiment(result, search=search, comparison=comparison, seconds=seconds))
        store.write_result(result, arrays)  # marks the run as finished

    def _search(self, fitted: FittedEnsemble, callback: SearchCallback, stop: Callable[[], bool]) -> TunedDiversity:
        """Search λ, unless the rule of `advise_diversity` predicts no gain."""
        table, scores = self.table, fitted.scores
        scores = None if scores is None else scores.scaled(table.target_variance)
        size = len(table.train) + len(table.validation)
        zero = ZeroDiversity(self.plan, table.train.x.shape[1], table.num_outputs, size, scores)
        if reason := zero.reason():
            return zero.keep(reason)
        cache = SearchCache(self.work / "search", SAVE_EVERY)
        # seed + 1: the search must not use the model's seed
        grid = table.grid_search(self.plan, self.device, self.seed + 1, cache=cache, end_early=True, baseline=scores)
        return grid.run(callback, stop)

    def _fit(
        self, diversity: float, callback: SearchCallback, stop: Callable[[], bool], *, scored: bool = False
    ) -> FittedEnsemble:
        """Train, and stop on folds of the training and validation rows, or on the validation rows.

        With folds, every row is left out by the same number of members, so that its scores are those of an ensemble.
        """
        plan, folds = self.plan, None
        owner = {"runs": [["model", diversity, self.seed]], "config_sha256": json_digest(self.request())}
        checkpoints = Checkpoints(self.work / "checkpoints" / f"model-{diversity:g}", owner=owner)
        train, validation, test = self.table.parts(plan, self.device)
        has_folds = plan.num_members % NUM_FOLDS == 0 and not plan.has_shared_weights and plan.batches == "shared"
        has_folds = has_folds and len(train) + len(validation) >= MIN_FOLD_ROWS and len(test) > 0
        if has_folds and plan.patience is not None and diversity == 0:
            train = train.join(validation)
            blocks = number_blocks(train.x.double(), weight=train.weight)
            folds = assign_folds(blocks, train.y, seed=self.seed, weight=train.weight)
        return fit_ensemble(
            plan,
            train,
            self.table.num_outputs,
            self.table.encoding,
            self.table.target_scaler,
            diversity=diversity,
            seed=self.seed,
            folds=folds,
            validation=validation if folds is None else None,
            scored=scored,
            checkpoint_policy=CheckpointPolicy(checkpoints, None, SAVE_EVERY, at_end=scored),
            on_progress=callback.on_step,
            stop=stop,
        )

    def _evaluate(self, fitted: FittedEnsemble) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return scores by part, in the target's units (several targets stay scaled), and the arrays of the last part.

        With folds, a validation row is predicted by the members that left it out.
        """
        table, ensemble, scores, arrays = self.table, fitted.ensemble, {}, {}
        scaler, is_single = table.target_scaler, table.num_outputs == 1

        @torch.no_grad()
        def predict(raw: Tensor, members: Tensor | None) -> Iterator[Tensor]:
            for rows in torch.arange(len(raw)).split(chunk_rows(ensemble, ensemble.num_members)):
                logits = ensemble(raw[rows])
                if members is not None:
                    logits = logits.gather(0, members[:, rows, None].expand(-1, -1, logits.shape[2]))
                yield logits if scaler is None or is_single else scaler.transform(logits)

        for name in ("validation", "test"):
            y, members = getattr(table, name).y, None
            if not len(y):
                continue
            if scaler is not None and is_single:
                y = scaler.inverse_transform(y).squeeze(1)
            if fitted.left_out is not None and name == "validation":
                left_out = fitted.left_out[:, -len(y) :].cpu()  # the same number of members for every row
                members = left_out.byte().topk(int(left_out[:, 0].sum()), dim=0).indices
            evaluation = evaluate(predict(table.raw[name], members), y, task=table.task)
            scores[name], arrays = evaluation.metrics, evaluation.arrays
            if "disputed_index" in arrays:
                arrays["disputed_row"] = table.rows[name][arrays["disputed_index"]] + 1  # from 1, as in the file
        return scores, arrays

    def _result(self, run: RunKey, fitted: FittedEnsemble, scores: dict[str, Any]) -> RunResult:
        history, metric = fitted.trained.fitted.history, f"train_{TASKS[self.table.task].score_name}"
        content = {
            **asdict(run),
            "run": run.id,
            "num_members": self.plan.num_members,
            "batches": self.plan.batches,
            "status": "finished",
            "metrics": scores,
            "history": [{"epoch": e["epoch"], "step": e["step"], metric: e["score"][0]} for e in history],
            "steps": fitted.trained.train_config.steps,
            "seconds": fitted.trained.fitted.seconds,
            "parameters": sum(p.numel() for p in fitted.ensemble.parameters()),
            "job": run.arm,
            "versions": versions(),
            **hardware(self.device),
        }
        return RunResult.model_validate(content)

    def _experiment(self, result: RunResult, **content: Any) -> ExperimentResult:
        table, target = self.table, self.table.schema.target
        widths = [table.train.x.shape[1], *self.plan.hidden, table.num_outputs]
        network = "MLP " + "-".join(map(str, widths))
        arm = {"name": result.arm, "label": "the model", "role": "model", "network": network}
        arm |= {name: getattr(result, name) for name in ("num_members", "batches", "parameters")}
        data = {"name": table.name, "classes": target.class_names, "schema": table.description}
        content |= {
            "name": self.out.name,
            "title": f"{target.name}, from {table.name}",
            "description": f"{self.plan.num_members} networks that predict {target.name} together.",
            "task": table.task,
            "data": {**data, **{name: len(rows) for name, rows in table.rows.items()}},
            "arms": [{**arm, "diversities": [result.diversity]}],
            "seeds": [result.seed],
            "hardware": hardware(self.device),
            "versions": versions(),
            "config": self.request(),
            "started": read_record(self.work / "fit.json")["started"],
        }
        return ExperimentResult.model_validate(content)
