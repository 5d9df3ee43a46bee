"""A timm network as an ensemble, trained with timm's own optimizer, schedule and meters.

    python examples/timm_digits.py

Twice: many classifiers on one network (stack_classifiers), and members with a last stage of their own (branch). The
rest is timm as usual; only the model, the loss and the shape of the logits, (K, N, C), change.
"""

import timm
import timm.optim
import timm.scheduler
import timm.utils
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchace as ace

MEMBERS, EPOCHS, DIVERSITY = 4, 8, 0.5


def data() -> list[TensorDataset]:
    x, y = load_digits(return_X_y=True)
    parts = train_test_split((x / 8 - 1).reshape(-1, 1, 8, 8), y, test_size=0.3, random_state=0, stratify=y)
    x, test_x, y, test_y = (
        torch.tensor(part, dtype=torch.float32 if part.ndim == 4 else torch.int64) for part in parts
    )
    # larger images, since the network halves them five times
    return [TensorDataset(F.interpolate(x, 16), y), TensorDataset(F.interpolate(test_x, 16), test_y)]


def network() -> nn.Module:
    return timm.create_model("test_resnet", in_chans=1, num_classes=10)


def train(ensemble: nn.Module, loader: DataLoader, epochs: int) -> None:
    loss = ace.AmendedCrossEntropyLoss(DIVERSITY)
    # timm leaves vectors out of weight decay; the biases of stacked heads are (K, C), and it takes them for matrices
    optimizer = timm.optim.create_optimizer_v2(ensemble, opt="adamw", lr=3e-3, weight_decay=0.01)
    scheduler, epochs = timm.scheduler.create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=epochs, warmup_epochs=1, warmup_lr=1e-4
    )
    for epoch in range(epochs):
        ensemble.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss(ensemble(x), y).backward()  # logits are (K, N, C): members first
            timm.utils.dispatch_clip_grad(ensemble.parameters(), value=5.0)
            optimizer.step()
        scheduler.step(epoch + 1)


@torch.no_grad()
def evaluate(ensemble: nn.Module, loader: DataLoader) -> dict[str, float]:
    ensemble.eval()
    top1, top5, differ = timm.utils.AverageMeter(), timm.utils.AverageMeter(), timm.utils.AverageMeter()
    for x, y in loader:
        logits = ensemble(x)
        first, fifth = timm.utils.accuracy(ace.ensemble_log_probs(logits), y, topk=(1, 5))  # in percent
        top1.update(first.item(), len(y))
        top5.update(fifth.item(), len(y))
        differ.update(ace.disagreement(logits).item(), len(y))
    return {"accuracy": top1.avg / 100, "top5": top5.avg / 100, "disagreement": differ.avg}


def main(epochs: int = EPOCHS) -> dict[str, dict[str, float]]:
    train_set, test_set = data()
    found = {}
    for kind in ("heads", "branches"):
        timm.utils.random_seed(0)
        if kind == "heads":
            ensemble = ace.stack_classifiers(network(), MEMBERS)
        else:  # timm has a rule of its own for first weights: every member takes those of a new network
            ensemble = ace.branch(network(), at="layer4", num_members=MEMBERS, reinitialize=network)
        train(ensemble, DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True), epochs)
        found[kind] = evaluate(ensemble, DataLoader(test_set, batch_size=256))
        print(
            f"{kind:8} accuracy {found[kind]['accuracy']:.4f}, top 5 {found[kind]['top5']:.4f}, "
            f"members disagree on {found[kind]['disagreement']:.2%} of the images"
        )
    return found


if __name__ == "__main__":
    main()
