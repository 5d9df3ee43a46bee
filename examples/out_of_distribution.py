"""Out-of-distribution detection: digits against corrupted digits, by the ensemble's mutual information.

    python examples/out_of_distribution.py

λ is tuned on validation digits, without the corrupted ones; then AUROC at λ=0 and at the tuned λ, seed by seed.
All runs train together as one network.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

import torchace as ace
from torchace.lab.data import Split
from torchace.lab.training.members import MemberPlan, train_members
from torchace.lab.tuning.grid_search import GridSearch
from torchace.lab.tuning.search import SearchProblem

SEEDS = range(5)
PLAN = MemberPlan("classification", num_members=10, hidden=(16,), epochs=30, learning_rate=0.01, precision="float32")


def data() -> tuple[Split, Split, torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 8 - 1, dtype=torch.float32), torch.tensor(y)
    rest, test = train_test_split(torch.arange(len(x)), test_size=0.3, random_state=0, stratify=y)
    train, held_out = train_test_split(rest, test_size=0.25, random_state=0, stratify=y[rest])
    return Split(x[train], y[train]), Split(x[held_out], y[held_out]), x[test]


def corrupt(x: torch.Tensor) -> dict[str, torch.Tensor]:
    images = x.view(-1, 8, 8)
    generator = torch.Generator().manual_seed(0)
    return {
        "inverted": -x,
        "on its side": images.rot90(1, (1, 2)).flatten(1),
        "shuffled pixels": x[:, torch.randperm(64, generator=generator)],
        "noise": x + 0.7 * torch.randn(x.shape, generator=generator),
    }


def main() -> dict[str, dict[float, list[float]]]:
    train, held_out, test = data()
    tuned = GridSearch(SearchProblem(PLAN, train, held_out, 10, seed=1), num_seeds=3, num_fresh=3).run()
    print(tuned.sentence)
    diversities = [0.0, tuned.diversity] if tuned.diversity else [0.0, 0.5]
    runs = [(diversity, seed) for seed in SEEDS for diversity in diversities]
    trained = train_members(PLAN, train, 10, diversities=[d for d, _ in runs], seeds=[s for _, s in runs])
    trained.network.eval()
    found: dict[str, dict[float, list[float]]] = {}
    with torch.no_grad():
        inside = [ace.mutual_information(z, reduction="none") for z in trained.network.predict(test)]
        for kind, x in corrupt(test).items():
            outside = [ace.mutual_information(z, reduction="none") for z in trained.network.predict(x)]
            found[kind] = {diversity: [] for diversity in diversities}
            for (diversity, _), known, strange in zip(runs, inside, outside, strict=True):
                labels = torch.cat([torch.zeros(len(known)), torch.ones(len(strange))])
                found[kind][diversity].append(float(roc_auc_score(labels, torch.cat([known, strange]))))
            values = {d: torch.tensor(v) for d, v in found[kind].items()}
            cells = [f"λ={d:g} {float(v.mean()):.3f} ± {float(v.std()):.3f}" for d, v in values.items()]
            gain = values[diversities[1]] - values[0.0]
            print(f"{kind:16} AUROC {', '.join(cells)}; difference {float(gain.mean()):+.3f} ± {float(gain.std()):.3f}")
    return found


if __name__ == "__main__":
    main()
