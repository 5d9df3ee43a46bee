"""Three changed lines turn a training script into one that trains an ensemble.

    python examples/training_loop.py

The same script twice: one network, and twenty of them trained jointly. The changed lines are marked.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import torchace as ace

MEMBERS, EPOCHS = 20, 30


def data() -> list[torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=0.3, random_state=0, stratify=y)
    return [torch.tensor(part, dtype=torch.float32 if part.ndim == 2 else torch.int64) for part in parts]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def train(model: nn.Module, loss: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()


def main() -> dict[str, float]:
    torch.manual_seed(0)
    train_x, test_x, train_y, test_y = data()

    model = network()
    train(model, nn.CrossEntropyLoss(), train_x, train_y)
    with torch.no_grad():
        alone = float((model(test_x).argmax(1) == test_y).double().mean())

    ensemble = ace.StackedEnsemble(network() for _ in range(MEMBERS))  # 1: the model
    train(ensemble, ace.AmendedCrossEntropyLoss(diversity=0.7), train_x, train_y)  # 2: the loss
    together = float((ensemble.predict(test_x) == test_y).double().mean())  # 3: the prediction

    with torch.no_grad():
        unsure = ace.mutual_information(ensemble(test_x), reduction="none")
    wrong = ensemble.predict(test_x) != test_y
    print(f"one network: {alone:.4f}; {MEMBERS} trained jointly: {together:.4f}")
    print(f"mutual information: {unsure[~wrong].mean():.3f} where right, {unsure[wrong].mean():.3f} where wrong")
    return {"alone": alone, "together": together}


if __name__ == "__main__":
    main()
