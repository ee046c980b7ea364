"""Statistics of boards: confidence intervals of scores, paired differences to the baseline, and significance.

Few samples are the rule here, so each tool is one that stays honest with few:

- the interval of a score is Wilson's where every sample is right or wrong (five of five is not "1.00 for sure"), else
  Student's t;
- the interval of a difference is a paired bootstrap over samples (percentiles; every method is resampled alike);
- its p-value is of a sign-flip test: under the null hypothesis each sample's difference may as well have had the other
  sign. It is exact where the differences are of one size or the samples few, else drawn. A bootstrap's own p-value would
  call five samples of one kind certain; this test cannot go below 2 / 2^n;
- the mark of significance is of p-values corrected after Holm (1979) over all comparisons of one table, which bounds
  the chance of even one false mark whatever hangs together.

Distributions are scipy's. Three things are ours: Wilson's interval (a line of arithmetic, where scipy.stats would take a
second to import), the bootstrap and the sign flips. Those draw their resamples once for all methods with equally many
samples, as one matrix; `scipy.stats.bootstrap` and `permutation_test` draw them again for each, and other ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy import special

LEVEL = 0.95
RESAMPLES = 4000
FLIPS = 20000
EXACT = 14  # samples up to which every assignment of signs is looked at
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Interval:
    """A mean, its standard error and the ends of its interval; what one sample cannot tell is None."""

    mean: float
    stderr: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Difference(Interval):
    """A paired difference, the p-value of there being none, and the number of samples that both sides have."""

    p: float
    n: int


def standard_error(values: Sequence[float] | np.ndarray) -> float | None:
    """Of the mean, with n - 1 degrees of freedom."""
    if len(values) < 2:
        return None
    return float(np.std(np.asarray(values, dtype=np.float64), ddof=1) / math.sqrt(len(values)))


def score_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Mean score with its interval: Wilson's for scores that are all 0 or 1, else Student's t within [0, 1].

    Raises:
        ValueError: there are no values.
    """
    if not len(values):
        raise ValueError("no scores: an interval needs at least one sample")
    array = np.asarray(values, dtype=np.float64)
    n, mean = len(array), float(array.mean())
    if np.isin(array, (0.0, 1.0)).all():
        low, high = wilson(mean, n, level)
        return Interval(mean, standard_error(array), low, high)
    error = standard_error(array)
    if error is None:
        return Interval(mean, None, None, None)
    reach = student_quantile((1 + level) / 2, n - 1) * error
    low, high = mean - reach, mean + reach
    if 0.0 <= array.min() and array.max() <= 1.0:
        low, high = max(0.0, low), min(1.0, high)
    return Interval(mean, error, low, high)


def wilson(share: float, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of a share of n."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle = share + z * z / (2 * n)
    reach = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # rounding must not put 0 of n above nothing, or n of n below all
    return min(share, max(0.0, (middle - reach) / scale)), max(share, min(1.0, (middle + reach) / scale))


def student_quantile(level: float, freedom: int) -> float:
    """The quantile of Student's t with so many degrees of freedom."""
    return float(special.stdtrit(freedom, level))


# ---------------------------------------------------------------------- paired differences


def paired(scores: Mapping[str, float], base: Mapping[str, float]) -> np.ndarray:
    """Differences on the samples that both have, by sample id in order. Shape [n]."""
    common = sorted(scores.keys() & base.keys())
    return np.asarray([float(scores[key]) - float(base[key]) for key in common], dtype=np.float64)


def difference(deltas: Sequence[float] | np.ndarray, level: float = LEVEL, seed: int = 0) -> Difference | None:
    """The mean of paired differences with bootstrap interval and p-value; None without a common sample."""
    array = np.asarray(deltas, dtype=np.float64)
    n = len(array)
    if n == 0:
        return None
    mean = float(array.mean())
    if n == 1:
        return Difference(mean, None, None, None, 1.0, 1)
    low, high = bootstrap(array, level, seed)
    return Difference(mean, standard_error(array), low, high, sign_flip(array, seed), n)


def bootstrap(values: np.ndarray, level: float = LEVEL, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean of `values` [n] over resamples; the same seed and n give the same resamples."""
    means = _resamples(len(values), seed) @ values / len(values)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@lru_cache(maxsize=16)
def _resamples(n: int, seed: int) -> np.ndarray:
    """How often each of n samples is drawn in each resample. [RESAMPLES, n]"""
    draw = np.random.default_rng([seed, n])
    return draw.multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(np.float32 if n > 1000 else np.float64)


def sign_flip(deltas: np.ndarray, seed: int = 0) -> float:
    """Two-sided p-value of a mean of zero, over all or FLIPS drawn assignments of signs to the differences [n].

    Differences of zero say nothing and are left out. Where the rest have one size, as right-or-wrong scores give, it is
    the exact binomial test (McNemar's).
    """
    moved = deltas[np.abs(deltas) > 1e-12]
    n = len(moved)
    if n == 0:
        return 1.0
    sizes = np.abs(moved)
    if np.ptp(sizes) < 1e-9 * sizes.max():
        return _binomial(int((moved > 0).sum()), n)
    seen, slack = abs(float(moved.sum())), 1e-9 * float(sizes.sum())
    sums = np.abs(_signs(n, seed) @ sizes)
    extreme = int((sums >= seen - slack).sum())
    # drawn: what was seen is one assignment among the others, so that p is never 0
    return extreme / len(sums) if n <= EXACT else (extreme + 1) / (len(sums) + 1)


@lru_cache(maxsize=16)
def _signs(n: int, seed: int) -> np.ndarray:
    """Assignments of signs, all of them for few samples. [assignments, n] of -1 and 1"""
    if n <= EXACT:
        bits = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    else:
        bits = np.random.default_rng([seed, n, 1]).integers(0, 2, size=(FLIPS, n), dtype=np.int8)
    return (2 * bits - 1).astype(np.float32 if n > 1000 else np.float64)


def _binomial(k: int, n: int) -> float:
    """Two-sided p-value of k of n where both are as likely."""
    return min(1.0, 2 * float(special.bdtr(min(k, n - k), n, 0.5)))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for being one of many (Holm 1979): reject those below a level, and the chance of any false
    rejection stays below it. In the order given."""
    count = len(p_values)
    corrected, worst = [0.0] * count, 0.0
    for rank, at in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, (count - rank) * p_values[at]))
        corrected[at] = worst
    return corrected


def least_samples(comparisons: int, level: float = SIGNIFICANT) -> int:
    """Samples below which no difference among so many comparisons can be marked, however large it is."""
    return math.ceil(math.log2(2 * max(comparisons, 1) / level))


# ---------------------------------------------------------------------- comparisons at equal measured bytes


def at_bytes(points: Sequence[tuple[float, float]], target: float, near: float = 0.02) -> dict[str, Any] | None:
    """The score of one method at a share of bytes held.

    A run within `near` of the target (relative) is taken as it is; else two runs around it are joined by a straight
    line and the result says so. Never beyond the runs there are.

    Args:
        points: (measured share of bytes, score) of one method's runs.

    Returns:
        {"score", "interpolated"} or None.
    """
    points = sorted(points)
    close = [point for point in points if abs(point[0] - target) <= near * target]
    if close:
        best = min(close, key=lambda point: abs(point[0] - target))
        return {"score": best[1], "interpolated": False}
    for (left, low), (right, high) in zip(points, points[1:], strict=False):
        if left < target < right:
            return {"score": low + (high - low) * (target - left) / (right - left), "interpolated": True}
    return None


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points (cost, score) that no other beats in one without losing in the other, by rising cost."""
    found: list[int] = []
    best = -math.inf
    for at in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[at][1] > best:
            best = points[at][1]
            found.append(at)
    return found
