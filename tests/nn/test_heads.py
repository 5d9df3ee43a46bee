"""K linear heads as one product, and SMOC against its naive form (the paper's Algorithm 2)."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchace.functional import amended_cross_entropy
from torchace.nn import SMOC, LowRankStackedLinear, StackedLinear

EXACT = {"rtol": 0, "atol": 1e-12}  # float64, a few hundred operations on numbers of order 1


def heads(rank: int | None, bias: bool = True) -> StackedLinear | LowRankStackedLinear:
    if rank is None:
        return StackedLinear(6, 4, num_members=3, bias=bias, dtype=torch.float64)
    return LowRankStackedLinear(6, 4, num_members=3, rank=rank, bias=bias, dtype=torch.float64)


def matrices(head: StackedLinear | LowRankStackedLinear) -> tuple[torch.Tensor, torch.Tensor]:
    """W^k `(K, C, D)` and the biases `(K, C)`."""
    if isinstance(head, StackedLinear):
        weight, bias = head.weight, head.bias
    else:
        weight = torch.stack([head.weight + u @ v for u, v in zip(head.left, head.right, strict=True)])
        bias = None if head.bias is None else head.bias.expand(head.num_members, -1)
    return weight, weight.new_zeros(weight.shape[:2]) if bias is None else bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stacked_linear_starts_as_linear_layers_do(bias, dtype):
    torch.manual_seed(3)
    layers = [nn.Linear(7, 5, bias=bias, dtype=dtype) for _ in range(4)]
    after = torch.rand(())
    torch.manual_seed(3)
    stacked = StackedLinear(7, 5, num_members=4, bias=bias, dtype=dtype)
    assert torch.equal(stacked.weight, torch.stack([layer.weight for layer in layers]))
    if bias:
        assert torch.equal(stacked.bias, torch.stack([layer.bias for layer in layers]))
    else:
        assert stacked.bias is None
    assert torch.equal(torch.rand(()), after)  # and draws as many numbers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("lead", [(), (5, 2), (0,)])
def test_heads_equal_linear_layers(rank, bias, lead):
    torch.manual_seed(0)
    head = heads(rank, bias)
    weight, bias_ = matrices(head)
    x = torch.randn(*lead, 6).double()
    expected = torch.stack([F.linear(x, w, b) for w, b in zip(weight, bias_, strict=True)])
    torch.testing.assert_close(head(x), expected, **EXACT)
    torch.testing.assert_close(head.flat(x), torch.cat(list(expected), -1), **EXACT)

    own = torch.randn(3, *lead, 6).double()
    expected = torch.stack([F.linear(v, w, b) for v, w, b in zip(own, weight, bias_, strict=True)])
    torch.testing.assert_close(head(own, batches="separate"), expected, **EXACT)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("batches", ["shared", "separate"])
def test_gradients_of_heads(rank, batches):
    """Autograd through the matrices written out; what members share receives the mean of their gradients."""
    torch.manual_seed(0)
    head = heads(rank)
    x = torch.randn(3, 5, 6).double() if batches == "separate" else torch.randn(5, 6).double()
    upstream = torch.randn(3, 5, 4).double()
    x.requires_grad_()
    names, parameters = zip(*head.named_parameters(), strict=True)
    weight, bias = matrices(head)
    plain = (x if batches == "separate" else x.expand(3, 5, 6)) @ weight.mT + bias[:, None]
    expected = torch.autograd.grad(plain, (x, *parameters), upstream)
    ours = torch.autograd.grad(head(x, batches=batches), (x, *parameters), upstream)
    for name, gradient, wanted in zip(("x", *names), ours, expected, strict=True):
        averaged = rank is not None and name in ("weight", "bias")
        torch.testing.assert_close(gradient, wanted / 3 if averaged else wanted, **EXACT)


@pytest.mark.parametrize("bias", [True, False])
def test_low_rank_adds_exactly_its_difference(bias):
    in_features, out_features, num_members, rank = 13, 9, 5, 3
    head = LowRankStackedLinear(in_features, out_features, num_members, rank, bias=bias)
    one = sum(p.numel() for p in nn.Linear(in_features, out_features, bias=bias).parameters())
    added = num_members * rank * (out_features + in_features)
    assert sum(p.numel() for p in head.parameters()) == one + added


@pytest.mark.parametrize("rank", [1, 4])
def test_low_rank_starts_with_the_variance_of_a_linear_layer(rank):
    torch.manual_seed(0)
    in_features = 32
    draws = [LowRankStackedLinear(in_features, 32, num_members=8, rank=rank) for _ in range(30)]
    weights = torch.stack([matrices(head)[0] for head in draws])  # (draws, K, C, D)
    expected = 1 / (3 * in_features)  # of uniform(-b, b), b = 1/√D
    # 30 x 8 independent matrices; at rank 1 the variance of a matrix' estimate is a few times 1/32: 5 % is 4 deviations
    assert weights.var().item() == pytest.approx(expected, rel=0.05)
    shared = torch.stack([head.weight for head in draws])
    assert shared.var().item() == pytest.approx(expected / 2, rel=0.05)
    own = weights - shared[:, None]
    assert own.var().item() == pytest.approx(expected / 2, rel=0.1)
    assert abs(weights.mean().item()) < 0.1 * math.sqrt(expected)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("num_members", [1, 10])
def test_smoc_is_algorithm_2(rank, num_members):
    """One trunk against K networks with a copy of it each, their trunk gradients averaged afterwards."""
    torch.manual_seed(1)
    trunk = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8), nn.GELU())
    smoc = SMOC(trunk, 8, num_classes=5, num_members=num_members, rank=rank).double()
    weight, bias = (value.detach() for value in matrices(smoc.head))
    networks = []
    for w, b in zip(weight, bias, strict=True):
        last = nn.Linear(8, 5).double()
        last.load_state_dict({"weight": w, "bias": b})
        networks.append(nn.Sequential(copy.deepcopy(smoc.trunk), last))
    x, y = torch.randn(11, 1, 6, 6).double(), torch.randint(5, (11,))

    logits = smoc(x)
    amended_cross_entropy(logits, y, 0.7).backward()
    # each network's own loss, the others held constant, by the definition (mathematics, line 1)
    outputs = [network(x) for network in networks]
    for k, own in enumerate(outputs):
        loss = F.cross_entropy(own, y)
        for j, other in enumerate(outputs):
            if j != k:
                loss = loss - 0.7 / num_members * F.cross_entropy(own, other.detach().softmax(1))
        loss.backward()

    torch.testing.assert_close(logits, torch.stack(outputs), **EXACT)
    for i, parameter in enumerate(smoc.trunk.parameters()):
        mean = torch.stack([list(network[0].parameters())[i].grad for network in networks]).mean(0)
        torch.testing.assert_close(parameter.grad, mean, **EXACT)
    gradients = torch.stack([network[1].weight.grad for network in networks])
    biases = torch.stack([network[1].bias.grad for network in networks])
    if rank is None:
        torch.testing.assert_close(smoc.head.weight.grad, gradients, **EXACT)
        torch.testing.assert_close(smoc.head.bias.grad, biases, **EXACT)
    else:  # the chain rule of W^k = W + U^k V^k; W is shared, so it averages (mathematics, line 8)
        torch.testing.assert_close(smoc.head.weight.grad, gradients.mean(0), **EXACT)
        torch.testing.assert_close(smoc.head.bias.grad, biases.mean(0), **EXACT)
        torch.testing.assert_close(smoc.head.left.grad, gradients @ smoc.head.right.detach().mT, **EXACT)
        torch.testing.assert_close(smoc.head.right.grad, smoc.head.left.detach().mT @ gradients, **EXACT)


@pytest.mark.parametrize("rank", [None, 2])
def test_smoc_with_separate_batches(rank):
    torch.manual_seed(0)
    smoc = SMOC(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), 8, 5, num_members=3, rank=rank).double()
    weight, bias = matrices(smoc.head)
    x = torch.randn(3, 7, 6).double()
    expected = torch.stack([F.linear(smoc.trunk(own), w, b) for own, w, b in zip(x, weight, bias, strict=True)])
    torch.testing.assert_close(smoc(x, batches="separate"), expected, **EXACT)
    with pytest.raises(ValueError, match="one batch per member"):
        smoc(x[:2], batches="separate")
    smoc = SMOC(nn.LSTM(6, 8), 8, 5, num_members=3, rank=rank).double()  # returns (features, state)
    with pytest.raises(TypeError, match="trunk to return one tensor with batches='separate', but got tuple"):
        smoc(x, batches="separate")
    with pytest.raises(ValueError, match=r"features of shape \(\.\.\., 8\), one tensor, .* but got tuple"):
        smoc(x[0])


def test_smoc_under_compile():
    torch.manual_seed(0)
    smoc = SMOC(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), 8, 5, num_members=3).double()
    compiled = copy.deepcopy(smoc)
    x, y = torch.randn(7, 6).double(), torch.randint(5, (7,))
    amended_cross_entropy(smoc(x), y, 0.5).backward()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(x, y):
        return amended_cross_entropy(compiled(x), y, 0.5)

    loss(x, y).backward()
    for ours, theirs in zip(compiled.parameters(), smoc.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)


def test_errors():
    with pytest.raises(ValueError, match=r"`rank` of at most 4.*StackedLinear"):
        LowRankStackedLinear(6, 4, 3, rank=5)
    with pytest.raises(ValueError, match="`num_members` to be at least 1"):
        StackedLinear(6, 4, num_members=0)
    with pytest.raises(TypeError, match="`in_features` to be an int"):
        StackedLinear(6.0, 4, num_members=2)
    for rank in (None, 2):
        with pytest.raises(ValueError, match="one batch per member"):
            heads(rank)(torch.zeros(2, 5, 6).double(), batches="separate")
        with pytest.raises(ValueError, match="`batches` to be one of"):
            heads(rank)(torch.zeros(5, 6).double(), batches="mine")
        for batches in ("shared", "separate"):
            with pytest.raises(ValueError, match="in_features=6"):  # never a quiet regrouping of numbers
                heads(rank)(torch.zeros(3, 6, 3).double(), batches=batches)


def test_repr_names_the_shape():
    assert "num_members=3" in repr(heads(None))
    assert "rank=2" in repr(heads(2))
