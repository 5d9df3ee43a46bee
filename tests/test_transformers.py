"""The Trainer of transformers on ensembles: a small BERT and a small ViT with random weights, offline."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

# a no-op where the environment has installed it already
from tests.support import torchvision_shim as torchvision_shim
from tests.support.scripts import load_script
from torchace import adapt, functional, load_weights, save_model, stack_classifiers
from torchace.metrics import EnsembleMetrics
from torchace.nn import AmendedCrossEntropyLoss, BinaryAmendedCrossEntropyLoss, Ensemble, NegativeCorrelationLoss

pytest.importorskip("accelerate")

pytestmark = pytest.mark.extended
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as hf

    from torchace.transformers import ACETrainer, ACETrainerMixin

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


class Rows(Dataset):
    """Samples as dictionaries, which the Trainer's own collator puts together."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def bert(num_labels: int = 3, **options) -> nn.Module:
    config = hf.BertConfig(
        vocab_size=24, max_position_embeddings=12, num_labels=num_labels, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **SIZES, **options,
    )  # fmt: skip
    return hf.BertForSequenceClassification(config)


def vit(num_labels: int = 3) -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, num_labels=num_labels, **SIZES))


def sentences(n: int, seed: int = 0) -> Rows:
    """Token 1 + c stands somewhere in a sentence of class c, among tokens that say nothing."""
    g = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(5, 24, (n, 10), generator=g), torch.randint(3, (n,), generator=g)
    tokens[range(n), torch.randint(10, (n,), generator=g)] = 1 + labels
    return Rows(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels)


def images(n: int, seed: int = 0) -> Rows:
    """The color that one quarter has more of is the class."""
    g = torch.Generator().manual_seed(seed)
    pixels, labels = torch.rand(n, 3, 8, 8, generator=g), torch.randint(3, (n,), generator=g)
    pixels[range(n), labels, :4, :4] += 0.7
    return Rows(pixel_values=pixels, labels=labels)


def arguments(folder: Path, **options) -> hf.TrainingArguments:
    quiet = {
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 1000,
        "per_device_train_batch_size": 16, "per_device_eval_batch_size": 100, "dataloader_pin_memory": False,
    }  # fmt: skip
    return hf.TrainingArguments(str(folder), **{**quiet, **options})


def new_trainer(ensemble: nn.Module, folder: Path, *, train=None, test=None, trainer=ACETrainer, **options):
    own = {name: options.pop(name) for name in ("diversity", "loss", "compute_metrics") if name in options}
    return trainer(ensemble, arguments(folder, **options), train_dataset=train, eval_dataset=test, **own)


# -- training step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("head", ["full", "low rank"])
def test_the_step_is_plain_pytorch(head, accumulated, tmp_path):
    torch.manual_seed(0)
    ensemble = stack_classifiers(bert(), 3, rank=2 if head == "low rank" else None)
    start = {name: value.clone() for name, value in ensemble.state_dict().items()}
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=0.1)
    rows = sentences(16)
    flat = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    sizes = {"gradient_accumulation_steps": accumulated, "per_device_train_batch_size": 16 // accumulated}
    args = arguments(tmp_path, max_steps=1, max_grad_norm=0.0, **sizes)
    trainer = ACETrainer(ensemble, args, train_dataset=rows, optimizers=(optimizer, flat), diversity=0.7)
    batches = list(trainer.get_train_dataloader())  # the order of the first epoch, drawn from the seed
    trainer.train()
    plain = stack_classifiers(bert(), 3, rank=2 if head == "low rank" else None)
    plain.load_state_dict(start)
    for batch in batches:
        labels = batch.pop("labels")
        (functional.amended_cross_entropy(plain(**batch), labels, 0.7) / accumulated).backward()
    for (name, ours), theirs in zip(ensemble.named_parameters(), plain.parameters(), strict=True):
        expected = theirs.detach() - 0.1 * theirs.grad if theirs.grad is not None else theirs.detach()
        torch.testing.assert_close(ours.detach(), expected, rtol=0, atol=1e-7, msg=name)  # float32 of order 1


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "data", "rate"), [(bert, sentences, 5e-3), (vit, images, 3e-3)], ids=["bert", "vit"])
def test_trains_to_95_percent(make, data, rate, tmp_path):
    """Four heads, λ=0.5, 120 steps of 32 samples: above 0.95 on samples not seen, every head above 0.9."""
    hf.set_seed(0)
    ensemble = stack_classifiers(make(), 4)
    test = data(300, seed=1)
    trainer = new_trainer(
        ensemble, tmp_path, train=data(640), test=test, diversity=0.5, max_steps=120, learning_rate=rate,
        per_device_train_batch_size=32, logging_steps=40,
    )  # fmt: skip
    trainer.train()
    scores = trainer.evaluate()
    assert scores["eval_accuracy"] > 0.95
    assert all(scores[f"eval_member_accuracy_{k}"] > 0.9 for k in range(4))

    labels = test.columns["labels"]
    inputs = {name: column for name, column in test.columns.items() if name != "labels"}
    with torch.no_grad():
        logits = ensemble.eval()(**inputs)
    predicted = trainer.predict(test)
    assert predicted.predictions.shape == (300, logits.shape[2])
    torch.testing.assert_close(
        torch.tensor(predicted.predictions), functional.ensemble_log_probs(logits), rtol=1e-4, atol=1e-5
    )  # batches of another size
    assert (predicted.label_ids == labels.numpy()).all()
    metrics = EnsembleMetrics(*logits.shape[::2])
    metrics.update(logits, labels)
    for name, value in metrics.compute().items():
        if name != "members":
            assert scores[f"eval_{name}"] == pytest.approx(float(value), abs=1e-5), name
    assert scores["eval_loss"] == scores["eval_cross_entropy"]
    logged = [row["diversity"] for row in trainer.state.log_history if "loss" in row]
    assert logged == [0.5] * 3


def test_resumes_from_a_checkpoint_of_the_trainer(tmp_path):
    """Eight steps at once, and four and four: the same weights."""

    def run(folder: str, steps: int, **resume) -> tuple[nn.Module, ACETrainerMixin]:
        hf.set_seed(0)
        ensemble = stack_classifiers(bert(), 3)
        trainer = new_trainer(
            ensemble, tmp_path / folder, train=sentences(64), diversity=0.5, max_steps=steps, learning_rate=1e-2,
            save_strategy="steps", save_steps=4, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer.train(**resume)
        return ensemble, trainer

    whole, _ = run("whole", 8)
    run("parts", 4)
    checkpoint = tmp_path / "parts" / "checkpoint-4"
    resumed, trainer = run("parts", 8, resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 8
    for (name, ours), theirs in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs), name

    # what the Trainer saved is a state dict: no pickle needed to read it
    fresh = stack_classifiers(bert(), 3)
    fresh.load_state_dict(load_file(tmp_path / "parts" / "checkpoint-8" / "model.safetensors"))
    batch = {name: column[:5] for name, column in sentences(5).columns.items() if name != "labels"}
    assert torch.equal(fresh.predict_proba(**batch), resumed.predict_proba(**batch))
    # and with λ and the weights of the members
    resumed.set_member_weights([0.5, 0.25, 0.25])
    save_model(tmp_path / "model", resumed, diversity=trainer.ace_loss.diversity)
    again = stack_classifiers(bert(), 3)
    assert load_weights(again, tmp_path / "model")["diversity"] == 0.5
    assert torch.equal(again.predict_proba(**batch), resumed.predict_proba(**batch))


def test_the_best_model_is_chosen_by_the_ensembles_cross_entropy(tmp_path):
    hf.set_seed(0)
    rows, test = sentences(32), sentences(64, seed=1)
    trainer = new_trainer(
        stack_classifiers(bert(), 3), tmp_path, train=rows, test=test, diversity=0.9, num_train_epochs=3,
        learning_rate=3e-2, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
    )  # fmt: skip
    trainer.train()
    history = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert len(history) == 3
    assert min(history) > 0  # the training loss at λ=0.9 is not
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(history), rel=1e-5)


def test_metrics_of_ones_own(tmp_path):
    def compute(prediction):
        assert prediction.predictions.shape == (50, 3)
        return {"accuracy": 7.0, "agreed": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}

    trainer = new_trainer(
        stack_classifiers(bert(), 3), tmp_path, test=sentences(50), diversity=0.5, compute_metrics=compute
    )
    scores = trainer.evaluate()
    assert scores["eval_accuracy"] == 7.0  # the user's stays
    assert 0 <= scores["eval_agreed"] <= 1
    without = {name: column for name, column in sentences(50).columns.items() if name != "labels"}
    predicted = trainer.predict(Rows(**without))
    assert predicted.predictions.shape == (50, 3)
    assert predicted.label_ids is None
    assert "test_accuracy" not in predicted.metrics


def test_a_trainer_of_ones_own(tmp_path):
    class Mine(ACETrainerMixin, hf.Trainer):
        pass

    trainer = new_trainer(
        stack_classifiers(bert(), 2), tmp_path, train=sentences(16), trainer=Mine, diversity=0.5, max_steps=1
    )
    assert math.isfinite(trainer.train().training_loss)


def test_the_example(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = load_script("examples/transformers_text.py").main(steps=150)
    assert scores["eval_accuracy"] > 0.9
    assert "five sentences: " in capsys.readouterr().out


# -- other labels -----------------------------------------------------------------------------------------------------


def test_several_labels_a_sample(tmp_path):
    torch.manual_seed(0)
    rows = sentences(48)
    rows.columns["labels"] = nn.functional.one_hot(rows.columns["labels"], 3).float()
    ensemble = stack_classifiers(bert(), 3, link="sigmoid")
    trainer = new_trainer(ensemble, tmp_path, train=rows, test=rows, diversity=0.5, max_steps=2)
    assert isinstance(trainer.ace_loss, BinaryAmendedCrossEntropyLoss)
    trainer.train()
    probs = ensemble.predict_proba(input_ids=rows.columns["input_ids"], attention_mask=rows.columns["attention_mask"])
    truth = torch.where(rows.columns["labels"] == 1, probs, 1 - probs)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(-truth.log().mean()), rel=1e-4)


def test_regression_with_one_output(tmp_path):
    torch.manual_seed(0)
    rows = sentences(48)
    rows.columns["labels"] = rows.columns["labels"].float()  # (N,), as transformers has them
    ensemble = stack_classifiers(bert(num_labels=1), 3, link="identity")
    loss = NegativeCorrelationLoss(0.5, member_weights=[0.5, 0.25, 0.25])
    trainer = new_trainer(ensemble, tmp_path, train=rows, test=rows, loss=loss, max_steps=2)
    trainer.train()
    inputs = {name: column for name, column in rows.columns.items() if name != "labels"}
    mean = ensemble.predict(**inputs)  # weighed as the loss weighs them
    expected = float((mean[:, 0] - rows.columns["labels"]).square().mean())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(torch.tensor(trainer.predict(rows).predictions), mean, rtol=1e-4, atol=1e-5)


def test_labels_under_another_name_and_columns_of_no_use(tmp_path):
    rows = sentences(16)
    rows.columns["truth"] = rows.columns.pop("labels")
    rows.columns["index"] = torch.arange(16)  # the host takes no such thing
    trainer = new_trainer(
        stack_classifiers(bert(), 2), tmp_path, train=rows, diversity=0.5, max_steps=1, label_names=["truth"]
    )
    trainer.train()
    rows.columns["labels"] = rows.columns.pop("truth")
    trainer = new_trainer(stack_classifiers(bert(), 2), tmp_path, train=rows, diversity=0.5, max_steps=1)
    trainer.train()
    del rows.columns["labels"]
    with pytest.raises(ValueError, match=r"Expected labels under 'labels' in a batch, but it has input_ids, "):
        trainer.train()


def test_members_of_any_kind(tmp_path):
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.EmbeddingBag(24, 3)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.words(input_ids)

    rows = sentences(64)
    del rows.columns["attention_mask"]
    trainer = new_trainer(Ensemble([Bag(), Bag()]), tmp_path, train=rows, test=rows, diversity=0.5, max_steps=3)
    trainer.train()
    assert 0 < trainer.evaluate()["eval_disagreement"] < 1


def test_a_model_that_computes_activations_again(tmp_path):
    """As the refusal of `gradient_checkpointing` says: switched on before the model is stacked."""
    rows, weights = sentences(16), []
    for again in (False, True):
        torch.manual_seed(0)
        model = bert()
        if again:
            model.gradient_checkpointing_enable()
        trainer = new_trainer(stack_classifiers(model, 2), tmp_path, train=rows, test=rows, diversity=0.5, max_steps=2)
        trainer.train()
        assert model.is_gradient_checkpointing == again
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    torch.testing.assert_close(weights[1], weights[0])


def test_numbers_to_predict_are_not_rounded_to_bf16(tmp_path):
    ensemble = stack_classifiers(bert(num_labels=1), 2, link="identity").bfloat16()
    trainer = new_trainer(ensemble, tmp_path, diversity=0.5)
    labels = torch.arange(1000.0, 1008.0)
    assert torch.equal(trainer._as_loss_target(labels, torch.zeros(2, 8, 1, dtype=torch.bfloat16)), labels[:, None])


# -- arguments --------------------------------------------------------------------------------------------------------


def test_argument_errors(tmp_path):
    ensemble, loss = stack_classifiers(bert(), 2), AmendedCrossEntropyLoss(0.5)
    with pytest.raises(TypeError, match="one of `diversity` and `loss`"):
        new_trainer(ensemble, tmp_path)
    with pytest.raises(TypeError, match="one of `diversity` and `loss`"):
        new_trainer(ensemble, tmp_path, diversity=0.5, loss=loss)
    with pytest.raises(TypeError, match=r"Expected an ensemble module, but got BertFor.* stack_classifiers"):
        new_trainer(bert(), tmp_path, diversity=0.5)
    with pytest.raises(ValueError, match="link='sigmoid' for BinaryAmendedCrossEntropyLoss"):
        new_trainer(ensemble, tmp_path, loss=BinaryAmendedCrossEntropyLoss(0.5))
    with pytest.raises(ValueError, match=r"`diversity` in \[0, 1\], but got 1.5"):
        new_trainer(ensemble, tmp_path, diversity=1.5)
    with pytest.raises(ValueError, match=r"no label_smoothing_factor, but got 0\.1\. Give it to the loss"):
        new_trainer(ensemble, tmp_path, diversity=0.5, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"no gradient_checkpointing.* before it is stacked"):
        new_trainer(ensemble, tmp_path, diversity=0.5, gradient_checkpointing=True)
    with pytest.raises(ValueError, match=r"no neftune_noise_alpha.* got 5"):
        new_trainer(ensemble, tmp_path, diversity=0.5, neftune_noise_alpha=5.0)
    with pytest.raises(ValueError, match="no `compute_loss_func`"):
        ACETrainer(ensemble, arguments(tmp_path), diversity=0.5, compute_loss_func=lambda *_: None)
    with pytest.raises(ValueError, match="one name in `label_names`"):
        new_trainer(ensemble, tmp_path, diversity=0.5, label_names=["start", "end"])
    several = arguments(tmp_path)
    assert several.n_gpu <= 1
    several._n_gpu = 2  # what the Trainer reads where it would spread a model over two devices of one process
    with pytest.raises(ValueError, match=r"one device per process, but this one has 2.* member axis"):
        ACETrainer(ensemble, several, diversity=0.5)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_is_imported_when_it_is_used():
    code = """
import sys, torchace.transformers
print("transformers" in sys.modules, "accelerate" in sys.modules)
sys.modules["accelerate"] = None
try:
    torchace.transformers.ACETrainer
except ImportError as error:
    print(error)
"""
    expected = "False False\ntorchace.transformers needs accelerate: pip install 'torchace[transformers]'."
    assert run(code) == expected


# -- adapters ---------------------------------------------------------------------------------------------------------


def tagged_tokens(n: int, seed: int = 0) -> Rows:
    """Each token's class is its remainder; padding does not count."""
    tokens = torch.randint(4, 24, (n, 10), generator=torch.Generator().manual_seed(seed))
    labels = tokens % 3
    labels[:, 7:] = -100
    return Rows(input_ids=tokens, labels=labels)


def counting(n: int, seed: int = 0) -> Rows:
    """Sequences that count upwards: the next token follows from the last."""
    start = torch.randint(4, 14, (n, 1), generator=torch.Generator().manual_seed(seed))
    tokens = start + torch.arange(10)
    return Rows(input_ids=tokens, labels=tokens.clone())


def tagger() -> nn.Module:
    return hf.BertForTokenClassification(hf.BertConfig(vocab_size=24, num_labels=3, **SIZES))


def language_model() -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 12, "bos_token_id": 0, "eos_token_id": 0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=24, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes))


ADAPTED = {
    "sequences": (bert, sentences, {}, (64, 3)),
    "tokens": (tagger, tagged_tokens, {}, (64, 10, 3)),
    "language model": (language_model, counting, {"head": "shared"}, (64, 10, 24)),
}


@pytest.mark.parametrize("task", list(ADAPTED))
def test_adapted_models_learn(task: str, tmp_path: Path) -> None:
    hf.set_seed(0)
    make, data, options, shape = ADAPTED[task]
    ensemble = adapt(make(), 4, **options)
    options = {"diversity": 0.3, "learning_rate": 2e-2, "num_train_epochs": 3}
    trainer = new_trainer(ensemble, tmp_path, train=data(320), test=data(64, seed=1), **options)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.6 * before["eval_loss"]
    output = trainer.predict(data(64, seed=1))
    assert output.predictions.shape == shape
    rows = output.label_ids != -100
    if task == "language model":  # a token is predicted from those before it
        found, labels = output.predictions.argmax(-1)[:, :-1], output.label_ids[:, 1:]
        assert (found == labels).mean() == pytest.approx(after["eval_accuracy"], abs=1e-6)
    else:
        assert (output.predictions.argmax(-1) == output.label_ids)[rows].mean() == pytest.approx(after["eval_accuracy"])


def test_checkpoints_of_tied_weights_resume(tmp_path: Path) -> None:
    finals = []
    for resume in (None, True):
        hf.set_seed(0)
        ensemble = adapt(language_model(), 2, head="shared", adapter="low_rank", rank=2, freeze=True)
        folder = tmp_path / ("resumed" if resume else "whole")
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "train": counting(64)}
        if resume:
            hf.set_seed(0)
            short = adapt(language_model(), 2, head="shared", adapter="low_rank", rank=2, freeze=True)
            new_trainer(
                short, folder, diversity=0.2, **{**options, "max_steps": 2}, lr_scheduler_type="constant"
            ).train()
        trainer = new_trainer(ensemble, folder, diversity=0.2, **options, lr_scheduler_type="constant")
        trainer.train(resume_from_checkpoint=resume)
        finals.append(ensemble.state_dict())
    for name, value in finals[0].items():
        torch.testing.assert_close(finals[1][name], value, rtol=0, atol=0, msg=name)
