"""An ensemble of models trained separately: member weights, diagnosis and saving.

    python examples/existing_models.py

Three files of weights (one of them of a model that was hardly trained, one loaded twice) become an ensemble; weights of
the members are fitted on validation data; the diagnosis finds both problems.
"""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import torchace as ace

EPOCHS = (30, 1, 30)  # of each model


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


def main() -> dict[str, float]:
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x))
    x, y = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"model{k}.pt" for k in range(3)]
        for path, epochs in zip(paths, EPOCHS, strict=True):  # trained earlier
            model = network()
            train(model, x[:800], y[:800], epochs)
            torch.save(model.state_dict(), path)

        ensemble = ace.Ensemble.from_checkpoints(network, [*paths, paths[0]])  # one file twice, by mistake
        with torch.no_grad():
            logits = ensemble(x[800:])
        held_out, test = slice(0, 400), slice(400, None)
        target = y[800:]
        weights = ace.fit_member_weights(logits[:, held_out].log_softmax(2), target[held_out])
        before, after = (
            float((ace.ensemble_log_probs(logits[:, test], member_weights=w).argmax(1) == target[test]).double().mean())
            for w in (None, weights)
        )
        print(f"accuracy {before:.4f} with equal weights, {after:.4f} with {[round(w, 2) for w in weights.tolist()]}")
        diagnosis = ace.diagnose(logits[:, test], target[test])
        print(diagnosis)
        ensemble.set_member_weights(weights)
        ace.save_model(f"{folder}/ensemble", ensemble)
    return {"before": before, "after": after, "warnings": float(len(diagnosis.warnings))}


if __name__ == "__main__":
    main()
