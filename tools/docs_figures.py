"""Draws the figures of the page "How it works" with the library itself: `python tools/docs_figures.py`.

Every figure is written twice, for white pages and for black ones. Two are computed here (members' gradients, members on
two moons), two are drawn from the result files in docs/results.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import make_moons

import torchace as ace

ROOT = Path(__file__).parents[1]
STEPS = 600  # of training on two moons
INK = {"light": "#1f2328", "dark": "#e2e4e9"}
FAINT = {"light": "#d8dbe0", "dark": "#4a4f5a"}
BLUE, ORANGE, GREEN, PURPLE = "#4c8fd6", "#e07b39", "#2fa37c", "#b3689f"
MEMBERS = (BLUE, ORANGE, GREEN, PURPLE, "#c9a227", "#d1605e", "#5fb3b3", "#8d8d8d")


def gradients(scheme: str) -> Figure:
    """What moves five members on one sample, as λ grows."""
    probs = torch.tensor([0.15, 0.35, 0.6, 0.85, 0.97], dtype=torch.float64)  # each member's for the right class
    figure, axes = panels(3, 2.4, sharey=True)
    for ax, diversity in zip(axes, (0.0, 0.5, 1.0), strict=True):
        logits = torch.stack([probs, 1 - probs], 1).log()[:, None].requires_grad_()  # (K=5, N=1, C=2)
        ace.amended_cross_entropy(logits, torch.tensor([0]), diversity).backward()
        pull = -logits.grad[:, 0, 0]  # what gradient descent adds to the right class's logit, but for the step's length
        ax.barh(range(5), pull.tolist(), 0.6, color=MEMBERS[:5])
        ax.axvline(float(1 - probs.mean()), color=INK[scheme], linestyle="--", linewidth=1)
        ax.set(title=f"λ={diversity:g}", xlim=(0, 0.9), xlabel="pull to the label", yticks=range(5))
        ax.set_yticklabels([f"is {q:.0%} sure" for q in probs.tolist()])
        ax.grid(visible=False, axis="y")
    axes[0].invert_yaxis()  # shared
    axes[0].text(0.44, 4.2, "the ensemble's", fontsize=8)
    return figure


def moons(scheme: str) -> Figure:
    """Members' boundaries on two moons, and where the members disagree."""
    figure, axes = panels(3, 2.9, sharey=True)
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
        ax.contour(across, up, mean, [0.5], colors=INK[scheme], linewidths=2.5)
        for label, marker in enumerate("os"):
            rows = x[y == label].numpy()
            ax.plot(*rows.T, marker, color=(ORANGE, BLUE)[label], markersize=4, markeredgecolor=INK[scheme], mew=0.4)
        together = 1 - float((ace.ensemble_probs(known).argmax(1) == test_y).double().mean())
        alone = 1 - float((known.argmax(2) == test_y).double().mean())
        ax.set(title=f"λ={diversity:g}", xticks=(), yticks=())
        ax.set_xlabel(
            f"error {together:.1%}, one member {alone:.1%}\ndisagreement {float(ace.disagreement(known)):.1%}"
        )
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


def knob(scheme: str) -> Figure:
    """What λ gives and takes: twenty small networks on MNIST."""
    runs = [run for run in finished_runs("small_members") if run["arm"] == "shared"]
    figure, axes = panels(3, 2.4)
    for ax, title, key, color, scale in zip(
        axes,
        ("The ensemble's cross entropy", "One member's cross entropy", "Pairs that disagree, %"),
        ("cross_entropy", "member_cross_entropy", "disagreement"),
        (ORANGE, BLUE, GREEN),
        (1, 1, 100),
        strict=True,
    ):
        curve(ax, runs, key, "", color, scale=scale)
        ax.set(title=title, xlabel="λ")
    axes[2].set_ylim(0, None)
    return figure


def parting(scheme: str) -> Figure:
    """Where members part decides: four members on a ResNet-20, CIFAR-10."""
    runs = finished_runs("branched")
    figure, (left, right) = panels(2, 2.9)
    for arm, label, color in (
        ("smoc", "heads alone", BLUE),
        ("branched", "a last stage each", ORANGE),
    ):
        mine = [run for run in runs if run["arm"] == arm]
        curve(left, mine, "disagreement", label, color, scale=100)
        curve(right, mine, "cross_entropy", label, color)
    equal = np.mean([run["metrics"]["test"]["cross_entropy"] for run in runs if run["arm"] == "equal"])
    right.axhline(equal, color=INK[scheme], linestyle="--", linewidth=1, label="one network of equal size")
    left.set(title="Pairs of members that disagree, %", xlabel="λ", ylim=(0, None))
    right.set(title="The ensemble's cross entropy", xlabel="λ", ylim=(0.29, 0.42))
    right.legend(frameon=False, labelcolor=INK[scheme])
    return figure


FIGURES: dict[str, Callable[[str], Figure]] = {"gradients": gradients, "moons": moons, "knob": knob, "parting": parting}


def panels(number: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, list(figure.subplots(1, number, **options))


def curve(ax: Axes, runs: list[dict[str, Any]], key: str, label: str, color: str, *, scale: float = 1.0) -> None:
    """Means over seeds against λ, with standard deviations."""
    diversities = sorted({run["diversity"] for run in runs})
    values = [[scale * run["metrics"]["test"][key] for run in runs if run["diversity"] == d] for d in diversities]
    deviations = [np.std(v, ddof=1) for v in values]
    ax.errorbar(diversities, [np.mean(v) for v in values], deviations, color=color, marker="o", label=label, capsize=2)
    ax.set_xticks(diversities, [f"{d:g}" for d in diversities])


def finished_runs(name: str) -> list[dict[str, Any]]:
    runs = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text("utf-8"))["runs"]
    return [run for run in runs if run["status"] == "finished"]


def tensors(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


@contextmanager
def style(scheme: str) -> Iterator[None]:
    ink, faint = INK[scheme], FAINT[scheme]
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), ink)
    settings = {
        **colors, "axes.edgecolor": faint, "axes.grid": True, "grid.color": faint, "grid.linewidth": 0.5,
        "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none",
        "figure.facecolor": "none", "savefig.facecolor": "none", "font.size": 9, "axes.titlesize": 10,
        "svg.hashsalt": "torchace", "savefig.dpi": 100,
    }  # fmt: skip
    with mpl.rc_context(settings):
        yield


def main(folder: Path = ROOT / "docs" / "figures") -> list[Path]:
    """Draws all figures into a folder and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in FIGURES.items():
        for scheme in ("light", "dark"):
            paths.append(folder / f"{name}_{scheme}.svg")
            with style(scheme):
                draw(scheme).savefig(paths[-1], metadata={"Date": None})
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    for path in main(parser.parse_args().out):
        print(path)
