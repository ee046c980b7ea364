"""Off-policy gap: how far a sampler's tokens lie from the policy that scores them, from log-probabilities alone.

Notation: Δ_t = log π(y_t) − log μ(y_t) for tokens y_t sampled from μ (the compressed model) and scored by π (the dense
model), both at the same temperature; the importance ratio is ρ_t = e^Δ_t. Sums are made in float64. Sources: k3 and the
direction of the KL estimate as in verl and ms-swift (log μ − log π estimates KL(μ || π)); truncated weights (TIS) and
masks as in slime, where rejected tokens leave the denominator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Array = np.ndarray

# log of the smallest positive float32: what a log-probability of minus infinity counts as
LOG_ZERO = math.log(2.0**-149)


def deltas(sampler: Sequence[float], scorer: Sequence[float]) -> tuple[Array, Array]:
    """Δ `[n]` of one sample, and where the scorer gave the token no probability (bool `[n]`).

    A log-probability of minus infinity under the scorer counts as `LOG_ZERO`, so that the token stays in every mean.

    Raises:
        ValueError: lengths differ, or a value is NaN or positive infinity, or the sampler's own is not finite.
    """
    mu, pi = np.asarray(sampler, dtype=np.float64), np.asarray(scorer, dtype=np.float64)
    if mu.shape != pi.shape:
        raise ValueError(f"{mu.size} log-probabilities of the sampler, {pi.size} of the scorer: one of each per token")
    if not np.isfinite(mu).all():
        raise ValueError("a sampled token has no finite log-probability under its own sampler")
    if np.isnan(pi).any() or (pi == math.inf).any():
        raise ValueError("a log-probability of the scorer is not a number below infinity")
    impossible = np.isneginf(pi)
    return np.where(impossible, LOG_ZERO, pi) - mu, impossible


def kl(delta: Array) -> float:
    """Mean of −Δ: the plain estimate of KL(μ || π) in nats per token; it may be negative."""
    return float(-delta.mean())


def k3(delta: Array) -> float:
    """Mean of e^Δ − 1 − Δ in nats per token: the same expectation as `kl`, never negative, of smaller variance."""
    return float((np.expm1(delta) - delta).mean())


def chi2_token(delta: Array) -> float:
    """Mean of ρ² minus 1: χ² of the token ratios."""
    return float(np.exp(2 * delta).mean() - 1)


def log_chi2_sequence(sums: Array) -> float:
    """log(1 + χ²) of sequence ratios, from ΣΔ of each sample; in log space, as e^2ΣΔ leaves the range of floats."""
    doubled = 2 * sums
    top = doubled.max()
    return float(top + math.log(np.exp(doubled - top).mean()))


def ess(log_weights: Array) -> float:
    """Effective sample size as a share, (Σw)² / (n Σw²) in (0, 1], from log-weights `[n]`."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def truncated(delta: Array, most: float) -> Array:
    """Truncated importance weights min(ρ, C) (TIS)."""
    return np.minimum(np.exp(delta), most)


def mask(delta: Array, low: float = 0.5, high: float = 2.0) -> Array:
    """Bool `[n]`: tokens whose ratio lies in [low, high]; the others are rejected."""
    ratio = np.exp(delta)
    return (ratio >= low) & (ratio <= high)


def masked_mean(values: Array, kept: Array) -> float:
    """Mean over kept tokens alone (rejected ones leave the denominator); 0 where none is kept."""
    return float(values[kept].mean()) if kept.any() else 0.0


def rejected(samples: Sequence[Array], threshold: float) -> float:
    """Share of samples that hold any token with ρ below `threshold` (Sparse-RL's rejection of whole sequences)."""
    return float(np.mean([bool(len(one)) and float(one.min()) < math.log(threshold) for one in samples]))


def advantages(rewards: Sequence[float]) -> list[float]:
    """Group-normalised advantages (r − mean) / (std + 1e-6); 0 where all rewards of the group are equal."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.size == 0 or (values == values[0]).all():
        return [0.0] * values.size
    return [float(x) for x in (values - values.mean()) / (values.std() + 1e-6)]


def importance_reward(rewards: Sequence[float], sums: Array) -> float:
    """Self-normalised estimate Σ w r / Σ w of the scorer's expected reward, with w = exp(ΣΔ) of each sample."""
    weights = np.exp(sums - sums.max())
    return float((weights * np.asarray(rewards, dtype=np.float64)).sum() / weights.sum())


def pass_at(k: int, rewards: Sequence[float]) -> float:
    """Unbiased pass@k of one group (Chen et al., arXiv 2107.03374): 1 − C(n − c, k) / C(n, k).

    Raises:
        ValueError: k is not between 1 and the number of samples.
    """
    n, right = len(rewards), sum(reward >= 1.0 for reward in rewards)
    if not 1 <= k <= n:
        raise ValueError(f"k={k}; from 1 to the {n} samples of the group")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)
