"""`average_gradients`: the identity forward, 1/K of the gradient backward, under every transform."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from torchace.functional import amended_cross_entropy, average_gradients


@given(st.integers(1, 9), st.sampled_from([(), (1,), (3,), (2, 0, 3), (2, 3, 4)]), st.integers(0, 2**16))
def test_identity_forward_and_mean_backward(num_members: int, shape: tuple[int, ...], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(shape, generator=g, dtype=torch.float64)
    out = average_gradients(x, num_members)
    assert torch.equal(out, x)
    (gradient,) = torch.autograd.grad(out, x, upstream)
    assert_close(gradient, upstream / num_members, rtol=1e-15, atol=0)


def test_infinite_and_nan_values_pass() -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0], requires_grad=True)
    out = average_gradients(x, 3)
    assert torch.equal(out.detach().nan_to_num(), x.detach().nan_to_num())
    out.sum().backward()
    assert_close(x.grad, torch.full((4,), 1 / 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_are_kept(dtype: torch.dtype) -> None:
    x = torch.ones(3, dtype=dtype, requires_grad=True)
    out = average_gradients(x, 4)
    assert out.dtype == dtype
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert torch.equal(x.grad, torch.full((3,), 0.25, dtype=dtype))


def scale_gradient(x: Tensor) -> Tensor:
    return (average_gradients(x, 4) ** 2).sum()


def test_second_derivative() -> None:
    # The backward is ∇ = 2x/4; its own derivative passes the same averaging once more.
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(scale_gradient(x), x, create_graph=True)
    assert_close(gradient.detach(), 2 * x.detach() / 4)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert_close(second, torch.full((2,), 2 / 16, dtype=torch.float64))


# torch's own rules for forward mode are written in TorchScript
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_func_transforms() -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close(torch.func.grad(scale_gradient)(x), x / 2)
    assert_close(torch.func.vmap(torch.func.grad(scale_gradient))(x), x / 2)
    assert_close(torch.func.vmap(lambda row: average_gradients(row, 4))(x), x)
    assert_close(torch.func.grad(lambda y: torch.func.vmap(scale_gradient)(y).sum())(x), x / 2)
    value, tangent = torch.func.jvp(scale_gradient, (x[0],), (torch.ones(3, dtype=torch.float64),))
    assert_close(value, (x[0] ** 2).sum())
    assert_close(tangent, (2 * x[0]).sum() / 4)


def test_compiled_transforms() -> None:
    torch._dynamo.reset()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    compile = {"fullgraph": True, "backend": "aot_eager"}
    out = torch.compile(lambda y: average_gradients(y, 4), **compile)(x)
    assert torch.equal(out, x)
    assert_close(torch.compile(torch.func.grad(scale_gradient), **compile)(x), x / 2)
    assert_close(torch.compile(torch.func.vmap(torch.func.grad(scale_gradient)), **compile)(x), x / 2)
    leaf = x.clone().requires_grad_()
    torch.compile(scale_gradient, **compile)(leaf).backward()
    assert_close(leaf.grad, x / 2)


def test_a_shared_trunk_receives_the_mean_of_the_members_gradients() -> None:
    # The paper's Algorithm 2: heads keep their own gradient, the trunk gets the mean
    torch.manual_seed(0)
    num_members, lam = 3, 0.4
    trunk = nn.Linear(4, 5).double()
    heads = nn.ModuleList([nn.Linear(5, 2).double() for _ in range(num_members)])
    x = torch.randn(6, 4, dtype=torch.float64)
    target = torch.randint(2, (6,))

    def gradients(average: bool) -> tuple[list[Tensor], list[Tensor]]:
        h = torch.tanh(trunk(x))
        h = average_gradients(h, num_members) if average else h
        loss = amended_cross_entropy(torch.stack([head(h) for head in heads]), target, lam)
        shared = torch.autograd.grad(loss, list(trunk.parameters()), retain_graph=True)
        return list(shared), list(torch.autograd.grad(loss, list(heads.parameters())))

    shared, own = gradients(True)
    summed, plain = gradients(False)
    for mean, total in zip(shared, summed, strict=True):
        assert_close(mean, total / num_members, rtol=1e-13, atol=1e-15)
    for mine, undivided in zip(own, plain, strict=True):
        assert torch.equal(mine, undivided)
