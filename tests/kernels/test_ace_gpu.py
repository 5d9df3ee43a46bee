"""The fused loss against references: compiled on a GPU, elsewhere interpreted in float64."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

ON_GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="no Triton")

from tests.reference import losses as reference  # noqa: E402
from tests.reference.loss_inputs import Case, ace_cases, check_changed_options  # noqa: E402
from torchace import kernels  # noqa: E402
from torchace.functional import amended_cross_entropy  # noqa: E402
from torchace.kernels import LossOptions, ace_gpu, closed_form  # noqa: E402

pytestmark = [
    pytest.mark.extended,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # interpreted, both sides of a choice are computed
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),  # torch's compiler, of itself
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.float32 if ON_GPU else torch.float64
# Sums of at most some thousand terms about 1; exp and log of a GPU are good to a few units in the last place.
CLOSE = {"rtol": 2e-5, "atol": 2e-5} if ON_GPU else {"rtol": 1e-11, "atol": 1e-12}
# Everything at once; in blocks by one program; by several; each with the smallest tiles.
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in small programs": {"ONE_PROGRAM": 1, "COUNTED": 1, "ALL_REGISTERS": 1, "COUNTERS": (2, 1)},
    "read twice": {"MAX_WARPS": 0, "HELD_OF_BLOCK": 0, "WARPS": 1},
    "by several programs": {
        "MAX_WARPS": 0, "HELD_OF_BLOCK": 0, "WARPS": 1, "READ_TWICE": 0, "SPAN": 300, "COUNTERS_OF_BLOCKS": (2, 1),
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def kernel() -> Iterator[None]:
    """On a CPU the kernel is taken, interpreted, wherever a GPU would take it."""
    if ON_GPU:
        yield
        return

    def fits(logits: Tensor, options: LossOptions) -> bool:
        return logits.numel() > 0

    with mock.patch.object(kernels, "fits_gpu", fits):
        yield


def choose_kernel(name: str) -> Any:
    return mock.patch.multiple(ace_gpu, **WAYS[name]) if WAYS[name] else nullcontext()


def ours(case: Case, way: str, **changed: Any) -> tuple[Tensor, Tensor]:
    """Value and gradient by the kernel, λ on the device."""
    to = {"dtype": DTYPE, "device": DEVICE}

    def to_device(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(**to) if value.is_floating_point() else value.to(DEVICE)

    outputs = to_device(case.outputs).detach().clone().requires_grad_()
    options = {name: to_device(value) for name, value in case.options.items()} | changed
    with choose_kernel(way):
        value = amended_cross_entropy(outputs, to_device(case.target), torch.tensor(case.diversity, **to), **options)
        value.backward()
    assert value.grad_fn.backend is ace_gpu
    assert outputs.grad is not None
    return value.detach().cpu().double(), outputs.grad.cpu().double()


def by_definition(case: Case) -> tuple[Tensor, Tensor]:
    expected = reference.amended_cross_entropy(*case.args, **case.options)
    return expected.value(), expected.gradient()


@settings(max_examples=60)
@given(ace_cases(), st.sampled_from(["mean", "sum"]), st.sampled_from(list(WAYS)))
def test_value_and_gradient_by_definition(case: Case, reduction: str, way: str) -> None:
    case.options["reduction"], case.upstream = reduction, None
    if "label_smoothing" in case.options:  # numbers travel to a kernel in float32: eighths arrive as they are
        case.options["label_smoothing"] = round(case.options["label_smoothing"] * 8) / 8
    value, gradient = ours(case, way)
    expected, expected_gradient = by_definition(case)
    assert_close(value, expected, equal_nan=True, **CLOSE)
    if not expected.isnan():
        assert_close(gradient, expected_gradient, **CLOSE)


def random_case(members: int, samples: int, classes: int, seed: int = 0, **options: Any) -> Case:
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(members, samples, classes, generator=g, dtype=torch.float64)
    target = torch.randint(classes, (samples,), generator=g)
    target[torch.rand(samples, generator=g) < 0.2] = -100
    target[0] = classes - 1
    return Case(logits, target, 0.7, options)


# Filled up to powers of two, and one more or less; classes in several blocks and spans, the last of them not full.
SHAPES = [
    (1, 1, 1),
    (1, 5, 3),
    (2, 1, 16),
    (3, 7, 17),
    (5, 4, 33),
    (8, 2, 64),
    (9, 3, 150),
    (2, 3, 129),
    (7, 2, 300),
    (40, 2, 70),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_shapes(shape: tuple[int, int, int], way: str) -> None:
    case = random_case(*shape)
    value, gradient = ours(case, way)
    expected, expected_gradient = by_definition(case)
    assert_close(value, expected, **CLOSE)
    assert_close(gradient, expected_gradient, **CLOSE)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["samples first", "classes first", "every second", "one row for all"])
def test_strided_logits(layout: str, way: str) -> None:
    """SMOC's logits lie as (N, K, C) in memory; the gradient lies as they do."""
    case = random_case(3, 6, 20)
    whole = case.outputs.to(DTYPE).to(DEVICE)
    strided = {
        "samples first": whole.transpose(0, 1).contiguous().transpose(0, 1),
        "classes first": whole.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "every second": whole.repeat_interleave(2, 2)[..., ::2],
        "one row for all": whole[:, :1].expand(-1, 6, -1),
    }[layout].requires_grad_()
    assert not strided.is_contiguous()
    with choose_kernel(way):
        loss = amended_cross_entropy(strided, case.target.to(DEVICE), torch.tensor(0.7, dtype=DTYPE, device=DEVICE))
    (gradient,) = torch.autograd.grad(loss, strided)
    case.outputs = strided.detach().cpu().double()
    expected, expected_gradient = by_definition(case)
    assert_close(loss.detach().cpu().double(), expected, **CLOSE)
    assert_close(gradient.cpu().double(), expected_gradient, **CLOSE)
    if layout == "samples first":
        assert gradient.stride() == strided.stride()


@pytest.mark.parametrize("way", WAYS)
def test_strided_options(way: str) -> None:
    g = torch.Generator().manual_seed(3)
    case = random_case(3, 6, 20)
    weight = torch.rand(40, generator=g).double().to(DTYPE).to(DEVICE)[::2]
    alpha = torch.tensor([0.5, 9, 0.25, 9, 0.25, 9], dtype=DTYPE, device=DEVICE)[::2]
    every_second = torch.stack([case.target, case.target], 1)[:, 0]
    assert not any(part.is_contiguous() for part in (weight, alpha, every_second))
    case.target = every_second
    case.options = {"weight": weight.cpu().double(), "member_weights": alpha.cpu().double()}
    found = ours(case, way, weight=weight, member_weights=alpha)
    for mine, expected in zip(found, by_definition(case), strict=True):
        assert_close(mine, expected, **CLOSE)
    one_for_all = weight[:1].expand(20)
    case.options["weight"] = one_for_all.cpu().double().clone()
    assert_close(ours(case, way, weight=one_for_all, member_weights=alpha)[0], by_definition(case)[0], **CLOSE)


@pytest.mark.parametrize("way", WAYS)
def test_scores_of_ignored_samples(way: str) -> None:
    case = random_case(3, 4, 20)
    case.target[0] = -100
    case.options["mixture"] = case.outputs.softmax(2).mean(0)
    expected, _ = by_definition(case)
    case.options["mixture"][0] = torch.nan
    assert_close(ours(case, way)[0], expected, **CLOSE)


def test_several_gradients_at_once() -> None:
    case = random_case(2, 3, 5)
    for dtype in (DTYPE, torch.float16):
        logits = case.outputs.to(DEVICE, dtype).requires_grad_()
        loss = amended_cross_entropy(logits, case.target.to(DEVICE), torch.tensor(0.5, dtype=DTYPE, device=DEVICE))
        (each,) = torch.autograd.grad(loss, logits, retain_graph=True)
        factors = torch.tensor([1.0, -2.0], dtype=loss.dtype, device=DEVICE)
        (both,) = torch.autograd.grad(loss, logits, factors, is_grads_batched=True)
        assert_close(both.to(DTYPE), torch.stack([each, -2 * each]).to(DTYPE))


def test_in_place_changes_before_the_backward() -> None:
    case = random_case(2, 3, 5)
    logits, diversity = case.outputs.to(DEVICE, DTYPE).requires_grad_(), torch.tensor(0.7, dtype=DTYPE, device=DEVICE)
    loss = amended_cross_entropy(logits, case.target.to(DEVICE), diversity)
    diversity.fill_(0.1)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert_close(gradient.cpu().double(), by_definition(case)[1], **CLOSE)
    for create_graph in (False, True):  # the gradient was given away: it would have to be computed with another λ
        with pytest.raises(RuntimeError, match="changed in place"):
            torch.autograd.grad(loss, logits, retain_graph=True, create_graph=create_graph)
    with torch.inference_mode():
        fixed = torch.tensor(0.7, dtype=DTYPE, device=DEVICE)
    amended_cross_entropy(logits, case.target.to(DEVICE), fixed).backward()
    check_changed_options(torch.randn(3, 4, 5, dtype=DTYPE, device=DEVICE), "mean")


def test_spans_are_readable_by_later_programs() -> None:
    """Of a thousand members, samples are shared out among few programs."""
    launched, names = [], ace_gpu._read_twice.arg_names

    class Kernel:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            return lambda *args, **flags: launched.append((grid, dict(zip(names, args, strict=True))))

    options = LossOptions(torch.zeros(1, 1).long(), 0.5, ignore_index=-100, reduction="mean")
    with mock.patch.multiple(ace_gpu, _read_twice=Kernel(), _count_samples=mock.MagicMock(), _read_once=None):
        for members, classes in ((1024, 200_000), (300, 128_256), (4, 128_256)):
            logits = torch.zeros(()).expand(members, 1, classes)
            ace_gpu.value_and_gradient(logits, options, want_gradient=False)
    for grid, flags in launched:
        assert flags["BLOCK_SPANS"] * (flags["BLOCK_K"] + flags["REST_K"]) <= 2 * ace_gpu.STATISTICS
        assert grid[1] * flags["SPAN"] >= flags["CLASSES"]
    assert launched[-1][0] == (1, 16)


def test_steps_between_classes_that_32_bits_cannot_count() -> None:
    far = torch.empty_strided((2, 3, 70_000), (1, 2, 40_000), device="meta")
    assert ace_gpu.reachable(far).is_contiguous()
    near = torch.empty_strided((2, 3, 50_000), (1, 2, 40_000), device="meta")
    assert ace_gpu.reachable(near) is near


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("largest", [1e4, 2e9, 1e30])
def test_confident_logits(way: str, largest: float) -> None:
    case = random_case(4, 5, 20)
    case.outputs = torch.where(case.outputs > 3, largest, case.outputs).float().double()
    value, gradient = ours(case, way)
    expected, expected_gradient = by_definition(case)
    assert_close(value / expected, torch.ones(()).double(), **CLOSE)
    assert_close(gradient, expected_gradient, **CLOSE)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("diversity", [0.0, 0.7])
def test_an_impossible_class_adds_nothing(way: str, diversity: float) -> None:
    case = random_case(3, 4, 20)
    case.diversity = diversity
    case.outputs[:, :, 3] = -torch.inf
    case.target[case.target == 3] = 4
    value, gradient = ours(case, way)
    possible = torch.arange(20) != 3
    case.outputs = case.outputs[:, :, possible]
    case.target = torch.where(case.target > 3, case.target - 1, case.target)
    expected, expected_gradient = by_definition(case)
    assert_close(value, expected, **CLOSE)
    assert_close(gradient[:, :, possible], expected_gradient, **CLOSE)
    assert not gradient[:, :, 3].any()


@pytest.mark.parametrize("way", WAYS)
def test_an_impossible_true_class_costs_infinity(way: str) -> None:
    case = random_case(2, 3, 20)
    case.outputs[0, 0, int(case.target[0])] = -torch.inf
    value, gradient = ours(case, way)
    assert value == torch.inf
    assert gradient.isfinite().all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_are_visible(bad: float, way: str) -> None:
    case = random_case(2, 3, 20)
    case.outputs[1, 0, 2] = bad
    value, gradient = ours(case, way)
    assert value.isnan()
    assert gradient[1, 0].isnan().any()
    case.target[0] = -100  # a sample that does not count
    value, gradient = ours(case, way)
    assert value.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("way", WAYS)
def test_no_sample_that_counts_is_nan_as_in_torch(way: str) -> None:
    case = random_case(2, 3, 20)
    case.target[:] = -100
    value, gradient = ours(case, way)
    assert value.isnan()
    assert not gradient.any()


@pytest.mark.skipif(not ON_GPU, reason="on a CPU labels are checked")
@pytest.mark.parametrize("label", [20, -1, 1 << 40])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_label_outside_the_classes_is_visible(label: int, weighted: bool) -> None:
    case = random_case(2, 3, 20, **({"weight": torch.ones(20).double()} if weighted else {}))
    case.target[1] = label
    assert ours(case, "whole")[0].isnan()


@pytest.mark.parametrize("few", [0, 1 << 20])
def test_the_incoming_gradient(few: int) -> None:
    case = random_case(3, 5, 20)
    logits = case.outputs.to(DTYPE).to(DEVICE).requires_grad_()
    for upstream in (1.0, -2.5, 0.0):
        with mock.patch.object(ace_gpu, "FEW", few):
            loss = amended_cross_entropy(logits, case.target.to(DEVICE), torch.tensor(0.7, dtype=DTYPE, device=DEVICE))
            (gradient,) = torch.autograd.grad(loss * upstream, logits)
        assert_close(gradient.cpu().double(), upstream * by_definition(case)[1], **CLOSE)


def test_a_second_backward_and_a_second_derivative() -> None:
    case = random_case(3, 4, 6)
    logits = case.outputs.to(DTYPE).to(DEVICE).requires_grad_()

    def loss(z: Tensor) -> Tensor:
        return amended_cross_entropy(z, case.target.to(DEVICE), torch.tensor(0.7, dtype=DTYPE, device=DEVICE))

    value = loss(logits)
    (first,) = torch.autograd.grad(value, logits, retain_graph=True)
    (again,) = torch.autograd.grad(3 * value, logits)
    assert_close(again, 3 * first)
    curvatures = []
    for fits in (kernels.fits_gpu, lambda *args: False):
        with mock.patch.object(kernels, "fits_gpu", fits):
            (slope,) = torch.autograd.grad(loss(logits), logits, create_graph=True)
            curvatures.append(torch.autograd.grad((slope**2).sum(), logits)[0])
    assert_close(*curvatures)


def test_half_precision() -> None:
    """Computed in float32, the gradient rounded once; a tiny one survives float16 under a loss scale."""
    case = random_case(3, 8, 20)
    for dtype in (torch.bfloat16, torch.float16):
        logits = case.outputs.to(dtype).to(DEVICE).requires_grad_()
        for scale in (1.0, 1024.0):
            loss = amended_cross_entropy(logits, case.target.to(DEVICE), 0.75)
            assert loss.dtype == torch.float32
            (gradient,) = torch.autograd.grad(loss * scale * 2.0**-12, logits)
            rounded = Case(logits.detach().cpu().double(), case.target, 0.75)
            expected, expected_gradient = by_definition(rounded)
            assert_close(loss.detach().cpu().double(), expected, rtol=2e-6, atol=2e-6)
            exact = expected_gradient * scale * 2.0**-12
            smallest = 2.0**-24 if dtype == torch.float16 else 0.0
            error = (gradient.cpu().double() - exact).abs()
            roundings = 2.0 if dtype == torch.bfloat16 and scale * 2.0**-12 != 1 else 1.0
            bound = roundings * exact.abs() * torch.finfo(dtype).eps / 2 + 1e-6 * exact.abs().max() + smallest
            assert (error <= bound).all()


def test_a_diversity_elsewhere_is_read_once_or_moved_into_a_graph() -> None:
    elsewhere, lam = torch.device("meta"), torch.tensor(0.5)
    assert kernels.readable_diversity(lam, elsewhere) == 0.5
    compiled = torch.compile(lambda d: kernels.readable_diversity(d, elsewhere) * 2, fullgraph=True, backend="eager")
    assert compiled(lam).device == elsewhere
    assert kernels.readable_diversity(lam, lam.device) is lam


def test_unneeded_gradients_are_not_computed() -> None:
    case = random_case(3, 5, 20)
    logits, target = case.outputs.to(DTYPE).to(DEVICE), case.target.to(DEVICE)
    with mock.patch.object(ace_gpu, "value_and_gradient", wraps=ace_gpu.value_and_gradient) as called:
        value = amended_cross_entropy(logits, target, torch.tensor(0.7, dtype=DTYPE, device=DEVICE))
        with torch.no_grad():
            amended_cross_entropy(logits.requires_grad_(), target, 0.7)
    assert [call.kwargs["want_gradient"] for call in called.call_args_list] == [False, False]
    assert_close(value.cpu().double(), by_definition(case)[0], **CLOSE)


@pytest.mark.parametrize("weighted", [False, True])
def test_as_operators_for_the_compiler(weighted: bool) -> None:
    """Value and gradient are operators of their own; the compiler sees their shapes alone."""
    from torchace.kernels import ace_op_gpu

    case = random_case(3, 5, 20, **({"weight": torch.rand(20).double() + 0.5} if weighted else {}))
    weight = case.options.get("weight")
    logits = case.outputs.to(DTYPE).to(DEVICE).requires_grad_()
    options = LossOptions(
        case.target.to(DEVICE)[None],
        torch.tensor(0.7, dtype=DTYPE, device=DEVICE),
        weight=None if weight is None else weight.to(DTYPE).to(DEVICE),
        label_smoothing=0.125,
        ignore_index=-100,
        reduction="mean",
    )
    torch.library.opcheck(ace_op_gpu._value, (logits, *ace_op_gpu._to_arguments(options)))
    case.options["label_smoothing"] = 0.125

    @torch.compile(fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    def compiled(z: Tensor) -> Tensor:
        return 2 * ace_op_gpu.total_loss(z * 1.0, options)

    value = compiled(logits)
    value.backward()
    expected, expected_gradient = by_definition(case)
    assert_close(value.detach().cpu().double(), 2 * expected, **CLOSE)
    assert logits.grad is not None
    assert_close(logits.grad.cpu().double(), 2 * expected_gradient, **CLOSE)


@pytest.mark.skipif(not ON_GPU, reason="no GPU")
def test_captured_in_a_graph_without_synchronisation() -> None:
    case = random_case(5, 64, 10)
    logits = case.outputs.to(DTYPE).to(DEVICE).requires_grad_()
    target, diversity = case.target.to(DEVICE), torch.tensor(0.7, device=DEVICE)

    def step() -> tuple[Tensor, Tensor]:
        loss = amended_cross_entropy(logits, target, diversity)
        return loss, torch.autograd.grad(loss, logits)[0]

    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value, gradient = step()
    other = random_case(5, 64, 10, seed=1)
    other.diversity = 0.25
    logits.data.copy_(other.outputs)
    target.copy_(other.target)
    diversity.fill_(0.25)
    graph.replay()
    expected, expected_gradient = by_definition(other)
    assert_close(value.cpu().double(), expected, **CLOSE)
    assert_close(gradient.cpu().double(), expected_gradient, **CLOSE)


@pytest.mark.skipif(not ON_GPU, reason="no GPU")
def test_compiled_as_a_user_would_and_under_transforms() -> None:
    case = random_case(3, 8, 20)
    logits = case.outputs.to(DTYPE).to(DEVICE).requires_grad_()
    target, diversity = case.target.to(DEVICE), torch.tensor(0.7, device=DEVICE)
    expected, expected_gradient = by_definition(case)

    def loss(z: Tensor) -> Tensor:
        return amended_cross_entropy(z, target, diversity)

    value = torch.compile(loss, fullgraph=True)(logits)
    value.backward()
    assert logits.grad is not None
    assert_close(value.detach().cpu().double(), expected, **CLOSE)
    assert_close(logits.grad.cpu().double(), expected_gradient, **CLOSE)
    for transformed in (torch.func.grad(loss), torch.compile(torch.func.grad(loss), fullgraph=True)):
        assert_close(transformed(logits.detach()).cpu().double(), expected_gradient, **CLOSE)
    batch = torch.stack([logits.detach(), logits.detach() + 1])
    for gradient in torch.compile(torch.func.vmap(torch.func.grad(loss)), fullgraph=True)(batch):
        assert_close(gradient.cpu().double(), expected_gradient, **CLOSE)


def run_case(members: int, samples: int, classes: int, kind: str) -> tuple[Tensor, LossOptions]:
    """Logits of three runs and the options of a training step; the second run has stopped."""
    g = torch.Generator().manual_seed(0)
    to = {"dtype": DTYPE, "device": DEVICE}
    logits = 3 * torch.randn(3, members, samples, classes, generator=g, dtype=torch.float64)
    target = torch.randint(classes, (3, samples), generator=g)
    scale = torch.tensor([[1.0], [0.0], [1.0]]) / samples
    options = LossOptions(target.to(DEVICE), torch.tensor([0.0, 0.4, 0.9], **to), scale=scale.to(**to))
    if kind == "weights":
        weight = scale * torch.rand(3, samples, generator=g)
        options = options.replace(scale=weight.to(**to), label_smoothing=0.125)
    elif kind == "mixture":
        mixture = torch.rand(3, samples, classes, generator=g, dtype=torch.float64).softmax(2)
        options = options.replace(mixture=mixture.to(**to), alpha=torch.full((members,), 0.25, **to))
    return logits.to(**to), options


@pytest.mark.parametrize("kind", ["plain", "weights", "mixture"])
@pytest.mark.parametrize("way", ["whole", "in small programs"])
@pytest.mark.parametrize(("shape", "layout"), [((5, 7, 10), "dense"), ((1, 6, 17), "dense"), ((4, 5, 12), "classes")])
def test_runs_of_a_training_step(shape: tuple[int, int, int], layout: str, way: str, kind: str) -> None:
    """Losses of members, scores of ensembles and the gradient, of several runs with their own λ in one launch."""
    logits, options = run_case(*shape, kind)
    if layout == "classes":
        logits = logits.mT.contiguous().mT
    expected = closed_form.compute(logits.double().cpu(), _in_float64(options), want_scores=True)
    with choose_kernel(way), mock.patch.object(closed_form, "compute", None):
        found = kernels.member_terms(logits, options)
    for mine, other in zip(found, expected, strict=True):
        assert mine is not None
        assert_close(mine.cpu().double(), other, **CLOSE)
    assert found.gradient is not None
    assert found.gradient.stride() == logits.stride()
    assert not found.gradient[1].any()


def _in_float64(options: LossOptions) -> LossOptions:
    parts = (part.cpu() if isinstance(part, Tensor) else part for part in vars(options).values())
    return LossOptions(*(p.double() if isinstance(p, Tensor) and p.is_floating_point() else p for p in parts))


def test_runs_with_impossible_and_broken_logits() -> None:
    """A class at -inf adds nothing; a score is finite where every probability underflows; NaN stays in its run."""
    logits, options = run_case(3, 4, 6, "plain")
    logits[0, :, 0, :] = -1e4
    logits[0, :, 0, int(options.target[0, 0]) - 1] = 0.0  # all members are certain, and wrong
    logits[2, 1, 2, 3] = torch.nan
    options.target[0, 1:] = 0
    logits[0, :, 1:, 5] = -torch.inf
    found = kernels.member_terms(logits, options)
    assert found.scores is not None
    assert_close(found.scores[0, 0].cpu().double(), torch.tensor(1e4).double())
    assert found.losses[0].isfinite().all()
    assert found.losses[2].isnan().tolist() == [True, True, True]  # through the mixture
    assert found.scores[2].isnan().tolist() == [False, False, True, False]


def test_samples_that_do_not_fit_on_chip_are_left_to_the_closed_form() -> None:
    logits, options = run_case(2, 2, 3, "plain")
    with mock.patch.object(ace_gpu, "MAX_WARPS", 0), mock.patch.object(ace_gpu, "member_terms", None):
        kernels.member_terms(logits, options)
    with mock.patch.object(kernels, "STEP_ON_GPU", "closed_form"), mock.patch.object(ace_gpu, "member_terms", None):
        kernels.member_terms(logits, options)


@pytest.mark.skipif(not ON_GPU, reason="no GPU")
@pytest.mark.parametrize("shape", [(5, 128, 10), (10, 300, 100), (4, 64, 250)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_captured_in_a_graph(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Also at the sizes of a sweep: 70 runs."""
    g = torch.Generator(DEVICE).manual_seed(0)
    logits = (3 * torch.randn(70, *shape, generator=g, device=DEVICE)).to(dtype)
    target = torch.randint(shape[2], (70, shape[1]), generator=g, device=DEVICE)
    diversity = torch.linspace(0, 1, 70, device=DEVICE)
    options = LossOptions(target, diversity, scale=torch.full((70, 1), 1 / shape[1], device=DEVICE))
    assert ace_gpu.fits_member_terms(logits)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        kernels.member_terms(logits, options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.member_terms(logits, options)
    logits.copy_(logits.flip(0))
    diversity.copy_(diversity.flip(0))
    graph.replay()
    exact = options.replace(diversity=diversity.double(), scale=torch.full((70, 1), 1 / shape[1]).double().to(DEVICE))
    expected = closed_form.compute(logits.double(), exact, want_scores=True)
    for mine, other in zip(found[:2], expected[:2], strict=True):
        assert mine is not None
        assert other is not None
        assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)
    assert found.gradient is not None
    assert expected.gradient is not None
    within = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps / 2  # rounded once
    error = (found.gradient.double() - expected.gradient).abs()
    assert (error <= within * expected.gradient.abs() + 1e-5 * expected.gradient.abs().max()).all()


# One warp for a sample, two, four; of few members and of many; in blocks; by several programs.
LARGE = [
    (10, 5000, 100), (4, 3000, 250), (1, 600, 8000), (2, 2100, 1000), (20, 3000, 100), (5, 2500, 1000), (3, 900, 1001),
    (8, 2100, 1000), (10, 300, 1000), (16, 500, 500), (32, 50, 1000), (5, 40, 3200), (3, 70, 10_000), (16, 9, 5000),
    (2, 20, 16_000), (1, 9, 32_000), (4, 5, 128_256), (300, 2, 3000),
]  # fmt: skip


@pytest.mark.skipif(not ON_GPU, reason="no GPU")
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize(
    ("dtype", "impossible"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_large_shapes_against_the_composite(shape: tuple[int, int, int], dtype: torch.dtype, impossible: bool) -> None:
    """Also where a class is impossible in some samples only, which are computed with more care."""
    g = torch.Generator(DEVICE).manual_seed(0)
    logits = (3 * torch.randn(shape, generator=g, device=DEVICE)).to(dtype)
    target = torch.randint(1, shape[2], shape[1:2], generator=g, device=DEVICE)
    target[::7] = -100
    if impossible:
        logits[:, ::5, 0] = -torch.inf

    def both(z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.detach().requires_grad_()
        loss = amended_cross_entropy(z, target, 0.7, label_smoothing=0.0 if impossible else 0.1)
        return loss.detach(), torch.autograd.grad(loss, z)[0]

    value, gradient = both(logits)
    repeated = both(logits)
    assert torch.equal(value, repeated[0])
    assert torch.equal(gradient, repeated[1])
    expected, expected_gradient = both(logits.double())  # float64: not for the kernel
    assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    largest = expected_gradient.abs().max()
    within = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps / 2  # rounded once
    assert ((gradient.double() - expected_gradient).abs() <= within * expected_gradient.abs() + 1e-5 * largest).all()
