"""Draw the documentation's figures with the library: `python tools/docs_figures.py`.

Every figure is written twice, for wide pages and for phones. Its text and lines take the reader's colors: from the
page where the SVG is part of it (tools/docs_pages.py), from the system's light or dark scheme elsewhere.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from sklearn.datasets import make_moons

import torchace as ace
from torchace.lab.sweeps.config import load_experiment

ROOT = Path(__file__).parents[1]
STEPS = 600  # of training on two moons
INK, FAINT = "#010203", "#040506"  # stand for colors of the reader's scheme
COLORS = {INK: "var(--ink)", FAINT: "var(--faint)"}
SCHEMES = """<style>
:root { --ink: #1f2328; --faint: #d8dbe0 }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e4e9; --faint: #4a4f5a } }
</style>"""
BLUE, ORANGE, GREEN, PURPLE = "#4c8fd6", "#e07b39", "#2fa37c", "#b3689f"
MEMBERS = (BLUE, ORANGE, GREEN, PURPLE, "#c9a227", "#d1605e", "#5fb3b3", "#8d8d8d")


def gradients(narrow: bool) -> Figure:
    """Gradients of five members on one sample, as λ grows."""
    probs = torch.tensor([0.15, 0.35, 0.6, 0.85, 0.97], dtype=torch.float64)  # each member's for the right class
    figure, axes = panels(3, 2.4, narrow, sharey=True)
    for ax, diversity in zip(axes, (0.0, 0.5, 1.0), strict=True):
        logits = torch.stack([probs, 1 - probs], 1).log()[:, None].requires_grad_()  # (K=5, N=1, C=2)
        ace.amended_cross_entropy(logits, torch.tensor([0]), diversity).backward()
        pull = -logits.grad[:, 0, 0]  # what gradient descent adds to the right class's logit, but for the step's length
        ax.barh(range(5), pull.tolist(), 0.6, color=MEMBERS[:5])
        ax.axvline(float(1 - probs.mean()), color=INK, linestyle="--", linewidth=1)
        ax.set(title=f"λ={diversity:g}", xlim=(0, 0.9), xlabel="pull towards the label", yticks=range(5))
        ax.set_yticklabels([f"is {100 * q:.0f} % sure" for q in probs.tolist()])
        ax.grid(visible=False, axis="y")
    axes[0].invert_yaxis()  # shared
    axes[0].text(0.44, 4.2, "the ensemble's", fontsize=8)
    return figure


def moons(narrow: bool) -> Figure:
    """Members' boundaries on two moons, and where the members disagree."""
    figure, axes = panels(3, 2.9, narrow, sharey=True)
    across, up = mesh()
    x, y = tensors(*make_moons(60, noise=0.25, random_state=0))
    test_x, test_y = tensors(*make_moons(4000, noise=0.25, random_state=1))
    for ax, diversity in zip(axes, (0.0, 0.5, 0.9), strict=True):
        ensemble = on_moons(diversity)
        with torch.no_grad():
            logits, known = ensemble(torch.tensor(np.stack([across, up], -1)).flatten(0, 1)), ensemble(test_x)
        differ = ace.disagreement(logits, reduction="none").view(across.shape)
        shade = np.full((*across.shape, 4), mpl.colors.to_rgba(BLUE))
        shade[..., 3] = differ.numpy()  # none where all members agree
        ax.imshow(shade, extent=(across.min(), across.max(), up.min(), up.max()), origin="lower", aspect="auto")
        for member, color in zip(logits.softmax(2)[..., 1], MEMBERS, strict=True):
            ax.contour(across, up, member.view(across.shape).numpy(), [0.5], colors=color, linewidths=1)
        mean = ace.ensemble_probs(logits)[:, 1].view(across.shape).numpy()
        ax.contour(across, up, mean, [0.5], colors=INK, linewidths=2.5)
        for label, marker in enumerate("os"):
            rows = x[y == label].numpy()
            ax.plot(*rows.T, marker, color=(ORANGE, BLUE)[label], markersize=4, markeredgecolor=INK, mew=0.4)
        together = 1 - float((ace.ensemble_probs(known).argmax(1) == test_y).double().mean())
        alone = 1 - float((known.argmax(2) == test_y).double().mean())
        ax.set(title=f"λ={diversity:g}", xticks=(), yticks=())
        ax.set_xlabel(
            f"error {100 * together:.1f} %, one member {100 * alone:.1f} %\n"
            f"disagreement {100 * float(ace.disagreement(known)):.1f} %"
        )
    return figure


def uncertainty(narrow: bool) -> Figure:
    """Total uncertainty of an ensemble on two moons, and its two parts."""
    figure, axes = panels(3, 2.5, narrow, sharey=True)
    across, up = mesh()
    ensemble = on_moons(0.5)
    with torch.no_grad():
        logits = ensemble(torch.tensor(np.stack([across, up], -1)).flatten(0, 1))
    total = ace.predictive_entropy(logits, reduction="none")
    epistemic = ace.mutual_information(logits, reduction="none")
    x, y = make_moons(60, noise=0.25, random_state=0)
    for ax, title, values in zip(
        axes, ("total", "epistemic", "aleatoric"), (total, epistemic, total - epistemic), strict=True
    ):
        shade = np.full((*across.shape, 4), mpl.colors.to_rgba(PURPLE))
        shade[..., 3] = (values / np.log(2)).clamp(0, 1).view(across.shape).numpy()  # of at most log 2
        ax.imshow(shade, extent=(across.min(), across.max(), up.min(), up.max()), origin="lower", aspect="auto")
        for label, marker in enumerate("os"):
            ax.plot(*x[y == label].T, marker, color=(ORANGE, BLUE)[label], markersize=3)
        ax.set(title=title, xticks=(), yticks=())
    return figure


def mesh() -> tuple[np.ndarray, np.ndarray]:
    across, up = np.meshgrid(np.linspace(-1.8, 2.8, 110), np.linspace(-1.3, 1.8, 80))
    return across.astype(np.float32), up.astype(np.float32)


@functools.cache
def on_moons(diversity: float) -> ace.StackedEnsemble:
    """Eight networks of four hidden units, trained jointly on sixty points."""
    x, y = tensors(*make_moons(60, noise=0.25, random_state=0))
    torch.manual_seed(0)  # the same first weights at every λ
    ensemble = ace.StackedEnsemble(ace.mlp(2, 4, 2) for _ in range(len(MEMBERS)))
    loss = ace.AmendedCrossEntropyLoss(diversity)
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.02)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(ensemble(x), y).backward()
        optimizer.step()
    return ensemble


def knob(narrow: bool) -> Figure:
    """Effect of λ on twenty small networks on MNIST."""
    runs = [run for run in finished_runs("small_members") if run["arm"] == "shared"]
    figure, axes = panels(3, 2.7, narrow)
    for ax, title, label, key, color, scale in zip(
        axes,
        ("The ensemble improves", "while one member gets worse", "and members disagree more"),
        ("test cross entropy", "test cross entropy", "pairs that disagree, %"),
        ("cross_entropy", "member_cross_entropy", "disagreement"),
        (ORANGE, BLUE, GREEN),
        (1, 1, 100),
        strict=True,
    ):
        curve(ax, runs, key, "", color, scale=scale)
        ax.set(title=title, xlabel="diversity λ", ylabel=label)
    axes[2].set_ylim(0, None)
    mark_gain(axes[0], runs)
    return figure


def gain(narrow: bool) -> Figure:
    """The first panel of `knob`, for the front page."""
    runs = [run for run in finished_runs("small_members") if run["arm"] == "shared"]
    figure, (ax,) = panels(1, 2.7, narrow=True)
    curve(ax, runs, "cross_entropy", "", ORANGE)
    ax.set(xlabel="diversity λ", ylabel="test cross entropy of the ensemble")
    mark_gain(ax, runs)
    return figure


def mark_gain(ax: Axes, runs: list[dict[str, Any]]) -> None:
    """Mark the lowest mean cross entropy and its change against λ=0."""
    means = {d: np.mean(v) for d, v in by_diversity(runs, "cross_entropy").items()}
    best = min(means, key=lambda diversity: means[diversity])
    ax.axhline(means[0.0], color=INK, linestyle="--", linewidth=1)
    ax.text(0.5, means[0.0] + 0.0006, "members fitted alone (λ=0)", ha="center", va="bottom", fontsize=8)
    ax.annotate(
        "",
        (best, means[best]),
        (best, means[0.0]),
        arrowprops={"arrowstyle": "-|>", "color": ORANGE, "shrinkA": 0, "shrinkB": 8},
    )
    change = f"{100 * means[best] / means[0.0] - 100:+.0f} %".replace("-", "−")
    ax.text(best - 0.03, means[best] * 0.4 + means[0.0] * 0.6, change, ha="right", fontsize=12)
    ax.set_ylim(None, means[0.0] + 0.004)


def speed(narrow: bool) -> Figure:
    """Training steps of stacked members and of a loop over them, on one H200."""
    cases = experiment("bench_stacking_gpu")["cases"]
    networks = {"resnet18": "8 ResNet-18", "vit_tiny": "8 ViT-tiny", "bert": "8 BERT, small"}
    figure, axes = panels(len(networks), 2.0, narrow)
    for ax, (case, title) in zip(axes, networks.items(), strict=True):
        ways = {"loop": "loop", "stacked": "stacked", "compiled": "stacked, compiled"}
        values = [1000 * cases[case][way]["seconds_a_model_step"]["median"] for way in ways.values()]
        bars = ax.barh(list(ways), values, 0.6, color=(FAINT, BLUE, ORANGE))
        ax.bar_label(bars, [f"{value:.1f}" for value in values], padding=3)
        ax.set(title=title, xlabel="ms per member and step")
        ax.margins(x=0.2)
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
    return figure


def cross_entropies(name: str, narrow: bool, *, without: str = "") -> Figure:
    """Cross entropy of the ensemble against λ, one line for each arm of an experiment."""
    runs = finished_runs(name)
    figure, (ax,) = panels(1, 2.9, narrow)
    arms = [arm for arm in experiment(name)["experiment"]["arms"] if arm["name"] != without]
    for arm, color in zip(arms, MEMBERS, strict=False):
        mine = [run for run in runs if run["arm"] == arm["name"]]
        curve(ax, mine, "cross_entropy", arm["label"], color)
    ax.set(xlabel="diversity λ", ylabel="the ensemble's test cross entropy")
    figure.legend(loc="outside upper center", ncols=1 if narrow else 3, frameon=False, labelcolor=INK)
    return figure


def parting(narrow: bool) -> Figure:
    """Where members part decides: four members on a ResNet-20, CIFAR-10."""
    runs = finished_runs("branched")
    figure, (left, right) = panels(2, 2.9, narrow)
    for arm, label, color in (("smoc", "heads alone", BLUE), ("branched", "a last stage each", ORANGE)):
        mine = [run for run in runs if run["arm"] == arm]
        curve(left, mine, "disagreement", label, color, scale=100)
        curve(right, mine, "cross_entropy", label, color)
    equal = np.mean([run["metrics"]["test"]["cross_entropy"] for run in runs if run["arm"] == "equal"])
    right.axhline(equal, color=INK, linestyle="--", linewidth=1, label="one network of equal size")
    left.set(title="Pairs of members that disagree, %", xlabel="λ", ylim=(0, None))
    right.set(title="The ensemble's cross entropy", xlabel="λ", ylim=(0.29, 0.42))
    right.legend(frameon=False, labelcolor=INK)
    return figure


def table2(narrow: bool) -> Figure:
    """Every run of the paper's Table 2 beside the paper's numbers."""
    files = sorted((ROOT / "docs" / "results" / "table2_full").glob("*.json"))
    runs = [json.loads(file.read_text("utf-8")) for file in files]
    columns = sorted({(run["num_members"], run["diversity"]) for run in runs})
    paper = load_experiment("table2").paper
    assert paper is not None
    figure, axes = panels(2, 2.9, narrow)
    for ax, key, title in zip(axes, ("error", "cross_entropy"), ("Error, %", "Cross entropy"), strict=True):
        for run in runs:
            score = run["metrics"]["test"]
            value = 100 * (1 - score["accuracy"]) if key == "error" else score[key]
            ax.plot(columns.index((run["num_members"], run["diversity"])), value, "o", color=ORANGE, markersize=4)
        stated = {(row.num_members, row.diversity or 0.0): getattr(row, key) for row in paper.rows}
        ax.plot(range(len(columns)), [stated[column] for column in columns], "x", color=INK)
        ax.set_xticks(range(len(columns)), ["K=1", *(f"{d:g}" for _, d in columns[1:])])
        ax.set(title=title, xlabel="λ, with K=10")
    axes[1].set_ylim(0.27, 0.35)
    figure.legend(
        handles=[
            Line2D([], [], color=ORANGE, marker="o", linestyle="", markersize=4, label="one training"),
            Line2D([], [], color=INK, marker="x", linestyle="", label="paper"),
        ],
        loc="outside upper center",
        ncols=2,
        frameon=False,
        labelcolor=INK,
    )
    return figure


def underfitting(narrow: bool) -> Figure:
    """Gain at the chosen λ by number of images and width, on MNIST and Fashion-MNIST."""
    figure, axes = panels(2, 3.1, narrow)
    for ax, (name, title) in zip(axes, UNDERFITTING.items(), strict=True):
        cells = experiment(name)["cells"]
        rows, columns = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("limit", "hidden"))
        for cell in cells:
            x, y, change = columns.index(cell["hidden"]), rows.index(cell["limit"]), 100 * cell["relative"]
            alpha = min(1.0, abs(change) / 10)
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=BLUE if change < 0 else ORANGE, alpha=alpha, lw=0))
            star = "*" if cell["verdict"] == "lower" else ""
            ax.text(x, y, f"{change:+.1f}{star}".replace("-", "−"), ha="center", va="center", fontsize=8)
        ax.set_xticks(range(len(columns)), columns)
        ax.set_yticks(range(len(rows)), [f"{int(row):,}" for row in rows])
        ax.set(title=title, xlabel="hidden units", xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(rows) - 0.5))
        ax.grid(visible=False)
    axes[0].set_ylabel("images")
    return figure


def underfitting_gap(narrow: bool) -> Figure:
    """Gain at the chosen λ against the ratio of training to validation loss at λ=0."""
    figure, (ax,) = panels(1, 3.2, narrow)
    for (name, title), color in zip(UNDERFITTING.items(), (BLUE, ORANGE), strict=True):
        for suffix, label, marker in (("", "to the end", "o"), ("_early", "stopped early", "s")):
            cells = experiment(name + suffix)["cells"]
            ratios = [np.mean(cell["train"][0]) / np.mean(cell["validation"][0]) for cell in cells]
            gains = [-100 * cell["relative"] for cell in cells]
            faces = [color if cell["verdict"] == "lower" else "none" for cell in cells]
            ax.scatter(ratios, gains, 22, faces, marker=marker, edgecolors=color, label=f"{title}, {label}")
    ax.axhline(0, color=INK, linewidth=1)
    ax.set(xlabel="training loss / validation loss at λ=0", ylabel="gain, % of cross entropy")
    figure.legend(loc="outside upper center", ncols=1 if narrow else 2, frameon=False, labelcolor=INK)
    return figure


def underfitting_samples(narrow: bool) -> Figure:
    """Gain at the chosen λ against the number of training samples, in all data that do not overfit."""
    sys.path.append(str(ROOT / "benchmarks"))
    import underfitting_rule as rules

    figure, (ax,) = panels(1, 3.2, narrow)
    for is_table, label, marker, color in ((False, "images, signals, text", "o", BLUE), (True, "tables", "s", ORANGE)):
        files = [rules.read(name) for name in rules.KNOWN | rules.NEW if name.startswith(rules.PERCEPTION) != is_table]
        cells = [cell for results in files for cell in results["cells"] if not rules.overfits(cell)]
        gains = [-100 * cell["relative"] for cell in cells]
        ax.scatter([cell["n"] for cell in cells], gains, 18, color, marker=marker, alpha=0.6, label=label, linewidths=0)
    ax.axhline(0, color=INK, linewidth=1)
    ax.axvline(rules.MANY_SAMPLES, color=INK, linestyle="--", linewidth=1)
    ax.set(xscale="log", xlabel="training samples", ylabel="gain, % of cross entropy")
    ax.set_xticks([300, 1000, 5000, 20_000, 60_000], ["300", "1,000", "5,000", "20,000", "60,000"])
    ax.minorticks_off()
    figure.legend(loc="outside upper center", ncols=2, frameon=False, labelcolor=INK)
    return figure


UNDERFITTING = {"underfitting_mnist": "MNIST", "underfitting_fashion_mnist": "Fashion-MNIST"}


def equal_budgets(narrow: bool) -> Figure:
    """Four members with λ, without it, and one larger network, by width."""
    names = ("equal_budgets_4", "equal_budgets_8", "equal_budgets_16")
    found = [experiment(name) for name in names if (ROOT / "docs" / "results" / f"{name}.json").exists()]
    widths = [entry for file in found for entry in file["widths"] if entry["runs"]]
    contenders = (("members", True, "four members, λ=0"), ("members", False, "four members, chosen λ"))
    contenders += (("wider", True, "one wider network"), ("deeper", True, "one deeper network"))
    figure, axes = panels(3, 2.9, narrow)
    scores = {"accuracy": "Error, %", "cross_entropy": "Cross entropy", "calibration_error": "Calibration error"}
    for ax, (key, title) in zip(axes, scores.items(), strict=True):
        for i, (arm, is_zero, label) in enumerate(contenders):
            for j, entry in enumerate(widths):
                runs = [r["test"][key] for r in entry["runs"] if r["arm"] == arm and (r["diversity"] == 0) == is_zero]
                values = 100 * (1 - np.array(runs)) if key == "accuracy" else np.array(runs)
                place = {"color": MEMBERS[i], "marker": "o", "capsize": 2, "label": label if j == 0 else None}
                ax.errorbar(j + 0.18 * (i - 1.5), values.mean(), values.std(ddof=1), linestyle="", **place)
        ax.set_xticks(range(len(widths)), [f"width {entry['width']}" for entry in widths])
        ax.set(title=title, xlim=(-0.6, len(widths) - 0.4))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=1 if narrow else 4, frameon=False, labelcolor=INK)
    return figure


def heads(narrow: bool) -> Figure:
    """Disagreement and cross entropy of six kinds of heads."""
    runs = [{**run, "metrics": run} for run in experiment("heads")["runs"]]
    labels = {"one": "one network", "plain": "linear", "mask": "own features", "adapters": "adapted last stage"}
    figure, (left, right) = panels(2, 2.9, narrow)
    for kind, color in zip(dict.fromkeys(run["arm"] for run in runs), MEMBERS, strict=False):
        mine = [run for run in runs if run["arm"] == kind]
        curve(right, mine, "cross_entropy", labels.get(kind, kind.replace("_", " ")), color)
        if kind != "one":
            curve(left, mine, "disagreement", "", color, scale=100)
    left.set(title="Pairs of heads that disagree, %", xlabel="λ")
    left.set_ylim(bottom=0)
    right.set(title="The ensemble's cross entropy", xlabel="λ")
    figure.legend(loc="outside upper center", ncols=2 if narrow else 4, frameon=False, labelcolor=INK)
    return figure


FIGURES: dict[str, Callable[[bool], Figure]] = {
    "gradients": gradients,
    "moons": moons,
    "knob": knob,
    "gain": gain,
    "uncertainty": uncertainty,
    "speed": speed,
    "parting": parting,
    "table2": table2,
    "equal_budgets": equal_budgets,
    "heads": heads,
    "underfitting": underfitting,
    "underfitting_gap": underfitting_gap,
    "underfitting_samples": underfitting_samples,
    "table2_short": functools.partial(cross_entropies, "table2_short", without="attached"),
    "table2_short_ablation": functools.partial(cross_entropies, "table2_short"),
    **{name: functools.partial(cross_entropies, name) for name in ("small_members", "table1", "branched")},
}


def panels(number: int, height: float, narrow: bool, **options: Any) -> tuple[Figure, list[Axes]]:
    """Panels beside each other, or below each other on a phone."""
    shape, size = ((number, 1), (3.9, height * number)) if narrow else ((1, number), (8, height))
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(*shape, squeeze=False, **options).flat)


def by_diversity(runs: list[dict[str, Any]], key: str) -> dict[float, list[float]]:
    """Test values of all seeds at each λ."""
    diversities = sorted({run["diversity"] for run in runs})
    return {d: [run["metrics"]["test"][key] for run in runs if run["diversity"] == d] for d in diversities}


def curve(ax: Axes, runs: list[dict[str, Any]], key: str, label: str, color: str, *, scale: float = 1.0) -> None:
    """Means over seeds against λ, with standard deviations; a single λ is a dashed line."""
    values = {d: scale * np.array(v) for d, v in by_diversity(runs, key).items()}
    means, deviations = [v.mean() for v in values.values()], [v.std(ddof=1) for v in values.values()]
    if len(values) == 1:
        ax.axhline(means[0], color=color, linestyle="--", linewidth=1, label=label)
        return
    ax.errorbar(list(values), means, deviations, color=color, marker="o", label=label, capsize=2)
    shown, room = [], (0.09 if ax.figure.get_figwidth() < 5 else 0) * max(values)  # labels must not overlap
    for diversity in values:
        shown += [diversity] if not shown or diversity - shown[-1] >= room else []
    ax.set_xticks(shown, [f"{d:g}" for d in shown])


@functools.cache
def experiment(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text("utf-8")))


def finished_runs(name: str) -> list[dict[str, Any]]:
    return [run for run in experiment(name)["runs"] if run["status"] == "finished"]


def tensors(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


@contextmanager
def style() -> Iterator[None]:
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK)
    settings = {
        **colors, "axes.edgecolor": FAINT, "axes.grid": True, "grid.color": FAINT, "grid.linewidth": 0.5,
        "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none",
        "figure.facecolor": "none", "savefig.facecolor": "none", "font.size": 9, "axes.titlesize": 10,
        "svg.hashsalt": "torchace", "svg.fonttype": "none", "savefig.dpi": 100,
    }  # fmt: skip
    with mpl.rc_context(settings):
        yield


def save(figure: Figure, path: Path) -> None:
    """Write a figure as an SVG file in the reader's colors."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    for stand_in, color in COLORS.items():
        text = text.replace(stand_in, color)
    text = re.sub('font-family: [^;"]*', "font-family: system-ui, sans-serif", text)
    path.write_text(text.replace("<defs>", f"{SCHEMES}\n <defs>", 1), "utf-8")


def main(folder: Path = ROOT / "docs" / "figures", names: Iterable[str] = tuple(FIGURES)) -> list[Path]:
    """Draw figures into a folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in names:
        for narrow in (False, True):
            paths.append(folder / f"{name}{'_narrow' if narrow else ''}.svg")
            with style():
                save(FIGURES[name](narrow), paths[-1])
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *FIGURES], help="all unless named")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    arguments = parser.parse_args()
    for path in main(arguments.out, arguments.names or FIGURES):
        print(path)
