"""Adapters beside peft and tabm: the same outputs and trainings on the same weights, files in both directions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# a no-op where the environment has installed it already
from tests.support import torchvision_shim as torchvision_shim
from torchace import adapt, load_adapters

pytestmark = pytest.mark.extended
peft = pytest.importorskip("peft")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as hf

CLOSE = {"rtol": 0, "atol": 1e-10}  # float64; sums in another order, over a network of some layers
SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40,
    "max_position_embeddings": 20,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DISTILBERT = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "vocab_size": 40}
GPT2 = {
    "vocab_size": 40,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 20,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class SameEnd(nn.Module):
    """A head whose name is the end of other names, as in DistilBERT: peft saves those layers too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.pre_top = nn.Linear(6, 4), nn.Sequential(), nn.Linear(4, 4)
        self.a.add_module("top", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        self.top = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.pre_top(self.a(self.body(x).tanh()).tanh()).tanh())


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, 3))


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 40, (4, 7))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]] = {
    "bert": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**SIZES)), tokens, {"layers": ["query", "value"]},
    ),
    "bert tokens": (lambda: hf.BertForTokenClassification(hf.BertConfig(num_labels=5, **SIZES)), tokens, {}),
    "roberta": (lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**SIZES)), tokens, {}),
    "gpt2": (
        lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2, pad_token_id=0)), tokens, {},
    ),
    "gpt2 language model": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), tokens, {"head": "shared", "layers": ["c_attn", "c_proj"]},
    ),
    "distilbert": (
        lambda: hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**DISTILBERT)), tokens, {},
    ),
    "distilbert, shared head": (
        lambda: hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**DISTILBERT)), tokens, {"head": "shared"},
    ),
    "roberta, shared head": (
        lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**SIZES)), tokens, {"head": "shared"},
    ),
    "same end": (SameEnd, lambda: torch.randn(5, 6, dtype=torch.float64), {}),
    "convolutional": (convolutional, lambda: torch.randn(5, 1, 6, 6, dtype=torch.float64), {}),
}  # fmt: skip


def timm_vit() -> nn.Module:
    import timm

    return timm.create_model("test_vit", num_classes=3, img_size=32)


MODELS["timm ViT"] = (timm_vit, lambda: torch.randn(2, 3, 32, 32, dtype=torch.float64), {"layers": ["qkv", "fc1"]})


def call(model: nn.Module, x: Any) -> Tensor:
    """The logits, with classes on axis -1 for tokens."""
    output = model(**x) if isinstance(x, dict) else model(x)
    return output if isinstance(output, Tensor) else output.logits


def members(ensemble: nn.Module, x: Any) -> Tensor:
    logits = call(ensemble, x)
    return logits.movedim(2, -1) if logits.ndim > 3 else logits


@pytest.mark.parametrize("name", list(MODELS))
def test_adapters_are_exchanged_with_peft(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, inputs, options = MODELS[name]
    model, x = make().double().eval(), inputs()
    ensemble = adapt(model, 3, adapter="low_rank", rank=2, freeze=True, **options).eval()
    with torch.no_grad():
        for parameter in ensemble.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)
        expected = members(ensemble, x)
        folders = ensemble.save_adapters(tmp_path / "ours")
        theirs = []
        for k, folder in enumerate(folders):
            alone = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
            torch.testing.assert_close(call(alone, x), expected[k], **CLOSE)
            torch.testing.assert_close(call(ensemble.merge(k).eval(), x), expected[k], **CLOSE)
            theirs.append(tmp_path / f"peft_{k}")
            alone.save_pretrained(theirs[-1])
        torch.testing.assert_close(members(load_adapters(model, theirs).eval(), x), expected, **CLOSE)


@pytest.mark.parametrize("name", ["out", "A", "layer"])
def test_peft_loads_heads_with_names_from_its_own_layers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(), torch.randn(5, 6)
    for child, layer in {"body": nn.Linear(6, 4), "act": nn.Tanh(), name: nn.Linear(4, 3)}.items():
        model.add_module(child, layer)
    ensemble = adapt(model, 2, adapter="low_rank", rank=2, freeze=True, trained=False)
    nn.init.normal_(ensemble.adapters["body"].B)
    for folder, expected in zip(ensemble.save_adapters(tmp_path), ensemble(x), strict=True):
        torch.testing.assert_close(peft.PeftModel.from_pretrained(copy.deepcopy(model), folder)(x), expected)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_one_member_is_the_lora_of_peft(optimizer: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**SIZES, **NO_DROPOUT)).double()
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["query", "dense"],
        modules_to_save=["classifier"],
        exclude_modules=["pooler.dense"],
    )
    theirs = peft.get_peft_model(copy.deepcopy(model), config).train()
    ours = adapt(
        model, 1, adapter="low_rank", rank=4, alpha=6, layers=["query", "*.layer.*.dense"], freeze=True
    ).train()
    lora = {n.split("base_model.model.")[1]: m for n, m in theirs.named_modules() if hasattr(m, "lora_A")}
    assert ours.adapters.keys() == lora.keys()
    with torch.no_grad():
        for name, adapter in ours.adapters.items():
            adapter.A[0] = lora[name].lora_A["default"].weight
    batches = [(torch.randint(40, (8, 7)), torch.randint(2, (8,))) for _ in range(5)]
    runs = []
    for network in (theirs, ours):
        steps = optimizer([p for p in network.parameters() if p.requires_grad], lr=0.01)
        losses = []
        for x, y in batches:
            steps.zero_grad()
            loss = F.cross_entropy(call(network, {"input_ids": x}).reshape(8, 2), y)
            loss.backward()
            steps.step()
            losses.append(loss.item())
        runs.append((losses, call(network, {"input_ids": batches[0][0]}).reshape(8, 2)))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=0, abs=1e-8)  # Adam divides by small second moments
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=0, atol=1e-7)


def test_dora_of_peft_is_refused(tmp_path: Path) -> None:
    model = convolutional()
    for name in ("use_dora", "use_rslora"):
        config = peft.LoraConfig(r=2, target_modules=["4"], modules_to_save=["6"], **{name: True})
        peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match=f"{name}=True"):
            load_adapters(model, [tmp_path / name])
    config = peft.LoraConfig(r=2, target_modules=["4"], init_lora_weights="pissa")
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(tmp_path / "pissa")
    with pytest.raises(ValueError, match="init_lora_weights='pissa', which cannot be loaded"):
        load_adapters(model, [tmp_path / "pissa"])


@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft: Conv1D, and that it saves the weight of lm_head
def test_adapters_of_output_layers_and_embeddings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, tie_word_embeddings=False)).double().eval()
    x, expected, folders = tokens(), [], []
    for k in range(2):  # peft saves the weight of lm_head too
        config = peft.LoraConfig(r=2, target_modules=["c_attn", "lm_head"], init_lora_weights=False)
        theirs = peft.get_peft_model(copy.deepcopy(model), config).eval()
        expected.append(call(theirs, x))
        folders.append(tmp_path / f"member_{k}")
        theirs.save_pretrained(folders[-1])
    torch.testing.assert_close(members(load_adapters(model, folders).eval(), x), torch.stack(expected), **CLOSE)
    config = peft.LoraConfig(r=2, target_modules=["c_attn", "wte"])
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(tmp_path / "wte")
    with pytest.raises(ValueError, match="adapts an embedding"):
        load_adapters(model, [tmp_path / "wte"])


@pytest.mark.parametrize("mini", [False, True])
def test_multiplicative_members_are_those_of_tabm(mini: bool) -> None:
    tabm = pytest.importorskip("tabm")
    torch.manual_seed(0)
    K, N = 4, 6
    theirs = tabm.TabM.make(
        n_num_features=5, d_out=3, k=K, n_blocks=2, d_block=8, dropout=0.0, arch_type="tabm-mini" if mini else "tabm"
    ).double()
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    ours = adapt(model, K, layers="first" if mini else None)
    linears = [block[0] for block in theirs.backbone.blocks] + [theirs.output]
    with torch.no_grad():
        for i, source in zip((0, 2, 4), linears, strict=True):
            layer = ours.stacked[i]
            layer.weight.copy_(source.weight.mT if i == 4 else source.weight)
            adapter = getattr(layer, "adapter", None)
            if i == 4 or mini:
                layer.bias.copy_(source.bias)
            else:
                adapter.r.copy_(source.r)
                adapter.s.copy_(source.s)
                adapter.bias.copy_(source.bias)
            if i == 0 and mini:
                adapter.r.copy_(theirs.backbone.affine.weight)
    x, y = torch.randn(N, 5, dtype=torch.float64), torch.randint(3, (N,))
    expected = theirs(x)  # (N, K, C)
    torch.testing.assert_close(ours(x), expected.transpose(0, 1), **CLOSE)
    # tabm's loss is the mean over members: shared weights receive the same gradient, adapters 1/K of ours
    F.cross_entropy(expected.flatten(0, 1), y.repeat_interleave(K)).backward()
    sum(F.cross_entropy(logits, y) for logits in ours(x)).backward()
    torch.testing.assert_close(ours.stacked[2].weight.grad, linears[1].weight.grad, **CLOSE)
    if not mini:
        torch.testing.assert_close(ours.stacked[2].adapter.r.grad, K * linears[1].r.grad, **CLOSE)
        # the start: signs at the first layer, ones after it
        fresh = adapt(model, K)
        assert fresh.stacked[0].adapter.r.abs().eq(1).all()
        assert fresh.stacked[2].adapter.r.eq(1).all()
        assert fresh.stacked[0].adapter.s.eq(1).all()
