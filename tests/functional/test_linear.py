"""The loss of linear heads in chunks: the same as from all logits, value and gradients, in the memory of a chunk."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchace as ace
from torchace.functional import amended_cross_entropy, average_gradients, linear, linear_amended_cross_entropy

K, N, C, D = 3, 11, 7, 5
# float64 sums in another order
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def inputs(dtype: torch.dtype = torch.float64, bias: bool = True, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(N, D), (K, C, D)] + [(K, C)] * bias
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def full(features: Tensor, heads: Tensor, bias: Tensor | None, *args: Any, **options: Any) -> Tensor:
    logits = torch.einsum("nd,kcd->knc", features, heads)
    return amended_cross_entropy(logits if bias is None else logits + bias[:, None], *args, **options)


def make_options(kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    rand = torch.rand(64, generator=generator, dtype=torch.float64)
    return {
        "plain": {},
        "sum": {"reduction": "sum"},
        "alpha": {"member_weights": torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)},
        "class weights": {"weight": rand[:C]},
        "smoothing": {"label_smoothing": 0.2, "weight": rand[:C]},
        "sample weights": {"sample_weight": rand[:N]},
        "members' sample weights": {"sample_weight": rand[: K * N].view(K, N), "weight": rand[:C]},
        "a member without samples": {"sample_weight": rand[: K * N].view(K, N) * torch.tensor([[1.0], [0.0], [1.0]])},
    }[kind]


KINDS = [
    "plain", "sum", "alpha", "class weights", "smoothing", "sample weights", "members' sample weights",
    "a member without samples",
]  # fmt: skip


@pytest.mark.parametrize("rows", [4, None])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target_kind", ["classes", "ignored", "probabilities"])
def test_it_is_the_loss_of_all_logits(kind: str, target_kind: str, rows: int | None) -> None:
    target = torch.randint(C, (N,), generator=torch.Generator().manual_seed(2))
    if target_kind == "ignored":
        target[::3] = -100
    if target_kind == "probabilities":
        target = torch.rand(N, C, dtype=torch.float64).softmax(1)
    for bias in (True, False):
        ours, theirs = inputs(bias=bias), inputs(bias=bias)
        pair = (ours[0], ours[1], ours[2] if bias else None), (theirs[0], theirs[1], theirs[2] if bias else None)
        mine = linear_amended_cross_entropy(*pair[0], target, 0.6, chunk_rows=rows, **make_options(kind))
        expected = full(*pair[1], target, 0.6, **make_options(kind))
        torch.testing.assert_close(mine, expected, **CLOSE)
        (2.5 * mine).backward()
        (2.5 * expected).backward()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad, **CLOSE)


@pytest.mark.parametrize("shared_head", [True, False])
@pytest.mark.parametrize("kind", ["plain", "members' sample weights"])
def test_features_of_each_member(kind: str, shared_head: bool) -> None:
    target = torch.randint(C, (N,), generator=torch.Generator().manual_seed(2))
    _, *heads = inputs()
    results = []
    for compute in (own_loss, lambda *args, **options: linear_amended_cross_entropy(*args, chunk_rows=4, **options)):
        features = torch.randn(K, N, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        own = [features.requires_grad_(), *(head.detach().requires_grad_() for head in heads)]
        given = own
        if shared_head:
            own = [own[0], own[1][0].detach().requires_grad_()]
            given = [own[0], own[1].expand(K, C, D), None]
        loss = compute(*given, target, 0.6, **make_options(kind))
        results.append((loss.detach(), *torch.autograd.grad(loss, own)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def own_loss(features: Tensor, heads: Tensor, bias: Tensor | None, *args: Any, **options: Any) -> Tensor:
    logits = torch.stack([x @ head.T for x, head in zip(features, heads, strict=True)])
    return amended_cross_entropy(logits if bias is None else logits + bias[:, None], *args, **options)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(1, 6), st.integers(1, 5), st.floats(0, 1), st.integers(1, 10),
    st.integers(0, 2**20),
)  # fmt: skip
def test_any_shape(k: int, n: int, c: int, d: int, diversity: float, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n, d), (k, c, d), (k, c))
    ours = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    theirs = [value.detach().clone().requires_grad_() for value in ours]
    target = torch.randint(c, (n,), generator=generator)
    mine = linear_amended_cross_entropy(*ours, target, diversity, chunk_rows=rows)
    expected = full(*theirs, target, diversity)
    torch.testing.assert_close(mine, expected, **CLOSE)
    for one, other in zip(torch.autograd.grad(mine, ours), torch.autograd.grad(expected, theirs), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_the_heads_decouple() -> None:
    """dW_k = (1-λ) g_k + λ Σ_j α^j g_j and dh = Σ_k D^k ((1-λ) W_k + λ α^k Σ_j W_j), from plain cross entropies."""
    alpha, diversity = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64), 0.7
    features, weight, bias = inputs()
    target = torch.randint(C, (N,), generator=torch.Generator().manual_seed(3))
    linear_amended_cross_entropy(features, weight, bias, target, diversity, member_weights=alpha).backward()
    with torch.no_grad():
        q = (torch.einsum("nd,kcd->knc", features, weight) + bias[:, None]).softmax(2)
        error = (q - torch.nn.functional.one_hot(target, C)) / N
        plain = torch.einsum("knc,nd->kcd", error, features)
        mixed = (1 - diversity) * plain + diversity * torch.einsum("k,kcd->cd", alpha, plain)
        heads = (1 - diversity) * weight + diversity * alpha[:, None, None] * weight.sum(0)
        pulled = torch.einsum("knc,kcd->nd", error, heads)
    torch.testing.assert_close(weight.grad, mixed, **CLOSE)
    torch.testing.assert_close(features.grad, pulled, **CLOSE)


def test_a_trunk_averages() -> None:
    head = ace.StackedLinear(D, C, num_members=K).double()
    trunk = torch.nn.Linear(4, D).double()
    x, target = torch.randn(N, 4, dtype=torch.float64), torch.randint(C, (N,))
    features = average_gradients(trunk(x), K)
    linear_amended_cross_entropy(features, head.weight, head.bias, target, 0.5, chunk_rows=3).backward()
    smoc = ace.SMOC(torch.nn.Linear(4, D), D, C, num_members=K).double()
    smoc.trunk.load_state_dict(trunk.state_dict())
    smoc.head.load_state_dict(head.state_dict())
    amended_cross_entropy(smoc(x), target, 0.5).backward()
    torch.testing.assert_close(trunk.weight.grad, smoc.trunk.weight.grad, **CLOSE)
    torch.testing.assert_close(head.weight.grad, smoc.head.weight.grad, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_accumulates_in_float32(dtype: torch.dtype) -> None:
    target = torch.randint(C, (N,), generator=torch.Generator().manual_seed(4))
    ours, exact = inputs(dtype), [value.detach().double().requires_grad_() for value in inputs(dtype)]
    mine = linear_amended_cross_entropy(*ours, target, 0.5, chunk_rows=1)
    assert mine.dtype == torch.float32
    mine.backward()
    expected = full(*exact, target, 0.5)
    expected.backward()
    # bf16 rounds logits and their gradients to 2^-9 of numbers of about 5
    within = 0.03 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(mine.double(), expected, rtol=within, atol=within)
    for one, other in zip(ours, exact, strict=True):
        assert one.grad.dtype == dtype
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=within, atol=within)


def test_only_requested_gradients_are_computed() -> None:
    target = torch.randint(C, (N,))
    for wanted in product([False, True], repeat=3):
        values = [v.detach().requires_grad_(w) for v, w in zip(inputs(), wanted, strict=True)]
        loss = linear_amended_cross_entropy(*values, target, 0.5, chunk_rows=2)
        torch.testing.assert_close(loss.detach(), full(*inputs(), target, 0.5).detach(), **CLOSE)
        if any(wanted):
            loss.backward()
        assert [value.grad is not None for value in values] == list(wanted)
    with torch.no_grad():
        assert linear_amended_cross_entropy(*inputs(), target, 0.5).requires_grad is False


def test_under_compile_and_func() -> None:
    target = torch.randint(C, (N,))
    values = [value.detach() for value in inputs()]

    def loss(weight: Tensor, diversity: Tensor) -> Tensor:
        return linear_amended_cross_entropy(values[0], weight, values[2], target, diversity)

    lam = torch.tensor([0.0, 0.5], dtype=torch.float64)
    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(values[1], lam)
    for place, diversity in enumerate((0.0, 0.5)):
        weight = values[1].clone().requires_grad_()
        full(values[0], weight, values[2], target, diversity).backward()
        torch.testing.assert_close(grads[place], weight.grad, **CLOSE)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(values[1], lam[1]), full(*values, target, 0.5), **CLOSE)


@pytest.mark.parametrize("rows", [1, None])
@pytest.mark.parametrize("samples", [0, N])
def test_without_counted_samples_gradients_are_zero(samples: int, rows: int | None) -> None:
    features, weight, bias = (value.detach() for value in inputs())
    sources = [features[:samples].requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    loss = linear_amended_cross_entropy(*sources, torch.full((samples,), -100), 0.5, chunk_rows=rows)
    loss.backward()
    assert loss.isnan()
    for source in sources:
        torch.testing.assert_close(source.grad, torch.zeros_like(source))


def test_all_ignored_equals_torch() -> None:
    target = torch.full((N,), -100)
    assert linear_amended_cross_entropy(*inputs(), target, 0.5).isnan()
    assert linear_amended_cross_entropy(*inputs(), target, 0.5, reduction="sum").item() == 0.0
    assert linear_amended_cross_entropy(*inputs(), target, 0.5, sample_weight=torch.ones(N)).item() == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.zeros(3)}, "features"),
        ({"head_weight": torch.zeros(3, 4)}, "head_weight"),
        ({"head_weight": torch.zeros(2, 4, 9)}, "head_weight"),
        ({"head_weight": torch.zeros(0, 4, D)}, "head_weight"),
        ({"head_bias": torch.zeros(4)}, "head_bias"),
        ({"target": torch.zeros(4, dtype=torch.long)}, "target"),
        ({"target": torch.full((N,), C)}, "class indices"),
        ({"diversity": 1.5}, "diversity"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"weight": torch.ones(C + 1)}, "weight"),
        ({"sample_weight": torch.ones(N + 1)}, "sample_weight"),
        ({"member_weights": [0.5, 0.5]}, "member_weights"),
        ({"ignore_index": 1.5}, "ignore_index"),
        ({"reduction": "none"}, "reduction"),
        ({"chunk_rows": 0}, "chunk_rows"),
        ({"features": torch.zeros(N, D, dtype=torch.long)}, "features"),
        ({"features": torch.zeros(N, D, dtype=torch.bfloat16)}, "`features` and `head_weight` of one type"),
        ({"head_weight": torch.zeros(2, 0, D), "head_bias": None}, "head_weight"),
        ({"target": torch.full((N, C), 1 / C).requires_grad_()}, "needs no gradient"),
    ],
)
def test_invalid_shapes(change: dict[str, Any], message: str) -> None:
    features, weight, bias = (value.detach().float() for value in inputs())
    given: dict[str, Any] = {
        "features": features, "head_weight": weight, "head_bias": bias, "target": torch.zeros(N, dtype=torch.long),
        "diversity": 0.5,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=message):
        linear_amended_cross_entropy(**{**given, **change})


def test_a_second_backward_is_refused() -> None:
    loss = linear_amended_cross_entropy(*inputs(), torch.zeros(N, dtype=torch.long), 0.5)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Call it again"):
        loss.backward()


@pytest.mark.parametrize("place", range(3))
def test_a_second_derivative_is_refused(place: int) -> None:
    sources = [value.detach().requires_grad_() for value in inputs()]
    loss = linear_amended_cross_entropy(*sources, torch.zeros(N, dtype=torch.long), 0.5)
    with pytest.raises(RuntimeError, match="use amended_cross_entropy of the logits"):
        torch.autograd.grad(loss, sources[place], create_graph=True)


def test_without_gradients_none_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    values, target = inputs(), torch.zeros(N, dtype=torch.long)
    expected = linear_amended_cross_entropy(*values, target, 0.5)
    monkeypatch.setattr(linear, "_add_gradients", None)
    with torch.no_grad():
        torch.testing.assert_close(linear_amended_cross_entropy(*values, target, 0.5), expected.detach())


def test_a_sum_beyond_float16_has_a_mean_within() -> None:
    features = torch.randn(8192, 4, generator=torch.Generator().manual_seed(0)).add(30).half()
    head = torch.zeros(2, 5, 4, dtype=torch.float16, requires_grad=True)
    linear_amended_cross_entropy(features, head, None, torch.zeros(8192, dtype=torch.long), 0.5).backward()
    # of the true class: (1 - λ)·(1/C - 1) + λ·(1/C - 1) times the mean feature of 30; the sum is 8,192 times as large
    torch.testing.assert_close(head.grad[:, 0].float(), torch.full((2, 4), -24.0), rtol=2e-3, atol=0)


MEMORY = """
import sys, resource, torch
from torchace.functional import linear_amended_cross_entropy
torch.set_num_threads(1)
K, N, C, D = 4, int(sys.argv[1]), 20000, 16
features = torch.randn(N, D, requires_grad=True)
weight = torch.randn(K, C, D, requires_grad=True)
linear_amended_cross_entropy(features[:8], weight, None, torch.randint(C, (8,)), 0.5, chunk_rows=8).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
linear_amended_cross_entropy(features, weight, None, torch.randint(C, (N,)), 0.5, chunk_rows=32).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.extended
def test_memory_does_not_grow_with_the_samples() -> None:
    def peak(samples: int) -> int:
        command = [sys.executable, "-c", MEMORY, str(samples)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1024

    all_logits = 4 * 1024 * 20000 * 4  # bytes of the logits of 1,024 samples
    assert peak(1024) < peak(64) + all_logits / 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_large_loss_scale_is_not_rounded_to_infinity(dtype: torch.dtype) -> None:
    features = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    head = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    loss = linear_amended_cross_entropy(features, head, None, torch.tensor([0, 1, 2, 3]), 0.5)
    (plain,) = torch.autograd.grad(loss, head)
    loss = linear_amended_cross_entropy(features, head, None, torch.tensor([0, 1, 2, 3]), 0.5)
    (scaled,) = torch.autograd.grad(loss * 2.0**16, head)  # 65,536: beyond float16
    torch.testing.assert_close(scaled, (plain.float() * 2.0**16).to(dtype), rtol=0, atol=0)


def test_the_gradient_of_a_mean_does_not_underflow_under_autocast() -> None:
    features, target = torch.ones(8192, 1), torch.zeros(8192, dtype=torch.long)
    head = torch.zeros(1, 4000, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        linear_amended_cross_entropy(features, head, None, target, 0.5).backward()
    # 1 / C of every wrong class; that of one sample, 3e-8, is half of float16's smallest number
    torch.testing.assert_close(head.grad[0, 1:], torch.full((3999, 1), 1 / 4000), rtol=1e-3, atol=0)
