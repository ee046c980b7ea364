"""Joint forward: one decode step of several sessions in one forward of the model, each with its own cache.

Embeddings, projections, MLP and head run once over the rows of all. In each layer a session's rows go through its own
cache, forward plan and compressor exactly as in a step of its own (`kvcompress.cache.joint`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvcompress.cache.joint import JointCache, JointMember
from kvcompress.hook.runner import ForwardRequest, check_head, kept_where_idle, next_positions
from kvcompress.hook.session import Session
from kvcompress.models import compat

Tensor = torch.Tensor


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why steps of this model cannot be taken in one forward, or None if they can."""
    windowed = sorted(set(compat.layer_types(model)) - {"full_attention"})
    kind = compat.text_config(model).model_type
    if windowed and kind not in compat.VERIFIED:
        return f"{kind!r} has layers with {', '.join(windowed)}, and which masks it makes for them is not verified"
    return None


@dataclass(eq=False)
class JointStep:
    """What one session asks of a joint forward, and what came of it.

    Attributes:
        session: whose current cache takes the step.
        ids: LongTensor `[b, 1]`; real: bool `[b]` on the CPU, rows that get their token, None for all.
        logits: `[b, V]` afterwards, kept on the cache; None where `error` says why the session has none. Its cache is
            half written then.
    """

    session: Session
    ids: Tensor
    real: Tensor | None = None
    logits: Tensor | None = None
    error: Exception | None = None

    def begin(self, first: int) -> None:
        """Plan the step for rows of the joint batch from `first` on."""
        session = self.session
        cache = session.caches.adopt(session.runner.current())
        rows, seen = self.ids.shape[0], cache.get_seq_length()
        self._fed = torch.ones(rows, dtype=torch.bool) if self.real is None else self.real.bool().cpu()
        self._previous, self._due = cache.logits, seen + 1
        self.positions = next_positions(cache, self._fed[:, None])
        request = ForwardRequest("decode", self._fed[:, None])
        device = session.model.device
        ids, positions = self.ids.to(device), self.positions.to(device)
        cache.begin(session.planner.plan(cache, ids, None, request, positions))
        masks = compat.window_masks(session.model, cache, rows, cache.columns)
        self.member = JointMember(cache, slice(first, first + rows), masks)

    def end(self, logits: Tensor) -> None:
        """Note the forward's `logits [B, V]` with the session."""
        member = self.member
        if member.error is not None:
            raise member.error
        self.session.hooks.complete(member.cache, self._due)
        # a copy: the rows of others are not to be held on to
        self.logits = kept_where_idle(logits[member.rows].clone(), self._previous, self._fed)
        member.cache.keep_logits(self.logits)


@torch.no_grad()
def run(model: PreTrainedModel, steps: Sequence[JointStep]) -> None:
    """Take one decode step of each session in one forward of a hooked model; what a session's part raises is noted.

    Raises:
        Exception: what the forward raises beside the sessions' own parts. All their caches are half written then.
    """
    check_head(model)
    going: list[JointStep] = []
    rows = 0
    for step in steps:
        try:
            step.begin(rows)
        except Exception as error:
            step.error = error
            continue
        going.append(step)
        rows += step.ids.shape[0]
    if not going:
        return
    device = model.device
    output = model(
        input_ids=torch.cat([step.ids.to(device) for step in going]),
        attention_mask=None,
        position_ids=torch.cat([step.positions for step in going]).to(device),
        cache=JointCache([step.member for step in going]),
        use_cache=True,
        logits_to_keep=1,
    )
    for step in going:
        try:
            step.end(output.logits[:, -1])
        except Exception as error:
            step.error = error
