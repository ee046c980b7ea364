"""Ragged rows: sessions that only attend and store, decoding as rows of one ragged batch that is read in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import DenseStore, RaggedStore
from kvcompress.hook.joint_forward import JointStep
from kvcompress.hook.session import Session
from kvcompress.method import Method
from kvcompress.models import compat

Tensor = torch.Tensor


def guest_reason(method: Method) -> str | None:
    """Why a session of this method takes part with its own cache, or None if it can be a row of the ragged batch."""
    parts = method.parts()
    if method.limited and parts.schedule.in_decode:
        return "it evicts while decoding"
    if not parts.reader.reads_all:
        return f"reader={parts.reader.name} reads a selection"
    if parts.codec.name != "plain":
        return f"codec={parts.codec.name} holds tokens in a form of its own"
    if method.limited and method.compact_positions:
        return "compact positions hold keys that are not rotated"
    return None


class Rider(Protocol):
    """Who has a row."""

    session: Session


class RaggedRows:
    """The rows that decode together now, one per rider, in a cache of their own.

    Attributes:
        host: the session that decodes them.
        riders: by row; None where one has ended and its row rides along.
        closed: a step of theirs failed: no more rows.
    """

    def __init__(self, model: PreTrainedModel, kernel: str) -> None:
        self.host = Session(model, Method(), kernel)
        self.riders: list[Rider | None] = []
        self.cache: CompressedCache | None = None
        self.closed = set(compat.layer_types(model)) != {"full_attention"}
        self._lives: list[int] = []  # steps that each row took part in
        self._before: list[Tensor] = []
        self._logits: list[Tensor | None] = []

    def can_take(self, session: Session, rows: int) -> bool:
        """True if what a session of `rows` rows holds can be a row here, and is attended to in the same way.

        Whether its method can, `guest_reason` says.
        """
        cache = session.cache
        if self.closed or rows != 1 or cache is None or cache.columns is not None:
            return False
        if session.compressor.wants_probabilities != self.host.compressor.wants_probabilities:
            return False
        return all(
            isinstance(layer.store, (DenseStore, RaggedStore)) and not layer.encoding.is_encoded
            for layer in cache.full_layers
        )

    def arrange(self, riders: Sequence[Rider]) -> bool:
        """Have a row for each of these, if they are several; True if they have."""
        # rows that have ended ride along, while they are the fewer
        if not set(riders) <= set(self.riders) or 2 * len(riders) < len(self.riders):
            self.dissolve()
            if len(riders) > 1:
                self._gather(riders)
        return bool(self.riders)

    def step(self, asked: Sequence[tuple[Rider, Tensor]]) -> JointStep:
        """The step of all rows; riders with their next tokens `[1, 1]`."""
        device = self.host.model.device
        ids = torch.zeros(len(self.riders), 1, dtype=torch.long, device=device)
        for rider, token in asked:
            ids[self.riders.index(rider)] = token.view(1).to(device)
        real = torch.tensor([rider is not None for rider in self.riders])
        self.host.cache = self.cache
        return JointStep(self.host, ids, None if bool(real.all()) else real)

    def taken(self, asked: Sequence[tuple[Rider, Tensor]], logits: Tensor) -> list[Tensor]:
        """Note that the step has been taken → logits `[1, V]` of each rider."""
        found = []
        for rider, _ in asked:
            row = self.riders.index(rider)
            self._lives[row] += 1
            self._logits[row] = logits[row][None]
            found.append(logits[row][None])
        return found

    def _gather(self, riders: Sequence[Rider]) -> None:
        with self.host.hooks.attached():  # a cache's settings may need the model
            self.cache = cache = self.host.new_cache()
        caches = [rider.session.cache for rider in riders]
        assert all(c is not None for c in caches)
        self.riders, self._lives, self._before = list(riders), [0] * len(riders), []
        self._logits = [None] * len(riders)
        for index, layer in enumerate(cache.layers):
            held = [c.layers[index] for c in caches if c is not None]
            assert isinstance(layer, CompressedLayer)
            layer.concat_rows([one for one in held if isinstance(one, CompressedLayer)])
            self._before.append(layer.counts.clone())
        cache.advance(None, torch.cat([c.real for c in caches if c is not None and c.real is not None]))

    def leave(self, rider: Rider) -> None:
        """Put what a row has decoded into its session's cache; nothing to do for who has no row."""
        own_cache = rider.session.cache
        if rider not in self.riders or self.cache is None or own_cache is None:
            return
        row = self.riders.index(rider)
        self.riders[row] = None
        new = self._lives[row]
        if not new:
            return
        one = torch.ones(1, dtype=torch.long)
        for index, (joint, own) in enumerate(zip(self.cache.layers, own_cache.layers, strict=True)):
            assert isinstance(joint, CompressedLayer) and isinstance(own, CompressedLayer)
            store = joint.held()
            assert isinstance(store, RaggedStore)
            channels = store.part(row, self._before[index][row], new)
            channels["positions"] = channels["positions"][:, :1]
            mine, done = own.held(), 0
            while done < new:  # buffers grow at the token at which they would have
                n = min(max(1, mine.spare), new - done)
                mine.append({name: value[:, :, done : done + n] for name, value in channels.items()}, None, n * one)
                done += n
            own.seen += new
        assert own_cache.real is not None
        own_cache.advance(None, torch.full_like(own_cache.real, new))
        own_cache.keep_logits(self._logits[row], own_cache.pending)
        own_cache.note_kept()
        rider.session.compressor.stats.merge(self.host.compressor.stats.kernels)

    def dissolve(self) -> None:
        """Give every row back to its session."""
        for rider in self.riders:
            if rider is not None:
                self.leave(rider)
        self.riders, self.cache, self._lives, self._before, self._logits = [], None, [], [], []
