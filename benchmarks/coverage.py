"""Coverage of 95 % intervals of a simulated gain: over seeds, and over crossed seeds and samples.

    python benchmarks/coverage.py --out docs/results/coverage.json

A gain is seed effect + sample effect + residual. Seed effects are normal; the others are normal, heavy-tailed (t with 3
degrees of freedom) or skewed (lognormal, and the difference of two lognormal losses).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import measure
import numpy as np
from numpy.typing import NDArray

from torchace._statistics import mean_over_seeds, mean_over_seeds_and_samples

Draw = Callable[[np.random.Generator, tuple[int, int]], NDArray[np.float64]]

SEEDS = (2, 3, 5, 10)
SAMPLES = (30, 400)
# shares of the mean's variance due to seeds, samples and their interaction
SHARES = ((0.0, 0.9, 0.1), (0.1, 0.7, 0.2), (0.3, 0.5, 0.2), (0.5, 0.3, 0.2), (0.9, 0.05, 0.05))


def _lognormal(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    return (np.exp(rng.standard_normal(shape)) - math.exp(0.5)) / math.sqrt(math.e * (math.e - 1))


def _losses(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    """The difference of two lognormal losses whose logarithms have a correlation of 0.8."""
    a = rng.standard_normal(shape)
    b = 0.8 * a + 0.6 * rng.standard_normal(shape)
    return (np.exp(a) - np.exp(b)) / math.sqrt(2 * (math.e**2 - math.exp(1.8)))


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "t, 3 degrees of freedom": lambda rng, shape: rng.standard_t(3, shape) / math.sqrt(3),
    "lognormal": _lognormal,
    "difference of lognormal losses": _losses,
}


def coverage(
    kind: str, samples: int, seeds: int, shares: tuple[float, float, float], *, runs: int, seed: int = 0
) -> dict[str, float]:
    """Share of simulated gains whose interval covers the true gain, by kind of interval.

    Args:
        kind: One of `DISTRIBUTIONS`.
        samples: N.
        seeds: S.
        shares: Shares of the mean's variance due to seeds, samples and their interaction.
        runs: Number of simulated gains.
        seed: Seed of the simulation.
    """
    rng, draw = np.random.default_rng(seed), DISTRIBUTIONS[kind]
    scale = np.sqrt(np.array(shares) * [seeds, samples, seeds * samples])
    covered = {"seeds alone": 0, "seeds and samples": 0}
    for _ in range(runs):
        differences = scale[0] * rng.standard_normal((seeds, 1)) + scale[1] * draw(rng, (1, samples))
        differences = differences + scale[2] * draw(rng, (seeds, samples))
        estimates = (mean_over_seeds(differences.mean(1)), mean_over_seeds_and_samples(differences))
        for name, estimate in zip(covered, estimates, strict=True):
            assert estimate is not None
            low, high = estimate.interval(0.05)
            covered[name] += low <= 0 <= high
    return {name: count / runs for name, count in covered.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--out", type=Path, default=Path("docs/results/coverage.json"))
    options = parser.parse_args()
    rows = []
    for kind, samples, seeds, shares in itertools.product(DISTRIBUTIONS, SAMPLES, SEEDS, SHARES):
        found = coverage(kind, samples, seeds, shares, runs=options.runs)
        rows.append({"distribution": kind, "samples": samples, "seeds": seeds, "shares": shares, **found})
        print(rows[-1], flush=True)
    versions = {"numpy": np.__version__, "commit": measure.commit()}
    content = {"runs": options.runs, "level": 0.95, "versions": versions, "rows": rows}
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(make_page(rows, options.runs, versions))


def make_page(rows: list[dict], runs: int, versions: dict[str, str | None]) -> str:  # type: ignore[type-arg]
    """The results as Markdown."""
    error = 100 * math.sqrt(0.95 * 0.05 / runs)
    kinds = "seeds and samples", "seeds alone"
    crossed, alone = ([100 * row[name] for row in rows if row["seeds"] > 2] for name in kinds)
    two, two_alone = ([100 * row[name] for row in rows if row["seeds"] == 2] for name in kinds)
    lines = [
        "# Coverage of the intervals",
        "",
        f"**95 % intervals from the loss of every sample cover the true gain in {min(crossed):.0f} to "
        f"{max(crossed):.0f} % of simulations; intervals over seeds alone in {min(alone):.0f} to {max(alone):.0f} %.** "
        f"That is with three seeds or more. With two, it is {min(two):.0f} to {max(two):.0f} % and "
        f"{min(two_alone):.0f} to {max(two_alone):.0f} %; the lowest of the first kind where seeds cause most of the "
        "variance.",
        "",
        "torchace reports the first, «crossed» kind if it has the loss of every sample, else the t interval of the "
        "seeds' mean gains («seeds alone»). The latter holds for new seeds on the same test samples, not for new "
        "samples. Reports say which one they show.",
        "",
        "| Seeds | Variance: seeds / samples / both | "
        + " | ".join(f"{n} samples: crossed | {n} samples: seeds alone" for n in SAMPLES)
        + " |",
        "| --: | :-- | " + " | ".join(["--: | --:"] * len(SAMPLES)) + " |",
    ]
    for seeds, shares in itertools.product(SEEDS, SHARES):
        cells = [f"{seeds}", " / ".join(f"{share:g}" for share in shares)]
        for samples, name in itertools.product(SAMPLES, ("seeds and samples", "seeds alone")):
            here = (seeds, samples, list(shares))
            found = [100 * r[name] for r in rows if (r["seeds"], r["samples"], list(r["shares"])) == here]
            cells.append(f"{min(found):.1f} to {max(found):.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Coverage in %, lowest and highest of {len(DISTRIBUTIONS)} distributions of the differences: "
        f"{'; '.join(DISTRIBUTIONS)}. {runs:,} simulated gains each (standard error {error:.1f} points). Variance: "
        "shares of seeds, samples and their interaction in the variance of the mean gain.",
        "",
        f"Written by `benchmarks/coverage.py` (random seed 0, numpy {versions['numpy']}, commit {versions['commit']}); "
        "[every case](coverage.json).",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
