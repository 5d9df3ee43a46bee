"""Sweeps of own networks with other packages: a transformer on tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchace as ace

pytestmark = pytest.mark.extended


def make_transformer() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=12, num_labels=2,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)  # returns an object with `logits`


def texts(count: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Token sequences of different lengths; the label is whether token 7 occurs."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, 30, (count, 12), generator=generator)
    lengths = torch.randint(4, 13, (count, 1), generator=generator)
    label = torch.arange(count) % 2
    ids[label == 1, 1] = 7
    mask = (torch.arange(12) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}, label


def test_a_transformer_learns_a_text_task() -> None:
    result = ace.sweep(
        make_transformer, texts(400, 0), texts(100, 1), num_members=2, diversities=[0.0, 0.4], seeds=2, epochs=12,
        batch_size=40, learning_rate=3e-3,
    )  # fmt: skip
    frame = result.to_frame()
    assert frame["accuracy"].min() > 0.9
    ensemble: Any = result.ensemble(0.4, 1)
    inputs, labels = texts(100, 1)
    predicted = ensemble.predict(inputs["input_ids"], inputs["attention_mask"])
    accuracy = float((predicted == labels).double().mean())
    assert accuracy == pytest.approx(frame.set_index(["diversity", "seed"]).loc[(0.4, 1), "accuracy"])
