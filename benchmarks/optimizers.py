"""Which optimizers of torch and timm can train stacked members without mixing them.

    python benchmarks/optimizers.py --out docs/results/optimizers.json

Forty members of a small network train for ten float64 steps, stacked; three of them also alone. The difference is the
largest between their weights, relative to a member's largest displacement. It must agree with the verdict of
`torchace.nn.optimizers`.
"""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import timm
import timm.optim
import torch
from measure import environment, finish, make_parser, table
from torch import nn
from torch.optim import Optimizer

from torchace.nn import StackedEnsemble, allow_optimizer
from torchace.nn.optimizers import check_elementwise, is_known

MEMBERS, ALONE, STEPS = 40, 3, 10  # forty: big-vision Adafactor factorizes axes of 32 and more
SMALL_AXES = ("Muon", "kron", "kronc", "kronw")  # torch's Muon takes matrices alone, Kron needs opt_einsum for more
AGREE = 1e-6  # elementwise optimizers stay below, also those that compute in float32; timm's least mixing is above 1e-4
LISTED, TRIED, REFUSED, ABSENT = "passes by the list", "passes the trial", "refused", "not available"


def make_member() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3),
        nn.GroupNorm(2, 8),  # not batch norm: the gradient of a bias before it is rounding noise alone
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 24),
        nn.LayerNorm(24),
        nn.Tanh(),
        nn.Linear(24, 5),
    ).double()


def make_optimizer(library: str, name: str, parameters: list[nn.Parameter]) -> Optimizer:
    if name in SMALL_AXES:  # biases and norms, stacked or of a member alone
        parameters = [p for p in parameters if p.ndim == (2 if p.shape[0] == MEMBERS else 1)]
    if library == "timm":
        return timm.optim.create_optimizer_v2(parameters, name, lr=0.01, weight_decay=0.05)
    options = {"Muon": {}, "LBFGS": {}, "Rprop": {}, "SparseAdam": {}}
    return getattr(torch.optim, name)(parameters, lr=0.01, **options.get(name, {"weight_decay": 0.05}))


def train(network: nn.Module, optimizer: Optimizer, inputs: list[torch.Tensor], targets: torch.Tensor) -> None:
    for x in inputs:

        @torch.enable_grad()  # not every optimizer does it for its closure
        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            logits = network(x)
            losses = nn.functional.cross_entropy(
                logits.reshape(-1, 5), targets.repeat(logits.numel() // 5 // len(targets)), reduction="none"
            )
            loss = losses.sum() / len(targets)  # a member's mean, summed over members
            loss.backward(create_graph=getattr(optimizer, "is_second_order", False))
            return loss

        optimizer.step(closure)


def relative_difference(library: str, name: str) -> float:
    """Difference between stacked members and members alone, relative to a member's displacement."""
    torch.manual_seed(0)
    members = [make_member() for _ in range(MEMBERS)]
    for k, member in enumerate(members):  # of different scale, as if trained for different times
        for p in member.parameters():
            p.data.mul_(1 + k % 3)
    ensemble = StackedEnsemble(members)
    starts = copy.deepcopy(members)
    inputs = [torch.randn(16, 2, 6, 6, dtype=torch.float64) for _ in range(STEPS)]
    targets = torch.randint(5, (16,))
    train(ensemble, make_optimizer(library, name, list(ensemble.parameters())), inputs, targets)
    largest = 0.0
    for start, member, stacked in list(zip(starts, members, ensemble, strict=True))[:ALONE]:
        train(member, make_optimizer(library, name, list(member.parameters())), inputs, targets)
        weights = [nn.utils.parameters_to_vector(m.parameters()) for m in (start, member, stacked)]
        displacement = (weights[1] - weights[0]).abs().max()
        largest = max(largest, ((weights[2] - weights[1]).abs().max() / displacement).item())
    return largest


def check_optimizer(optimizer: Optimizer) -> dict[str, str]:
    try:
        check_elementwise(optimizer)
    except ValueError as error:
        return {"verdict": REFUSED, "why": str(error).split("(", 1)[1].split("), which may")[0]}
    return {"verdict": LISTED if is_known(getattr(optimizer, "_base_optimizer", optimizer)) else TRIED}


def main() -> None:
    options = make_parser(__doc__.splitlines()[0]).parse_args()
    started = time.perf_counter()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    torch.compiler.set_stance("force_eager")  # Kron compiles its step for every shape
    names = [("torch", name) for name in dir(torch.optim) if name[0].isupper() and name != "Optimizer"]
    names += [("timm", name) for name in [*timm.optim.list_optimizers(), "lookahead_adam", "lookahead_lamb"]]
    if options.quick:
        names = [pair for pair in names if pair[1] in ("SGD", "Adafactor", "lion", "clion")]
    rows: list[dict[str, Any]] = []
    kinds: dict[str, type[Optimizer]] = {}
    for library, name in names:  # all verdicts before an optimizer is allowed in order to measure it
        row: dict[str, Any] = {"library": library, "name": name}
        rows.append(row)
        ensemble = StackedEnsemble([make_member() for _ in range(MEMBERS)])
        try:
            optimizer = make_optimizer(library, name, list(ensemble.parameters()))
        except (RuntimeError, AssertionError, ImportError) as error:
            row |= {"verdict": ABSENT, "why": str(error)}
            continue
        kinds[name] = type(getattr(optimizer, "_base_optimizer", optimizer))
        row |= check_optimizer(optimizer)
    for row in rows:
        row["difference"] = None
        if row["name"] in kinds:
            allow_optimizer(kinds[row["name"]])
            try:
                row["difference"] = relative_difference(row["library"], row["name"])
            except (RuntimeError, ValueError) as error:
                row["no_difference"] = str(error).split("\n")[0]
        print(row["library"], row["name"], row["verdict"], row["difference"], flush=True)
    wrong = [
        row["name"]
        for row in rows
        if row["difference"] is not None and (row["verdict"] != REFUSED) != (row["difference"] <= AGREE)
    ]
    if wrong:
        raise SystemExit(f"verdict and measured difference disagree: {', '.join(wrong)}")
    page = make_page(rows)
    print("\n" + page)
    if options.out is not None:
        where = {**environment(), "timm": timm.__version__}
        finish({"environment": where, "agree": AGREE, "optimizers": rows}, options.out, started)
        options.out.with_suffix(".md").write_text(page)


def make_page(rows: list[dict[str, Any]]) -> str:
    measured = [row for row in rows if row["difference"] is not None]
    passed = [row for row in measured if row["verdict"] != REFUSED]
    refused = [row for row in measured if row["verdict"] == REFUSED]
    unable = [row["name"] for row in rows if row["verdict"] == REFUSED and row["difference"] is None]
    absent = [row["name"] for row in rows if row["verdict"] == ABSENT]
    cells = [
        [
            row["library"],
            f"`{row['name']}`",
            row["verdict"] + (", allowed on request" if row["verdict"] == REFUSED else ""),
            row.get("why", ""),
            f"{row['difference']:.1e}" if row["difference"] is not None else row.get("no_difference", "not measured"),
        ]
        for row in rows
        if row["verdict"] != ABSENT
    ]
    largest, least = max(row["difference"] for row in passed), min(row["difference"] for row in refused)
    lines = [
        "# Optimizers for stacked members",
        "",
        f"**All {len(passed)} accepted optimizers train stacked members as they train single ones; the {len(refused)} "
        f"measured among the refused ones mix them.** Differences: at most {largest:.0e}, and at least {least:.0e}.",
        "",
        "An optimizer that looks at the shape or the norm of a stacked parameter mixes the members. The optimizers on "
        "the list pass. Any other is tried on toy parameters; it is refused if members move differently than "
        "alone, or if the trial fails. `torchace.allow_optimizer(kind)` allows a class on request.",
        "",
        table(["library", "optimizer", "verdict", "reason", "difference after ten steps"], cells),
        "",
        f"- {MEMBERS} members, {ALONE} of them also alone: convolution, group norm, layer norm, linear layers, biases; "
        "weights of different scale; ten steps in float64 on batches of 16; learning rate 0.01, weight decay 0.05.",
        "- Difference: the largest between the weights of stacked members and of members alone, in units of a member's "
        f"largest displacement. At most {AGREE:.0e} counts as none.",
        f"- {', '.join(SMALL_AXES)}: biases and norms alone.",
        f"- Refused and not measured: {', '.join(unable) or 'none'}.",
        f"- Not available without a GPU and other libraries: {', '.join(absent) or 'none'}. Tried when used.",
        f"- torch {torch.__version__}, timm {timm.__version__}; made by "
        "`python benchmarks/optimizers.py --out docs/results/optimizers.json`.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
