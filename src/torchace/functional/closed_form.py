"""What a training step needs of a loss, for several runs at once: values and the gradient in the logits, no autograd.

A step of small members is bound by the number of its operations. So one softmax serves everything here: the members'
losses, the ensemble's cross entropy and the gradient, which autograd would get from a dozen operations more. `λ` is a
tensor, one number a run; nothing is read back from a device. Arguments are not checked: whoever calls this, calls it
thousands of times with the same shapes. `amended_cross_entropy` and `negative_correlation` are the functions to use
elsewhere; these agree with them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchace.functional._members import compute_dtype

FEW_CLASSES = 64  # fewer, and torch's softmax over the last axis takes ten times as long as over the one before it


class ClosedForm(NamedTuple):
    losses: Tensor  # (R, K): each member's, summed over its samples times their scale
    scores: Tensor  # (R, N): the ensemble's on each sample; (R, K, N): each member's, where they have own targets
    gradient: Tensor  # (R, K, N, ...): of all losses in what the members gave, of its type


def ace_closed_form(
    logits: Tensor,
    target: Tensor,
    diversity: Tensor,
    scale: Tensor,
    *,
    label_smoothing: float = 0.0,
    mixture: Tensor | None = None,
) -> ClosedForm:
    r"""Amended Cross Entropy with uniform weights of the members; the scores are cross entropies.

    $$b = \lambda \bar q - p, \qquad
    e^k = \langle b, \log q^k \rangle - \frac{\lambda}{K} \langle q^k, \log q^k \rangle, \qquad
    \frac{\partial e^k}{\partial z^k} = (1 - \lambda) q^k + b$$

    Args:
        logits: `(R, K, N, C)`, detached.
        target: Class indices, `(R, N)`; `(R, K, N)` where members have batches of their own.
        diversity: λ of each run, `(R,)`.
        scale: What a sample's loss is multiplied by, with the axes of `target`; that of the samples may be 1.
        label_smoothing: Share of the target that is spread evenly over the classes.
        mixture: The ensemble's probabilities on the members' own batches, `(R, K, N, C)`; without it, own batches are
            trained on as with λ=0.

    Returns:
        Losses, scores and the gradient; in float32 for half-precision logits, but for the gradient.

    Example:
        >>> logits = torch.tensor([[[[2.0, 0.0]], [[0.0, 0.0]]]])  # one run of two members, one sample
        >>> found = ace_closed_form(logits, torch.tensor([[0]]), torch.tensor([0.5]), torch.ones(1, 1))
        >>> found.losses.sum(), found.gradient.squeeze()
        (tensor(0.3651), tensor([[-0.2144,  0.2144],
                [-0.4048,  0.4048]]))
    """
    num_members, num_classes, own = logits.shape[1], logits.shape[3], target.ndim == 3
    if not own:
        target, scale = target.unsqueeze(1), scale.unsqueeze(1)  # (R, 1, N): the same for all members
    z, axis = _laid_out(logits)  # (R, K, C, N), the classes at axis 2; or (R, K, N, C)
    log_q = z.log_softmax(axis, dtype=compute_dtype(logits))
    # A class that nobody believes in adds nothing: 0 times a very large number instead of 0 · inf.
    log_q.clamp_(min=torch.finfo(log_q.dtype).min)
    index, scale, lam = target.unsqueeze(axis), scale.unsqueeze(axis), diversity.view(-1, 1, 1, 1)
    hit = log_q.gather(axis, index.expand(-1, num_members, -1, -1)).squeeze(axis)  # (R, K, N)

    coupling = lam / num_members
    q = log_q.exp().mul_(scale)  # from here on, everything times its scale
    if not own:
        b = q.sum(1, keepdim=True).mul_(coupling)
    elif mixture is not None:
        b = (mixture if axis == 3 else mixture.mT) * (lam * scale)
    else:
        b, lam, coupling = torch.zeros_like(q), torch.zeros_like(lam), torch.zeros_like(lam)
    b.scatter_add_(axis, index, (scale * (label_smoothing - 1)).expand_as(index))
    if label_smoothing:
        b -= scale * (label_smoothing / num_classes)
    losses = (b - q * coupling).mul_(log_q).sum((2, 3))
    gradient = q.mul_(1 - lam).add_(b).to(logits.dtype)
    scores = -hit if own else -_log_mean_exp(hit)
    return ClosedForm(losses, scores, gradient if axis == 3 else gradient.mT)


def ncl_closed_form(
    predictions: Tensor, target: Tensor, diversity: Tensor, scale: Tensor, *, mixture: Tensor | None = None
) -> ClosedForm:
    r"""Negative Correlation Learning with uniform weights of the members; the scores are squared errors.

    $$e^k = \tfrac{1}{2}(F^k - Y)^2 - \frac{\lambda}{2(1 - 1/K)}(F^k - \bar F)^2, \qquad
    \frac{\partial e^k}{\partial F^k} = (F^k - Y) - \lambda(F^k - \bar F)$$

    Several outputs count as one: their mean.

    Args:
        predictions: `(R, K, N, M)`, detached.
        target: `(R, N, M)`; `(R, K, N, M)` where members have batches of their own.
        diversity: λ of each run, `(R,)`.
        scale: What a sample's loss is multiplied by, `(R, N)` or `(R, K, N)`; the axis of the samples may be 1.
        mixture: The ensemble's predictions on the members' own batches, `(R, K, N, M)`; without it, own batches are
            trained on as with λ=0.

    Example:
        >>> predictions = torch.tensor([[[[1.0]], [[3.0]]]])  # one run of two members, one sample
        >>> ncl_closed_form(predictions, torch.zeros(1, 1, 1), torch.tensor([0.5]), torch.ones(1, 1)).gradient.squeeze()
        tensor([1.5000, 2.5000])
    """
    num_members = predictions.shape[1]
    f = predictions.to(compute_dtype(predictions))
    if target.ndim == 4:
        error = f - target
        scores = error.square().mean(-1)
    else:
        mean = f.mean(1)
        scores = (mean - target).square().mean(-1)
        error, mixture, scale = f - target.unsqueeze(1), mean.unsqueeze(1), scale.unsqueeze(1)
    lam = diversity.view(-1, 1, 1, 1)
    if mixture is None or num_members == 1:  # a member alone has no second term
        mixture, lam = f, torch.zeros_like(lam)
    gap = f - mixture
    strength = lam / (2 * (1 - 1 / max(num_members, 2)))
    losses = ((0.5 * error.square() - strength * gap.square()).mean(-1) * scale).sum(2)
    gradient = (error - lam * gap) * (scale / predictions.shape[3]).unsqueeze(3)
    return ClosedForm(losses, scores, gradient.to(predictions.dtype))


def _log_mean_exp(values: Tensor) -> Tensor:
    """The logarithm of the mean over members, `(R, K, N)` to `(R, N)`: finite where every exp would underflow.

    `torch.logsumexp` takes twice as many operations, for infinite numbers, which are none of these.
    """
    largest = values.amax(1, keepdim=True)
    return (values - largest).exp_().mean(1).log_().add_(largest.squeeze(1))


def _laid_out(logits: Tensor) -> tuple[Tensor, int]:
    """Logits as the softmax is fastest, contiguous, and the axis of the classes."""
    turned = logits.mT
    if turned.is_contiguous() or (logits.device.type == "cpu" and logits.shape[3] < FEW_CLASSES):
        return turned.contiguous(), 2
    return logits.contiguous(), 3
