"""Adapted ensembles against K separate networks whose weights contain the adapters."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from tests.nn.library_models import TIMM, transformers_host
from tests.nn.networks import SMALL
from tests.reference.adapters import SeparateMembers
from tests.support.processes import team
from torchace import adapt, amended_cross_entropy, load_model, load_weights, save_model
from torchace.models import mlp
from torchace.nn.conversion import find_logits
from torchace.nn.stacked_state import all_shared_names

K = 3
KINDS = {"multiplicative": {"adapter": "multiplicative"}, "low_rank": {"adapter": "low_rank", "rank": 2}}


class Encoder(nn.Module):
    """`nn.TransformerEncoder`, whose attention reads the weights of its layers without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.encoder(self.tokens(tokens)).mean(1))


NETWORKS = {
    **{name: SMALL[name] for name in ("mlp", "cifar_resnet", "conv1d", "attention")},
    "encoder": (Encoder, lambda: torch.randint(0, 11, (4, 7))),
}


def randomize(ensemble: nn.Module) -> None:
    """Move all trained parameters, so that low-rank adapters are not zero."""
    with torch.no_grad():
        for parameter in ensemble.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("adapter", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_gradients_and_statistics_equal_separate_members(name, adapter, freeze, training):
    torch.manual_seed(0)
    make, inputs = NETWORKS[name]
    x = inputs()
    x = x.double() if x.is_floating_point() else x
    ensemble = adapt(make().double(), K, **KINDS[adapter], freeze=freeze).train(training)
    randomize(ensemble)
    members = [ensemble[k] for k in range(K)]
    merged = torch.stack([ensemble.merge(k)(x) for k in range(K)])
    expected = torch.stack([member(x) for member in members])
    logits = ensemble(x)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(logits, merged, rtol=1e-9, atol=1e-10)

    weights = torch.randn_like(logits)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    shared = set(all_shared_names(ensemble.stacked))
    for name, parameter in ensemble.stacked.named_parameters():
        layer = ensemble.stacked.get_submodule(name.rpartition(".")[0])
        assert parameter.requires_grad == (not freeze or (name not in shared and not isinstance(layer, _NormBase)))
        if parameter.requires_grad:
            own = torch.stack([member.get_parameter(name).grad for member in members])
            own = own.mean(0) if name in shared else own
            torch.testing.assert_close(parameter.grad, own, rtol=1e-8, atol=1e-9, msg=name)
    for name, buffer in ensemble.stacked.named_buffers():
        own = torch.stack([member.get_buffer(name) for member in members])
        torch.testing.assert_close(buffer.expand_as(own), own)


@pytest.mark.parametrize("options", [{}, {"adapter": "low_rank", "rank": 2, "freeze": True}, {"layers": "first"}])
def test_saving_loading_copies_and_parts(tmp_path, options):
    ensemble = adapt(mlp(12, (8, 6), 3), K, **options)
    randomize(ensemble)
    x = torch.randn(5, 12)
    expected = ensemble(x)
    save_model(tmp_path / "model", ensemble)
    loaded = load_model(tmp_path / "model")
    assert torch.equal(loaded(x), expected)
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in ensemble.parameters()]
    fresh = adapt(mlp(12, (8, 6), 3), K, **options)
    load_weights(fresh, tmp_path / "model")
    assert torch.equal(fresh(x), expected)
    assert torch.equal(copy.deepcopy(ensemble)(x), expected)
    torch.testing.assert_close(ensemble.take(slice(1, 3))(x), expected[1:])
    assert ensemble.predict_proba(x).shape == (5, 3)
    assert "adapter='low_rank'" in repr(ensemble) or "adapter='multiplicative'" in repr(ensemble)


@pytest.mark.parametrize("make_optimizer", [lambda p: SGD(p, 0.05, momentum=0.9), lambda p: Adam(p, 0.01)])
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("adapter", KINDS)
@pytest.mark.parametrize("name", ["mlp", "conv", "encoder"])
def test_ten_steps_equal_separate_networks_whose_weights_contain_the_adapters(name, adapter, freeze, make_optimizer):
    torch.manual_seed(0)
    make, inputs = {**NETWORKS, "conv": (small_conv, lambda: torch.randn(6, 2, 5, 5))}[name]
    model, batches = make().double(), [inputs() for _ in range(10)]
    batches = [x.double() if x.is_floating_point() else x for x in batches]
    target = torch.randint(3, (len(batches[0]),))
    ensemble = adapt(model, K, **KINDS[adapter], freeze=freeze)
    randomize(ensemble)
    shared = set(all_shared_names(ensemble.stacked))
    trained = {name for name, p in ensemble.stacked.named_parameters() if p.requires_grad}
    tensors = dict(ensemble.stacked.named_parameters()) | dict(ensemble.stacked.named_buffers())
    separate = SeparateMembers(model, tensors, shared, trained, K)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    separate.train(make_optimizer, lambda logits: amended_cross_entropy(logits, target, 0.5), batches, alpha=8)
    optimizer = make_optimizer([p for p in ensemble.parameters() if p.requires_grad])
    for x in batches:
        optimizer.zero_grad()
        amended_cross_entropy(ensemble(x), target, 0.5).backward()
        optimizer.step()
    for name, tensor in tensors.items():
        expected = separate.shared[name] if name in shared else torch.stack([own[name] for own in separate.own])
        torch.testing.assert_close(tensor, expected, rtol=1e-7, atol=1e-8, msg=name)
        changed = not torch.equal(tensor, before[name])
        assert changed == (name in trained or "running" in name or "num_batches" in name), name
    expected = torch.stack(separate.logits(batches[0], 8))
    torch.testing.assert_close(ensemble(batches[0]), expected, rtol=1e-7, atol=1e-8)


def small_conv() -> nn.Module:
    # no bias before BatchNorm: its gradient is a rounding error, which Adam would scale up
    first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
    layers = [first, nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(27, 3))


def test_start_of_new_and_trained_models():
    torch.manual_seed(0)
    model = mlp(12, (64, 64), 3)
    new = adapt(model, K)
    first, second = new.adapters.values()
    assert set(first.r.unique().tolist()) == {-1.0, 1.0}
    assert all(torch.equal(values, torch.ones_like(values)) for values in (first.s, second.r, second.s))
    assert torch.equal(first.bias, model.linear1.bias.expand(K, -1))
    assert not torch.equal(new.stacked.fc.weight[0], new.stacked.fc.weight[1])
    trained = adapt(model, 50, freeze=True)
    for adapter in trained.adapters.values():
        for values in (adapter.r, adapter.s):
            assert values.mean().item() == pytest.approx(1, abs=0.02)  # 600 values or more: 4 standard errors
            assert values.std().item() == pytest.approx(0.1, abs=0.015)
    assert torch.equal(trained.stacked.fc.weight, model.fc.weight.expand(50, -1, -1))
    low_rank = adapt(model, K, adapter="low_rank", freeze=True)
    x = torch.randn(5, 12)
    torch.testing.assert_close(low_rank(x), model(x).expand(K, -1, -1))  # equal to the model until the first step
    assert low_rank.adapters["linear1"].A.abs().max() <= 12**-0.5  # as nn.Linear's weights


@pytest.mark.parametrize("adapter", ["multiplicative", "low_rank"])
def test_new_heads_on_a_frozen_model(adapter):
    torch.manual_seed(0)
    model = mlp(12, (64, 64), 3)
    ensemble = adapt(model, K, adapter=adapter, freeze=True, trained=False)
    assert len({tuple(weight.flatten().tolist()) for weight in (*ensemble.stacked.fc.weight, model.fc.weight)}) == K + 1
    x = torch.randn(50, 12)
    for k in range(K):  # the features stay close to those the model learned
        member = ensemble.merge(k)
        member.fc, features = nn.Identity(), copy.deepcopy(model)
        features.fc = nn.Identity()
        assert nn.functional.cosine_similarity(member(x), features(x)).min() > 0.9


@pytest.mark.parametrize("in_place", [True, False])
def test_members_values_in_a_shared_buffer_are_refused(in_place):
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                new = self.mean.lerp(x.detach().mean(0), 0.1)
                self.mean = self.mean.copy_(new) if in_place else new
            return x - self.mean

    ensemble = adapt(nn.Sequential(nn.Linear(12, 8), Centered(), nn.Linear(8, 3)), K)
    with pytest.raises(ValueError, match=r"share the buffer '1\.mean', but the forward writes values .* differ"):
        ensemble(torch.randn(5, 12))
    assert torch.equal(ensemble.stacked[1].mean, torch.zeros(8))
    assert ensemble.eval()(torch.randn(5, 12)).shape == (K, 5, 3)


def test_first_layer_alone_and_a_shared_head():
    model = mlp(12, (8, 6), 3)
    ensemble = adapt(model, K, layers="first", head="shared")
    own = {name: tuple(p.shape) for name, p in ensemble.stacked.named_parameters() if name.count("adapter")}
    assert own == {"linear1.adapter.r": (K, 12)}
    assert all_shared_names(ensemble.stacked) == [name for name, _ in model.named_parameters()]
    x = torch.randn(5, 12)
    expected = torch.stack([model(x * r) for r in ensemble.adapters["linear1"].r])
    torch.testing.assert_close(ensemble(x), expected)


def test_layers_by_name_part_and_pattern():
    model = Encoder()
    for layers, expected in {
        "linear1": ["encoder.layers.0.linear1", "encoder.layers.1.linear1"],
        "encoder.layers.1": [
            f"encoder.layers.1.{name}" for name in ("linear1", "linear2", "self_attn.in_proj", "self_attn.out_proj")
        ],
        "*.0.linear?": ["encoder.layers.0.linear1", "encoder.layers.0.linear2"],
    }.items():
        assert sorted(adapt(model, K, layers=layers).adapters) == expected


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers": ["linear9"]}, ValueError, r"none matches 'linear9'. It has 'linear1', 'linear2'"),
        ({"layers": []}, ValueError, "at least one name in `layers`"),
        ({"adapter": "low_rank", "rank": 9}, ValueError, r"`rank` of at most 8, the size of the layer 'linear1'"),
        ({"adapter": "low_rank", "rank": 0}, ValueError, "`rank` to be at least 1"),
        ({"adapter": "low_rank", "alpha": "high"}, TypeError, "`alpha` to be a number"),
        ({"adapter": "low_rank", "alpha": float("nan")}, ValueError, "`alpha` in .* but got nan"),
        ({"adapter": "dora"}, ValueError, "`adapter` to be one of 'multiplicative', 'low_rank', but got 'dora'"),
        ({"head": "nothing"}, ValueError, r"`head` to name a linear layer.*head='shared'"),
        ({"num_members": 0}, ValueError, "`num_members` to be at least 1"),
        ({"model": nn.ReLU()}, ValueError, "ends in an nn.Linear"),
        ({"model": nn.Linear(3, 2)}, ValueError, "layer before its head, but Linear has none"),
        ({"model": "bert"}, TypeError, "`model` to be a module, but got str"),
        ({"model": adapt(mlp(12, 8, 3), 2)}, TypeError, "one network, but got the ensemble AdaptedEnsemble"),
    ],
)
def test_bad_arguments(options, error, message):
    arguments = {"model": mlp(12, (8, 6), 3), "num_members": K, **options}
    with pytest.raises(error, match=message):
        adapt(arguments.pop("model"), arguments.pop("num_members"), **arguments)


@pytest.mark.parametrize("option", [{"alpha": 3.0}, {"rank": 4}])
def test_options_of_another_adapter_are_reported(option):
    with pytest.warns(UserWarning, match="have no effect: they belong to adapter='low_rank'"):
        adapt(mlp(12, (8, 6), 3), K, **option)


def test_grouped_convolutions_have_no_low_rank_adapters():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 3))
    assert list(adapt(model, K, adapter="low_rank", rank=2).adapters) == ["0"]
    with pytest.raises(ValueError, match="'1' is a grouped or transposed convolution"):
        adapt(model, K, adapter="low_rank", layers=["1"])


@pytest.mark.parametrize("layers", [None, "first"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2),
        lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2),
    ],
)
def test_factors_of_convolutions(make, layers):
    torch.manual_seed(0)
    conv, x = make().double(), torch.randn(5, 4, 7, 7).double()
    model = nn.Sequential(conv, nn.Flatten(), nn.Linear(conv(x)[0].numel(), 2).double())
    ensemble = adapt(model, K, layers=layers)
    randomize(ensemble)
    adapter, logits, plain = ensemble.adapters["0"], ensemble(x), copy.deepcopy(conv)
    plain.weight, plain.bias = ensemble.stacked[0].weight, None
    for k in range(K):
        s = torch.ones(6) if layers else adapter.s[k]
        bias = ensemble.stacked[0].bias if layers else adapter.bias[k]
        expected = plain(x * adapter.r[k].view(-1, 1, 1)) * s.view(-1, 1, 1) + bias.view(-1, 1, 1)
        expected = expected.flatten(1) @ ensemble.stacked[2].weight[k].T + ensemble.stacked[2].bias[k]
        torch.testing.assert_close(logits[k], expected, rtol=1e-9, atol=1e-10)
    with pytest.raises(RuntimeError, match="channels"):
        ensemble(x[:, :3])
    assert isinstance(ensemble.stacked[0].weight, nn.Parameter)  # not the members' weight of the failed call


class Reader(nn.Module):
    """Layers whose weights are read without a call, as in timm's BEiT; one with weight norm, which has no adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.read, self.a = nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.kernel, self.out = nn.Conv1d(8, 4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).tanh()
        x = nn.functional.linear(x, self.inner.read.weight, self.inner.read.bias).tanh()
        return self.out(nn.functional.conv1d(x[..., None], self.kernel.weight, self.kernel.bias).flatten(1).tanh())


@pytest.mark.parametrize("adapter", KINDS)
def test_layers_whose_weights_are_read_without_a_call(adapter):
    torch.manual_seed(0)
    ensemble, x = adapt(Reader().double(), K, **KINDS[adapter]), torch.randn(5, 6).double()
    assert list(ensemble.adapters) == ["inner.read", "kernel"]
    randomize(ensemble)
    logits, merged = ensemble(x), [ensemble.merge(k) for k in range(K)]
    expected = torch.stack([member(x) for member in merged])
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-10)
    weights = torch.randn_like(logits)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    kernel = torch.stack([member.kernel.bias.grad for member in merged])
    bias = ensemble.adapters["kernel"].bias.grad if adapter == "multiplicative" else ensemble.stacked.kernel.bias.grad
    torch.testing.assert_close(bias, kernel if adapter == "multiplicative" else kernel.mean(0))
    assert all(p.grad.abs().sum() > 0 for p in ensemble.parameters())
    assert isinstance(ensemble.stacked.kernel.weight, nn.Parameter)  # not the members' weight of the call


@pytest.mark.parametrize("name", ["attention", "conv1d", "mlp"])
def test_ensembles_can_be_pickled(name):
    make, inputs = NETWORKS[name]
    ensemble, x = adapt(make(), K).eval(), inputs()
    assert torch.equal(pickle.loads(pickle.dumps(ensemble))(x), ensemble(x))


def test_dropout_masks_own_batches_and_optimizers():
    torch.manual_seed(0)
    ensemble = adapt(mlp(12, (64, 6), 3, dropout=0.5), K, layers="first", head="shared")
    for adapter in ensemble.adapters.values():
        adapter.r.data.fill_(1.0)
    logits = ensemble(torch.ones(4, 12))
    assert not torch.equal(logits[0], logits[1])  # masks of its own for each member
    ensemble.eval()
    x = torch.randn(K, 4, 12)
    separate = ensemble(x, batches="separate")
    for k in range(K):
        torch.testing.assert_close(separate[k], ensemble(x[k])[k])
    groups = adapt(mlp(12, (8, 6), 3), K).parameter_groups(0.1)
    shapes = [{tuple(p.shape) for p in group["params"]} for group in groups]
    assert shapes == [{(8, 12), (6, 8), (K, 3, 6)}, {(K, 12), (K, 8), (K, 6), (K, 3)}]


@pytest.mark.extended
@pytest.mark.parametrize(("name", "adapter"), [("conv1d", "multiplicative"), ("attention", "low_rank")])
def test_compiled_and_half_precision_ensembles(name, adapter):
    torch.manual_seed(0)
    make, inputs = NETWORKS[name]
    x = inputs()
    ensemble = adapt(make(), K, **KINDS[adapter]).eval()
    randomize(ensemble)
    expected = ensemble(x)
    gradients = torch.autograd.grad(expected.square().sum(), list(ensemble.parameters()))
    compiled = torch.compile(ensemble, backend="aot_eager", fullgraph=True)
    logits = compiled(x)
    torch.testing.assert_close(logits, expected)
    ours = torch.autograd.grad(logits.square().sum(), list(ensemble.parameters()))
    for one, other in zip(ours, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = ensemble(x)
    assert half.dtype == torch.bfloat16
    # bfloat16 has 8 bits: errors of 0.4 % in each of about ten layers
    assert (half.float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.extended
def test_compiled_networks_of_transformers_return_logits():
    torch.manual_seed(0)
    model, inputs, _ = transformers_host("bert")
    ensemble = adapt(model, K, adapter="low_rank", rank=2, freeze=True).train()
    randomize(ensemble)
    for module in ensemble.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    compiled = torch.compile(ensemble, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = compiled(**inputs)
        torch.testing.assert_close(logits, ensemble(**inputs))
    logits.float().square().sum().backward()
    assert all(p.grad is not None for adapter in ensemble.adapters.values() for p in adapter.parameters())


def train_in_parallel() -> dict[str, Tensor]:
    """Two steps, each rank on half of the batch."""
    torch.manual_seed(0)
    ensemble = adapt(mlp(12, (8, 6), 3).double(), K)
    replicated = DistributedDataParallel(ensemble)
    x, y = torch.randn(2, 6, 12).double(), torch.randint(3, (2, 6))
    part = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    optimizer = SGD(ensemble.parameters(), 0.1)
    for batch, target in zip(x, y, strict=True):
        optimizer.zero_grad()
        amended_cross_entropy(replicated(batch[part]), target[part], 0.5).backward()
        optimizer.step()
    return ensemble.state_dict()


@pytest.mark.extended
def test_data_parallel_training_equals_one_process():
    torch.manual_seed(0)
    ensemble = adapt(mlp(12, (8, 6), 3).double(), K)
    x, y = torch.randn(2, 6, 12).double(), torch.randint(3, (2, 6))
    optimizer = SGD(ensemble.parameters(), 0.1)
    for batch, target in zip(x, y, strict=True):
        optimizer.zero_grad()
        amended_cross_entropy(ensemble(batch), target, 0.5).backward()
        optimizer.step()
    for state in team().run(2, train_in_parallel):
        for name, value in ensemble.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10)


@pytest.mark.extended
@pytest.mark.parametrize("adapter", KINDS)
@pytest.mark.parametrize("name", ["timm vit", "timm convnext", "timm mobilenetv3", "bert", "gpt2", "convnext"])
def test_networks_of_other_libraries(name, adapter):
    torch.manual_seed(0)
    kind, _, timm_name = name.partition(" ")
    model, inputs, head = TIMM[timm_name]() if timm_name else transformers_host(kind)
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    ensemble = adapt(model.double(), K, **KINDS[adapter] | ({"rank": 1} if adapter == "low_rank" else {}))
    assert head not in ensemble.adapters
    randomize(ensemble)
    members = [ensemble[k] for k in range(K)]
    expected = torch.stack([find_logits(member(**inputs)) for member in members])
    logits = ensemble(**inputs)
    torch.testing.assert_close(logits, expected, rtol=1e-8, atol=1e-9)
    logits.square().sum().backward()
    expected.square().sum().backward()
    shared = set(all_shared_names(ensemble.stacked))
    for path, parameter in ensemble.stacked.named_parameters():
        gradients = [member.get_parameter(path).grad for member in members]
        if gradients[0] is not None:
            own = torch.stack(gradients)
            torch.testing.assert_close(parameter.grad, own.mean(0) if path in shared else own, rtol=1e-6, atol=1e-7)
    assert ensemble.explain().call_by_call
