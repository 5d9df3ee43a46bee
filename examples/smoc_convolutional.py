"""Many classifiers on one convolutional network (the paper's SMOC), and members that branch earlier.

    python examples/smoc_convolutional.py

Linear heads on one feature vector collapse onto each other, whatever λ is: look at the disagreement. Members that have
layers of their own do not. The two differ only in the layer where the members branch.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import torchace as ace

MEMBERS, EPOCHS = 4, 20


def data() -> list[torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    parts = train_test_split((x / 16).reshape(-1, 1, 8, 8), y, test_size=0.3, random_state=0, stratify=y)
    return [torch.tensor(part, dtype=torch.float32 if part.ndim == 4 else torch.int64) for part in parts]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def train(ensemble: nn.Module, diversity: float, x: torch.Tensor, y: torch.Tensor) -> None:
    torch.manual_seed(1)
    loss = ace.AmendedCrossEntropyLoss(diversity)
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            loss(ensemble(x[rows]), y[rows]).backward()
            optimizer.step()


def main() -> dict[str, dict[str, float]]:
    train_x, test_x, train_y, test_y = data()
    found = {}
    for diversity in (0.0, 0.7):
        kinds = {
            "heads": ace.stack_classifiers(network(), MEMBERS),
            "branches": ace.branch(network(), at="3", num_members=MEMBERS, reinitialize=True),
        }
        for kind, ensemble in kinds.items():
            train(ensemble, diversity, train_x, train_y)
            ensemble.eval()
            with torch.no_grad():
                logits = ensemble(test_x)
            accuracy = float((ensemble.predict(test_x) == test_y).double().mean())
            differ = float(ace.disagreement(logits))
            found[f"{kind} λ={diversity:g}"] = {"accuracy": accuracy, "disagreement": differ}
            print(f"{kind:8} λ={diversity:g}: accuracy {accuracy:.4f}, members disagree on {differ:.2%} of the images")
    return found


if __name__ == "__main__":
    main()
