"""Networks of all kinds, each with an input."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchace.models import cifar_resnet, mlp


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = F.relu(self.norm(self.down(x)))
        inner = F.relu(self.inner(F.max_pool2d(skipped, 2)))
        return self.out(torch.cat([self.up(inner), skipped], 1))


class Attention(nn.Module):
    """`nn.MultiheadAttention`, a class token, positions, a scale that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 6, 16))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1) + self.positions
        h = self.norm(h + self.scale * self.attention(h, h, h, need_weights=False)[0])
        return self.out(h[:, 0])


class Wild(nn.Module):
    """Einsum, matmul, softmax, roll, pad, chunk, pooling, group and RMS norm, embeddings, `F` functions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 12, padding_idx=0)
        self.mix = nn.Parameter(torch.randn(12, 12) / 4)
        self.group = nn.GroupNorm(3, 12)
        self.rms = nn.RMSNorm(12)
        self.act = nn.PReLU(12)
        self.conv = nn.Conv1d(12, 24, 3, groups=2)
        self.head = nn.Bilinear(12, 12, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.rms(self.tokens(tokens))  # (N, T, 12)
        h = torch.einsum("ntd,de->nte", h, self.mix).roll(1, dims=1)
        h = h + torch.softmax(h @ h.transpose(1, 2), -1) @ h
        c = self.act(self.group(h.permute(0, 2, 1)))
        a, b = self.conv(F.pad(c, (1, 1))).chunk(2, dim=1)
        pooled = F.adaptive_max_pool1d(a * torch.sigmoid(b), 1).squeeze(-1)
        return self.head(pooled, F.normalize(h.mean(1), dim=-1))


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.GELU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        nn.Linear(8, 3), nn.BatchNorm1d(3),
    )  # fmt: skip


def torchvision(name: str, depth: bool = False, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchvision import models

            model = getattr(models, name)(weights=None, num_classes=10, **options)
        for module in model.modules():
            if not depth and type(module).__name__ == "StochasticDepth":
                module.p = 0.0
        return model

    return make


def vgg() -> nn.Module:
    """Its convolutions, before a smaller classifier: the original has 100 million weights there."""
    model = torchvision("vgg11_bn", dropout=0.0)()
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier[0] = nn.Linear(512, 64)
    model.classifier[3] = nn.Linear(64, 64)
    model.classifier[6] = nn.Linear(64, 10)
    return model


def timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import timm

            return timm.create_model(name, pretrained=False, num_classes=5, **options)

    return make


class Text(nn.Module):
    """One of transformers' models, which returns its logits."""

    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        import transformers

        if kind == "bert":
            self.model = transformers.BertForSequenceClassification(
                transformers.BertConfig(
                    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                    max_position_embeddings=32, num_labels=3, hidden_dropout_prob=dropout,
                    attention_probs_dropout_prob=dropout,
                )
            )  # fmt: skip
        else:
            self.model = transformers.GPT2ForSequenceClassification(
                transformers.GPT2Config(
                    vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, num_labels=3, pad_token_id=0,
                    bos_token_id=1, eos_token_id=1, resid_pdrop=dropout, attn_pdrop=dropout, embd_pdrop=dropout,
                )
            )  # fmt: skip

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.model(tokens, attention_mask=mask).logits


def images(count: int = 2, size: int = 32) -> Callable[[], Tensor]:
    return lambda: torch.randn(count, 3, size, size)


def words(top: int = 50) -> Callable[[], Tensor]:
    return lambda: torch.randint(1, top, (3, 8))


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor]]
SMALL: dict[str, Case] = {
    "mlp": (lambda: mlp(12, (8, 6), 3), lambda: torch.randn(7, 3, 4)),
    "cifar_resnet": (lambda: cifar_resnet(8, width=4), images(3, 12)),
    "conv1d": (conv1d, lambda: torch.randn(5, 3, 20)),
    "unet": (UNet, images(2, 8)),
    "attention": (Attention, lambda: torch.randn(4, 5, 6)),
    "wild": (Wild, lambda: torch.randint(0, 11, (3, 8))),
    "bert": (lambda: Text("bert"), words()),
    "gpt2": (lambda: Text("gpt2"), words()),
    "shufflenet": (torchvision("shufflenet_v2_x0_5"), images()),
    "mobilenet_v3_small": (torchvision("mobilenet_v3_small", dropout=0.0), images()),
    "vit_tiny": (timm("vit_tiny_patch16_224", img_size=32, depth=2), images()),
    "swin_tiny": (timm("swin_tiny_patch4_window7_224", img_size=32, window_size=2, drop_path_rate=0.0), images()),
    "regnet_y_400mf": (torchvision("regnet_y_400mf"), images()),
}
LARGE: dict[str, Case] = {
    "mixer": (timm("mixer_s32_224", img_size=64), images(2, 64)),
    "resnet18": (torchvision("resnet18"), images()),
    "resnext50": (torchvision("resnext50_32x4d"), images()),
    "densenet121": (torchvision("densenet121"), images()),
    "efficientnet_b0": (torchvision("efficientnet_b0", dropout=0.0), images(8)),
    "convnext_tiny": (torchvision("convnext_tiny"), images()),
    "vgg11_bn": (vgg, images(8)),
    "swin_t": (torchvision("swin_t"), images(2, 64)),
}
