"""Selection: from scores and counts to the set of slots to keep, with sinks and window in it by construction."""

from __future__ import annotations

import warnings

import torch

from kvcompress.method.budget import Protection

Tensor = torch.Tensor


def _guarded(positions: Tensor, protection: Protection) -> tuple[Tensor, Tensor]:
    """(held, protected) bool `[B, H, P]`: non-empty slots, and the first sinks and last window of them."""
    held = positions >= 0
    rank = held.cumsum(-1) - 1
    number = held.sum(-1, keepdim=True)
    sinks, window = (x.to(positions.device)[..., None] for x in (protection.sinks, protection.window))
    return held, held & ((rank < sinks) | (rank >= number - window))


def candidates(positions: Tensor, protection: Protection) -> Tensor:
    """Bool `[B, H, P]`: slots that may be dropped, neither empty nor protected."""
    held, guarded = _guarded(positions, protection)
    return held & ~guarded


def ranked(scores: Tensor, positions: Tensor, protection: Protection) -> Tensor:
    """Scores as an allocator sees them: +inf where a slot is protected, -inf where it is empty, finite elsewhere."""
    held, guarded = _guarded(positions, protection)
    finite = torch.finfo(scores.dtype)
    scores = scores.nan_to_num(finite.min, finite.max, finite.min)
    return scores.masked_fill(~held, float("-inf")).masked_fill(guarded, float("inf"))


def check_nan(rows: Tensor) -> None:
    """Warn of rows of a batch, bool `[B]`, that have a NaN among their scores: the others are as they are alone.

    Raises:
        ValueError: every row has one.
    """
    found = rows.nonzero().squeeze(1).tolist()
    if len(found) == len(rows):
        raise ValueError("a score is NaN" + (f" in each of the {len(rows)} rows" if len(rows) > 1 else ""))
    if found:
        which = f"row {found[0]}" if len(found) == 1 else f"rows {', '.join(map(str, found))}"
        warnings.warn(
            f"a score is NaN in {which} of a batch of {len(rows)}: what is kept there is arbitrary, the other rows are sound",
            stacklevel=2,
        )


def _without_nan(scores: Tensor, candidate: Tensor) -> Tensor:
    """Scores with the lowest number in the place of NaN; raises as `check_nan`."""
    nan = scores.isnan() & candidate
    if not bool(nan.any()):
        return scores
    check_nan(nan.flatten(1).any(1))
    return scores.masked_fill(nan, torch.finfo(scores.dtype).min)


def top_slots(scores: Tensor, positions: Tensor, counts: Tensor, protection: Protection) -> Tensor:
    """The slots to keep: the protected ones, then the highest scores; ties go to the earlier position.

    Args:
        scores: float32 `[B, H, P]`, positions int `[B, H or 1, P]`, -1 = empty.
        counts: LongTensor `[B, H]`, slots to keep, at most what is held.
        protection: per head `[B, H]`.

    Returns:
        bool `[B, H, P]` with exactly `counts` true values per head.

    Raises:
        ValueError: if a held slot's score is NaN in every row of the batch.
    """
    held, guarded = _guarded(positions, protection)
    candidate = (held & ~guarded).expand_as(scores)
    scores = _without_nan(scores, candidate)
    lowest = torch.finfo(torch.float32).min
    ranked = scores.clamp(min=lowest).masked_fill(~candidate, float("-inf"))
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    guarded = guarded.expand_as(scores)
    free = (counts.to(scores.device) - guarded.sum(-1)).clamp(min=0)
    take = torch.arange(scores.shape[-1], device=scores.device) < free[..., None]
    return guarded | (torch.zeros_like(candidate).scatter_(2, order, take) & candidate)


def staged(
    scores: Tensor,
    second: Tensor,
    positions: Tensor,
    counts: Tensor,
    protection: Protection,
    share: float,
    inside: bool,
) -> Tensor:
    """One ranking from two stages: a head's first part by `scores` goes before all others, which go by `second`.

    Args:
        scores, second: float32 `[B, H, P]`.
        counts: LongTensor `[B, H]`, slots to keep.
        share: of the slots kept beside the protected ones, rounded down, that the first stage picks.
        inside: the share is of all slots kept, and protected ones are picked first.

    Returns:
        `second`, with +inf where the first stage picked.
    """
    held, guarded = _guarded(positions, protection)
    candidate = (held & ~guarded).expand_as(scores)
    protected = guarded.expand_as(scores).sum(-1)
    counts = counts.to(scores.device)
    first = (counts * share).long() - protected if inside else ((counts - protected) * share).long()
    order = scores.masked_fill(~candidate, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    take = torch.arange(scores.shape[-1], device=scores.device) < first[..., None]
    picked = torch.zeros_like(candidate).scatter_(2, order, take) & candidate
    return second.masked_fill(picked, float("inf"))


def lowest_slot(scores: Tensor, positions: Tensor, protection: Protection) -> Tensor:
    """The one slot per head to drop, `[B, H, 1]`: the lowest score; of ties the latest position goes."""
    held, guarded = _guarded(positions, protection)
    candidate = (held & ~guarded).expand_as(scores)
    return last_lowest(_without_nan(scores, candidate), ~candidate)


def last_lowest(scores: Tensor, blocked: Tensor) -> Tensor:
    """The lowest score's slot per head outside `blocked`, bool `[B, H, P]`, of ties the last: LongTensor `[B, H, 1]`.

    A NaN is the lowest. Nothing is asked of the host.
    """
    highest = torch.finfo(torch.float32).max
    ranked = scores.clamp(max=highest).masked_fill_(blocked, float("inf"))
    return scores.shape[-1] - 1 - ranked.flip(-1).argmin(dim=-1, keepdim=True)
