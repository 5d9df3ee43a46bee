"""A classifier of transformers as an ensemble, trained by its own Trainer.

    python examples/transformers_text.py

A small BERT with random weights learns to classify three kinds of generated sentences; for a pretrained one, change
only the line that makes the model: AutoModelForSequenceClassification.from_pretrained(...).
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments, set_seed

import torchace as ace
from torchace.transformers import ACETrainer

MEMBERS, DIVERSITY = 5, 0.5
WORDS = ["[PAD]", "good", "bad", "so", "the", "film", "was", "and", "plot", "music", "of", "a", "very", "it"]
KINDS = ("praise", "blame", "neither")


def sentences(n: int, seed: int) -> list[dict[str, object]]:
    """Praise has more `good` in it than `bad`, blame more `bad`, and what is neither has as much of both."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for label in torch.randint(3, (n,), generator=g).tolist():
        tokens = torch.randint(3, len(WORDS), (12,), generator=g)
        places = torch.randperm(12, generator=g)
        good, bad = ((2, 1), (1, 2), (1, 1))[label]
        tokens[places[:good]], tokens[places[good : good + bad]] = 1, 2
        rows.append({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": label})
    return rows


def network() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def main(steps: int = 400) -> dict[str, float]:
    set_seed(0)
    ensemble = ace.stack_classifiers(network(), MEMBERS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=200,
            learning_rate=3e-3,
            warmup_steps=20,
            logging_steps=100,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = ACETrainer(
            ensemble,
            arguments,
            train_dataset=sentences(2000, seed=1),
            eval_dataset=sentences(600, seed=2),
            diversity=DIVERSITY,
        )
        trainer.train()
        scores = trainer.evaluate()  # eval_loss is the ensemble's own cross entropy
        log_probs = torch.tensor(trainer.predict(sentences(5, seed=3)).predictions)  # (N, C)
        ace.save_model(f"{folder}/model", ensemble, diversity=DIVERSITY, class_names=KINDS)
        again = ace.stack_classifiers(network(), MEMBERS)
        ace.load_weights(again, f"{folder}/model")
    print(
        f"accuracy {scores['eval_accuracy']:.4f} (one head {scores['eval_member_accuracy']:.4f}), "
        f"disagreement {scores['eval_disagreement']:.4f}: linear heads on one network agree; branch parts them earlier"
    )
    print("five sentences:", ", ".join(f"{KINDS[int(row.argmax())]} ({row.exp().max():.2f})" for row in log_probs))
    return {name: value for name, value in scores.items() if isinstance(value, float)}


if __name__ == "__main__":
    main()
