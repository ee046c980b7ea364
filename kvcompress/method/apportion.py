"""Apportionment: whole numbers of slots that add up to a total, from shares that are not whole.

Budgets are handed out in slots, per row of the batch, in plain Python numbers: a layer has few heads and a model few
layers, and exact totals matter more than speed here.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor


def occupancy(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Held and protected slots per head, LongTensor `[B, H_kv]` on the CPU, from scores as an allocator sees them."""
    return (scores > float("-inf")).sum(-1).cpu(), (scores == float("inf")).sum(-1).cpu()


def evenly(total: int, parts: int) -> list[int]:
    """`total` in `parts` whole parts that differ by at most 1, the larger ones first."""
    each, rest = divmod(total, parts)
    return [each + (i < rest) for i in range(parts)]


def largest_remainder(shares: list[float], least: list[int], most: list[int], total: int) -> list[int]:
    """Whole counts near `shares`, within `least` and `most`, that add up to `total` where these allow it.

    Each share is rounded down; what is left goes one by one to the largest remainder, of equals to the first.
    """
    shares = [round(share, 9) for share in shares]  # 2.9999999999 is 3
    counts = [min(max(int(share), low), high) for share, low, high in zip(shares, least, most, strict=True)]
    rest = min(max(total, sum(least)), sum(most)) - sum(counts)
    step = 1 if rest > 0 else -1
    for _ in range(abs(rest)):
        open_ = [i for i, n in enumerate(counts) if (n < most[i] if step > 0 else n > least[i])]
        counts[max(open_, key=lambda i: (step * (shares[i] - counts[i]), -i))] += step
    return counts


def proportional(weights: list[float], least: list[int], most: list[int], total: int) -> list[int]:
    """Whole counts proportional to `weights`, within `least` and `most`, that add up to `total` where these allow it.

    Webster's method: round(weight x factor), with one factor for all. Unlike largest remainders, one more weight at
    the same total never raises the count of another: a cascade that has evicted never wants a token back, and ends
    where a single decision over all layers ends.
    """
    weights = [min(max(weight, 1e-250), 1e250) for weight in weights]
    total = min(max(total, sum(least)), sum(most))

    def at(factor: float) -> list[int]:
        bounds = zip(weights, least, most, strict=True)
        return [max(low, math.floor(min(high, weight * factor) + 0.5)) for weight, low, high in bounds]

    low, high = -600.0, 600.0  # logarithms of a factor that is too small, and of one that is not
    for _ in range(64):
        middle = (low + high) / 2
        if sum(at(math.exp(middle))) <= total:
            low = middle
        else:
            high = middle
    counts = at(math.exp(low))
    for i in sorted(range(len(counts)), key=lambda i: (-weights[i] / (counts[i] + 0.5), i)):
        if sum(counts) == total:
            break
        counts[i] += counts[i] < most[i]  # equal quotients, which no factor parts
    return counts
