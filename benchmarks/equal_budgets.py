"""Equal budgets: four small ResNets with λ against λ=0 and against one network with as many parameters or operations.

    TORCHACE_DATA=data python benchmarks/equal_budgets.py --widths 8 --runs runs --out docs/results/equal_budgets_8.json
    python benchmarks/equal_budgets_page.py

CIFAR-10, ResNet-8 of few channels, which underfits. λ is chosen on validation images with two seeds; eight other seeds
compare. The trained networks then see shifted images: another data set's, and corrupted test images. For held-out
classes, the members train again on eight classes and see images of the other two.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from adapters_training import auroc, load_data, scores
from image_sweeps import LEAST_EPOCHS, TIMED_STEPS, Sweeps, arguments, count_operations, read_runs
from torch import Tensor

from torchace.lab.data import Dataset, Split
from torchace.lab.data.datasets import read_idx
from torchace.lab.schema.experiment import Arm, Experiment
from torchace.lab.schema.results import RunKey
from torchace.lab.store import RunStore
from torchace.lab.sweeps import loaded_data
from torchace.lab.sweeps.loaded_data import LoadedData
from torchace.lab.sweeps.networks import build_network
from torchace.lab.training.evaluate import predict_logits
from torchace.lab.training.run_group import RunGroup
from torchace.models import cifar_resnet

DEPTH, MEMBERS = 8, 4
DIVERSITIES = [0.0, 0.1, 0.3, 0.5, 0.7]
CHOOSING_SEEDS, SEEDS = [100, 101], list(range(8))
EPOCHS = 30
KNOWN = 8  # classes that members train on, for the detection of held-out classes
# time of all run groups of a width, in units of the group of 16 ensembles: 10 ensembles that choose λ, 8 + 8 networks,
# and 16 ensembles without the held-out classes
ALL_GROUPS, SETUP_SECONDS = 3.4, 40.0


def single_networks(width: int) -> dict[str, dict[str, int]]:
    """One network as large as four of this width: a wider one, and a deeper one."""
    return {"wider": {"depth": DEPTH, "width": 2 * width}, "deeper": {"depth": 26, "width": width}}


class EqualBudgets(Sweeps):
    """The sweeps of all widths."""

    def __init__(self, options: Any) -> None:
        super().__init__(options, self.results)
        self.members = 2 if options.quick else MEMBERS
        self.seeds = SEEDS[:2] if options.quick else SEEDS

    def compare_experiment(self, width: int, diversities: list[float], steps: int, singles: bool = True) -> Experiment:
        """Return the experiment of the eight seeds."""
        arms: list[dict[str, Any]] = [{"name": "members", "diversities": diversities}]
        for name, size in single_networks(width).items() if singles else ():
            arms.append({"name": name, "diversities": [0.0], "model": {**size, "num_members": 1}})
        return self._experiment(f"width{width}", width, steps, arms, self.seeds)

    def choose_experiment(self, width: int, steps: int) -> Experiment:
        """Return the experiment that chooses λ."""
        diversities = DIVERSITIES[::2] if self.options.quick else DIVERSITIES
        arms = [{"name": "members", "diversities": diversities}]
        return self._experiment(f"width{width}_choose", width, steps, arms, CHOOSING_SEEDS)

    def _experiment(self, name: str, width: int, steps: int, arms: list[Any], seeds: list[int]) -> Experiment:
        model = {"network": "resnet", "depth": DEPTH, "width": width, "num_members": self.members}
        return self.experiment(name, steps=steps, model=model, arms=arms, seeds=seeds, group_size=16)

    def chosen(self, width: int) -> dict[str, Any] | None:
        """Return the mean validation cross entropy of each λ, and the λ > 0 where it is lowest."""
        rows = read_runs(self.options.runs / f"width{width}_choose")
        found: dict[float, list[float]] = {}
        for row in rows:
            found.setdefault(row["diversity"], []).append(row["validation"]["cross_entropy"])
        means = {diversity: sum(values) / len(values) for diversity, values in found.items()}
        above = [diversity for diversity in means if diversity > 0]
        return {"diversity": min(above, key=means.__getitem__), "validation": means} if above else None

    def results(self) -> dict[str, Any]:
        """Return all finished runs by width."""
        widths = []
        for width in self.options.widths:
            directory = self.options.runs / f"width{width}"
            sizes = {"members": {"depth": DEPTH, "width": width}, **single_networks(width)}
            networks = {}
            for name, size in sizes.items():
                network, count = cifar_resnet(**size), self.members if name == "members" else 1
                parameters = sum(p.numel() for p in network.parameters())
                operations = count * count_operations(network)
                networks[name] = size | {"parameters": count * parameters, "operations": operations}
            entry = {"width": width, "networks": networks, "chosen": self.chosen(width), "runs": read_runs(directory)}
            files = [directory / "shifted.json", self.options.runs / f"width{width}_known" / "shifted.json"]
            entry["shifted"] = [row for file in files if file.exists() for row in json.loads(file.read_text())]
            widths.append(entry)
        epochs = self.options.runs / "epochs.json"
        settings = {"num_members": self.members, "depth": DEPTH, "diversities": DIVERSITIES, "seeds": self.seeds}
        settings["epochs"] = json.loads(epochs.read_text()) if epochs.exists() else None
        return {"design": settings, "widths": widths}

    def train(self) -> None:
        """Choose λ and compare, width by width."""
        timed_steps = 3 if self.options.quick else TIMED_STEPS
        timed = [
            self.compare_experiment(width, [0.0, 0.5], timed_steps, singles=False) for width in self.options.widths
        ]
        setup = SETUP_SECONDS * len(timed)
        epochs = self.choose_epochs(lambda: ALL_GROUPS * sum(map(self.seconds_per_step, timed)), setup)
        steps = 6 if self.options.quick else max(LEAST_EPOCHS, epochs) * self.steps_per_epoch
        for width in self.options.widths:
            self.run(self.choose_experiment(width, steps))
            choice = self.chosen(width)
            assert choice is not None
            print(f"width {width}: validation cross entropy {choice['validation']}", flush=True)
            experiment = self.compare_experiment(width, [0.0, choice["diversity"]], steps)
            directory = self.run(experiment)
            shifted = directory / "shifted.json"
            if not shifted.exists():
                rows = score_shifted(experiment, directory, self.options.device, self.seeds)
                shifted.write_text(json.dumps(rows))
            self.write()
            self.train_known(width, [0.0, choice["diversity"]], steps)
            self.write()

    def train_known(self, width: int, diversities: list[float], steps: int) -> None:
        """Train the members on some classes and score how well they detect the others."""
        experiment = self.compare_experiment(width, diversities, steps, singles=False)
        experiment = experiment.model_copy(update={"name": f"width{width}_known"})
        shifted = self.options.runs / experiment.name / "shifted.json"
        if shifted.exists():
            return
        usual, whole = loaded_data.load, load_data("cifar10", self.options.quick)
        loaded_data.load = lambda name: keep_classes(whole)
        try:
            directory = self.run(experiment)
            data = LoadedData.load(experiment.data, self.options.device)
        finally:
            loaded_data.load = usual
        new = whole.test.take((whole.test.y >= KNOWN).nonzero()[:, 0]).x
        shifts = {"held-out classes": (new, None)}
        shifted.write_text(
            json.dumps(score_images(experiment, data, directory, shifts, self.options.device, self.seeds))
        )


def score_shifted(experiment: Experiment, directory: Path, device: str, seeds: list[int]) -> list[dict[str, Any]]:
    """Score all ensembles on shifted images: those of another data set, and corrupted test images."""
    data = LoadedData.load(experiment.data, device)
    test = data.dataset.test
    shifts: dict[str, tuple[Tensor, Tensor | None]]
    shifts = {name: (x[: len(test)], None) for name, x in other_images().items()}
    shifts |= {name: (x, test.y) for name, x in corrupt(test.x).items()}
    return score_images(experiment, data, directory, shifts, device, seeds)


def score_images(
    experiment: Experiment,
    data: LoadedData,
    directory: Path,
    shifts: dict[str, tuple[Tensor, Tensor | None]],
    device: str,
    seeds: list[int],
) -> list[dict[str, Any]]:
    """Score all ensembles on images by name; with labels, also their cross entropy and calibration."""
    test, rows = data.dataset.test, []
    for arm in experiment.complete_arms():
        for diversity in arm.diversities:
            group = load_group(arm, data, directory, diversity, seeds).to(device)
            clean, target = predict_logits(group, data.chunks(arm, test))
            for name, (x, y) in shifts.items():
                split = Split(x, torch.zeros(len(x), dtype=torch.int64) if y is None else y)
                shifted, _ = predict_logits(group, data.chunks(arm, split))
                for seed, known, new in zip(seeds, clean, shifted, strict=True):
                    is_new = torch.arange(known.shape[1] + new.shape[1], device=new.device) >= known.shape[1]
                    row: dict[str, Any] = {"arm": arm.name, "diversity": diversity, "seed": seed, "shift": name}
                    row |= auroc(torch.cat([known, new], 1), is_new)
                    rows.append(row | ({} if y is None else scores(new, target)))
    return rows


def load_group(arm: Arm, data: LoadedData, directory: Path, diversity: float, seeds: list[int]) -> RunGroup:
    """Return the trained ensembles of one λ as one network."""
    store, untrained = RunStore(directory), build_network(arm, data.dataset, seeds, "cpu")
    ensembles = [untrained.ensemble(r) for r in range(len(seeds))]
    for seed, ensemble in zip(seeds, ensembles, strict=True):
        ensemble.load_state_dict(store.weights(RunKey(arm.name, diversity, seed)))
    return RunGroup(ensembles)


def keep_classes(data: Dataset) -> Dataset:
    """Return the data set with its first classes alone."""
    parts = {part: getattr(data, part) for part in ("train", "test")}
    parts = {part: split.take((split.y < KNOWN).nonzero()[:, 0]) for part, split in parts.items()}
    return dataclasses.replace(data, class_names=data.class_names[:KNOWN], **parts)


def other_images() -> dict[str, Tensor]:
    """Return the test images of MNIST and Fashion-MNIST with 32x32 pixels and three channels, without downloading."""
    found, root = {}, Path(os.environ.get("TORCHACE_DATA", "."))
    for name in ("mnist", "fashion_mnist"):
        folders = [root / folder for folder in (name, name.replace("_", "-"))]
        files = [folder / f"t10k-images-idx3-ubyte{end}" for folder in folders for end in (".gz", "")]
        file = next((file for file in files if file.exists()), None)
        if file is None:
            print(f"without {name}: no t10k-images-idx3-ubyte in TORCHACE_DATA", flush=True)
            continue
        x = torch.from_numpy(read_idx(file, shape=(10_000, 28, 28)).copy())
        x = F.interpolate(x.view(-1, 1, 28, 28).float(), size=32, mode="bilinear")
        found[name] = x.round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    return found


def corrupt(x: Tensor) -> dict[str, Tensor]:
    """Return corrupted copies of images of uint8, `(N, 3, H, W)`."""
    pixels = x.float()
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
    line = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
    kernel = (line[:, None] * line).expand(3, 1, 5, 5)
    mean = pixels.mean((2, 3), keepdim=True)
    small = F.interpolate(pixels, scale_factor=0.5, mode="area")
    corrupted = {
        "noise": pixels + 25 * noise,
        "blur": F.conv2d(F.pad(pixels, (2, 2, 2, 2), mode="reflect"), kernel, groups=3),
        "contrast": mean + 0.4 * (pixels - mean),
        "pixelation": F.interpolate(small, scale_factor=2.0, mode="nearest"),
    }
    return {name: values.round().clamp(0, 255).to(torch.uint8) for name, values in corrupted.items()}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], EPOCHS)
    parser.add_argument("--widths", type=int, nargs="+", default=[8], help="channels of the members' first stage")
    EqualBudgets(parser.parse_args()).train()


if __name__ == "__main__":
    main()
