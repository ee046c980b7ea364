"""Statistics of boards: confidence intervals of scores, paired differences to the baseline, and significance.

Few samples are the rule here, so each tool is one that stays honest with few:

- the interval of a score is Wilson's where every sample is right or wrong (five of five is not "1.00 for sure"), else
  Student's t; Agresti and Coull (1998) and Bowyer et al. (2025, arXiv 2503.01747) say why not the normal one;
- the interval of a difference is a paired bootstrap over samples (percentiles; every method is resampled alike), never
  narrower than Student's: the percentiles of few samples are too narrow (Hesterberg, 2015);
- no interval has width zero. Where more than half of the samples have one value, a share of up to 1 - (α/2)^(1/n) of all
  samples there are may have none of the values seen (Clopper and Pearson, 1934, for 0 of n) and score anything: an interval
  reaches at least as far as that moves the mean. For differences that are all one loss this agrees with the sign-flip test:
  the interval leaves out 0 from the sixth sample on, and so does p < 0.05;
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
POWER = 0.8  # chance to tell a difference that is there
COLUMNS = 64  # of differences whose signs are flipped together: 20,000 sums of each


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
    low, high = student(mean, error, n, level)
    if 0.0 <= array.min() and array.max() <= 1.0:
        low, high = hull((max(0.0, low), min(1.0, high)), floor(array, 0.0, 1.0, level))
    return Interval(mean, error, low, high)


def student(mean: float, error: float, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Student's interval of a mean of n values with this standard error."""
    reach = student_quantile((1 + level) / 2, n - 1) * error
    return mean - reach, mean + reach


def unseen_share(n: int, level: float = LEVEL) -> float:
    """The largest share of a population of which n samples may have shown nothing (Clopper and Pearson's bound for 0 of
    n)."""
    return 1 - ((1 - level) / 2) ** (1 / n)


def floor(values: np.ndarray, least: float, most: float, level: float = LEVEL) -> tuple[float, float] | None:
    """What the interval of a mean has to hold where more than half of the values are one; None elsewhere.

    Args:
        least, most: that a value can be.
    """
    counts = np.unique(np.round(values, 6), return_counts=True)[1]
    if 2 * counts.max() <= len(values):
        return None
    mean, share = float(values.mean()), unseen_share(len(values), level)
    return (1 - share) * mean + share * least, (1 - share) * mean + share * most


def hull(*intervals: tuple[float, float] | None) -> tuple[float, float]:
    """The smallest interval that holds all of these."""
    given = [one for one in intervals if one is not None]
    return min(low for low, _ in given), max(high for _, high in given)


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
    """The mean of paired differences of scores with interval and p-value; None without a common sample."""
    array = np.asarray(deltas, dtype=np.float64)
    n = len(array)
    if n == 0:
        return None
    mean = float(array.mean())
    if n == 1:
        return Difference(mean, None, None, None, 1.0, 1)
    error = standard_error(array)
    assert error is not None
    wide = student(mean, error, n, level)
    low, high = hull(
        bootstrap(array, level, seed), (max(-1.0, wide[0]), min(1.0, wide[1])), floor(array, -1.0, 1.0, level)
    )
    return Difference(mean, error, low, high, sign_flip(array, seed), n)


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


def samples_needed(deltas: Sequence[float] | np.ndarray, comparisons: int = 1, power: float = POWER) -> int | None:
    """Samples that would tell a difference as large as the one seen from none, with this power; None where none is seen.

    Paired: ((z of the level + z of the power) · s / mean)², with the standard deviation s of the differences, at a level
    that is shared out among the comparisons. Never fewer than the sign-flip test can mark at all. What is seen may be an
    accident: an effect found large by chance makes the number too small.
    """
    array = np.asarray(deltas, dtype=np.float64)
    mean = float(array.mean()) if len(array) else 0.0
    if len(array) < 2 or abs(mean) < 1e-12:
        return None
    normal = NormalDist()
    reach = normal.inv_cdf(1 - SIGNIFICANT / max(comparisons, 1) / 2) + normal.inv_cdf(power)
    needed = math.ceil((reach * float(array.std(ddof=1)) / mean) ** 2)
    return max(needed, least_samples(comparisons))


@dataclass(frozen=True)
class Pooled(Interval):
    """Several runs as one: the interval is over `distinct` samples, however often each was run.

    Attributes:
        runs, samples: how many, and samples of each at most; distinct: samples by id, in all runs together; least: samples
            of the run that has the fewest.
    """

    runs: int
    samples: int
    distinct: int
    least: int

    @property
    def counted(self) -> str:
        """ "5 runs of 2 samples", and whether they are the same ones."""
        most = "" if self.least == self.samples else "at most "
        same = self.distinct == self.least == self.samples and self.runs > 1
        return f"{self.runs} runs of {most}{self.samples} samples" + (" (the same)" if same else "")


def pooled(runs: Sequence[Mapping[str, float]]) -> Pooled:
    """The mean score of runs that differ in their seed, from scores by sample id.

    A sample that several runs had counts once, with its mean: to run it again tells nothing of other samples.

    Raises:
        ValueError: there is no score.
    """
    ids = sorted({name for run in runs for name in run})
    means = [float(np.mean([run[name] for run in runs if name in run])) for name in ids]
    found = score_interval(means)
    most = max(len(run) for run in runs)
    least = min(len(run) for run in runs)
    return Pooled(found.mean, found.stderr, found.low, found.high, len(runs), most, len(ids), least)


# ---------------------------------------------------------------------- ranks


def rank_bounds(scores: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """The best and the worst rank that each of several methods may have, from their scores on the same samples `[n]`.

    A method is surely above another where the sign-flip test of their paired differences says so, corrected after Holm over
    all pairs: all statements hold together at that level (Mogstad et al., 2024, Review of Economic Studies 91). Methods
    that cannot be told apart share a range.
    """
    count = len(scores)
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    if not pairs:
        return [(1, 1)] * count
    deltas = np.stack([scores[i] - scores[j] for i, j in pairs], axis=1)
    told = [p < SIGNIFICANT for p in holm(sign_flips(deltas))]
    above = [0] * count
    below = [0] * count
    for (i, j), apart, mean in zip(pairs, told, deltas.mean(axis=0), strict=True):
        if apart:
            better, worse = (i, j) if mean > 0 else (j, i)
            above[worse] += 1
            below[better] += 1
    return [(above[i] + 1, count - below[i]) for i in range(count)]


def sign_flips(deltas: np.ndarray, seed: int = 0) -> list[float]:
    """`sign_flip` of every column of differences `[n, m]`."""
    n, found = len(deltas), [1.0] * deltas.shape[1]
    sizes = np.abs(deltas)
    odd: list[int] = []  # columns whose differences are of several sizes: the rest is a binomial each
    for at in range(deltas.shape[1]):
        moved = sizes[:, at] > 1e-12
        if not moved.any():
            continue
        if np.ptp(sizes[moved, at]) < 1e-9 * sizes[:, at].max():
            found[at] = _binomial(int((deltas[moved, at] > 0).sum()), int(moved.sum()))
        else:
            odd.append(at)
    signs = _signs(n, seed) if odd else np.empty((0, n))
    for start in range(0, len(odd), COLUMNS):
        part = odd[start : start + COLUMNS]
        sums = np.abs(signs @ sizes[:, part].astype(signs.dtype))
        seen, slack = np.abs(deltas[:, part].sum(axis=0)), 1e-6 * sizes[:, part].sum(axis=0)
        extreme = (sums >= seen - slack).sum(axis=0)
        for at, many in zip(part, extreme, strict=True):
            found[at] = float(many) / len(sums) if n <= EXACT else (float(many) + 1) / (len(sums) + 1)
    return found


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
    weights = weights_at(points, target, near)
    if weights is None:
        return None
    return {"score": sum(share * points[at][1] for at, share in weights.items()), "interpolated": len(weights) > 1}


def weights_at(points: Sequence[tuple[float, float]], target: float, near: float = 0.02) -> dict[int, float] | None:
    """What share each run has in the score of `at_bytes`, by its place among the points: one run, or two around it."""
    order = sorted(range(len(points)), key=lambda i: points[i])
    close = [at for at in order if abs(points[at][0] - target) <= near * target]
    if close:
        return {min(close, key=lambda at: abs(points[at][0] - target)): 1.0}
    for i, j in zip(order, order[1:], strict=False):
        left, right = points[i][0], points[j][0]
        if left < target < right:
            share = (target - left) / (right - left)
            return {i: 1 - share, j: share}
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
