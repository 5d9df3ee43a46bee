"""Fine-tune one network into eight members by low-rank adapters.

    python examples/adapters_digits.py

A convolutional network learns the digits 0 to 4. Its frozen weights then serve eight members that learn 5 to 9, each
with a low-rank adapter and a head of its own, all computed in one pass. Their mutual information is higher for digits
that fine-tuning never showed. The adapters are saved in the format of peft, loaded again as one ensemble, and one
member is merged into a plain network.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import torchace as ace

MEMBERS, RANK, DIVERSITY = 8, 4, 0.3


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels: every fourth image is for testing."""
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x / 8 - 1, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(y)
    test = torch.arange(len(labels)) % 4 == 0
    return images[~test], labels[~test], images[test], labels[test]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 16, 32), nn.ReLU(), nn.Linear(32, 5),
    )  # fmt: skip


def fit(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            logits = model(x[rows])
            if logits.ndim == 2:
                F.cross_entropy(logits, y[rows]).backward()
            else:  # (K, N, C)
                ace.amended_cross_entropy(logits, y[rows], DIVERSITY).backward()
            optimizer.step()


def main(epochs: int = 15) -> dict[str, float]:
    torch.manual_seed(0)
    x, y, test_x, test_y = data()
    model = network()
    fit(model, x[y < 5], y[y < 5], epochs)

    # trained=False: new heads for new classes; low-rank adapters leave the trained weights as they are
    ensemble = ace.adapt(model, MEMBERS, adapter="low_rank", rank=RANK, freeze=True, trained=False)
    fit(ensemble, x[y >= 5], y[y >= 5] - 5, epochs)

    ensemble.eval()
    with torch.no_grad():
        logits = ensemble(test_x)
    new = test_y >= 5
    right = ensemble.predict(test_x[new]) == test_y[new] - 5
    information = ace.mutual_information(logits, reduction="none")
    found = {
        "accuracy": right.float().mean().item(),
        "mutual_information": information[new].mean().item(),
        "mutual_information_unseen": information[~new].mean().item(),
    }
    print(f"accuracy for 5 to 9: {found['accuracy']:.4f}")
    print(
        f"mutual information: {found['mutual_information']:.3f} for 5 to 9, "
        f"{found['mutual_information_unseen']:.3f} for 0 to 4, which fine-tuning never showed"
    )
    with tempfile.TemporaryDirectory() as folder:
        folders = ensemble.save_adapters(folder)  # a peft adapter for each member
        again = ace.load_adapters(model, folders)
        kilobytes = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors")) / 1000
    first = ensemble.merge(0).eval()  # a plain network
    with torch.no_grad():
        found["loaded"] = (again.eval()(test_x) - logits).abs().max().item()
        found["merged"] = (first(test_x) - logits[0]).abs().max().item()
    print(f"saved {len(folders)} adapters, {kilobytes:.0f} kB; largest difference after loading: {found['loaded']:.1e}")
    return found


if __name__ == "__main__":
    main()
