"""The kernels of residual networks against plain PyTorch: on a GPU in bf16, elsewhere interpreted in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="no Triton")

from tests.reference import residual as reference  # noqa: E402
from torchace.kernels import conv_gpu  # noqa: E402
from torchace.kernels import residual_gpu as kernels  # noqa: E402
from torchace.kernels.layers import Layer, Norm  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
EXACT = torch.float32 if ON_GPU else torch.float64
# float64: sums of at most a few thousand products of numbers about 1. bf16 keeps 8 bits, and where rounding moves a
# number across 0 a relu's gradient is another one: plain PyTorch with the same roundings is up to 12 % away for these
# shapes, the kernels on an H200 up to 13 %. A wrong place of the window is 33 %; finer mistakes show in float64.
WITHIN, GRADIENT_WITHIN, BATCHES = (1e-2, 0.25, 8) if ON_GPU else (1e-12, 1e-11, 1)

# runs, batch, height, width, channels in, channels, stride, projected
BLOCKS = [
    (2, 3, 8, 8, 16, 16, 1, False),
    (2, 3, 8, 8, 16, 16, 1, True),
    (2, 3, 8, 8, 16, 32, 2, True),
    (1, 2, 8, 8, 32, 32, 1, False),
    (2, 5, 7, 5, 32, 64, 2, True),  # odd sides; a last tile that is not full
    (2, 3, 4, 4, 64, 64, 1, False),
    (3, 1, 2, 3, 16, 16, 1, False),
]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:  # the interpreter takes milliseconds for each, however small
        monkeypatch.setattr(conv_gpu, "NUMBERS", 4096)
        monkeypatch.setattr(conv_gpu, "PARTS", {16: 2, 32: 2, 64: 2})


def layer(runs: int, outer: int, inner: int, size: int) -> Layer:
    def vector() -> Tensor:
        return torch.randn(runs, outer, dtype=EXACT, device=DEVICE)

    weight = torch.randn(runs, outer, inner, size, size, dtype=EXACT, device=DEVICE) / (inner * size**2) ** 0.5
    norm = Norm(
        (1 + 0.2 * vector()).requires_grad_(), (0.2 * vector()).requires_grad_(), vector(), vector() ** 2, 0.2, 1e-5
    )
    return Layer(weight.requires_grad_(), norm)


def images(*shape: int) -> Tensor:
    x = torch.randn(*shape, dtype=EXACT, device=DEVICE).relu()
    return x.bfloat16() if ON_GPU else x


def compared(
    x: Tensor, layers: list[Layer], ours: Callable[..., Tensor], theirs: Callable[..., Tensor], wanted: list[Tensor]
) -> None:
    """Outputs, gradients and running statistics."""
    statistics = [part for one in layers for part in (one.norm.running_mean, one.norm.running_var)]
    start = [part.clone() for part in statistics]
    out = ours(x)
    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, wanted, upstream)
    ours_after = [part.clone() for part in statistics]
    for part, value in zip(statistics, start, strict=True):
        part.copy_(value)
    exact = x.detach().to(EXACT).requires_grad_(x.requires_grad)
    expected = theirs(exact)
    sources = [exact if one is x else one for one in wanted]
    expected_gradients = torch.autograd.grad(expected, sources, upstream.to(EXACT))
    assert difference(out, expected) < WITHIN
    for ours_one, theirs_one in zip(gradients, expected_gradients, strict=True):
        assert difference(ours_one, theirs_one) < GRADIENT_WITHIN
    for ours_one, theirs_one in zip(ours_after, statistics, strict=True):
        assert difference(ours_one, theirs_one) < WITHIN


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours.to(EXACT) - theirs).norm() / theirs.norm()).detach())


@pytest.mark.parametrize("shape", BLOCKS)
def test_a_block(shape: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    runs, batch, height, width, inner, outer, stride, projected = shape
    x = images(runs, batch * BATCHES, height, width, inner).requires_grad_()
    layers = [layer(runs, outer, inner, 3), layer(runs, outer, outer, 3)]
    projection = layer(runs, outer, inner, 1) if projected else None
    layers += [] if projection is None else [projection]
    compared(
        x,
        layers,
        lambda x: kernels.block(x, layers[0], layers[1], projection, stride),
        lambda x: reference.block(x, layers[0], layers[1], projection, stride),
        [x, *(part for one in layers for part in one.trained)],
    )


def test_the_stem() -> None:
    torch.manual_seed(0)
    one = layer(2, 16, 3, 3)
    x = images(2, 3 * BATCHES, 8, 8, 16)
    x[..., 3:] = 0
    compared(x, [one], lambda x: kernels.stem(x, one), lambda x: reference.stem(x, one), list(one.trained))


def test_gradients_lie_as_their_weights() -> None:
    layers = [layer(2, 16, 16, 3) for _ in range(2)]
    channels_last = layers[0].weight.detach().permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    first = Layer(channels_last.requires_grad_(), layers[0].norm)
    x = images(2, 2, 4, 4, 16)
    plain, permuted = (
        torch.autograd.grad(kernels.block(x, one, layers[1], None, 1).sum(), one.weight)[0]
        for one in (layers[0], first)
    )
    assert plain.is_contiguous()
    assert permuted.stride() == first.weight.stride() != plain.stride()
    assert torch.equal(plain, permuted)


def test_runs_do_not_mix_and_nan_is_not_lost() -> None:
    layers = [layer(3, 16, 16, 3) for _ in range(2)]
    x = images(3, 2, 4, 4, 16)
    spoilt = x.clone()
    spoilt[1, 0, 0, 0, 0] = torch.nan
    x.requires_grad_(), spoilt.requires_grad_()
    outputs = [kernels.block(one, *layers, None, 1) for one in (x, spoilt)]
    gradients = [
        torch.autograd.grad(out.float().square().sum(), [one, layers[0].weight])
        for out, one in zip(outputs, (x, spoilt), strict=True)
    ]
    for healthy in (0, 2):
        assert torch.equal(outputs[0][healthy], outputs[1][healthy])
        for ours, theirs in zip(*gradients, strict=True):
            assert torch.equal(ours[healthy], theirs[healthy])
    assert outputs[1][1].isnan().any()
    assert gradients[1][1][1].isnan().any()


def test_the_same_bits_every_time() -> None:
    layers = [layer(2, 32, 32, 3) for _ in range(2)]
    x = images(2, BATCHES, 8, 8, 32).requires_grad_()
    wanted = [x, *(part for one in layers for part in one.trained)]
    first, second = (
        torch.autograd.grad(kernels.block(x, *layers, None, 1).float().square().sum(), wanted) for _ in range(2)
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


def test_a_second_derivative_is_refused() -> None:
    one = layer(1, 16, 3, 3)
    x = images(1, 1, 2, 2, 16)
    (gradient,) = torch.autograd.grad(kernels.stem(x, one).float().square().sum(), one.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
