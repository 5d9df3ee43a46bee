"""Small classifiers of timm and transformers with random weights, and the expected first step of an ensemble."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# a no-op where the environment has installed it already
from tests.support import torchvision_shim as torchvision_shim

NUM_CLASSES = 5
Host = tuple[nn.Module, dict[str, Tensor], str]  # the model, an input as keywords, the name of its head


def timm_host(name: str, head: str, size: int = 32, **kwargs: Any) -> Host:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import timm
    model = timm.create_model(name, num_classes=NUM_CLASSES, **kwargs)
    return model, {"x": torch.rand(3, 3, size, size)}, head


TIMM: dict[str, Callable[[], Host]] = {
    "resnet": lambda: timm_host("test_resnet", "fc"),
    "efficientnet": lambda: timm_host("test_efficientnet", "classifier"),
    "vit": lambda: timm_host("test_vit", "head", img_size=32),
    "convnext": lambda: timm_host("test_convnext", "head.fc"),
    "mobilenetv3": lambda: timm_host("mobilenetv3_small_050", "classifier", size=64),
}


def transformers_host(kind: str) -> Host:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers as hf
    tokens = {
        "input_ids": torch.randint(1, 30, (3, 7)),
        "attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 6 + [0]]),
    }
    tokens["input_ids"] = tokens["input_ids"] * tokens["attention_mask"]  # padded with 0
    image = {"pixel_values": torch.rand(3, 3, 32, 32)}
    text: dict[str, Any] = {
        "vocab_size": 32,
        "num_labels": NUM_CLASSES,
        "pad_token_id": 0,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    if kind == "vit":
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_labels")
        sizes = {name: text[name] for name in names}
        config = hf.ViTConfig(image_size=32, patch_size=8, hidden_dropout_prob=0.0, **sizes)
        return hf.ViTForImageClassification(config), image, "classifier"
    if kind == "convnext":
        config = hf.ConvNextConfig(hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, num_labels=NUM_CLASSES)
        return hf.ConvNextForImageClassification(config), image, "classifier"
    if kind == "resnet":
        config = hf.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=NUM_CLASSES
        )
        return hf.ResNetForImageClassification(config), image, "classifier.1"
    if kind == "bert":
        return hf.BertForSequenceClassification(hf.BertConfig(**text)), tokens, "classifier"
    if kind == "roberta":
        return hf.RobertaForSequenceClassification(hf.RobertaConfig(**text)), tokens, "classifier.out_proj"
    if kind == "distilbert":
        config = hf.DistilBertConfig(
            vocab_size=32, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=16, dropout=0.0,
            attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=NUM_CLASSES, pad_token_id=0,
        )  # fmt: skip
        return hf.DistilBertForSequenceClassification(config), tokens, "classifier"
    if kind == "gpt2":
        config = hf.GPT2Config(
            vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, num_labels=NUM_CLASSES, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        return hf.GPT2ForSequenceClassification(config), tokens, "score"
    raise ValueError(f"Expected the name of a host, but got {kind!r}.")


TRANSFORMERS = ("vit", "convnext", "resnet", "bert", "roberta", "distilbert", "gpt2")


def expected_gradient(logits: Tensor, target: Tensor, diversity: float) -> Tensor:
    """DESIGN, mathematics, line 2, uniform weights: the gradient at `(K, N, C)` logits of the members' mean losses."""
    probs = logits.softmax(2)
    truth = F.one_hot(target, logits.shape[2]).to(probs)
    mixture = probs.mean(0, keepdim=True)
    return ((1 - diversity) * (probs - truth) + diversity * (mixture - truth)) / logits.shape[1]


def naive_gradients(
    networks: list[nn.Module], inputs: dict[str, Tensor], target: Tensor, diversity: float, shared: set[str]
) -> tuple[Tensor, dict[str, Tensor], list[dict[str, Tensor]]]:
    """The first step of K whole networks, one after another, as the paper writes Algorithm 2.

    Args:
        networks: K networks whose parameters named in `shared` are equal.
        shared: Names of the parameters that receive the mean of the K gradients.

    Returns:
        The logits `(K, N, C)`, the mean gradients of the shared parameters, each member's gradients of its own.
    """
    networks = [copy.deepcopy(network) for network in networks]
    outputs = [network(**inputs) for network in networks]
    outputs = [getattr(output, "logits", output) for output in outputs]
    logits = torch.stack(outputs).detach()
    for output, gradient in zip(outputs, expected_gradient(logits, target, diversity), strict=True):
        output.backward(gradient)
    gradients = [{n: p.grad for n, p in network.named_parameters() if p.grad is not None} for network in networks]
    mean = {name: torch.stack([one[name] for one in gradients]).mean(0) for name in gradients[0] if name in shared}
    own = [{name: grad for name, grad in one.items() if name not in shared} for one in gradients]
    return logits, mean, own
