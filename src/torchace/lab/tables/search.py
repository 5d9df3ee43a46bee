"""A search on a user's table: for λ, or for λ with everything else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchace._files import refuse_links, remove_abandoned, write_atomic
from torchace.lab.data import Split
from torchace.lab.store import RunStoreError, finite
from torchace.lab.tables.table import Table, on_device, squared_scale
from torchace.lab.training.members import MemberPlan
from torchace.lab.tuning.search import SearchResult, SearchSpace, search
from torchace.lab.tuning.search_cache import Trials
from torchace.lab.tuning.tuning import Stage, TunedDiversity, tune_diversity

KEPT = {"search", "study.db", "study.db.lock", "tune.json"}  # what searches leave in their directory


@dataclass(frozen=True)
class TableSearch:
    """A table, the plan the search starts from, and the directory it is kept in."""

    table: Table
    plan: MemberPlan
    directory: Path
    seed: int = 0
    device: str = "cpu"

    def diversity(
        self,
        *,
        num_seeds: int,
        rounds: int,
        watch: Callable[[Stage, float], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> TunedDiversity:
        """λ, and what it is worth on the test part."""
        self._check()
        tuned = tune_diversity(
            self.plan,
            self._part(self.table.train),
            self._part(self.table.validation),
            self.table.num_outputs,
            check=self._part(self.table.test) if len(self.table.test) else None,
            seed=self.seed,
            num_seeds=num_seeds,
            num_fresh=num_seeds,
            rounds=rounds,
            score_scale=squared_scale(self.table.targets),
            store=Trials(self.directory / "search"),
            watch=watch,
            stop=stop,
        )
        self._write(tuned.to_json())
        return tuned

    def everything(
        self,
        trials: int,
        *,
        storage: str | None,
        study: str,
        pruning: bool,
        watch: Callable[[int, float | None, float | None], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> SearchResult:
        """λ with widths, rates and the number of members, in an Optuna study."""
        self._check()
        found = search(
            SearchSpace(),
            self.plan,
            self._part(self.table.train),
            self._part(self.table.validation),
            self.table.num_outputs,
            trials=trials,
            storage=storage or self.directory / "study.db",
            study_name=study,
            seed=self.seed,
            pruning=pruning,
            watch=watch,
            stop=stop,
        )
        self._write(found.to_json())
        return found

    def _check(self) -> None:
        """Refuses a directory that holds something else than searches, or links in their place."""
        if self.directory.is_dir() and (names := os.listdir(self.directory)) and not KEPT & set(names):
            raise RunStoreError(f"{self.directory} holds something else already. Choose another --out.")
        refuse_links(self.directory, (*KEPT, "study.db-journal"))

    def _part(self, split: Split) -> Split:
        return on_device(split, self.plan, self.device)

    def _write(self, content: dict[str, Any]) -> None:
        file = self.directory / "tune.json"
        remove_abandoned(file)
        write_atomic(file, (json.dumps(finite(content), indent=1) + "\n").encode())
