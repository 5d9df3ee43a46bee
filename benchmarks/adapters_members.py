"""Disagreement of members after training, and the ensemble's gain, for five kinds of members.

    python benchmarks/adapters_members.py --out docs/results/adapters_members_digits.json
    python benchmarks/adapters_members.py --data cifar10 --device cuda --out docs/results/adapters_members_cifar10.json
    python benchmarks/adapters_members.py --data cifar10 --device cuda --seeds 1 --steps 100 \\
        --out docs/results/adapters_members_cifar10_time.json  # nothing else on the GPU

Members share nothing (separate), the lower layers (branched), all but the head (SMOC), or all but an adapter and a head
(multiplicative, low rank). An MLP on digits (CPU) or ResNet-20 on CIFAR-10 (one GPU, about four minutes), five seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from adapters_training import load_data, make_batches, predict, report, scores, train
from measure import make_parser
from torch import nn

import torchace as ace
from torchace.models import cifar_resnet, mlp

DIVERSITIES = (0.0, 0.5)
RANK = 4
COLUMNS = ("accuracy", "cross_entropy", "member_accuracy", "gain", "disagreement", "ms_per_step")
# network, where branches part, K, epochs, batch size, learning rate
SETTINGS = {
    "digits": (lambda: mlp(64, [64, 64], 10), "linear2", 5, 40, 64, 3e-3),
    "cifar10": (lambda: cifar_resnet(20), "stage3", 4, 3, 128, 3e-3),
}
KINDS: dict[str, Callable[[Callable[[], nn.Module], int, str], nn.Module]] = {
    "one network": lambda make, count, at: ace.Ensemble([make()]),
    "separate": lambda make, count, at: ace.StackedEnsemble([make() for _ in range(count)]),
    "branched": lambda make, count, at: ace.branch(make(), count, at=at, reinitialize=make),
    "SMOC": lambda make, count, at: ace.stack_classifiers(make(), count),
    "multiplicative": lambda make, count, at: ace.adapt(make(), count),
    "low rank": lambda make, count, at: ace.adapt(make(), count, adapter="low_rank", rank=RANK),
}


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--data", choices=list(SETTINGS), default="digits")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="instead of the default")
    parser.add_argument("--steps", type=int, help="stop after this many steps, to measure the time of a step alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    data = load_data(options.data, options.quick)
    make, at, count, epochs, batch_size, learning_rate = SETTINGS[options.data]
    epochs, batch_size = options.epochs or epochs, 16 if options.quick else batch_size
    settings = {"num_members": count, "epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate}
    settings |= {"branched_at": at, "rank": RANK, "data": options.data}
    runs: list[dict[str, Any]] = []
    for seed in range(1 if options.quick else options.seeds):
        batches = make_batches(data, data.train, batch_size, seed, options.device)
        steps = 10 if options.quick else options.steps or epochs * batches.steps_per_epoch
        for kind, build in KINDS.items():
            for diversity in DIVERSITIES if kind != "one network" else (0.0,):
                torch.manual_seed(seed)
                ensemble = build(make, count, at)
                ms = train(ensemble, batches, steps=steps, diversity=diversity, learning_rate=learning_rate)
                logits = predict(ensemble, data, data.test, options.device)
                run = {"kind": kind, "diversity": diversity, "seed": seed, "ms_per_step": ms}
                run |= scores(logits, data.test.y.to(options.device))
                run["gain"] = run["member_cross_entropy"] - run["cross_entropy"]
                run["parameters"] = sum(p.numel() for p in ensemble.parameters())
                runs.append(run)
                print(
                    f"{kind:15} λ={diversity} seed {seed}: {run['accuracy']:.4f} {run['disagreement']:.4f}", flush=True
                )
        report(options, settings, runs, COLUMNS, started)  # after each seed: what is finished is kept


if __name__ == "__main__":
    main()
