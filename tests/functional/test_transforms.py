"""The losses under torch.func, torch.compile, autocast, forward mode, second derivatives: the same numbers."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.gradcheck import GradcheckError
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from tests.functional.test_every_loss import STRATEGIES
from tests.reference import losses as reference
from tests.reference.loss_inputs import U32, Case, ace_cases, member_weights, under_func, value_and_gradient
from torchace.functional import amended_cross_entropy, binary_amended_cross_entropy, negative_correlation

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
Loss = Callable[..., Tensor]
# torch's own rules for forward mode are written in TorchScript
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def example(loss: Loss, seed: int = 0, sweep: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Outputs `(*sweep, K, N, C)` or `(*sweep, K, N)` and a target."""
    g = torch.Generator().manual_seed(seed)
    if loss is amended_cross_entropy:
        return torch.randn(*sweep, 3, 4, 5, generator=g, dtype=torch.float64), torch.randint(5, (4,), generator=g)
    outputs = torch.randn(*sweep, 3, 4, generator=g, dtype=torch.float64)
    return outputs, torch.rand(4, generator=g, dtype=torch.float64)


LOSSES = [amended_cross_entropy, binary_amended_cross_entropy, negative_correlation]
losses = pytest.mark.parametrize("loss", LOSSES)


# torch.func ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
@given(st.data())
def test_grad_equals_backward(name: str, data: st.DataObject) -> None:
    loss, cases = STRATEGIES[name]
    case = data.draw(cases)
    value, gradient = value_and_gradient(loss, case)
    func_value, func_gradient = under_func(loss, case)
    assert_close(func_value, value, equal_nan=name == "ace", **CLOSE)
    assert_close(func_gradient, gradient, **CLOSE)


@given(ace_cases(), st.integers(1, 3), st.integers(0, 2**16))
def test_vmap_over_a_sweep_equals_the_loop(case: Case, num_runs: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_runs, *case.outputs.shape, generator=g, dtype=torch.float64)
    lams = torch.rand(num_runs, generator=g, dtype=torch.float64)
    case.options.pop("mixture", None)
    alpha = case.options.pop("member_weights", None)
    if alpha is not None:
        case.options["member_weights"] = alpha / alpha.sum()

    def scalar(z: Tensor, lam: Tensor) -> Tensor:
        value = amended_cross_entropy(z, case.target, lam, **case.options)
        return value if case.upstream is None else (value * case.upstream).sum()

    values = vmap(scalar)(logits, lams)
    gradients = vmap(grad(scalar))(logits, lams)
    for i in range(num_runs):
        case.outputs, case.diversity = logits[i], float(lams[i])
        value, gradient = value_and_gradient(amended_cross_entropy, case)
        total = value if case.upstream is None else (value * case.upstream).sum()
        assert_close(values[i], total, equal_nan=True, **CLOSE)
        assert_close(gradients[i], gradient, **CLOSE)


@losses
def test_vmap_over_every_axis_that_can_vary(loss: Loss) -> None:
    g = torch.Generator().manual_seed(0)
    outputs, _ = example(loss, sweep=(6,))
    targets = torch.stack([example(loss, seed)[1] for seed in range(6)])
    lams = torch.rand(6, generator=g, dtype=torch.float64)
    alphas = torch.randn(6, 3, generator=g, dtype=torch.float64).softmax(1)
    weights = torch.rand(6, 3, 4, generator=g, dtype=torch.float64)

    def full_loss(z: Tensor, y: Tensor, lam: Tensor, alpha: Tensor, weight: Tensor) -> Tensor:
        return loss(z, y, lam, member_weights=alpha, sample_weight=weight)

    arguments = (outputs, targets, lams, alphas, weights)
    expected = torch.stack([full_loss(*row) for row in zip(*arguments, strict=True)])
    assert_close(vmap(full_loss)(*arguments), expected, **CLOSE)
    gradients = vmap(grad(full_loss))(*arguments)
    for i in range(6):
        leaf = outputs[i].clone().requires_grad_()
        full_loss(leaf, *(value[i] for value in arguments[1:])).backward()
        assert_close(gradients[i], leaf.grad, **CLOSE)
    # λ alone, another axis of the logits, and two sweeps nested
    fixed = vmap(lambda lam: loss(outputs[0], targets[0], lam))(lams)
    assert_close(fixed, torch.stack([loss(outputs[0], targets[0], lam) for lam in lams]), **CLOSE)
    last = vmap(lambda z, lam: loss(z, targets[0], lam), in_dims=(-1, 0))(outputs.movedim(0, -1), lams)
    assert_close(last, torch.stack([loss(z, targets[0], lam) for z, lam in zip(outputs, lams, strict=True)]), **CLOSE)
    grid = vmap(lambda z: vmap(lambda lam: loss(z, targets[0], lam))(lams))(outputs)
    assert_close(grid, torch.stack([torch.stack([loss(z, targets[0], lam) for lam in lams]) for z in outputs]), **CLOSE)


def test_vmap_over_class_indices_some_of_them_ignored() -> None:
    logits, _ = example(amended_cross_entropy, sweep=(3,))
    targets = torch.tensor([[0, 1, -100, 2], [-100, -100, -100, -100], [4, 3, 2, 1]])
    weight = torch.rand(5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def one(z: Tensor, y: Tensor) -> Tensor:
        return amended_cross_entropy(z, y, 0.5, weight=weight)

    expected = torch.stack([one(z, y) for z, y in zip(logits, targets, strict=True)])
    assert expected.isnan().tolist() == [False, True, False]
    assert_close(vmap(one)(logits, targets), expected, equal_nan=True, **CLOSE)
    gradients = vmap(grad(one))(logits, targets)
    assert not gradients[1].any()
    assert gradients[[0, 2]].isfinite().all()


@losses
def test_jacrev_of_unreduced_losses_is_block_diagonal(loss: Loss) -> None:
    # ∂e^k/∂z^j = 0 for j ≠ k: the others are constants
    outputs, target = example(loss)
    jacobian = jacrev(lambda z: loss(z, target, 0.6, reduction="none"))(outputs)  # (K, N, K, N, ...)
    for k, j in itertools.product(range(3), range(3)):
        assert bool(jacobian[k, :, j].any()) == (k == j)


# torch.compile -------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {
        "member_weights": torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64),
        "sample_weight": torch.tensor([1.0, 0.0, 2.0, 0.5], dtype=torch.float64),
    },
    "own samples": {"sample_weight": torch.tensor([[1.0, 0, 0, 2], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.float64)},
}


@pytest.mark.parametrize("loss", [LOSSES[0], *(pytest.param(loss, marks=pytest.mark.extended) for loss in LOSSES[1:])])
@pytest.mark.parametrize(
    "variant", ["plain", *(pytest.param(v, marks=pytest.mark.extended) for v in list(VARIANTS)[1:])]
)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_compiled_loss_grad_and_vmap_of_grad_without_recompiling(loss: Loss, variant: str) -> None:
    options = VARIANTS[variant]
    outputs, target = example(loss, sweep=(2,))

    def scalar(z: Tensor, lam: Tensor) -> Tensor:
        return loss(z, target, lam, **options)

    counters = [CompileCounterWithBackend("aot_eager") for _ in range(3)]
    compilations = []
    compiled_loss = torch.compile(scalar, fullgraph=True, backend=counters[0])
    compiled_grad = torch.compile(grad(scalar), fullgraph=True, backend=counters[1])
    compiled_sweep = torch.compile(vmap(grad(scalar)), fullgraph=True, backend=counters[2])
    for value in (0.0, 0.3, 0.7, 1.0):
        lam = torch.tensor(value, dtype=torch.float64)
        leaf = outputs[0].clone().requires_grad_()
        expected = scalar(leaf, lam)
        expected.backward()
        other = outputs[0].clone().requires_grad_()
        compiled = compiled_loss(other, lam)
        compiled.backward()
        assert_close(compiled, expected, **CLOSE)
        assert_close(other.grad, leaf.grad, **CLOSE)
        assert_close(compiled_grad(outputs[0], lam), leaf.grad, **CLOSE)
        sweep = compiled_sweep(outputs, torch.stack([lam, 1 - lam]))
        assert_close(sweep[0], leaf.grad, **CLOSE)
        compilations.append([counter.frame_count for counter in counters])
    assert all(count > 0 for count in compilations[0])
    assert compilations == compilations[:1] * 4  # the first λ compiles, the others find it done


def test_compiled_gradients_are_those_of_constant_others() -> None:
    # The trap: a compiled torch.func.grad that differentiates through the others (the undetached forward)
    logits, target = example(amended_cross_entropy, sweep=(2,))
    lams = torch.tensor([0.5, 0.9], dtype=torch.float64)

    def scalar(z: Tensor, lam: Tensor, detach_others: bool = True) -> Tensor:
        return amended_cross_entropy(z, target, lam, detach_others=detach_others)

    closed = torch.stack(
        [reference.amended_cross_entropy(z, target, float(lam)).gradient() for z, lam in zip(logits, lams, strict=True)]
    )
    wrong = vmap(grad(lambda z, lam: scalar(z, lam, False)))(logits, lams)
    assert (wrong - closed).abs().max() > 1e-3
    compile = {"fullgraph": True, "backend": "aot_eager"}
    assert_close(torch.compile(grad(scalar), **compile)(logits[0], lams[0]), closed[0], **CLOSE)
    assert_close(torch.compile(vmap(grad(scalar)), **compile)(logits, lams), closed, **CLOSE)
    ablation = torch.compile(vmap(grad(lambda z, lam: scalar(z, lam, False))), **compile)(logits, lams)
    assert_close(ablation, wrong, **CLOSE)


# torch's default compiler imports modules written in TorchScript
@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the default compiler of torch.compile needs g++")
def test_the_default_compiler_gives_the_closed_form() -> None:
    logits, target = example(amended_cross_entropy, sweep=(2,))
    lams = torch.tensor([0.5, 0.9], dtype=torch.float64)

    def scalar(z: Tensor, lam: Tensor) -> Tensor:
        return amended_cross_entropy(z, target, lam)

    gradients = torch.compile(vmap(grad(scalar)), fullgraph=True)(logits, lams)
    for z, lam, gradient in zip(logits, lams, gradients, strict=True):
        assert_close(gradient, reference.amended_cross_entropy(z, target, float(lam)).gradient(), **CLOSE)
    leaf = logits[0].clone().requires_grad_()
    torch.compile(scalar, fullgraph=True)(leaf, lams[0]).backward()
    assert_close(leaf.grad, gradients[0], **CLOSE)


@pytest.mark.parametrize("kind", ["indices", "probabilities", "ignored"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_compiled_options(kind: str, reduction: str) -> None:
    logits, target = example(amended_cross_entropy)
    if kind == "probabilities":
        target = F.one_hot(target, 5).double() * 0.9 + 0.02
    elif kind == "ignored":
        target[0] = -100
    options = {
        "weight": torch.tensor([1.0, 2.0, 0.5, 1.5, 1.0], dtype=torch.float64),
        "label_smoothing": 0.1,
        "reduction": reduction,
    }
    upstream = torch.rand(3, 4, dtype=torch.float64) if reduction == "none" else None
    case = Case(logits, target, 0.4, options, upstream)  # λ as a number
    value, gradient = value_and_gradient(amended_cross_entropy, case)
    compiled = torch.compile(amended_cross_entropy, fullgraph=True, backend="aot_eager")
    other_value, other_gradient = value_and_gradient(compiled, case)
    assert_close(other_value, value, **CLOSE)
    assert_close(other_gradient, gradient, **CLOSE)


# autocast and half precision -----------------------------------------------------------------------------------------


@losses
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_does_not_change_precision(loss: Loss, dtype: torch.dtype, reduction: str) -> None:
    outputs, target = example(loss)
    target = target if loss is amended_cross_entropy else target.float()
    upstream = torch.ones(3, 4) if reduction == "none" else None
    case = Case(outputs.to(dtype), target, 0.4, {"reduction": reduction}, upstream)
    value, gradient = value_and_gradient(loss, case)
    func_value, func_gradient = under_func(loss, case)
    with torch.autocast("cpu", torch.bfloat16):
        cast_value, cast_gradient = value_and_gradient(loss, case)
        cast_func_value, cast_func_gradient = under_func(loss, case)
    assert value.dtype == cast_value.dtype == torch.float32
    assert gradient.dtype == cast_gradient.dtype == dtype
    assert_close(cast_value, value, rtol=0, atol=0)
    assert_close(cast_gradient, gradient, rtol=0, atol=0)
    assert_close(cast_func_value, func_value, rtol=0, atol=0)
    assert_close(cast_func_gradient, func_gradient, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [2.0**16, 1024.0, 3.0, -0.5, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_scaled_loss_has_scaled_gradients(dtype: torch.dtype, scale: float) -> None:
    # 2^16 is where torch.amp.GradScaler starts, and more than float16 can hold
    logits, target = example(amended_cross_entropy)
    leaf = logits.to(dtype).requires_grad_()
    (amended_cross_entropy(leaf, target, 0.5) * scale).backward()
    exact = scale * reference.amended_cross_entropy(logits.to(dtype), target, 0.5).gradient()
    # float32 arithmetic: the gradient of elements of at most 1/N·2 has some 20 roundings; then two to the type itself
    u = 2.0**-53 if dtype == torch.float64 else U32
    assert leaf.grad is not None
    assert_close(leaf.grad.double(), exact, rtol=torch.finfo(dtype).eps, atol=abs(scale) * 20 * u)


def test_a_loss_scale_saves_float16_gradients_from_underflow() -> None:
    # 1/N of a small probability lies below float16's smallest number; scaled first and rounded then, it does not
    num_samples = 4096
    logits = torch.tensor([[[8.0, 0.0]], [[8.0, 0.0]]]).repeat(1, num_samples, 1).half().requires_grad_()
    target = torch.zeros(num_samples, dtype=torch.long)
    scale = 2.0**14
    (amended_cross_entropy(logits, target, 0.5) * scale).backward()
    expected = scale / num_samples / (1 + torch.exp(torch.tensor(8.0)))
    assert expected / scale < 2.0**-23  # below a thousandth of float16's smallest normal number, 2^-14
    assert_close(logits.grad[:, :, 1].float(), expected.expand(2, num_samples), rtol=2.0**-10, atol=0)


# backward, once and again --------------------------------------------------------------------------------------------


@losses
def test_backward_through_a_retained_graph_adds_up(loss: Loss) -> None:
    outputs, target = example(loss)
    leaf = outputs.clone().requires_grad_()
    value = loss(leaf, target, 0.5)
    value.backward(retain_graph=True)
    once = leaf.grad.clone()
    value.backward(retain_graph=True)
    assert_close(leaf.grad, 2 * once, **CLOSE)
    value.backward(torch.tensor(0.5, dtype=torch.float64), retain_graph=True)
    assert_close(leaf.grad, 2.5 * once, **CLOSE)
    leaf.grad.zero_()  # in place, as optimizers do
    value.backward(retain_graph=True)
    assert_close(leaf.grad, once, **CLOSE)
    leaf.grad = None
    value.backward()
    assert_close(leaf.grad, once, **CLOSE)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        value.backward()


def test_a_gradient_changed_in_place_is_never_silently_reused() -> None:
    logits, target = example(amended_cross_entropy)
    leaf = logits.clone().requires_grad_()
    value = amended_cross_entropy(leaf, target, 0.5)
    (gradient,) = torch.autograd.grad(value, leaf, retain_graph=True)
    expected = gradient.clone()
    gradient.zero_()
    try:
        (again,) = torch.autograd.grad(value, leaf)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert_close(again, expected, **CLOSE)


@losses
def test_two_losses_of_the_same_outputs_add_up(loss: Loss) -> None:
    outputs, target = example(loss)
    leaf = outputs.clone().requires_grad_()
    (2 * loss(leaf, target, 0.2) + loss(leaf, target, 0.9) / 3).backward()
    expected = 2 * grad(loss)(outputs, target, 0.2) + grad(loss)(outputs, target, 0.9) / 3
    assert_close(leaf.grad, expected, **CLOSE)


@losses
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_batch_of_upstream_gradients(loss: Loss, dtype: torch.dtype) -> None:
    outputs, target = example(loss)
    leaf = outputs.to(dtype).requires_grad_()
    value = loss(leaf, target, 0.5)
    upstream = torch.tensor([1.0, 2.0, -4.0], dtype=value.dtype)
    (batch,) = torch.autograd.grad(value, leaf, upstream, is_grads_batched=True, retain_graph=True)
    (one,) = torch.autograd.grad(value, leaf)
    assert batch.dtype == dtype
    # powers of two: no further rounding
    assert_close(batch, torch.stack([one, 2 * one, -4 * one]), rtol=0, atol=0)


@losses
def test_inside_a_checkpoint(loss: Loss) -> None:
    outputs, target = example(loss)
    leaf = outputs.clone().requires_grad_()
    value = checkpoint(lambda z: loss(z * 1.0, target, 0.5), leaf, use_reentrant=False)
    value.backward()
    assert_close(leaf.grad, grad(loss)(outputs, target, 0.5), **CLOSE)


# forward mode --------------------------------------------------------------------------------------------------------


@losses
@forward_mode
def test_forward_mode_equals_backward(loss: Loss) -> None:
    # the tangent of the summed loss is Σ_k <∇e^k, v^k>: no tangent flows into the others either
    outputs, target = example(loss)
    tangents, _ = example(loss, seed=1)
    value, gradient = value_and_gradient(loss, Case(outputs, target, 0.6))
    expected = (gradient * tangents).sum()
    func_value, tangent = jvp(lambda z: loss(z, target, 0.6), (outputs,), (tangents,))
    assert_close(func_value, value, **CLOSE)
    assert_close(tangent, expected, **CLOSE)
    with fwd.dual_level():
        dual = loss(fwd.make_dual(outputs, tangents), target, 0.6)
        primal, tangent = fwd.unpack_dual(dual)
        assert_close(primal, value, **CLOSE)
        assert tangent is not None
        assert_close(tangent, expected, **CLOSE)


# second derivatives of a member's own loss ---------------------------------------------------------------------------


def own_loss(loss: Loss, k: int, outputs: Tensor, target: Tensor, lam: float, **options: Any) -> Callable[..., Tensor]:
    """Member k's own loss as a function of its own outputs, the others' samples weighted 0."""
    weight = torch.zeros(outputs.shape[:2], dtype=outputs.dtype)
    weight[k] = 1.0

    def own(mine: Tensor) -> Tensor:
        members = torch.stack([mine if j == k else outputs[j] for j in range(outputs.shape[0])])
        return loss(members, target, lam, sample_weight=weight, **options)

    return own


OPTIONS: dict[Loss, dict[str, Any]] = {
    amended_cross_entropy: {"label_smoothing": 0.1},
    binary_amended_cross_entropy: {"pos_weight": torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64)},
    negative_correlation: {},
}


@losses
@pytest.mark.parametrize("kind", ["uniform", "random", "one"])
@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("num_members", [1, 3])
def test_gradcheck_of_each_members_own_loss(num_members: int, lam: float, kind: str, loss: Loss) -> None:
    outputs, target = example(loss)
    outputs = outputs[:num_members]
    alpha = member_weights(kind, num_members, torch.Generator().manual_seed(5))
    options = {"member_weights": alpha, **OPTIONS[loss]}
    for k in range(num_members):

        def unreduced(mine: Tensor, k: int = k) -> Tensor:
            members = torch.stack([mine if j == k else outputs[j] for j in range(num_members)])
            return loss(members, target, lam, reduction="none", **options)[k]

        for own in (unreduced, own_loss(loss, k, outputs, target, lam, **options)):
            mine = outputs[k].clone().requires_grad_()
            assert torch.autograd.gradcheck(own, (mine,))
            assert torch.autograd.gradgradcheck(own, (mine,))


@losses
def test_gradcheck_of_the_summed_loss_fails(loss: Loss) -> None:
    # the others' constancy is no property of the value; this is why each member is checked alone
    outputs, target = example(loss)
    with pytest.raises(GradcheckError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda z: loss(z, target, 0.9), (outputs.requires_grad_(),))


def test_gradcheck_of_the_summed_loss_with_undetached_others() -> None:
    logits, target = example(amended_cross_entropy)
    for reduction in ("mean", "none"):

        def whole(z: Tensor, reduction: str = reduction) -> Tensor:
            return amended_cross_entropy(z, target, 0.9, detach_others=False, reduction=reduction)

        assert torch.autograd.gradcheck(whole, (logits.clone().requires_grad_(),))
        assert torch.autograd.gradgradcheck(whole, (logits.clone().requires_grad_(),))


@pytest.mark.parametrize("lam", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("kind", ["uniform", "random", "one"])
@pytest.mark.parametrize("weighted", [False, True])
@forward_mode
def test_second_derivative_equals_the_analytic_hessian(lam: float, kind: str, weighted: bool) -> None:
    # ∇e^k = s[(1-λ)q^k + λq̄] - w∘p with ∂q̄/∂z^k = α^k ∂q^k/∂z^k, so the Hessian is s(1 - λ + λα^k)(diag q^k - q^k q^kᵀ)
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 1, 4, generator=g, dtype=torch.float64)
    target = torch.tensor([2])
    alpha = member_weights(kind, 3, g)
    options: dict[str, Any] = {"member_weights": alpha}
    s = 1.0
    if weighted:
        options["weight"] = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=torch.float64)
        options["reduction"] = "sum"
        s = 0.5
    weights = [1 / 3] * 3 if alpha is None else alpha.tolist()
    for k in range(3):
        own = own_loss(amended_cross_entropy, k, logits, target, lam, **options)
        q = logits[k, 0].softmax(0)
        expected = s * (1 - lam + lam * weights[k]) * (torch.diag(q) - torch.outer(q, q))
        for vectorize in (False, True):
            matrix = torch.autograd.functional.hessian(own, logits[k], vectorize=vectorize)
            assert_close(matrix.reshape(4, 4), expected, **CLOSE)
        assert_close(hessian(own)(logits[k]).reshape(4, 4), expected, **CLOSE)


def test_second_derivatives_do_not_cross_members() -> None:
    logits, target = example(amended_cross_entropy)
    matrix = torch.autograd.functional.hessian(lambda z: amended_cross_entropy(z, target, 0.7), logits)
    for k, j in itertools.product(range(3), range(3)):
        assert bool(matrix[k, :, :, j].any()) == (k == j)


@losses
def test_a_gradient_penalty(loss: Loss) -> None:
    # scaled loss, create_graph, then a backward through the gradient: eager closed form against torch.func's composite
    outputs, target = example(loss)

    def penalty(z: Tensor) -> Tensor:
        return (grad(lambda x: 3 * loss(x, target, 0.6))(z) ** 2).sum()

    leaf = outputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(3 * loss(leaf, target, 0.6), leaf, create_graph=True)
    total = (gradient**2).sum()
    total.backward()
    assert_close(total, penalty(outputs), **CLOSE)
    assert_close(leaf.grad, grad(penalty)(outputs), **CLOSE)
