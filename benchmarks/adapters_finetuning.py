"""Fine-tune one trained network into eight members: accuracy, calibration and out-of-distribution detection.

    python benchmarks/adapters_finetuning.py --data cifar10 --device cuda --out docs/results/adapters_finetuning.json

A network is trained on the first five classes and fine-tuned on the other five, with 1,000 images of each: eight
low-rank adapters on frozen weights, eight fine-tunings of all weights, one fine-tuning, one adapter. Scores are of the
new classes; AUROC is how well mutual information detects test images of the first five. Each learning rate is the best
of three on validation data, with a seed that is not reported. About four minutes on one GPU for ResNet-20 on CIFAR-10.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from adapters_training import auroc, load_data, make_batches, predict, report, scores, train
from measure import make_parser
from torch import nn

import torchace as ace
from torchace.lab.data import Dataset, Split
from torchace.models import cifar_resnet, mlp

MEMBERS, RANK, OLD = 8, 4, 5
RATES = (1e-3, 3e-3, 1e-2)
TUNING_SEED = 100
COLUMNS = (
    "accuracy", "cross_entropy", "calibration_error", "disagreement", "auroc_mutual_information", "auroc_entropy",
    "ms_per_step",
)  # fmt: skip


def make_copies(base: nn.Module, count: int) -> nn.Module:
    """Copies of the network, each with a new head; all their weights are trained."""
    members = [copy.deepcopy(base) for _ in range(count)]
    for member in members:
        find_head(member).reset_parameters()
    return ace.StackedEnsemble(members)


def make_adapters(base: nn.Module, count: int) -> nn.Module:
    """The frozen network with an adapter and a new head for each member."""
    # trained=False: each member draws a new head; low-rank adapters leave the trained weights as they are
    return ace.adapt(base, count, adapter="low_rank", rank=RANK, freeze=True, trained=False)


KINDS: dict[str, tuple[Callable[[nn.Module, int], nn.Module], int, tuple[float, ...]]] = {
    "eight adapters": (make_adapters, MEMBERS, (0.0, 0.3, 0.6)),
    "eight fine-tunings": (make_copies, MEMBERS, (0.0,)),
    "one fine-tuning": (make_copies, 1, (0.0,)),
    "one adapter": (make_adapters, 1, (0.0,)),
}


def find_head(network: nn.Module) -> nn.Linear:
    return [module for module in network.modules() if isinstance(module, nn.Linear)][-1]


def select_classes(split: Split, first: int, images: slice = slice(None)) -> Split:
    """Some images of each of five classes, labeled 0 to 4."""
    wanted = range(first, first + OLD)
    chosen = torch.cat([(split.y == c).nonzero()[images, 0] for c in wanted]).sort().values
    return Split(split.x[chosen], split.y[chosen] - first)


def choose_batch_size(data: Dataset) -> int:
    return 128 if len(data.train) > 5000 else 32


def pretrain(data: Dataset, seed: int, steps: int, device: str) -> nn.Module:
    torch.manual_seed(seed)
    network = cifar_resnet(20, OLD) if data.name == "cifar10" else mlp(64, [64, 64], OLD)
    batches = make_batches(data, select_classes(data.train, 0), choose_batch_size(data), seed, device)
    train(ace.Ensemble([network]), batches, steps=steps, diversity=0.0, learning_rate=3e-3)
    return network


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--data", choices=["digits", "cifar10"], default="digits")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--epochs", type=int, nargs=2, default=(15, 15), help="of the first training and of fine-tuning"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    data, device = load_data(options.data, options.quick), options.device
    per_class = 40 if options.quick else 1000 if options.data == "cifar10" else 60
    new = select_classes(data.train, OLD, slice(per_class))
    validation = select_classes(data.train, OLD, slice(per_class, 2 * per_class))
    batch_size = choose_batch_size(data)
    seen = len(select_classes(data.train, 0)) // batch_size
    steps = [10, 10] if options.quick else [options.epochs[0] * seen, options.epochs[1] * (len(new) // batch_size)]
    test_target = data.test.y.to(device)

    def tune(kind: str, base: nn.Module, rate: float, diversity: float, seed: int) -> tuple[nn.Module, float]:
        build, count, _ = KINDS[kind]
        torch.manual_seed(seed)
        ensemble = build(base, count)
        batches = make_batches(data, new, batch_size, seed, device)
        ms = train(ensemble, batches, steps=steps[1], diversity=diversity, learning_rate=rate)
        return ensemble, ms

    base = pretrain(data, TUNING_SEED, steps[0], device)
    rates = {}
    for kind in ("eight adapters", "eight fine-tunings"):
        found = {}
        for rate in RATES[:1] if options.quick else RATES:
            logits = predict(tune(kind, base, rate, 0.0, TUNING_SEED)[0], data, validation, device)
            found[rate] = scores(logits, validation.y.to(device))["cross_entropy"]
        rates[kind] = min(found, key=found.__getitem__)
        print(kind, "validation cross entropy by learning rate:", found, flush=True)
    rates |= {"one adapter": rates["eight adapters"], "one fine-tuning": rates["eight fine-tunings"]}
    settings = {"num_members": MEMBERS, "rank": RANK, "batch_size": batch_size, "epochs": options.epochs}
    settings |= {"images": len(new), "learning_rates": rates, "data": options.data}
    runs = []
    for seed in range(1 if options.quick else options.seeds):
        base = pretrain(data, seed, steps[0], device)
        for kind, (_, _, diversities) in KINDS.items():
            for diversity in diversities:
                ensemble, ms = tune(kind, base, rates[kind], diversity, seed)
                logits = predict(ensemble, data, data.test, device)
                is_new = test_target >= OLD
                run = {"kind": kind, "diversity": diversity, "seed": seed, "ms_per_step": ms}
                run |= scores(logits[:, is_new], test_target[is_new] - OLD) | auroc(logits, ~is_new)
                run["trained"] = sum(p.numel() for p in ensemble.parameters() if p.requires_grad)
                runs.append(run)
                print(f"{kind:18} λ={diversity} seed {seed}: {run['accuracy']:.4f}", flush=True)
        report(options, settings, runs, COLUMNS, started)  # after each seed: what is finished is kept


if __name__ == "__main__":
    main()
