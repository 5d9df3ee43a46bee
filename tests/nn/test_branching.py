"""branch: gradients at every layer, copies of the model's state, and errors."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.nn.library_models import TIMM, naive_gradients
from torchace.functional import amended_cross_entropy
from torchace.models import cifar_resnet
from torchace.nn.branching import branch
from torchace.nn.ensemble import Ensemble
from torchace.nn.heads import SMOC

K, DIVERSITY, NUM_CLASSES = 3, 0.7, 5
TARGET = torch.tensor([0, 1, 2, 3, 4, 0])


class Output(NamedTuple):
    logits: Tensor


class Net(nn.Module):
    """Three layers with a given forward."""

    def __init__(self, run: Any = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, NUM_CLASSES)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))) if self.run is None else self.run(self, x)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, NUM_CLASSES)
    )


def resnet() -> nn.Module:
    return cifar_resnet(8, NUM_CLASSES, width=4)


PLACES = [
    *((mlp, (6, 4), at) for at in "025"),
    *((resnet, (6, 3, 8, 8), at) for at in ("conv1", "stage3", "flatten", "fc")),
    # inside a block the input crosses too, for the shortcut
    *((resnet, (6, 3, 8, 8), at) for at in ("stage2.0.conv2", "stage2.0.shortcut")),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("build", "shape", "at"), PLACES)
def test_first_step_equals_separate_networks(build: Any, shape: tuple[int, ...], at: str, training: bool) -> None:
    torch.manual_seed(0)
    model = build().double().train(training)
    x = torch.randn(shape, dtype=torch.float64)
    ensemble = branch(model, K, at=at, reinitialize=lambda: build().double())
    own = {name for name, _ in ensemble[0].named_parameters()}
    everything = {name for name, _ in model.named_parameters()}
    shared = {name for name, _ in ensemble.trunk.named_parameters()} if ensemble.trunk is not None else set()
    assert own | shared == everything
    assert not own & shared

    networks = []
    for member in ensemble:
        network = copy.deepcopy(model)
        network.load_state_dict({**model.state_dict(), **member.state_dict()})
        networks.append(network)
    inputs = {"input" if build is mlp else "x": x}
    expected, mean, of_members = naive_gradients(networks, inputs, TARGET, DIVERSITY, shared)
    logits = ensemble(x)
    assert len({z.sum().item() for z in logits}) == (K if own else 1)
    amended_cross_entropy(logits, TARGET, DIVERSITY).backward()
    # float64 rounding, summed in another order through a dozen layers; gradients here are of order 1 and less
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    for name, gradient in mean.items():
        torch.testing.assert_close(ensemble.trunk.get_parameter(name).grad, gradient, rtol=1e-10, atol=1e-12)
    for member, gradients in zip(ensemble, of_members, strict=True):
        assert set(gradients) == own
        for name, gradient in gradients.items():
            torch.testing.assert_close(member.get_parameter(name).grad, gradient, rtol=1e-10, atol=1e-12)


def test_at_the_input_equals_separate_models() -> None:
    torch.manual_seed(0)
    model = Net().double()
    ensemble = branch(model, K, at="first", reinitialize=True)
    assert ensemble.trunk is None
    models = Ensemble([copy.deepcopy(member) for member in ensemble])
    x = torch.randn(6, 4, dtype=torch.float64)
    for one in (ensemble, models):
        amended_cross_entropy(one(x), TARGET, DIVERSITY).backward()
    assert torch.equal(ensemble(x), models(x))
    for ours, theirs in zip(ensemble.parameters(), models.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    own = torch.randn(K, 6, 4, dtype=torch.float64)
    assert torch.equal(ensemble(own, batches="separate"), torch.stack([m(o) for m, o in zip(models, own, strict=True)]))


@pytest.mark.parametrize("build", [Net, resnet])
def test_at_the_last_layer_equals_smoc(build: Any) -> None:
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(6, 4, dtype=torch.float64)
    last = "last" if build is Net else "fc"
    if build is resnet:
        x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    ensemble = branch(model, K, at=last, reinitialize=True)
    trunk = copy.deepcopy(model)
    linear = trunk.get_submodule(last)
    setattr(trunk, last, nn.Identity())
    smoc = SMOC(trunk, linear.in_features, NUM_CLASSES, K).double()
    with torch.no_grad():
        smoc.head.weight.copy_(torch.stack([member.get_parameter(f"{last}.weight") for member in ensemble]))
        smoc.head.bias.copy_(torch.stack([member.get_parameter(f"{last}.bias") for member in ensemble]))
    for one in (ensemble, smoc):
        amended_cross_entropy(one(x), TARGET, DIVERSITY).backward()
    # float64 rounding: one matrix product for K heads against K products
    torch.testing.assert_close(ensemble(x), smoc(x), rtol=1e-12, atol=1e-12)
    for name, parameter in ensemble.trunk.named_parameters():
        torch.testing.assert_close(parameter.grad, trunk.get_parameter(name).grad, rtol=1e-12, atol=1e-12)
    for k, member in enumerate(ensemble):
        grads = (member.get_parameter(f"{last}.weight").grad, member.get_parameter(f"{last}.bias").grad)
        torch.testing.assert_close(grads, (smoc.head.weight.grad[k], smoc.head.bias.grad[k]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("at", ["first", "middle"])
def test_the_model_is_not_changed(at: str) -> None:
    model = Net()
    model.middle.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    attributes = set(vars(model))
    ensemble = branch(model, K, at=at, reinitialize=True)
    F.cross_entropy(ensemble(torch.randn(6, 4))[0], TARGET).backward()
    for parameter in ensemble.parameters():
        if parameter.requires_grad:
            parameter.data.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(vars(model)) == attributes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [member.get_parameter("middle.weight").requires_grad for member in ensemble] == [False] * K
    tensors = [tensor.data_ptr() for tensor in [*ensemble.parameters(), *model.parameters()]]
    assert len(set(tensors)) == len(tensors)


def test_modes_devices_and_types_stay() -> None:
    model = resnet().eval()
    model.bn1.train()
    model.stage3[0].bn2.train()
    for at in ("conv1", "stage3.0.conv2"):
        ensemble = branch(model, K, at=at)
        for part in (*ensemble, *([] if ensemble.trunk is None else [ensemble.trunk])):
            assert all(module.training == model.get_submodule(name).training for name, module in part.named_modules())
        assert not ensemble.training
        ensemble.train()
        assert all(module.training for module in ensemble.modules())
        ensemble.eval()
        assert not any(module.training for module in ensemble.modules())
    assert {p.dtype for p in branch(Net().bfloat16(), K, at="last").parameters()} == {torch.bfloat16}
    assert all(p.is_meta for p in branch(Net().to("meta"), K, at="last").parameters())


@pytest.mark.parametrize("at", ["conv1", "stage2.0.conv2", "fc"])
def test_copies_and_state_round_trip(at: str) -> None:
    torch.manual_seed(0)
    model, x = resnet(), torch.randn(6, 3, 8, 8)
    ensemble, other = (branch(model, K, at=at, reinitialize=True).eval() for _ in range(2))
    expected = ensemble(x)
    assert not torch.equal(expected, other(x))
    twin = copy.deepcopy(ensemble)
    assert torch.equal(twin(x), expected)
    assert list(twin.state_dict()) == list(ensemble.state_dict())
    assert not any(module.training for module in twin.modules())
    other.load_state_dict(ensemble.state_dict())
    assert torch.equal(other(x), expected)


def test_dropout_follows_the_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 5))
    ensemble, x = branch(model, K, at="2"), torch.randn(6, 4)
    members = ensemble(x)
    assert not torch.equal(members[0], members[1])  # a mask a member
    ensemble.eval()
    torch.testing.assert_close(ensemble(x), model.eval()(x).expand(K, -1, -1))


def test_buffers_are_saved_as_in_the_model() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(4))
            self.register_buffer("deviation", torch.full((4,), 2.0), persistent=False)
            self.offset = torch.full((5,), 0.5)  # a tensor that is no buffer

        def forward(self, x: Tensor) -> Tensor:
            offset = self.offset  # read before the layer, used after it
            return self.last(torch.tanh(self.middle(self.first((x - self.mean) / self.deviation)))) + offset

    model, x = Scaled(), torch.randn(6, 4)
    for ensemble in (one := branch(model, K, at="middle"), copy.deepcopy(one)):
        assert set(ensemble.trunk.state_dict()) == {"mean", "first.weight", "first.bias"}
        assert set(ensemble[0].state_dict()) == {"middle.weight", "middle.bias", "last.weight", "last.bias"}
        torch.testing.assert_close(ensemble(x), model(x).expand(K, -1, -1))


@pytest.mark.parametrize(
    "run",
    [
        lambda net, x: net.last(F.relu(net.middle(h := net.first(x)), inplace=True) + h),
        lambda net, x: net.last(net.middle(F.relu_(net.act(net.first(x))))),
        lambda net, x: net.last(net.middle(net.act(net.first(x)).add_(1.0))),
    ],
)
def test_members_that_work_in_place_have_copies(run: Any) -> None:
    torch.manual_seed(0)
    model, x = Net(run), torch.randn(6, 4)
    model.act = nn.Identity()
    at = "act" if "act" in run.__code__.co_names else "middle"
    ensemble = branch(model, K, at=at)
    F.cross_entropy(ensemble(x).flatten(0, 1), TARGET.repeat(K)).backward()
    with torch.no_grad():
        torch.testing.assert_close(ensemble(x), model(x).expand(K, -1, -1))


def test_values_of_any_kind_cross() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        size = x.size(0)
        h, (w, v) = net.first(x), (x.sum(1, keepdim=True), x.shape)
        return net.last(net.middle(h) * w).view(size, v[0] // size, -1).squeeze(1)

    torch.manual_seed(0)
    model, x = Net(run), torch.randn(6, 4)
    torch.testing.assert_close(branch(model, K, at="middle")(x), model(x).expand(K, -1, -1))
    # looking at the input's shape first is no reason for a trunk
    assert branch(model, K, at="first").trunk is None


def test_arguments_with_defaults_keep_them() -> None:
    class Optional(Net):
        def forward(self, x: Tensor, mask: Tensor | None = None, features: bool = False) -> Tensor:
            h = self.first(x)
            if mask is not None:
                h = h * mask
            return h if features else self.last(self.middle(h))

    model, x = Optional(), torch.randn(6, 4)
    ensemble = branch(model, K, at="middle")
    torch.testing.assert_close(ensemble(x=x), model(x).expand(K, -1, -1))
    with pytest.raises(TypeError, match="mask"):
        ensemble(x, mask=x)


def test_control_flow_inside_a_child_is_free() -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else F.dropout(x, training=self.training)

    model, x = nn.Sequential(Gate(), nn.Linear(4, 4), Gate(), nn.Linear(4, 5)), torch.ones(6, 4)
    torch.testing.assert_close(branch(model.eval(), K, at="1")(x), model(x).expand(K, -1, -1))


def test_a_layer_with_two_names_or_two_calls() -> None:
    model = Net(lambda net, x: net.last(net.alias(net.middle(net.first(x)))))
    model.alias = model.middle
    ensemble = branch(model, K, at="alias")  # its first call is that of `middle`
    assert [name for name, _ in ensemble.trunk.named_parameters()] == ["first.weight", "first.bias"]
    with pytest.raises(ValueError, match=r"'middle.weight' is used both before and after the split at 'last'"):
        branch(Net(lambda net, x: net.middle(net.last(net.middle(net.first(x))))), K, at="last")


def test_reinitialized_members_differ_and_follow_the_seed() -> None:
    def build() -> nn.Module:
        attention = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), attention, nn.BatchNorm1d(6), nn.Linear(6, 5))

    model = build()
    with torch.no_grad():
        for tensor in (*model.parameters(), model[3].running_mean):
            tensor.fill_(7.0)
    for reinitialize in (True, build):
        torch.manual_seed(1)
        ensemble = branch(model, K, at="2", reinitialize=reinitialize)
        torch.manual_seed(1)
        again = branch(model, K, at="2", reinitialize=reinitialize)
        for (name, one), (_, two), other in zip(
            ensemble[0].named_parameters(), again[0].named_parameters(), ensemble[1].parameters(), strict=True
        ):
            assert torch.equal(one, two)
            assert not (one == 7.0).any()
            assert one.std() == 0 or not torch.equal(one, other), name
        assert not ensemble[0].get_buffer("3.running_mean").any()
        assert not ensemble[0].get_parameter("2.self_attn.out_proj.bias").any()  # attention's rule, not the layer's own
        assert (ensemble.trunk.get_parameter("0.weight") == 7.0).all()


def test_models_that_cannot_be_reinitialized() -> None:
    model = Net(lambda net, x: net.last(net.middle(net.first(x))) * net.scale)
    model.scale = nn.Parameter(torch.ones(5))
    with pytest.raises(ValueError, match=r"Cannot re-initialize 'scale': .* has no reset_parameters. Give a function"):
        branch(model, K, at="last", reinitialize=True)
    model = Net()
    parametrizations.weight_norm(model.last)
    with pytest.raises(ValueError, match=r"Cannot re-initialize 'last.parametrizations.weight.original0'"):
        branch(model, K, at="last", reinitialize=True)
    for function in (mlp, lambda: None):
        with pytest.raises(ValueError, match="Expected `reinitialize` to return a model of the same architecture"):
            branch(Net(), K, at="last", reinitialize=function)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="Expected `reinitialize` to be a bool or a function"):
        branch(Net(), K, at="last", reinitialize=Net())  # type: ignore[arg-type]


def by_training(net: Net, x: Tensor) -> Tensor:
    return net.last(net.middle(net.first(x)) if net.training else net.first(x))


def frozen(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.first(x)
    return net.last(h)


def in_half(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net.last(net.first(x))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda net, x: net.last(net.first(x) if x.sum() > 0 else x),
            r"Cannot follow the forward of Net down to 'last'",
        ),
        (lambda net, x: net.last(F.dropout(net.first(x), training=net.training)), r"nn.Dropout for F.dropout"),
        (frozen, r"switches gradients or autocast"),
        (in_half, r"switches gradients or autocast"),
        (by_training, r"differs between training and evaluation"),
        (lambda net, x: net.last(net.first(x) + torch.rand(6)), r"creates a tensor that depends on no input"),
        (lambda net, x: net.middle(net.first(x)), r"never calls the layer 'last'"),
        (
            lambda net, x: F.linear(net.last(net.middle(net.first(x))), net.middle.weight[:, :5]),
            r"'middle.weight' is used",
        ),
    ],
)
def test_forwards_that_cannot_be_split(run: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        branch(Net(run), K, at="last")


@pytest.mark.parametrize(
    "pack", [lambda z: (z, z.sum()), lambda z: [z], lambda z: {"logits": z}, lambda z: Output(logits=z)]
)
def test_models_that_return_more_than_logits(pack: Any) -> None:
    with pytest.raises(TypeError, match=r"Expected Net to return one tensor of logits.* Wrap it in a module"):
        branch(Net(lambda net, x: pack(net.last(net.first(x)))), K, at="last")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "at"), [("resnet", "layer4"), ("efficientnet", "blocks.2.0"), ("convnext", "head.fc")]
)
def test_timm_networks(kind: str, at: str) -> None:
    torch.manual_seed(0)
    model, inputs, _ = TIMM[kind]()
    ensemble = branch(model.eval(), K, at=at)
    amended_cross_entropy(ensemble(**inputs), TARGET[:3], DIVERSITY).backward()
    assert all(parameter.grad is not None for parameter in ensemble.parameters())
    assert sum(p.numel() for p in ensemble.trunk.parameters()) + sum(
        p.numel() for p in ensemble[0].parameters()
    ) == sum(p.numel() for p in model.parameters())


def test_split_under_no_grad_and_autocast() -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        ensemble = branch(Net(), K, at="last")
    assert ensemble(torch.randn(6, 4)).requires_grad


def test_tied_weights_cannot_be_split() -> None:
    model = Net()
    model.last = nn.Linear(6, 6)
    model.last.weight = model.middle.weight
    with pytest.raises(ValueError, match=r"'middle.weight' is used both before and after"):
        branch(model, K, at="last")
    branch(model, K, at="middle")


def test_wrong_arguments_are_refused() -> None:
    model = resnet()
    with pytest.raises(ValueError, match=r"but got 'layer3'. It has 'conv1', 'bn1', .* 'fc'\."):
        branch(model, K, at="layer3")
    with pytest.raises(ValueError, match=r"but got 'stage3.7.conv1'. It has .*'stage3.0.conv1'"):
        branch(model, K, at="stage3.7.conv1")
    with pytest.raises(ValueError, match="Expected `at` to name a layer of the model, but got ''"):
        branch(model, K, at="")
    blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 5)])
    model = Net(lambda net, x: net.blocks[1](net.blocks[0](x)))
    model.blocks = blocks
    with pytest.raises(ValueError, match=r"never calls the layer 'blocks'.*such as 'blocks.0'"):
        branch(model, K, at="blocks")
    assert branch(model, K, at="blocks.1")(torch.randn(6, 4)).shape == (K, 6, 5)
    with pytest.raises(ValueError, match=r"Expected `at` to name a layer of the model, but got 3\. It has 'first', "):
        branch(model, K, at=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Expected `model` to be a module, but got str"):
        branch("resnet", K, at="fc")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected `num_members` to be at least 1"):
        branch(model, 0, at="blocks.1")
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        branch(model, "blocks.1", K)  # type: ignore[arg-type]


def test_the_description_for_save_model() -> None:
    model = resnet()
    assert branch(model, K, at="stage3").branched == {"architecture": model.architecture, "at": "stage3"}
    assert not hasattr(branch(Net(), K, at="last"), "branched")


def test_link_and_predictions() -> None:
    ensemble = branch(Net(), K, at="last", link="sigmoid", reinitialize=True)
    probs = ensemble.predict_proba(torch.randn(6, 4))
    assert ensemble.link == "sigmoid"
    assert ((probs > 0) & (probs < 1)).all()


def test_compiles_in_one_graph() -> None:
    ensemble, x = branch(resnet().eval(), K, at="stage2.0.conv2"), torch.randn(6, 3, 8, 8)
    compiled = torch.compile(ensemble, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), ensemble(x))
