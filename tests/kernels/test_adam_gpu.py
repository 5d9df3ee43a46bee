"""Adam in one pass: against torch's in float64, on a GPU as `make_optimizer` gives it, elsewhere interpreted."""

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

ON_GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="no Triton")

from tests.engine.cases import batches, cohort, recipe, weights  # noqa: E402
from torchace.data import Batches  # noqa: E402
from torchace.engine.checkpoint import Checkpoints  # noqa: E402
from torchace.engine.fit import Interrupted, Saving, fit  # noqa: E402
from torchace.engine.recipe import Recipe, make_optimizer, set_learning_rate  # noqa: E402
from torchace.kernels import adam_gpu  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
KINDS: list[tuple[type[torch.optim.Adam], type[torch.optim.Adam], dict[str, Any]]] = [
    (adam_gpu.Adam, torch.optim.Adam, {}),
    (adam_gpu.Adam, torch.optim.Adam, {"weight_decay": 0.1}),
    (adam_gpu.AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    (adam_gpu.Adam, torch.optim.Adam, {"betas": (0.5, 0.9), "eps": 1e-3}),
    (adam_gpu.Adam, torch.optim.Adam, {"betas": (0.0, 0.9)}),
]
SIZES = [(3, 5, 7), (1,), (2, 700)]


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with mock.patch.multiple(adam_gpu, LARGE=1, BLOCK=64):
        yield


def drawn(step: int, dtype: torch.dtype) -> list[Tensor]:
    """Gradients, some of them 0 and some tiny."""
    g = torch.Generator().manual_seed(step)
    values = [torch.randn(size, generator=g, dtype=torch.float64) for size in SIZES]
    values[2][0, :300] *= 1e-12
    values[2][1, :100] = 0
    return [value.float().to(dtype).to(DEVICE) for value in values]


def trained(kind: type[torch.optim.Adam], dtype: torch.dtype, steps: int, **options: Any) -> torch.optim.Adam:
    parameters = [nn.Parameter(value) for value in drawn(100, dtype)]
    rate = torch.tensor(0.01, device=DEVICE, dtype=dtype)
    fused = (
        {"fused": True, "capturable": ON_GPU} if dtype == torch.float32 else {"foreach": False, "capturable": ON_GPU}
    )
    optimizer = kind(parameters, lr=rate, **fused, **options)
    for step in range(steps):
        set_learning_rate(optimizer, 0.01 / (1 + step))
        for p, grad in zip(parameters, drawn(step, dtype), strict=True):
            p.grad = grad
        optimizer.step()
    return optimizer


def states(optimizer: torch.optim.Adam) -> list[Tensor]:
    parameters = optimizer.param_groups[0]["params"]
    names = ("exp_avg", "exp_avg_sq", "step")
    return [p.detach() for p in parameters] + [optimizer.state[p][name] for p in parameters for name in names]


@pytest.mark.parametrize(("kind", "plain", "options"), KINDS)
@pytest.mark.parametrize("steps", [1, 12])
def test_it_is_adam(
    kind: type[torch.optim.Adam], plain: type[torch.optim.Adam], options: dict[str, Any], steps: int
) -> None:
    ours, exact = trained(kind, torch.float32, steps, **options), trained(plain, torch.float64, steps, **options)
    for own, expected in zip(states(ours), states(exact), strict=True):
        torch.testing.assert_close(own.double(), expected.double(), rtol=2e-5, atol=2e-7)


def test_large_and_small_parameters_together() -> None:
    everything = trained(adam_gpu.Adam, torch.float32, 5)
    used = mock.MagicMock()
    used.__getitem__.side_effect = adam_gpu._adam.__getitem__
    with mock.patch.multiple(adam_gpu, LARGE=200, _adam=used):
        some = trained(adam_gpu.Adam, torch.float32, 5)
    assert used.__getitem__.call_count == 5  # the one of 1,400 numbers, in every step
    for own, expected in zip(states(some), states(everything), strict=True):
        torch.testing.assert_close(own, expected, rtol=2e-5, atol=2e-7)


def test_what_it_keeps_is_what_torch_keeps() -> None:
    """A checkpoint of one is read by the other."""
    ours = trained(adam_gpu.Adam, torch.float32, 3)
    plain = trained(torch.optim.Adam, torch.float32, 0)
    plain.load_state_dict(copy.deepcopy(ours.state_dict()))
    with torch.no_grad():
        for p, q in zip(plain.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
            p.copy_(q)
    for optimizer in (ours, plain):
        for p, grad in zip(optimizer.param_groups[0]["params"], drawn(9, torch.float32), strict=True):
            p.grad = grad
        optimizer.step()
    for own, expected in zip(states(ours), states(plain), strict=True):
        torch.testing.assert_close(own, expected, rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("rate", [0.02, torch.tensor(0.02)])
def test_it_goes_on_from_a_plain_optimizer(rate: float | Tensor) -> None:
    """One with its learning rate and its count of steps as torch keeps them by default."""
    parameters = [nn.Parameter(value) for value in drawn(100, torch.float32)]
    plain = torch.optim.Adam(parameters, lr=rate, foreach=False)
    ours = trained(adam_gpu.Adam, torch.float32, 0)
    for step in range(4):
        for p, grad in zip(parameters, drawn(step, torch.float32), strict=True):
            p.grad = grad
        if step == 3:
            ours.load_state_dict(copy.deepcopy(plain.state_dict()))
            with torch.no_grad():
                for q, p in zip(ours.param_groups[0]["params"], parameters, strict=True):
                    q.copy_(p)
                    q.grad = p.grad.clone()
            ours.step()
        plain.step()
    for own, expected in zip(states(ours), states(plain), strict=True):
        torch.testing.assert_close(own, expected.to(own.device), rtol=2e-5, atol=2e-7)


def test_moments_that_lie_otherwise_are_laid_as_the_parameter() -> None:
    shape, grads = (2, 3, 4, 5), [torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(torch.ones(shape, device=DEVICE).to(memory_format=layout))
        before = adam_gpu.Adam([p], lr=torch.tensor(0.1, device=DEVICE), fused=True, capturable=ON_GPU)
        p.grad = grads[0].to(DEVICE).to(memory_format=layout)
        before.step()
        q = nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format))
        after = adam_gpu.Adam([q], lr=torch.tensor(0.1, device=DEVICE), fused=True, capturable=ON_GPU)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        q.grad = grads[1].to(DEVICE)
        after.step()
        found.append(q.detach())
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=2e-7)


def test_a_group_that_is_added_has_its_own_rate() -> None:
    p, q = (nn.Parameter(torch.ones(70, device=DEVICE)) for _ in range(2))
    optimizer = adam_gpu.Adam([p], lr=torch.tensor(0.5, device=DEVICE), fused=True, capturable=ON_GPU)
    optimizer.add_param_group({"params": [q], "lr": 0.25})
    p.grad = q.grad = torch.ones(70, device=DEVICE)
    optimizer.step()
    torch.testing.assert_close(torch.stack([p.detach()[0], q.detach()[0]]).cpu(), torch.tensor([0.5, 0.75]))


def test_a_gradient_that_lies_otherwise_is_left_to_torch() -> None:
    p = nn.Parameter(torch.ones(4, 6, device=DEVICE))
    optimizer = adam_gpu.Adam([p], lr=torch.tensor(0.5, device=DEVICE), fused=True, capturable=ON_GPU)
    p.grad = torch.arange(24.0, device=DEVICE).view(6, 4).mT
    with mock.patch.multiple(adam_gpu, _adam=None, adam=mock.DEFAULT) as called:
        optimizer.step()
    called["adam"].assert_called_once()


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_what_it_does_not_do_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match="Expected neither amsgrad nor maximize"):
        adam_gpu.Adam([nn.Parameter(torch.ones(2))], **{option: True})
    ours = adam_gpu.Adam([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="Expected neither amsgrad nor maximize"):
        ours.add_param_group({"params": [nn.Parameter(torch.ones(2))], option: True})
    plain = torch.optim.Adam([nn.Parameter(torch.ones(2))], **{option: True})
    with pytest.raises(ValueError, match="Expected neither amsgrad nor maximize"):
        adam_gpu.Adam([nn.Parameter(torch.ones(2))]).load_state_dict(plain.state_dict())


def test_a_closure() -> None:
    p = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = adam_gpu.Adam([p], lr=torch.tensor(0.5, device=DEVICE), fused=True, capturable=ON_GPU)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.5, device=DEVICE))


@pytest.mark.skipif(not ON_GPU, reason="no GPU")
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_recipes_use_it_also_in_a_graph(optimizer: str) -> None:
    recipe = Recipe(steps=1, optimizer=optimizer, weight_decay=0.1)
    values = torch.randn(300, 784, 10, device=DEVICE)
    results = []
    for captured in (False, True):
        p = nn.Parameter(values.clone())
        made = make_optimizer(recipe, [p])
        assert isinstance(made, adam_gpu.Adam | adam_gpu.AdamW)
        p.grad = torch.zeros_like(p)
        calls: Any = made.step
        if captured:
            made.step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made.step()
            calls = graph.replay
        else:
            made.step()
        for step in range(3):
            p.grad.copy_(values * (step + 1) ** 0.5)
            calls()
        results.append(p.detach())
    assert torch.equal(*results)


@pytest.mark.skipif(not ON_GPU, reason="no GPU")
def test_a_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Eager steps, then a CUDA graph; a checkpoint between; against torch's own Adam too."""
    data = Batches(batches().split, 8, dtype=torch.float32, device=DEVICE)
    arguments: dict[str, Any] = {"diversities": [0.0, 0.5], "seeds": [1, 2]}

    def fitted(steps: int, **options: Any) -> dict[str, Tensor]:
        network = cohort([1, 2], torch.float32).to(DEVICE)
        how, asked = recipe(steps=20, precision="float32"), itertools.count()
        fit(network, data, how, **arguments, stop=lambda: next(asked) == steps, **options)
        return weights(network, 1)

    whole = fitted(20)
    saving = Saving(Checkpoints(tmp_path), 100, None)
    with pytest.raises(Interrupted):
        fitted(9, saving=saving)
    resumed = fitted(20, saving=saving)
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    with mock.patch.object(adam_gpu, "LARGE", 1 << 30):
        plain = fitted(20)
    for name, value in whole.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5)
