"""stack_classifiers: K heads on any host, against K separate networks; errors."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.nn.library_models import NUM_CLASSES, TIMM, TRANSFORMERS, Host, naive_gradients, timm_host, transformers_host
from torchace.functional import amended_cross_entropy, ensemble_log_probs
from torchace.models import cifar_resnet
from torchace.nn.conversion import FlatHead, StackedClassifiers, stack_classifiers
from torchace.nn.heads import LowRankStackedLinear, StackedLinear

K, DIVERSITY = 3, 0.7


class Registered(nn.Module):
    """A model whose layers are registered in another order than they run."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(6, NUM_CLASSES)
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))

    def forward(self, input: Tensor) -> Tensor:
        return self.classifier(self.encoder(input))


class Returning(nn.Module):
    """A model that packs its logits in some way."""

    def __init__(self, pack: Any, bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(4, NUM_CLASSES, bias=bias)
        self.pack = pack

    def forward(self, input: Tensor) -> Any:
        return self.pack(self.fc(input))


def sequential() -> Host:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, NUM_CLASSES))
    return model, {"input": torch.randn(7, 4)}, "3"


HOSTS: dict[str, Any] = {
    "sequential": sequential,
    "cifar": lambda: (cifar_resnet(8, NUM_CLASSES, width=4), {"x": torch.rand(3, 3, 16, 16)}, "fc"),
    **{f"timm-{name}": build for name, build in TIMM.items()},
    **{f"transformers-{name}": lambda name=name: transformers_host(name) for name in TRANSFORMERS},
}


def hosts(*names: str) -> list[Any]:
    """Parameters of a test; hosts of other libraries are in the extended tier."""
    return [pytest.param(name, marks=[pytest.mark.extended] if "-" in name else []) for name in names]


def double(host: Host) -> Host:
    model, inputs, head = host
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}, head


def separate(ensemble: StackedClassifiers, model: nn.Module) -> list[nn.Module]:
    """The members of an ensemble as whole networks: the model with one head's weights each."""
    stacked = ensemble.host.get_submodule(ensemble.head).stacked
    networks = []
    for k in range(ensemble.num_members):
        network = copy.deepcopy(model)
        linear = network.get_submodule(ensemble.head)
        low_rank = isinstance(stacked, LowRankStackedLinear)
        with torch.no_grad():
            linear.weight.copy_(stacked.weight + stacked.left[k] @ stacked.right[k] if low_rank else stacked.weight[k])
            if linear.bias is not None:
                linear.bias.copy_(stacked.bias if low_rank else stacked.bias[k])
        networks.append(network)
    return networks


def first_step(
    model: nn.Module, inputs: dict[str, Tensor], rank: int | None = None, head: str | None = None
) -> tuple[StackedClassifiers, Tensor, dict[str, Tensor], list[dict[str, Tensor]], Tensor]:
    """One backward of an ensemble, and the naive form's: logits, mean gradients below the head, members' own."""
    ensemble = stack_classifiers(model, K, rank=rank, head=head)
    target = torch.arange(next(iter(inputs.values())).shape[0]) % NUM_CLASSES
    own = {f"{ensemble.head}.weight", f"{ensemble.head}.bias"}
    shared = {name for name, _ in model.named_parameters()} - own
    reference = naive_gradients(separate(ensemble, model), inputs, target, DIVERSITY, shared)
    logits = ensemble(**inputs)
    amended_cross_entropy(logits, target, DIVERSITY).backward()
    return ensemble, *reference, logits


@pytest.mark.parametrize("name", hosts(*HOSTS))
def test_first_step_equals_separate_networks(name: str) -> None:
    torch.manual_seed(0)
    model, inputs, head = double(HOSTS[name]())
    model.train()
    ensemble, expected, mean, own, logits = first_step(model, inputs)
    assert ensemble.head == head
    assert logits.shape == (K, expected.shape[1], NUM_CLASSES)
    # float64 rounding, summed in another order through a few dozen layers; gradients here are of order 1 and less
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    ours = {name: p.grad for name, p in ensemble.host.named_parameters() if p.grad is not None}
    stacked = ensemble.host.get_submodule(head).stacked
    assert {name for name in ours if not name.startswith(f"{head}.stacked")} == set(mean)
    for parameter, gradient in mean.items():
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-10, atol=1e-12)
    for k in range(K):
        torch.testing.assert_close(stacked.weight.grad[k], own[k][f"{head}.weight"], rtol=1e-10, atol=1e-12)
        if stacked.bias is not None:
            torch.testing.assert_close(stacked.bias.grad[k], own[k][f"{head}.bias"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", hosts("sequential", "timm-convnext", "transformers-gpt2"))
def test_low_rank_first_step(name: str) -> None:
    torch.manual_seed(0)
    model, inputs, head = double(HOSTS[name]())
    ensemble, expected, mean, own, logits = first_step(model, inputs, rank=2)
    stacked = ensemble.host.get_submodule(head).stacked
    assert isinstance(stacked, LowRankStackedLinear)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    ours = dict(ensemble.host.named_parameters())
    for parameter, gradient in mean.items():
        torch.testing.assert_close(ours[parameter].grad, gradient, rtol=1e-10, atol=1e-12)
    for k in range(K):
        of_weight = own[k][f"{head}.weight"]
        torch.testing.assert_close(stacked.left.grad[k], of_weight @ stacked.right[k].T, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(stacked.right.grad[k], stacked.left[k].T @ of_weight, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", hosts(*HOSTS))
def test_host_predicts_and_learns(name: str) -> None:
    torch.manual_seed(0)
    model, inputs, _ = HOSTS[name]()
    before = copy.deepcopy(model.state_dict())
    ensemble = stack_classifiers(model.eval(), K)
    assert not any(module.training for module in ensemble.host.modules())
    probs = ensemble.predict_proba(**inputs)
    assert probs.shape == (next(iter(inputs.values())).shape[0], NUM_CLASSES)
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)))

    target = torch.arange(len(probs)) % NUM_CLASSES
    losses = []
    for _ in range(2):
        logits = ensemble(**inputs)
        losses.append(F.nll_loss(ensemble_log_probs(logits), target).item())
        ensemble.zero_grad()
        amended_cross_entropy(logits, target, DIVERSITY).backward()
        with torch.no_grad():
            # a short step downhill, whatever the scale of the host's gradients
            norm = torch.stack([p.grad.norm() for p in ensemble.parameters() if p.grad is not None]).norm()
            for parameter in ensemble.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad / norm
    assert losses[1] < losses[0]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert set(model.state_dict()) == set(before)


@pytest.mark.parametrize("num_members", [1, 8])
def test_trunk_backward_runs_once(num_members: int) -> None:
    model, inputs, _ = sequential()
    ensemble = stack_classifiers(model, num_members)
    runs: list[nn.Module] = []
    for layer in ensemble.host[:3]:
        layer.register_full_backward_hook(lambda layer, *_: runs.append(layer))
    x = inputs["input"].requires_grad_()  # a hook needs it to tell a layer's backward from its output's
    amended_cross_entropy(ensemble(x), torch.zeros(7, dtype=torch.long), DIVERSITY).backward()
    assert runs == [ensemble.host[2], ensemble.host[1], ensemble.host[0]]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_heads_are_like_the_one_replaced(bias: bool, dtype: torch.dtype) -> None:
    ensemble = stack_classifiers(Returning(lambda logits: logits, bias).to(dtype), K)
    head = ensemble.host.fc
    assert isinstance(head, FlatHead)
    assert isinstance(head.stacked, StackedLinear)
    assert (head.in_features, head.out_features) == (4, K * NUM_CLASSES)
    assert head.stacked.weight.dtype == dtype
    assert (head.stacked.bias is not None) == bias
    assert stack_classifiers(Returning(lambda logits: logits).to("meta"), K).host.fc.stacked.weight.is_meta


@pytest.mark.parametrize(
    "pack",
    [lambda z: (z, z.sum()), lambda z: [z], lambda z: {"logits": z, "loss": None}, lambda z: SimpleNamespace(logits=z)],
)
def test_logits_are_found_in_every_type_of_output(pack: Any) -> None:
    torch.manual_seed(0)
    ensemble = stack_classifiers(Returning(pack), K)
    x = torch.randn(7, 4)
    torch.testing.assert_close(ensemble(x), ensemble.host.fc.stacked(x))
    with pytest.raises(TypeError, match=r"Expected the host to return .* but got str"):
        stack_classifiers(Returning(lambda z: "logits"), K)(x)


@pytest.mark.extended
def test_a_transformers_tuple() -> None:
    model, inputs, _ = transformers_host("bert")
    ensemble = stack_classifiers(model, K)
    torch.testing.assert_close(ensemble(**inputs, return_dict=False), ensemble(**inputs))


def test_a_named_head() -> None:
    model = Registered()
    x = torch.randn(7, 4)
    assert stack_classifiers(model, K, head="classifier")(x).shape == (K, 7, NUM_CLASSES)
    # by default the layer registered last, which here is inside; the host fails behind it, and the note says why
    wrong = stack_classifiers(model, K)
    assert wrong.head == "encoder.0"
    with pytest.raises(RuntimeError, match=r"(?s)stack_classifiers replaced it.*name it: .*head="):
        wrong(x)
    with pytest.raises(ValueError, match=r"Expected `head` to name a linear layer .* 'classifier', 'encoder.0'"):
        stack_classifiers(model, K, head="fc")
    with pytest.raises(ValueError, match=r"'encoder.1' to be an nn.Linear, but it is LayerNorm"):
        stack_classifiers(model, K, head="encoder.1")


def test_the_last_layer_with_num_labels_outputs() -> None:
    model = nn.Sequential(nn.Linear(4, NUM_CLASSES), nn.ReLU(), nn.Linear(NUM_CLASSES, NUM_CLASSES))
    model.config = SimpleNamespace(num_labels=NUM_CLASSES)
    assert stack_classifiers(model, K).head == "2"
    model.register_module("pooler", nn.Linear(3, 3))
    assert stack_classifiers(model, K).head == "2"


def test_a_head_that_does_not_make_the_logits() -> None:
    model = Returning(lambda logits: logits)
    model.unused = nn.Linear(4, NUM_CLASSES)
    with pytest.raises(
        ValueError, match=r"logits to have 3·5 = 15 classes .* got shape \(7, 5\).* layer other than 'unused'"
    ):
        stack_classifiers(model, K)(torch.randn(7, 4))


def test_the_model_may_be_the_layer_or_hold_it_twice() -> None:
    assert stack_classifiers(nn.Linear(4, NUM_CLASSES), K)(torch.randn(7, 4)).shape == (K, 7, NUM_CLASSES)
    model = Returning(lambda logits: logits)
    model.alias = model.fc
    ensemble = stack_classifiers(model, K)
    assert ensemble.host.alias is ensemble.host.fc


def test_dense_logits() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 8, 4)
    last = stack_classifiers(Returning(lambda z: z), K)
    logits = last(x)
    assert logits.shape == (K, 2, NUM_CLASSES, 6, 8)
    torch.testing.assert_close(logits, last.host.fc.stacked(x).movedim(-1, 2))
    assert last.predict(x).shape == (2, 6, 8)
    first = stack_classifiers(Returning(lambda z: z.movedim(-1, 1)), K)
    torch.testing.assert_close(first(x), first.host.fc.stacked(x).movedim(-1, 2))

    fits_both = torch.randn(2, K * NUM_CLASSES, 4)
    # remembered from the first forward
    assert last(fits_both[:, :, None])[..., 0].equal(last.host.fc.stacked(fits_both).movedim(-1, 2))
    fresh = stack_classifiers(Returning(lambda z: z), K)
    with pytest.raises(ValueError, match=r"Axis 1 and the last axis .* both have 3·5 = 15.* Set `class_axis`"):
        fresh(fits_both)
    fresh.class_axis = -1
    torch.testing.assert_close(fresh(fits_both), fresh.host.fc.stacked(fits_both).movedim(-1, 2))


def test_logits_without_a_batch_axis_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got shape \(15,\)"):
        stack_classifiers(nn.Linear(4, NUM_CLASSES), K)(torch.randn(4))


def test_labels_are_refused() -> None:
    model, inputs, _ = sequential()
    ensemble = stack_classifiers(model, K)
    assert ensemble(**inputs, labels=None).shape == (K, 7, NUM_CLASSES)
    with pytest.raises(TypeError, match=r"Expected no `labels`.* Give them to the loss"):
        ensemble(**inputs, labels=torch.zeros(7, dtype=torch.long))


def test_compiles_in_one_graph() -> None:
    torch.manual_seed(0)
    ensemble = stack_classifiers(sequential()[0].eval(), K)
    x = torch.randn(7, 4)
    compiled = torch.compile(ensemble, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), ensemble(x))


def make_tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    return model


class Cosine(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.normalize(input, dim=-1), F.normalize(self.weight, dim=-1))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 5, 1), nn.Flatten()), "ends in an nn.Linear, but Sequential has none"),
        (make_tied, "The weight of the classifier '1' is tied to '0.weight'"),
        (lambda: Cosine(4, 5), "to compute what an nn.Linear does"),
        (lambda: parametrizations.weight_norm(nn.Linear(4, 5)), "it has a parametrization, hooks"),
        (lambda: nn.Sequential(nn.LazyLinear(5)), "has no shape yet"),
    ],
)
def test_unsupported_models_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stack_classifiers(build(), K)


@pytest.mark.extended
def test_unsupported_hosts_are_refused() -> None:
    model, _, _ = timm_host("test_resnet", "fc")
    model.reset_classifier(0)
    with pytest.raises(ValueError, match=r"returns Identity. Build the model with num_classes=C"):
        stack_classifiers(model, K)
    model, _, _ = timm_host("mobilenetv3_small_050", "classifier")
    model.classifier = nn.Conv2d(8, NUM_CLASSES, 1)
    with pytest.raises(ValueError, match=r"'classifier' to be an nn.Linear, but it is Conv2d.*branch"):
        stack_classifiers(model, K)
    model.get_classifier = lambda: (model.classifier, model.classifier)
    with pytest.raises(ValueError, match="to have one linear classifier"):
        stack_classifiers(model, K)
    model, _, _ = transformers_host("bert")
    with pytest.raises(ValueError, match=r"Expected BertModel to have an nn.Linear with config.num_labels = 5"):
        stack_classifiers(model.bert, K)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="Expected `model` to be a module, but got str"):
        stack_classifiers("resnet", K)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected `num_members` to be at least 1, but got 0"):
        stack_classifiers(nn.Linear(4, 5), 0)
    with pytest.raises(ValueError, match="Expected `rank` of at most 4"):
        stack_classifiers(nn.Linear(4, 5), K, rank=9)
    with pytest.raises(ValueError, match="Expected `link` to be one of"):
        stack_classifiers(nn.Linear(4, 5), K, link="tanh")


# Hosts that act over their classes behind the head


class Behind(nn.Module):
    """A model that does something with its logits, in one mode or in both."""

    def __init__(self, act: Any, modes: tuple[bool, ...] = (True, False)) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.fc = nn.Linear(6, NUM_CLASSES)
        self.act, self.modes = act, modes
        self.calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        logits = self.fc(self.body(input))
        return self.act(logits) if self.training in self.modes else logits


def divided_in_place(z: Tensor) -> Tensor:
    return z.div_(z.detach().norm(dim=1, keepdim=True))


MIXING = {
    "normalize": lambda z: 16 * F.normalize(z, dim=1),
    "softmax": lambda z: z.softmax(1),
    "centered": lambda z: z - z.mean(1, keepdim=True),
    "in place": divided_in_place,
    "without gradient": lambda z: z - z.detach().amax(1, keepdim=True),
    "the best two": lambda z: z.masked_fill(z < z.topk(2, dim=1).values[:, -1:], -torch.inf),
    "first class": lambda z: z - z[:, :1],
    "last class": lambda z: z + 0.01 * z[:, -1:],
    "reversed": lambda z: z.flip(1),
    "transposed": lambda z: z.unflatten(1, (NUM_CLASSES, -1)).mT.flatten(1),
}
APART = {
    "temperature": lambda z: z / 3.0,
    "tanh": lambda z: 30 * torch.tanh(z / 30),
    "dropout": lambda z: F.dropout(z, 0.5),
    "over the batch": lambda z: z - z.mean(0),
    "masked": lambda z: z.masked_fill(torch.arange(z.shape[1]) % NUM_CLASSES == 1, -torch.inf),
    "view": lambda z: z[:, None].squeeze(1),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("act", MIXING)
def test_hosts_that_mix_members_are_refused(act: str, training: bool) -> None:
    torch.manual_seed(0)
    ensemble = stack_classifiers(Behind(MIXING[act], (training,)), K).train(not training)
    x = torch.randn(7, 4)
    ensemble(x)  # members stay apart in the other mode
    for _ in range(2):
        with pytest.raises(ValueError, match=r"after its layer 'fc'.*changed.*K, N, C.*branch\(model, \d+, at=.fc"):
            ensemble.train(training)(x)


@pytest.mark.parametrize("act", APART)
def test_the_check_leaves_no_trace(act: str) -> None:
    """Logits, gradients, statistics and random numbers of the first forward as without the check."""
    torch.manual_seed(0)
    ensemble = stack_classifiers(Behind(APART[act]), K)
    plain = copy.deepcopy(ensemble)
    plain._checked_modes = {True}
    x, drawn = torch.randn(7, 4), []
    for one in (ensemble, plain):
        torch.manual_seed(1)
        own = x.clone()
        logits = one(own)
        assert torch.equal(own, x)
        drawn.append(torch.rand(3))
        torch.where(logits.isfinite(), logits, 0).square().sum().backward()
        assert one.host.calls == 1
    assert torch.equal(*drawn)
    assert torch.equal(ensemble(x).isinf(), plain(x).isinf())
    for (name, one), other in zip(ensemble.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
    for (name, one), other in zip(ensemble.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other), name


def test_the_check_runs_once_and_only_where_needed() -> None:
    runs: list[int] = []
    for act, count in ((lambda z: z, 1), (lambda z: 2 * z, 4)):  # one more as is, and with two changes
        ensemble = stack_classifiers(Behind(act), K)
        ensemble.host.fc.register_forward_hook(lambda *_: runs.append(1) and None)
        runs.clear()
        ensemble(torch.randn(7, 4))
        assert len(runs) == count
        ensemble(torch.randn(7, 4))
        assert len(runs) == count + 1
    compiled = torch.compile(stack_classifiers(Behind(lambda z: 2 * z).eval(), K), fullgraph=True, backend="eager")
    assert compiled(torch.randn(7, 4)).shape == (K, 7, NUM_CLASSES)
