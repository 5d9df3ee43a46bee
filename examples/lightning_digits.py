"""An ensemble in Lightning: scores of ensemble and members, a warm-up of λ, early stopping, checkpoints.

    python examples/lightning_digits.py

λ rises over the first epochs; the best epoch has the lowest cross entropy of the ensemble on validation data (the
training loss is unbounded below and not a score).
"""

import logging
import tempfile
import warnings
from functools import partial

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import torchace as ace
from torchace.lightning import ACEModule, DiversitySchedule

MEMBERS, EPOCHS, DIVERSITY = 10, 40, 0.7


def ensemble() -> ace.StackedEnsemble:
    return ace.StackedEnsemble([ace.mlp(64, 16, 10) for _ in range(MEMBERS)])


def loaders() -> list[DataLoader]:
    x, y = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    parts = random_split(digits, [1000, 300, len(digits) - 1300], torch.Generator().manual_seed(0))
    return [DataLoader(part, 64, shuffle=part is parts[0]) for part in parts]


def main(epochs: int = EPOCHS) -> dict[str, float]:
    warnings.filterwarnings("ignore", message=".*(does not have many workers|LeafSpec)")  # Lightning's own
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    train, val, test = loaders()
    module = ACEModule(ensemble(), ace.AmendedCrossEntropyLoss(0.0), partial(torch.optim.Adam, lr=5e-3))
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(f"{folder}/checkpoints", monitor="val_cross_entropy")
        trainer = Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=CSVLogger(folder),
            callbacks=[DiversitySchedule(DIVERSITY, warmup=5), EarlyStopping("val_cross_entropy", patience=5), best],
            log_every_n_steps=5,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, train, val)
        loaded = ACEModule.load_from_checkpoint(
            best.best_model_path,
            ensemble=ensemble(),
            loss=ace.AmendedCrossEntropyLoss(0.0),  # λ comes from the checkpoint
            optimizer_factory=torch.optim.Adam,
        )
        (scores,) = trainer.test(loaded, test, verbose=False)
        probs = torch.cat(trainer.predict(loaded, test))  # (N, C)
    print(f"stopped after {trainer.current_epoch} epochs; best checkpoint has λ={float(loaded.loss.diversity):g}")
    print(
        f"test accuracy {scores['test_accuracy']:.4f} (one member {scores['test_member_accuracy']:.4f}), "
        f"cross entropy {scores['test_cross_entropy']:.4f} ({scores['test_member_cross_entropy']:.4f}), "
        f"disagreement {scores['test_disagreement']:.4f}; probabilities {tuple(probs.shape)}"
    )
    return dict(scores)


if __name__ == "__main__":
    main()
