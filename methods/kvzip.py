"""KVzip: what the model reads when it repeats the context (Kim et al., NeurIPS 2025, arXiv 2505.23416)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcompress.common.tokenization import plain_ids
from kvcompress.method import Allocator, LayerView, Method, Needs, Observed, Pass, Scorer, State, Tensor, Uniform
from kvcompress.method.apportion import evenly, occupancy
from kvcompress.methods.adakv import Ada

MARK = "\u27e8context\u27e9"  # stands for the user's words while the chat template is taken apart
CONTINUATION = "\n\nRepeat the part of the previous context exactly, starting with"


@dataclass(frozen=True)
class RepetitionScorer(Scorer):
    """The strongest attention a key gets while the model repeats its chunk of the context, teacher-forced.

    Tokens that were not repeated (what the chat template opens with, decoded tokens) rank above all that were, the
    newer the higher.
    """

    sinks: int = 4
    chunk: int = 2000
    postfix: int = 8
    instruction: str = ""
    continuation: str = ""
    answer: str = ""

    @property
    def needs(self) -> Needs:
        return Needs(extra_passes=1)

    def passes(self, ids: Tensor, tokenizer: Any, first: int = 0) -> Iterable[Pass]:
        opening, closing = turn(tokenizer, self.answer)
        fixed = max(self.sinks, len(opening)) if ids[: len(opening)].tolist() == opening else self.sinks
        for at in range(max(first, fixed), len(ids), self.chunk):
            last = min(at + self.chunk, len(ids))
            if at == fixed:
                asked = encode(tokenizer, self.instruction)
            else:
                asked = encode(tokenizer, self.continuation) + ids[max(at - self.postfix, 0) : at].tolist()
            yield Pass(torch.cat([torch.tensor(asked + closing, dtype=torch.long), ids[at:last]]), at, last, fixed)

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        age = (view.positions + 1) / view.real.to(view.positions.device)[:, None, None]
        return torch.where(observed.passes > 0, observed.passes, 1 + age.float())


def encode(tokenizer: Any, text: str) -> list[int]:
    return plain_ids(tokenizer, text) if text else []


def turn(tokenizer: Any, answer: str) -> tuple[list[int], list[int]]:
    """Token ids that open a user's turn, and those between it and the model's answer (`answer` without a template)."""
    if not getattr(tokenizer, "chat_template", None):
        return [], encode(tokenizer, answer)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    before, found, after = text.partition(MARK)
    if not found:
        raise ValueError("the tokenizer's chat template leaves out what the user says: KVzip cannot ask to repeat it")
    return encode(tokenizer, before), encode(tokenizer, after)


@dataclass(frozen=True)
class Global(Allocator):
    """One threshold for all: the best scores of all layers and heads together say how many tokens each head gets.

    What is protected comes first and no head is emptied; totals are exact.
    """

    scope: ClassVar = "all"
    name: ClassVar[str] = "global"

    def allocate(self, scores, stats, layers_seen, n_layers, total):
        device = scores[0].device
        occupied = [occupancy(s) for s in scores]
        held, protected = (torch.stack(numbers, 1) for numbers in zip(*occupied, strict=True))  # [B, layers, H_kv]
        flat = torch.cat([self._candidates(s).flatten(1).to(device) for s in scores], dim=1)
        order = flat.sort(dim=-1, descending=True, stable=True).indices
        free = (total - protected.sum((1, 2))).clamp(min=0).to(device)
        take = torch.arange(flat.shape[1], device=device) < free[:, None]
        chosen = torch.zeros_like(take).scatter_(1, order, take) & (flat > float("-inf"))
        parts = chosen.split([s[0].numel() for s in scores], 1)
        hits = [part.view(s.shape).sum(-1).cpu() for part, s in zip(parts, scores, strict=True)]
        counts = torch.stack(hits, 1) + protected
        for row in (total >= held.sum((1, 2))).nonzero().squeeze(1).tolist():  # everything stays, with room to grow
            rest = evenly(int(total[row] - held[row].sum()), held[row].numel())
            counts[row] = held[row] + torch.tensor(rest).view_as(held[row])
        return list(counts.unbind(1))

    @staticmethod
    def _candidates(scores: Tensor) -> Tensor:
        """Scores of what is not protected, -inf elsewhere; +inf for the best of a head that protects nothing."""
        ranked = scores.masked_fill(scores == float("inf"), float("-inf"))
        best = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, ranked.argmax(-1, keepdim=True), True)
        bare = ~(scores == float("inf")).any(-1, keepdim=True)
        return ranked.masked_fill(best & bare & (ranked > float("-inf")), float("inf"))


@dataclass(frozen=True, kw_only=True)
class KVzip(Method):
    """Keep what the model needs to repeat the context, whatever will be asked of it (paper section 3), at prompt end.

    Each chunk of the context is repeated in an extra pass over the un-evicted cache: two to three times the prefill's
    work, counted as compression. The softmax of its scores runs over its own keys, the fixed opening and the
    repetition, as in the released code, but in float32, and totals are exact (the code keeps what lies above a
    threshold, one pair fewer, with ties several). A chunk of a chunked prefill is repeated when it ends, against what
    is held then, and keeps its scores; a later turn is repeated with the answers before it.

    Attributes:
        chunk: tokens repeated per pass: 2,000, in kvpress 2,048.
        postfix: last tokens of the chunk before, which tell where to go on.
        sinks: first tokens that are always kept. What the chat template itself opens with ranks above all that is
            repeated; a system prompt of your own counts as context unless `sinks` covers it.
        level: "pair" for one threshold over all layers and heads; "layer" for equal totals per layer, shared by its
            heads (kvpress's layerwise); "uniform" for the same number in every head.
        instruction, continuation: what the model is asked, for the first chunk and for later ones.
        answer: stands before the repetition where the tokenizer has no chat template.
    """

    family = "reconstruction"
    keeps = "what the model attends to while it repeats the context; one threshold over layers and heads"
    source = "arXiv 2505.23416; snu-mllab/KVzip"
    differences = (
        "float32; exact totals instead of a threshold; evicted pairs are freed in every layer and head; no head-"
        "level scores computed beforehand"
    )

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"chunk": 2000, "continuation": f"{CONTINUATION} ", "answer": "\n\nAnswer: "},
        "code": {"chunk": 2000, "continuation": f"{CONTINUATION} ", "answer": "\n\nAnswer: "},
        "kvpress": {"chunk": 2048, "continuation": CONTINUATION, "answer": "\n"},
    }

    chunk: int | None = None
    postfix: int = 8
    sinks: int = 4
    level: str = "pair"
    instruction: str = "\n\nRepeat the previous context exactly."
    continuation: str | None = None
    answer: str | None = None

    def check(self) -> None:
        assert self.chunk is not None
        for name, value, least in (("chunk", self.chunk, 1), ("postfix", self.postfix, 0), ("sinks", self.sinks, 0)):
            if value < least:
                raise ValueError(f"{name}={value}; at least {least}")
        if self.level not in ("pair", "layer", "uniform"):
            raise ValueError(f"level={self.level!r}; valid: pair, layer, uniform")

    def reserved(self) -> int:
        return self.sinks

    def make_scorer(self) -> RepetitionScorer:
        assert self.chunk is not None and self.continuation is not None and self.answer is not None
        return RepetitionScorer(self.sinks, self.chunk, self.postfix, self.instruction, self.continuation, self.answer)

    def make_allocator(self) -> Allocator:
        return {"pair": Global(), "layer": Ada(alpha=0.0), "uniform": Uniform()}[self.level]
