"""Regression with Negative Correlation Learning, and the members' spread as an uncertainty.

python examples/regression.py
"""

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

import torchace as ace
from torchace.functional import negative_correlation

MEMBERS, STEPS = 10, 400


def data() -> list[torch.Tensor]:
    x, y = load_diabetes(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    parts = train_test_split(x, (y - y.mean()) / y.std(), test_size=0.3, random_state=0)
    return [torch.tensor(part, dtype=torch.float32) for part in parts]


def main() -> dict[float, dict[str, float]]:
    train_x, test_x, train_y, test_y = data()
    found = {}
    for diversity in (0.0, 0.5, 0.9):
        torch.manual_seed(0)  # the same start for every λ
        ensemble = ace.StackedEnsemble((ace.mlp(10, 16, 1) for _ in range(MEMBERS)), link="identity")
        optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.005)
        for _ in range(STEPS):
            optimizer.zero_grad()
            negative_correlation(ensemble(train_x).squeeze(2), train_y, diversity).backward()
            optimizer.step()
        with torch.no_grad():
            members = ensemble(test_x).squeeze(2)  # (K, N)
        error = (members.mean(0) - test_y).square()
        spread = members.std(0)
        ranks = torch.stack([spread.argsort().argsort(), error.argsort().argsort()]).double()
        found[diversity] = {
            "mse": float(error.mean()),
            "member_mse": float((members - test_y).square().mean()),
            "rank_correlation": float(torch.corrcoef(ranks)[0, 1]),
        }
        print(
            f"λ={diversity:g}: squared error {found[diversity]['mse']:.4f} (a member alone "
            f"{found[diversity]['member_mse']:.4f}), rank correlation of spread and error "
            f"{found[diversity]['rank_correlation']:+.2f}"
        )
    return found


if __name__ == "__main__":
    main()
