"""Search for λ on the samples of an estimator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchace.lab.data import Split, hashed_key
from torchace.lab.data.folds import FewBlocksError, hold_out
from torchace.lab.training.members import FitScores, MemberPlan
from torchace.lab.tuning.auto import ZeroDiversity
from torchace.lab.tuning.grid_search import GridSearch, TunedDiversity
from torchace.lab.tuning.search import SearchCallback, SearchProblem

MAX_SEARCH_ROWS = 10_000


class _EstimatePrinter(SearchCallback):
    def on_estimate(self, seconds: float) -> None:
        print(f"The search for λ takes at most about {seconds:.0f} s.", flush=True)


def search_diversity(
    estimator: Any, plan: MemberPlan, samples: Split, blocks: Tensor | None, seed: int, scores: FitScores | None
) -> TunedDiversity:
    """Choose λ on one held-out part and measure its gain on another, unless the rule predicts none.

    At most `MAX_SEARCH_ROWS` samples are used. No part splits one of the `blocks` (see `number_blocks`).
    """
    fraction, scaler = estimator.validation_fraction, estimator._target_scaler
    variance = 1.0 if scaler is None else float(scaler.std.square().mean())
    score_scale = variance if 1e-50 < variance < 1e50 else 1.0  # else scores of scaled targets: no overflow
    scores = None if scores is None else scores.scaled(score_scale)
    zero = ZeroDiversity(plan, samples.x.shape[1], estimator._num_outputs, len(samples), scores)
    if reason := zero.reason():
        return zero.keep(reason)

    def take(part: Split, part_blocks: Tensor, share: float, purpose: str) -> tuple[Split, Tensor, Split, Tensor]:
        key = hashed_key(seed, purpose)
        mask = hold_out(part_blocks, part.y, share, seed=key, weight=part.weight)
        return part.take(~mask), part_blocks[~mask], part.take(mask), part_blocks[mask]

    assert blocks is not None  # there are enough samples
    try:
        if len(samples) > MAX_SEARCH_ROWS:
            _, _, samples, blocks = take(samples, blocks, MAX_SEARCH_ROWS / len(samples), "search")
        rest, blocks, test, _ = take(samples, blocks, fraction, "check")
        train, _, validation, _ = take(rest, blocks, fraction, "validation")
    except FewBlocksError:
        return zero.keep("There are too few groups for a search.")
    problem = SearchProblem(plan, train, validation, estimator._num_outputs, seed)
    search = GridSearch(
        problem, test=test, test_name="held-out", score_scale=score_scale, end_early=True, baseline=scores
    )
    return search.run(_EstimatePrinter() if estimator.verbose else None)
