"""Divergence of next-token distributions: KL, top-1 agreement and -log p along teacher-forced tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from kvcompress.data.task import Turn


def token_divergence(full: torch.Tensor, ours: torch.Tensor, tokens: torch.Tensor) -> dict[str, list[float]]:
    """Per position, from logits `[n, V]` of both and the tokens `[n]` that came: KL in nats, agreement, -log p of each.

    In float64: at a full budget the divergence is what rounding in the logits makes of it, not in the comparison.
    """
    if not bool(full.isfinite().any(-1).all() and ours.isfinite().any(-1).all()) or bool(ours.isnan().any()):
        raise ValueError("logits that are not numbers: nothing can be compared")
    p, q = full.double().log_softmax(-1), ours.double().log_softmax(-1)
    kl = torch.where(p == -math.inf, 0.0, p.exp() * (p - q)).sum(-1).clamp(min=0.0)
    at = tokens[:, None]
    return {
        "kl": kl.tolist(),
        "agree": (full.argmax(-1) == ours.argmax(-1)).double().tolist(),
        "nll": (-q.gather(1, at)[:, 0]).tolist(),
        "nll_full": (-p.gather(1, at)[:, 0]).tolist(),
    }


def reference_answer(
    session: Any, logits: torch.Tensor, turn: Turn, choose: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The full model's own answer after a prompt, token by token, with its logits: the reference of a divergence.

    Args:
        logits: `[1, V]` of the prompt's last position.
        choose: gives the next token `[1]` for logits `[1, V]`.

    Returns:
        `tokens [n]`, the end token included where it comes, and the logits `[n, V]` that predicted each.
    """
    rows: list[torch.Tensor] = []
    tokens: list[int] = []
    while True:
        token = choose(logits)
        rows.append(logits[0].cpu())
        tokens.append(int(token))
        if len(tokens) == turn.max_new_tokens or tokens[-1] in turn.stop:
            return {"logits": torch.stack(rows), "tokens": torch.tensor(tokens)}
        logits = session.step(token[:, None])


def teacher_forced_divergence(
    session: Any, reference: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, dict[str, list[float]]]]:
    """Feed a reference's tokens after a prompt: per forward the session's logits `[n, V]` and the `token_divergence`.

    Values have six digits, which is what a record keeps.
    """
    full, tokens = reference["logits"], reference["tokens"]
    at = 0
    for block in session.follow(tokens[None].to(session.model.device)):
        ours = block[0].float().cpu()
        here = slice(at, at + len(ours))
        found = token_divergence(full[here].float(), ours, tokens[here])
        yield ours, {name: [float(f"{value:.6g}") for value in values] for name, values in found.items()}
        at += len(ours)
