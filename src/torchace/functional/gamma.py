"""Conversion between the paper's γ and λ."""

from __future__ import annotations

from torchace import _checks

LOSSES = ("ace", "ncl")


def diversity_from_gamma(gamma: float, num_members: int, loss: str = "ace") -> float:
    r"""The diversity λ that equals the paper's γ.

    $$\gamma_\text{ACE} = \lambda \frac{K-1}{K} \qquad \gamma_\text{NCL} = \frac{\lambda}{2(1 - 1/K)}$$

    Args:
        gamma: γ, such that λ lies in [0, 1].
        num_members: K, at least 2.
        loss: `"ace"` or `"ncl"`.

    Returns:
        λ.

    Example:
        >>> diversity_from_gamma(0.4, 5)
        0.5
    """
    largest = gamma_from_diversity(1.0, num_members, loss)
    _checks.check_gamma(gamma, largest, loss)
    return min(float(gamma) / largest, 1.0)


def gamma_from_diversity(diversity: float, num_members: int, loss: str = "ace") -> float:
    r"""The paper's γ that equals the diversity λ; the inverse of `diversity_from_gamma`.

    Args:
        diversity: λ in [0, 1].
        num_members: K, at least 2.
        loss: `"ace"` or `"ncl"`.

    Returns:
        γ.

    Example:
        >>> gamma_from_diversity(0.5, 5)
        0.4
    """
    _checks.check_diversity(diversity)
    _checks.check_count(num_members, "num_members", least=2)
    _checks.check_choice(loss, "loss", LOSSES)
    if loss == "ace":
        return float(diversity) * (num_members - 1) / num_members
    return float(diversity) * num_members / (2 * (num_members - 1))
