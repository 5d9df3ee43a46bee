"""Soft labels: class probabilities instead of classes, such as annotators' votes or a teacher's predictions.

    python examples/soft_labels.py

Every digit was labeled by five annotators who err now and then. An ensemble trained on their votes is calibrated; one
trained on the majority vote is overconfident.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import torchace as ace

MEMBERS, EPOCHS, ANNOTATORS = 10, 40, 5


def data() -> list[torch.Tensor]:
    """Images and the annotators' shares of votes `(N, C)`, for training and for testing."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    generator = torch.Generator().manual_seed(0)
    votes = y.expand(ANNOTATORS, -1).clone()
    errs = torch.rand(votes.shape, generator=generator) < 0.3
    votes[errs] = torch.randint(10, votes.shape, generator=generator)[errs]
    shares = torch.nn.functional.one_hot(votes, 10).float().mean(0)
    train, test = train_test_split(torch.arange(len(x)), test_size=0.3, random_state=0, stratify=y)
    return [x[train], shares[train], x[test], shares[test], y[test]]


def main() -> dict[str, dict[str, float]]:
    train_x, shares, test_x, test_shares, test_y = data()
    found = {}
    for kind, target in (("majority", shares.argmax(1)), ("votes", shares)):
        torch.manual_seed(0)
        ensemble = ace.StackedEnsemble(ace.mlp(64, 32, 10) for _ in range(MEMBERS))
        loss = ace.AmendedCrossEntropyLoss(diversity=0.5)
        optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.005)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(train_x)).split(64):
                optimizer.zero_grad()
                loss(ensemble(train_x[rows]), target[rows]).backward()  # class indices or probabilities
                optimizer.step()
        log_probs = ensemble.predict_log_proba(test_x)
        found[kind] = {
            "accuracy": float((log_probs.argmax(1) == test_y).double().mean()),
            "cross_entropy": float(-(test_shares * log_probs).sum(1).mean()),  # with the annotators' votes
        }
        print(
            f"trained on {kind:8}: accuracy {found[kind]['accuracy']:.4f}, "
            f"cross entropy with the votes {found[kind]['cross_entropy']:.4f}"
        )
    return found


if __name__ == "__main__":
    main()
