"""Plots of an ensemble's predictions: the values they draw."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import torchace as ace


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def predictions() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    target = torch.randint(3, (200,), generator=g)
    logits = 2 * torch.nn.functional.one_hot(target, 3) + 1.5 * torch.randn(4, 200, 3, generator=g)
    return logits, target


def test_reliability_draws_accuracy_by_confidence():
    logits, target = predictions()
    probs = ace.ensemble_probs(logits)
    ax = ace.plot_reliability(probs, target, num_bins=5)
    confidence, choice = probs.max(1)
    points = []
    for b in range(5):
        inside = (confidence >= b / 5) & (confidence < (b + 1) / 5)
        if inside.any():
            points.append([float(confidence[inside].mean()), float((choice == target)[inside].double().mean())])
    diagonal, line = ax.get_lines()
    assert np.allclose(line.get_xydata(), points, atol=1e-6)  # float32
    assert diagonal.get_xydata().tolist() == [[0, 0], [1, 1]]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("confidence", "accuracy")
    assert line.get_label() == f"calibration error {float(ace.calibration_error(probs, target, 5)):.3f}"


def test_reliability_takes_arrays_and_own_axes():
    logits, target = predictions()
    probs = ace.ensemble_probs(logits)
    _, ax = plt.subplots()
    assert ace.plot_reliability(probs.numpy(), target.numpy(), label="together", ax=ax) is ax
    ace.plot_reliability(logits[0].softmax(1), target, label="alone", ax=ax)
    labels = [text.get_text().partition(",")[0] for text in ax.get_legend().get_texts()]
    assert labels == ["together", "alone"]
    colors = [line.get_color() for line in ax.get_lines() if not line.get_label().startswith("_")]
    assert len(set(colors)) == 2
    assert plt.get_fignums() == [1]


def test_members_draws_accuracy_by_disagreement():
    logits, target = predictions()
    weights = [0.7, 0.1, 0.1, 0.1]
    ax = ace.plot_members(logits, target, member_weights=weights)
    choice = logits.argmax(2)
    others = [[100 * float((choice[k] != choice[j]).double().mean()) for j in range(4) if j != k] for k in range(4)]
    accuracy = (choice == target).double().mean(1)
    points = ax.containers[0][0].get_xydata()
    assert np.allclose(points, np.stack([np.mean(others, 1), accuracy], 1))
    assert np.mean(points[:, 0]) == pytest.approx(100 * float(ace.disagreement(logits)))
    together = (ace.ensemble_probs(logits, member_weights=weights).argmax(1) == target).double().mean()
    [line] = [line for line in ax.get_lines() if line.get_label() == "ensemble"]
    assert set(line.get_ydata()) == {float(together)}
    assert [text.get_text() for text in ax.texts] == ["0", "1", "2", "3"]


def test_one_member_is_drawn_too():
    logits, target = predictions()
    assert ace.plot_members(logits[:1], target).containers[0][0].get_xdata().tolist() == [0]


@pytest.mark.parametrize("plot", [ace.plot_members, ace.plot_reliability])
def test_wrong_values_leave_no_figure(plot):
    with pytest.raises(ValueError, match="Expected"):
        plot(torch.full((2, 3), 0.7), torch.zeros(5, dtype=torch.long))
    assert plt.get_fignums() == []
