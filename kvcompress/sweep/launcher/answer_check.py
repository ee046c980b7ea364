"""Answer check: decoding together gives the tokens of decoding alone, up to the first that was a close call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

CLOSE = 1e-3  # logits: two kernels differ in the last digits, so a nearer second token may win


class MarginRecorder:
    """Records the margin between the best and the second logit, per answer and token: a session's `on_logits`."""

    def __init__(self) -> None:
        self.margins: list[list[float]] = []

    def __call__(self, number: int, logits: Tensor) -> None:
        if number == 0:
            self.margins.append([])
        best, second = logits[0].float().topk(2).values.tolist()
        self.margins[-1].append(best - second)


def compare_answers(alone: Mapping[str, Any], together: Mapping[str, Any], margins: list[list[float]]) -> str | None:
    """First difference of answers decoded together to those decoded alone, None where they agree.

    Args:
        alone, together: what a task returned of the same sample; `margins` were noted when it ran alone.
    """
    turns = zip(alone["tokens"], together["tokens"], margins, strict=True)
    for number, (expected, found, lead) in enumerate(turns, 1):
        if list(expected) == list(found) and alone["finished"][number - 1] == together["finished"][number - 1]:
            continue
        first = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
        first = min(len(expected), len(found)) if first is None else first
        if lead[first] < CLOSE:
            return None  # from here on the sequences differ for a good reason
        return (
            f"answer {number}, token {first + 1}: together not as alone, where the best logit led by {lead[first]:.2g}"
        )
    return None
