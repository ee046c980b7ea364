"""Answer check: decoding together gives the tokens of decoding alone, up to the first that was a close call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcompress.hook.generation import Generation
from kvcompress.hook.session import Session, Tensor

CLOSE = 1e-3  # logits: two kernels differ in the last digits, so a nearer second token may win


class MarginRecorder(Session):
    """A session that notes, per answer and token, the margin between the best and the second logit."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.margins: list[list[float]] = []

    def generate(self, *args: Any, **kwargs: Any) -> Generation:
        self.margins.append([])
        if self.cache is not None and self.cache.pending is None and self.cache.logits is not None:
            self._note_margin(self.cache.logits)
        return super().generate(*args, **kwargs)

    def step(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        logits = super().step(ids, real)
        self._note_margin(logits)
        return logits

    def _note_margin(self, logits: Tensor) -> None:
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
