"""The results of a sweep, read from its run directory."""

from __future__ import annotations

import math
import shutil
import weakref
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchace._extras import import_extra
from torchace._figures import LIGHT, WIDTH
from torchace.lab.report import Results, read_results, write_report
from torchace.lab.report.findings import headline, other_gains
from torchace.lab.report.formats import capitalize, count, join
from torchace.lab.report.plots import lambda_figures
from torchace.lab.report.statistics import comparable_means, compare, paired_differences
from torchace.lab.report.tables import summarize_metric
from torchace.lab.schema.results import ArmSummary, RunKey
from torchace.lab.store import RunStore
from torchace.lab.sweeps.config import Components, ConfigError, parse_experiment
from torchace.lab.sweeps.loaded_data import LoadedData
from torchace.lab.sweeps.networks import build_network
from torchace.nn.base import EnsembleModule

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series  # type: ignore[import-untyped]


class SweepResult:
    """The results of a sweep.

    Args:
        directory: The run directory of `torchace.sweep(..., out=...)` or `torchace run`.
        components: The objects that were given to the sweep; by default they are imported by their names.
        temporary: Whether to remove the directory when this object is deleted.

    Example:
        >>> x, y = torch.randn(60, 4), torch.randint(3, (60,))
        >>> result = ace.sweep(
        ...     lambda: nn.Linear(4, 3), (x, y), (x, y), diversities=[0, 0.5], seeds=2, steps=3, batch_size=20
        ... )
        >>> result
        Sweep of 2 λ and 2 seeds, 4 runs
        >>> result.table()["seeds"].tolist()
        [2, 2]
    """

    def __init__(self, directory: str | Path, components: Components | None = None, *, temporary: bool = False) -> None:
        self.directory = Path(directory)
        self._components = components
        if temporary:
            weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)

    def _results(self, arrays: bool = False) -> Results:
        return read_results(self.directory, arrays=arrays)

    def to_frame(self) -> DataFrame:
        """Return one row per run: diversity, seed, test metrics, validation metrics (`validation_...`) and times.

        Settings with a list of values, such as `learning_rate`, are columns too. Failed runs have no metrics; `status`
        is `"failed"`.
        """
        import pandas as pd

        results, rows = self._results(), []
        names = {arm.name: arm.variant_of or arm.name for arm in results.arms}
        for run in results.runs:
            row: dict[str, Any] = {"arm": names[run.arm], "diversity": run.diversity, "seed": run.seed, **run.settings}
            row |= {"status": run.status, **results.scores(run, "test")}
            row |= {f"validation_{key}": value for key, value in results.scores(run, "validation").items()}
            rows.append({**row, "steps": run.steps, "seconds": run.seconds, "parameters": run.parameters})
        frame = pd.DataFrame(rows)
        return frame.drop(columns="arm") if len(set(names.values())) == 1 and len(frame) else frame

    def table(self) -> DataFrame:
        """Return one row per λ: means over seeds on test data, standard deviations, and the difference to λ=0.

        The index is λ, preceded by the arm, if there are several, and by settings with a list of values.
        `difference` is the mean paired difference of the loss (cross entropy or mean squared error), `low` to `high`
        its 95 % interval, corrected for the number of λ.
        """
        import pandas as pd

        results = self._results(arrays=True)
        rows = [_row(results, arm, diversity) for arm in results.arms for diversity in results.diversities(arm)]
        frame = pd.DataFrame(rows, columns=None if rows else _index(results))
        return frame.set_index(_index(results)).drop(columns="arm", errors="ignore")

    def best(self) -> Series:
        """Return the row of `table` for the λ chosen on validation data, with `diversity`.

        It is the λ with the lowest validation loss of those significantly below λ=0 (paired over seeds), else 0.

        Raises:
            ValueError: The sweep has no validation data.
        """
        import pandas as pd

        results = self._results(arrays=True)
        loss, found = results.task.loss, list[tuple[float, ArmSummary, float]]()
        for arm in results.arms:
            means = comparable_means(results, arm, loss, "validation")
            if not means:
                continue
            candidates = list(means)
            if 0.0 in means:  # the choice is corrected for the number of λ
                series = {d: results.values(arm, d, loss, "validation") for d in means}
                differences = paired_differences({d: v for d, v in series.items() if d}, series[0.0])
                candidates = [d.diversity for d in differences if d.significant and d.mean < 0] or [0.0]
            chosen = min(candidates, key=means.__getitem__)
            found.append((means[chosen], arm, chosen))
        if not found:
            if any(results.arm_data(arm).validation for arm in results.arms):
                raise ValueError("best() needs a finished run, but all runs failed or are missing.")
            raise ValueError(
                "best() needs validation data, but this sweep has none. Use sweep(..., validation=0.2), or compare the "
                "values of λ with table()."
            )
        score, arm, diversity = min(found, key=lambda candidate: candidate[0])
        row = _row(results, arm, diversity)
        keys = {key: row.pop(key) for key in _index(results)}
        row.pop("arm", None)
        return pd.Series({**keys, f"validation_{loss}": score, **row}, dtype=object)

    def plot(self) -> Figure:
        """Draw the loss and the error by λ, with 95 % intervals over seeds."""
        plt = import_extra("matplotlib.pyplot", "Drawing figures needs")
        specs = lambda_figures(self._results(arrays=True))[:2]
        if not specs:
            raise ValueError("There is nothing to plot: no run is finished, or the ensembles have one member.")
        figure = plt.figure(figsize=(WIDTH * len(specs), specs[0].height), layout="constrained")
        for spec, part in zip(specs, figure.subfigures(1, len(specs), squeeze=False)[0], strict=True):
            part.suptitle(spec.title)
            spec.draw(part, LIGHT)
        return figure

    def report(self, out: str | Path | None = None) -> Path:
        """Write the report and return the path of its page; `out` is `report` in the run directory by default."""
        return write_report(self.directory, out)

    def ensemble(self, diversity: float, seed: int, *, arm: str | None = None, **settings: float) -> EnsembleModule:
        """Return the trained ensemble of one run, in evaluation mode on the CPU.

        `settings` selects values of other axes of the sweep, such as `learning_rate=0.1`.

        Raises:
            ValueError: There is no such run, or its weights were not kept.
        """
        config = self._results().experiment.config
        given = {key: value for key, value in config.items() if key != "components"}
        experiment = parse_experiment(given, f"{self.directory}/experiment.json")
        arms = {one.name: one for one in experiment.complete_arms()}
        if arm is not None and arm not in arms:
            raise ValueError(f"Expected `arm` to be one of {', '.join(map(repr, arms))}, but got {arm!r}.")
        chosen = next(iter(arms.values())) if arm is None else arms[arm]
        if set(settings) != set(chosen.axes):
            needed = ", ".join(f"{axis}=..." for axis in chosen.axes) or "no settings"
            raise ValueError(f"Expected {needed} to identify the run, but got {settings or 'none'}.")
        key = RunKey(chosen.name, float(diversity), int(seed), **settings)
        weights = RunStore(self.directory).weights(key)
        try:
            components = self._components or Components.load(chosen)
        except ConfigError as error:
            raise ConfigError(
                f"{error} Repeat the call of sweep() with the same `out`: it trains nothing and returns a result with "
                "the function."
            ) from None
        data = None if components.member is not None else LoadedData.load(chosen.data, "cpu", components).dataset
        ensemble = build_network(chosen, data, [key.seed], "cpu", components=components).ensemble(0)
        try:
            ensemble.load_state_dict(weights)
        except RuntimeError:
            raise ValueError(
                f"The weights of run {key.description} do not fit the network; its function changed after the sweep. "
                "Restore the function, or train with another `out`."
            ) from None
        return ensemble.eval()

    def __repr__(self) -> str:
        results = self._results()
        parts = [f"{len({run.diversity for run in results.runs})} λ"]
        for name in _index(results)[:-1]:  # arms and settings with several values
            values = {arm.variant_of or arm.name if name == "arm" else arm.settings.get(name) for arm in results.arms}
            parts.append(count(len(values - {None}), name.replace("_", " ")))
        parts.append(count(len({run.seed for run in results.runs}), "seed"))
        return f"Sweep of {join(parts)}, {count(len(results.runs), 'run')}"

    def __str__(self) -> str:
        sentences, table = _sentences(self._results(arrays=True)), self.table()
        if len(table):
            shown = table[[key for key in table if not key.endswith("_sd")]]
            shown = shown.T if len(shown) <= 6 else shown  # fits into 80 columns
            sentences.append(shown.to_string(float_format="{:.4g}".format, na_rep=""))
        return "\n".join([repr(self), *sentences])

    def _repr_html_(self) -> str:
        """Show the table and the main finding in a notebook."""
        table = self.table()
        sentences = [f"<b>{escape(repr(self))}</b>", *map(escape, _sentences(self._results(arrays=True)))]
        shown = table.to_html(float_format="{:.4g}".format, border=0) if len(table) else ""
        return "".join(f"<p>{sentence}</p>" for sentence in sentences) + shown


def _sentences(results: Results) -> list[str]:
    """Return the main findings, each with the arms or settings it is about, and the reason if all runs failed."""
    if results.runs and not any(run.finished for run in results.runs):
        first = results.failed[0]
        reason = first.failure.message if first.failure else "unknown reason"
        return [f"All runs failed. The first one is λ={first.diversity:g} with seed {first.seed}: {reason}."]
    found: dict[str, list[str]] = {}
    for arm in results.arms:
        if about := headline(results, arm):
            found.setdefault(about.sentence + other_gains(results, arm), []).append(arm.label)
    sentences = list(found)
    if len(results.arms) > 1:
        sentences = [f"{capitalize('; '.join(found[text]))}: {text}" for text in sentences]
    return sentences


def _index(results: Results) -> list[str]:
    """Return the columns that identify a row of the table."""
    several = len({arm.variant_of or arm.name for arm in results.arms}) > 1
    axes = dict.fromkeys(axis for arm in results.arms for axis in arm.settings)
    return [*(["arm"] if several else []), *axes, "diversity"]


def _row(results: Results, arm: ArmSummary, diversity: float) -> dict[str, Any]:
    """Return means and standard deviations of an arm at one λ."""
    task = results.task
    row: dict[str, Any] = {"arm": arm.variant_of or arm.name, **arm.settings, "diversity": diversity}
    row["seeds"] = len(results.finished(arm, diversity))
    for key in (*task.ensemble, *task.member, task.spread, *task.details.get("Own", ())):
        summary = summarize_metric(results, arm, diversity, key)
        if summary is not None:
            row |= {key: summary.mean, f"{key}_sd": summary.sd}
    comparison = compare(results, arm, task.loss)
    if comparison is not None and (difference := comparison.at(diversity)) is not None:
        low, high = difference.joint_interval or (None, None)
        row |= {"difference": difference.mean, "low": low, "high": high}
    return {key: math.nan if value is None else value for key, value in row.items()}
