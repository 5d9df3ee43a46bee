"""Searches on a table."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torchace._files import write_atomic
from torchace.lab.data import Split
from torchace.lab.store import RunStoreError, finite
from torchace.lab.tables.table import Table
from torchace.lab.training.members import MemberPlan
from torchace.lab.tuning.grid_search import GridSearch, TunedDiversity
from torchace.lab.tuning.optuna_search import OptunaSearch, StudyResult
from torchace.lab.tuning.search import SearchCache, SearchCallback, SearchProblem

Result = TypeVar("Result", TunedDiversity, StudyResult)

CONTENT = {"search", "study.db", "tune.json"}  # of a search's directory


@dataclass(frozen=True)
class TableSearch:
    """A search on a table, from a plan, with its results in a directory."""

    table: Table
    plan: MemberPlan
    directory: Path
    seed: int = 0
    device: str = "cpu"

    def tune_diversity(
        self, *, num_seeds: int, rounds: int, callback: SearchCallback, stop: Callable[[], bool]
    ) -> TunedDiversity:
        """Search λ alone and measure its gain on the test part."""
        self._check_directory()
        problem, test = self._problem()
        search = GridSearch(
            problem,
            test=test if len(test) else None,
            num_seeds=num_seeds,
            num_fresh=num_seeds,
            rounds=rounds,
            score_scale=self.table.target_variance,
            cache=SearchCache(self.directory / "search"),
        )
        return self._write(search.run(callback, stop))

    def run_study(
        self, trials: int, *, callback: SearchCallback, stop: Callable[[], bool], storage: str | None, **options: Any
    ) -> StudyResult:
        """Search λ and other hyperparameters in an Optuna study."""
        self._check_directory()
        problem, _ = self._problem()
        search = OptunaSearch(problem, trials, storage=storage or self.directory / "study.db", **options)
        return self._write(search.run(callback, stop))

    def _problem(self) -> tuple[SearchProblem, Split]:
        train, validation, test = self.table.parts(self.plan, self.device)
        return SearchProblem(self.plan, train, validation, self.table.num_outputs, self.seed), test

    def _check_directory(self) -> None:
        """Refuse a directory with other content."""
        if self.directory.is_dir() and (names := os.listdir(self.directory)) and not CONTENT & set(names):
            raise RunStoreError(f"{self.directory} already holds other files. Choose another --out.")

    def _write(self, result: Result) -> Result:
        file = self.directory / "tune.json"
        write_atomic(file, (json.dumps(finite(result.to_dict()), indent=1) + "\n").encode())
        return result
