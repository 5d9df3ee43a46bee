"""Conversion between λ and the paper's γ."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchace.functional import diversity_from_gamma, gamma_from_diversity


@given(st.floats(0, 1), st.integers(2, 1000), st.sampled_from(["ace", "ncl"]))
def test_conversion_round_trip(diversity: float, num_members: int, loss: str) -> None:
    gamma = gamma_from_diversity(diversity, num_members, loss)
    again = diversity_from_gamma(gamma, num_members, loss)
    assert 0 <= again <= 1
    # five roundings; below the smallest normal number they are absolute
    assert again == pytest.approx(diversity, rel=1e-15, abs=1e-300)


@given(st.floats(0, 1), st.integers(2, 1000))
def test_the_formulas_of_the_paper(diversity: float, num_members: int) -> None:
    # ACE: γ = λ(K-1)/K; NCL: λ = 2γ(1 - 1/K)
    ace = gamma_from_diversity(diversity, num_members)
    assert ace == pytest.approx(diversity * (num_members - 1) / num_members, rel=1e-15)
    ncl = gamma_from_diversity(diversity, num_members, loss="ncl")
    assert 2 * ncl * (1 - 1 / num_members) == pytest.approx(diversity, rel=1e-14, abs=1e-300)


@pytest.mark.parametrize("num_members", [2, 3, 7, 49, 1000])
@pytest.mark.parametrize("loss", ["ace", "ncl"])
def test_the_ends_are_exact(num_members: int, loss: str) -> None:
    assert diversity_from_gamma(0.0, num_members, loss) == 0.0
    assert diversity_from_gamma(gamma_from_diversity(1.0, num_members, loss), num_members, loss) == 1.0


def test_the_paper_s_range() -> None:
    # γ ∈ [0, (K-1)/K]
    assert diversity_from_gamma(0.8, 5) == 1.0
    with pytest.raises(ValueError, match=r"Expected `gamma` in \[0, 0\.8\].*but got 0\.81\."):
        diversity_from_gamma(0.81, 5)
    assert diversity_from_gamma(0.625, 5, loss="ncl") == 1.0
    assert gamma_from_diversity(1.0, 2, loss="ncl") == 1.0
