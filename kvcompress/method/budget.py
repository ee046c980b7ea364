"""Budgets: how many tokens a row may keep, per KV head, averaged over layers and heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Budget = float | int
MOST_TOKENS = 2**31 - 1  # positions are held as int32


class NotTogether(ValueError):
    """Invalid combination of valid settings: a sweep over all combinations skips the cell."""


@dataclass(frozen=True)
class Protection:
    """Slots of one row that are kept whatever their score, after clamping.

    `sinks` first real tokens and `window` last real tokens, each a LongTensor `[B]`; `clamped` is a bool `[B]` that
    says where the cap was too small for what the method asked for.
    """

    sinks: torch.Tensor
    window: torch.Tensor
    clamped: torch.Tensor


def check_budget(budget: Budget, reserved: int = 0) -> Budget:
    """Return `budget` if it is legal: a float share in (0, 1] or an int number of tokens above `reserved`.

    Args:
        budget: scikit-learn's convention. `1.0` means no limit.
        reserved: sinks plus window of the method; an int budget must leave at least one slot beside them.

    Raises:
        ValueError: names the value and what is allowed; `NotTogether` where other methods may have that budget.
    """
    allowed = "allowed: a float share in (0, 1] of the row's real tokens, or an int number of tokens"
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise ValueError(f"budget={budget!r} is a {type(budget).__name__}; {allowed}")
    if isinstance(budget, float):
        if not math.isfinite(budget) or not 0.0 < budget <= 1.0:
            hint = ""
            if budget > 1 and math.isfinite(budget):
                tokens = max(2, math.ceil(budget))
                share = f"; for {budget:g}% write {budget / 100:g}" if budget <= 100 else ""
                hint = f" (for {tokens} tokens write the int {tokens}{share})"
            raise ValueError(f"budget={budget} is not a share in (0, 1]{hint}; {allowed}")
        return budget
    if budget < 1:
        raise ValueError(f"budget={budget} keeps nothing; {allowed} of at least 1")
    if budget > MOST_TOKENS:
        raise ValueError(f"budget={budget} is more tokens than a sequence can have; {allowed} up to {MOST_TOKENS}")
    if budget < reserved + 1:
        raise NotTogether(
            f"budget={budget} tokens is too small: sinks plus window need {reserved}, so at least {reserved + 1} is "
            "allowed; raise the budget, or lower the method's sinks or window"
        )
    return budget


def is_unlimited(budget: Budget) -> bool:
    """True for the share 1.0, which evicts nothing in prompt or decode."""
    return isinstance(budget, float) and budget == 1.0


def cap(budget: Budget, real: torch.Tensor) -> torch.Tensor | None:
    """Tokens each row may keep per KV head, or None where there is no limit.

    Args:
        budget: as checked by `check_budget`.
        real: LongTensor `[B]`, real (non-padding) tokens each row has seen.

    Returns:
        LongTensor `[B]`: `max(1, round(share * real))` with Python's rounding, or the int budget.
    """
    if is_unlimited(budget):
        return None
    if isinstance(budget, float):
        return (real.double() * budget).round().long().clamp(min=1)
    return torch.full_like(real, budget)


def protect(kept: torch.Tensor, sinks: int | torch.Tensor, window: int | torch.Tensor, spare: int = 1) -> Protection:
    """Clamp sinks and window to what `kept` slots allow, so that at least `spare` slots are left to the score.

    The window shrinks to at most half of what is kept, then the sinks to what is left but `spare`.

    Args:
        kept: LongTensor `[B]`, slots kept per head.
        sinks: first tokens the method protects.
        window: last tokens the method protects.
        spare: 0 where an allocator may leave a head nothing but its protected tokens.
    """
    first = torch.as_tensor(sinks, device=kept.device).expand_as(kept)
    asked = torch.as_tensor(window, device=kept.device).expand_as(kept)
    clamped = kept < first + asked + spare
    small_window = torch.minimum(asked, kept // 2)
    small_sinks = torch.minimum(first, (kept - small_window - spare).clamp(min=0))
    return Protection(
        sinks=torch.where(clamped, small_sinks, first),
        window=torch.where(clamped, small_window, asked),
        clamped=clamped & ((first > 0) | (asked > 0)),
    )
