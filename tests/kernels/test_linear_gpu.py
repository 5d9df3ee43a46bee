"""The GPU form of the loss of linear heads against that of all logits: on a GPU, elsewhere interpreted."""

import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="no Triton")

from torchace.functional import amended_cross_entropy, linear, linear_amended_cross_entropy  # noqa: E402
from torchace.kernels import ace_gpu, linear_gpu  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
K, N, C, D = 3, 3, 21, 6
# float64: sums of some dozens of numbers about 1, in another order
CLOSE = {"rtol": 1e-11, "atol": 1e-12}
pytestmark = [
    pytest.mark.extended,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of the interpreter, about inf and NaN
]
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, parts and blocks, none of which divides the classes."""
    monkeypatch.setattr(linear_gpu, "LOGITS", 1)
    monkeypatch.setattr(linear_gpu, "LEAST_CLASSES", 16)
    monkeypatch.setattr(linear_gpu, "ALIGNED", 8)
    monkeypatch.setattr(linear_gpu, "TILE", 16)
    monkeypatch.setattr(linear_gpu, "STEPS", 2)
    if not ON_GPU:
        monkeypatch.setattr(linear, "_fits_gpu", lambda *given: not given[3].is_floating_point())
        monkeypatch.setattr(linear_gpu, "_product", _product)


def _product(out: Tensor, a: Tensor, b: Tensor, *, add: bool, alpha: float) -> None:
    """A CPU's products of half precision are not of type float32."""
    result = alpha * (a.to(torch.float64) @ b.to(torch.float64))
    out.copy_(out + result if add else result)


def inputs(dtype: torch.dtype = torch.float64, bias: bool = True, k: int = K, n: int = N, c: int = C) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, D), (k, c, D)] + [(k, c)] * bias
    values = [torch.randn(s, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for s in shapes]
    return [value.requires_grad_() for value in values] + [None] * (not bias)


def classes(n: int = N, c: int = C, ignored: int | None = None) -> Tensor:
    target = torch.randint(c, (n,), generator=torch.Generator().manual_seed(2))
    if ignored is not None:
        target[::3] = ignored
    return target.to(DEVICE)


def exact(values: list[Any]) -> list[Any]:
    return [None if value is None else value.detach().double().requires_grad_() for value in values]


def full(features: Tensor, heads: Tensor, bias: Tensor | None, *args: Any, **options: Any) -> Tensor:
    logits = torch.einsum("nd,kcd->knc", features, heads)
    return amended_cross_entropy(logits if bias is None else logits + bias[:, None], *args, **options)


def gradients(loss: Tensor, values: list[Any], by: float = 1.0) -> tuple[Tensor, ...]:
    return torch.autograd.grad(by * loss, [value for value in values if value is not None])


def compare(values: list[Any], *args: Any, close: dict[str, float] = CLOSE, by: float = 2.5, **options: Any) -> None:
    wide = exact(values)
    ours, theirs = linear_amended_cross_entropy(*values, *args, **options), full(*wide, *args, **options)
    torch.testing.assert_close(ours.double(), theirs, **close)
    pairs = zip(gradients(ours, values, by), gradients(theirs, wide, by), strict=True)
    for (mine, other), source in zip(pairs, values, strict=False):
        assert mine.dtype == source.dtype
        torch.testing.assert_close(mine.double(), other, **close)


def make_options(kind: str) -> dict[str, Any]:
    rand = torch.rand(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE)
    own = rand[: K * N].view(K, N)
    return {
        "plain": {},
        "sum": {"reduction": "sum", "sample_weight": rand[:N]},
        "alpha": {"member_weights": torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64, device=DEVICE)},
        "one member counts": {"member_weights": [0.0, 1.0, 0.0]},
        "class weights": {"weight": rand[:C]},
        "smoothing": {"label_smoothing": 0.2},
        "smoothing and class weights": {"label_smoothing": 0.2, "weight": rand[:C]},
        "sample weights": {"sample_weight": rand[:N]},
        "members' sample weights": {"sample_weight": own, "weight": rand[:C]},
        "a member without samples": {"sample_weight": own * torch.tensor([[1.0], [0.0], [1.0]], device=DEVICE)},
        "another ignored index": {"ignore_index": 200, "weight": rand[:C]},
    }[kind]


KINDS = [
    "plain", "sum", "alpha", "one member counts", "class weights", "smoothing", "smoothing and class weights",
    "sample weights", "members' sample weights", "a member without samples", "another ignored index",
]  # fmt: skip


def test_the_pieces_are_many_and_uneven() -> None:
    """Assumptions of the other tests."""
    features, weight, bias = (value.detach() for value in inputs())
    chunks = linear_gpu._chunks(linear_gpu.Heads(features, weight, bias))
    assert [chunk.logits.shape[2] for chunk in chunks] == [5, 16]
    assert [chunk.start for chunk in chunks] == [0, 5]
    for chunk, expected in zip(chunks, (1, 2), strict=True):
        parts, tiles = linear_gpu._tiles(chunk, linear_gpu.Heads(features, weight, bias), torch.float64)
        assert (parts, tiles["BLOCK_K"], tiles["BLOCK"]) == (expected, 4, 4)


@pytest.mark.parametrize(("kind", "bias"), [*product(KINDS, [True]), ("plain", False), ("alpha", False)])
def test_it_is_the_loss_of_all_logits(kind: str, bias: bool) -> None:
    options = make_options(kind)
    target = classes(ignored=options.get("ignore_index"))
    compare(inputs(bias=bias), target, 0.6, **options)


@pytest.mark.parametrize(
    ("k", "n", "c"), [(1, 3, 37), (2, 1, 1), (4, 2, 16), (5, 1, 17), (3, 9, 7), (20, 1, 20), (1, 1, 100)]
)
def test_any_shape(k: int, n: int, c: int) -> None:
    compare(inputs(k=k, n=n, c=c), classes(n, c), 0.7)


@pytest.mark.parametrize("diversity", [0, 0.0, 1.0, torch.tensor(0.3), torch.tensor(0.3, dtype=torch.float64)])
def test_any_diversity(diversity: float | Tensor) -> None:
    compare(inputs(), classes(), diversity)
    if isinstance(diversity, Tensor):
        compare(inputs(), classes(), diversity.to(DEVICE))


def test_no_diversity_keeps_members_apart() -> None:
    values = inputs()
    with torch.no_grad():
        values[1][0] = torch.nan
    (gradient,) = torch.autograd.grad(linear_amended_cross_entropy(*values, classes(), 0.0), values[1])
    assert gradient[0].isnan().all()
    assert gradient[1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_other_types(dtype: torch.dtype) -> None:
    # float16 keeps 11 bits and bf16 8, of logits of up to 10 and of gradients of up to 1
    within = {torch.float32: 2e-5, torch.float16: 0.01, torch.bfloat16: 0.06}[dtype]
    for reduction in ("mean", "sum"):
        compare(inputs(dtype), classes(), 0.5, close={"rtol": within, "atol": within}, reduction=reduction)


def test_a_mean_survives_float16() -> None:
    """Classes of probability 2.5e-6: a sixteenth of it is between 2 and 3 of the smallest numbers of float16."""
    features, weight = torch.zeros(16, 1), torch.zeros(1, 4, 1)
    bias = torch.tensor([[12.9, 0.0, 0.0, 0.0]])
    values = [value.to(DEVICE, torch.float16) for value in (features, weight, bias)]
    values[2].requires_grad_()
    target = torch.zeros(16, dtype=torch.long, device=DEVICE)
    (gradient,) = torch.autograd.grad(linear_amended_cross_entropy(*values, target, 0.5), values[2])
    expected = values[2].detach().double().softmax(1)
    expected[0, 0] -= 1
    # 2.5e-6 is 42 of those numbers, and is rounded or cut off twice; without more bits in between, 3 or 2 for 2.6
    torch.testing.assert_close(gradient.double(), expected, rtol=0.06, atol=0)


def test_the_true_class_is_finished_before_it_is_rounded() -> None:
    """q - 1 of a confident member: q alone would round to 1 in bf16."""
    bias = torch.zeros(1, C, device=DEVICE, dtype=torch.bfloat16)
    bias[0, 3] = 12.0
    features, weight = torch.ones(1, 1), torch.zeros(1, C, 1)
    values = [value.to(DEVICE, torch.bfloat16).requires_grad_() for value in (features, weight)]
    target = torch.full((1,), 3, device=DEVICE)
    (gradient,) = torch.autograd.grad(linear_amended_cross_entropy(*values, bias, target, 0.5), values[1])
    expected = bias.double().softmax(1)[0, 3] - 1
    torch.testing.assert_close(gradient[0, 3, 0].double(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_confident_logits_stay_finite(dtype: torch.dtype) -> None:
    values = inputs(dtype)
    with torch.no_grad():
        values[1].mul_(1e4)
    loss = linear_amended_cross_entropy(*values, classes(), 0.5)
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(loss, values))


def test_a_class_that_is_ruled_out() -> None:
    """A bias of -inf: its probability is 0, and it adds nothing."""
    values = inputs()
    with torch.no_grad():
        values[2][:, 3] = -torch.inf
        values[2][:, 13:] = -torch.inf  # a whole part
    target = torch.zeros(N, dtype=torch.long, device=DEVICE)
    compare(values, target, 0.5)


def test_a_sample_that_does_not_count_may_have_an_infinite_loss() -> None:
    values, target = inputs(), classes()
    with torch.no_grad():
        values[2][:, target[0]] = -torch.inf
    target[1:] = (target[0] + 1) % C
    compare(values, target, 0.5, sample_weight=torch.tensor([0.0, 1.0, 1.0], device=DEVICE))


def test_nan_is_not_lost() -> None:
    values = inputs()
    with torch.no_grad():
        values[0][1] = torch.nan
    loss = linear_amended_cross_entropy(*values, classes(), 0.5)
    assert loss.isnan()
    (gradient,) = torch.autograd.grad(loss, values[0])
    assert gradient.isnan().any(1).tolist() == [False, True, False]


def test_only_requested_gradients_are_computed() -> None:
    target, expected = classes(), full(*inputs(), classes(), 0.5).detach()
    for wanted in [(False, False, False), (True, False, False), (False, True, False), (False, False, True)]:
        values = [value.detach().requires_grad_(want) for value, want in zip(inputs(), wanted, strict=True)]
        loss = linear_amended_cross_entropy(*values, target, 0.5)
        torch.testing.assert_close(loss.detach(), expected, **CLOSE)
        if any(wanted):
            loss.backward()
        assert [value.grad is not None for value in values] == list(wanted)
    with torch.no_grad():
        assert not linear_amended_cross_entropy(*inputs(), target, 0.5).requires_grad


def test_noncontiguous_operands() -> None:
    values = inputs()
    strided = [value.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for value in values]
    rand = torch.rand(2 * C, dtype=torch.float64, device=DEVICE)
    target, weight = torch.stack([classes(), classes()], 1)[:, 0], rand[::2]
    alpha = rand[: 2 * K].view(K, 2).softmax(0)[:, 0]
    options = {"member_weights": alpha, "weight": weight}
    assert not any(value.is_contiguous() for value in [*strided, target, alpha, weight])
    ours, theirs = linear_amended_cross_entropy(*strided, target, 0.5, **options), full(*values, target, 0.5, **options)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    for mine, other in zip(gradients(ours, strided), gradients(theirs, values), strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


def test_all_ignored_equals_torch() -> None:
    values, target = inputs(), torch.full((N,), -100, device=DEVICE)
    loss = linear_amended_cross_entropy(*values, target, 0.5)
    assert loss.isnan()
    assert all((gradient == 0).all() for gradient in gradients(loss, values))
    assert linear_amended_cross_entropy(*values, target, 0.5, reduction="sum") == 0
    assert linear_amended_cross_entropy(*values, target, 0.5, sample_weight=torch.ones(N, device=DEVICE)) == 0


def test_a_diversity_that_changes_before_the_backward() -> None:
    values, diversity = inputs(), torch.tensor(0.5, dtype=torch.float64, device=DEVICE)
    expected = gradients(linear_amended_cross_entropy(*values, classes(), 0.5), values)
    loss = linear_amended_cross_entropy(*values, classes(), diversity)
    diversity.fill_(1.0)
    assert all(torch.equal(*pair) for pair in zip(gradients(loss, values), expected, strict=True))


def test_the_same_bits_every_time() -> None:
    values = inputs(torch.float32)
    first, second = (gradients(linear_amended_cross_entropy(*values, classes(), 0.5), values) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_logits_are_computed_once_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = []
    fill = linear_gpu.Heads.fill
    monkeypatch.setattr(linear_gpu.Heads, "fill", lambda *args: (filled.append(args[1].start), fill(*args)))
    linear_amended_cross_entropy(*inputs(), classes(), 0.5)
    assert filled == [0, 5, 0]  # the last of the first pass is the first of the second
    filled.clear()
    monkeypatch.setattr(linear_gpu, "LOGITS", 1 << 20)
    compare(inputs(), classes(), 0.5)
    assert filled == [0]


def test_memory_of_a_chunk_is_that_of_one_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_gpu, "LOGITS", 1 << 24)
    features = torch.empty(4096, D, dtype=torch.bfloat16, device="meta")
    for k in (1, 4):
        weight = torch.empty(k, 100_000, D, dtype=torch.bfloat16, device="meta")
        chunks = linear_gpu._chunks(linear_gpu.Heads(features, weight, None))
        assert 0.9 < chunks[-1].logits.untyped_storage().nbytes() / (1 << 24) <= 1


@pytest.mark.parametrize(
    "options", [{"chunk_rows": 2}, {"target": torch.full((N, C), 1 / C, dtype=torch.float64, device=DEVICE)}]
)
def test_unsupported_options_are_computed_by_rows(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(linear_gpu, "value_and_gradients", None)
    given = {"target": classes(), **options}
    expected = full(*inputs(), given["target"], 0.5)
    torch.testing.assert_close(linear_amended_cross_entropy(*inputs(), diversity=0.5, **given), expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("by", [1.0, -2.5, 0.0])
def test_a_gradient_is_scaled_in_place(dtype: torch.dtype, by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ace_gpu, "FEW", 2)
    for count in (0, 1, 63, 5000):
        values = torch.randn(count).to(DEVICE, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        expected = (values.to(wide) * by).to(dtype)
        assert ace_gpu.scale_gradient(values, torch.tensor(by, dtype=wide, device=DEVICE)) is values
        # Triton's interpreter cuts bf16 off instead of rounding it
        ulps = 2**-7 if dtype == torch.bfloat16 and not ON_GPU else 0
        torch.testing.assert_close(values, expected, rtol=ulps, atol=0)


def test_a_scale_of_one_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of a signalling NaN would change on the way through a multiplication."""
    monkeypatch.setattr(ace_gpu, "FEW", 2)
    values = torch.full((8,), 0x7F810001, dtype=torch.int32, device=DEVICE).view(torch.float32)
    ace_gpu.scale_gradient(values, torch.ones((), device=DEVICE))
    assert (values.view(torch.int32) == 0x7F810001).all()


def test_a_second_backward_is_refused() -> None:
    loss = linear_amended_cross_entropy(*inputs(), classes(), 0.5)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Call it again"):
        loss.backward()


def test_autocast_lowers_the_products() -> None:
    values = inputs(torch.float32)
    wide = exact(values)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = linear_amended_cross_entropy(*values, classes(), 0.5)
    theirs = full(*wide, classes(), 0.5)
    within = {"rtol": 0.06, "atol": 0.06}  # as bf16's above
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), theirs, **within)
    for mine, other in zip(gradients(loss, values), gradients(theirs, wide), strict=True):
        assert mine.dtype == torch.float32
        assert not torch.equal(mine, other.float())
        torch.testing.assert_close(mine.double(), other, **within)


COMPILED = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torchace.kernels import linear_gpu

def compiled(kernel, **known):
    pointers = {"logits": "*bf16", "bias": "*bf16", "values": "*fp32", "target": "*i64", "count": "i64"}
    whole = ("samples", "pitch", "start", "width", "classes", "scale_k", "scale_n")
    types = {name: pointers.get(name, "i32" if name in whole else "*fp32") for name in kernel.arg_names}
    types |= dict.fromkeys(known, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in known.items()}
    ready = triton.compile(ASTSource(kernel, types, places), target=GPUTarget("cuda", 90, 32))
    assert ready.asm["cubin"]

for k, some, dtype in (1, True, tl.float32), (4, True, tl.float32), (3, False, tl.float64):
    shape = {"MEMBERS": k, "BLOCK_K": triton.next_power_of_2(k), "ACC": dtype, "STEPS": 2, "BLOCK": 256}
    shape |= {"BIASED": True} if some else {"BIASED": False, "bias": None}
    compiled(linear_gpu._softmax_sums, **shape)
    shape |= {"WEIGHTED": True} if some else {"WEIGHTED": False, "weight": None, "s_of_samples": None}
    compiled(linear_gpu._value_and_gradient, ONE_HOT=0.9, SPREAD=1e-6, COUPLED=k > 1, WITH_GRADIENT=some, **shape)
"""


def test_the_kernels_compile_for_a_gpu() -> None:
    """The interpreter takes more than the compiler does; no GPU is needed to ask it."""
    settings = {**os.environ, "TRITON_INTERPRET": "0"}
    found = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False, env=settings)
    assert not found.returncode, found.stderr


@pytest.mark.parametrize("label", [-1, C])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_label_that_is_no_class_is_seen(label: int, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchace._checks.can_read", lambda tensor: False)  # as on a GPU
    values, target = inputs(torch.float32), classes()
    target[1] = label
    loss = linear_amended_cross_entropy(*values, target, 0.5, reduction=reduction)
    assert loss.isnan()
    assert gradients(loss, values)[0][1].isnan().all()


def test_without_gradients_none_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    values, target = inputs(), classes()
    expected = linear_amended_cross_entropy(*values, target, 0.5)
    monkeypatch.setattr(linear_gpu, "_product", None)
    with torch.no_grad():
        torch.testing.assert_close(linear_amended_cross_entropy(*values, target, 0.5), expected.detach(), **CLOSE)
