"""Members of different kinds: a linear model, a wide network and a convolutional one, trained jointly with weights.

    python examples/mixed_members.py

`Ensemble` takes any modules that predict the same classes. Members of different accuracy get weights, fitted on
validation data.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import torchace as ace

EPOCHS = 20


def data() -> list[torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    rest_x, test_x, rest_y, test_y = train_test_split(x / 16, y, test_size=0.3, random_state=0, stratify=y)
    train_x, held_x, train_y, held_y = train_test_split(rest_x, rest_y, test_size=0.25, random_state=0, stratify=rest_y)
    parts = (train_x, train_y, held_x, held_y, test_x, test_y)
    return [torch.tensor(part, dtype=torch.float32 if part.ndim == 2 else torch.int64) for part in parts]


def main() -> dict[str, float]:
    torch.manual_seed(0)
    train_x, train_y, held_x, held_y, test_x, test_y = data()
    convolutional = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 10),
    )  # fmt: skip
    wide = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    tiny = nn.Sequential(nn.Linear(64, 2), nn.Tanh(), nn.Linear(2, 10))
    ensemble = ace.Ensemble([nn.Linear(64, 10), wide, convolutional, tiny])

    loss = ace.AmendedCrossEntropyLoss(diversity=0.3)
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.005)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(train_x)).split(64):
            optimizer.zero_grad()
            loss(ensemble(train_x[rows]), train_y[rows]).backward()
            optimizer.step()

    with torch.no_grad():
        weights = ace.fit_member_weights(ensemble(held_x).log_softmax(2), held_y)
        logits = ensemble(test_x)
    names = ("linear", "wide", "convolutional", "tiny")
    for name, member, weight in zip(names, logits, weights, strict=True):
        print(
            f"{name:14} accuracy {float((member.argmax(1) == test_y).double().mean()):.4f}, weight {float(weight):.3f}"
        )
    uniform = ensemble.predict_log_proba(test_x)
    ensemble.set_member_weights(weights)
    weighed = ensemble.predict_log_proba(test_x)
    nll = nn.functional.nll_loss
    found = {"uniform": float(nll(uniform, test_y)), "weighed": float(nll(weighed, test_y))}
    print(f"cross entropy: uniform weights {found['uniform']:.4f}, fitted weights {found['weighed']:.4f}")
    return found


if __name__ == "__main__":
    main()
