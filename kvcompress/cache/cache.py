"""CompressedCache: the layers of one sequence batch, each slot of which knows the token it holds.

Logical length L counts the columns the model has seen, physical length P the slots held. Masks, rotation, reports and
tests derive from positions: int, the token's index among the real tokens of its row, -1 where a slot is empty or padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer, row_index
from kvcompress.cache.layouts import PagedStore
from kvcompress.cache.nbytes import KINDS, layer_bytes, storage_bytes
from kvcompress.cache.sequence import CacheSpec, SequenceState
from kvcompress.models.compat import Cache

Tensor = torch.Tensor


class CompressedCache(Cache):
    """Layers of one sequence batch, their common settings (`spec`) and the state of the rows (`sequence`).

    Made by a session; `fork()` gives an independent copy.
    """

    def __init__(
        self,
        spec: CacheSpec,
        make_layers: Callable[[CompressedCache], Iterable[Any]],
        sequence: SequenceState | None = None,
    ):
        """Args:
        spec: settings, shared with forks.
        make_layers: builds the layers of this cache.
        sequence: state of the rows; by default nothing seen yet.
        """
        self.spec = spec
        self._sequence = SequenceState() if sequence is None else sequence
        self._forward: Forward | None = None
        self._broken = False
        super().__init__(layers=[])
        self.layers[:] = make_layers(self)

    def __repr__(self) -> str:
        if self.real is None or not self.full_layers:
            return f"CompressedCache({len(self.layers)} layers, nothing evictable held)"
        seen, kept = int(self.real.max()), float(self.kept_tokens().double().mean())
        held = self.nbytes()["valid"] / 2**20
        return f"CompressedCache({len(self.layers)} layers, {kept:.0f} of {seen} tokens per head, {held:.1f} MiB held)"

    @property
    def full_layers(self) -> list[CompressedLayer]:
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer) and not layer.temporary]

    @property
    def sequence(self) -> SequenceState:
        """State of the rows."""
        return self._sequence

    @property
    def forward(self) -> Forward | None:
        """The forward that runs now."""
        return self._forward

    @property
    def broken(self) -> bool:
        """True if a forward failed half-way, so that layers may hold different tokens."""
        return self._broken

    @property
    def real(self) -> Tensor | None:
        """Real tokens seen by each row, LongTensor `[B]` on the CPU."""
        return self._sequence.real

    @property
    def cap(self) -> Tensor | None:
        """Tokens each row may keep per head, LongTensor `[B]` on the CPU; None without limit."""
        return self._sequence.cap

    @property
    def columns(self) -> Tensor | None:
        """Columns that hold a real token, bool `[B, L]` on the CPU; None while no column was padding."""
        return self._sequence.columns

    @property
    def logits(self) -> Tensor | None:
        """Logits `[B, V]` of each row's last token, where a session ran the last forward."""
        return self._sequence.logits

    @property
    def pending(self) -> Tensor | None:
        """Tokens `[B, 1]` that generate() picked and no forward has seen."""
        return self._sequence.pending

    def leader(self, layer: int, size: int) -> Tensor | None:
        """Positions held by the first of `layer`'s group of `size` full-attention layers, None if it is the first."""
        numbers = [full.index for full in self.full_layers]
        number = numbers.index(layer)
        return None if number % size == 0 else self.positions(numbers[number - number % size])

    def held_rows(self) -> Tensor:
        """Tokens held per row by the first full-attention layer's first head, LongTensor `[B]` on the CPU."""
        return self.full_layers[0].counts[:, 0]

    def positions(self, layer: int) -> Tensor:
        """LongTensor `[B, H_kv, P]` of a full-attention layer; -1 = empty."""
        chosen = self._full(layer)
        positions = chosen.positions()
        return positions.expand(-1, chosen.counts.shape[1], -1).long()

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H_kv, P, D]` of a full-attention layer, padded where heads hold fewer."""
        return self._full(layer).keys_values()

    def tiers(self, layer: int) -> Tensor:
        """Where each slot of `positions(layer)` lies: 0 = on the device, 1 = on the host only."""
        store = self._full(layer).store
        return store.tiers() if isinstance(store, PagedStore) else torch.zeros_like(self.positions(layer))

    def kept_tokens(self) -> Tensor:
        """Tokens held, LongTensor `[n_full_layers, B, H_kv]` on the CPU."""
        if not self.full_layers:  # every layer slides: none is ours
            return torch.zeros(0, 0 if self.real is None else len(self.real), 0, dtype=torch.long)
        return torch.stack([layer.counts for layer in self.full_layers])

    def _full(self, layer: int) -> CompressedLayer:
        chosen = self.layers[layer]
        if not isinstance(chosen, CompressedLayer):
            raise ValueError(
                f"layer {layer} is a {type(chosen).__name__}: it keeps transformers' own cache, without positions"
            )
        return chosen

    def nbytes(self) -> dict[str, int]:
        """Bytes held now, summed over live storage.

        Returns:
            by kind, `keys_values` and `positions` of non-empty slots on the device (under a codec `keys_values` is the
            sum of its `codes`, `scales` and exact `residual`, 0 without one); where slots lie in pages, `summaries` of
            these and the `tables` that find them, of either tier; storage of `scores` and `index` (summaries and
            tables among it), of what methods keep beside them; `headroom` (spare and empty slots), `host`; `valid` =
            keys_values + positions + summaries + tables, `allocated` = the storage of these, `full` = what a
            DynamicCache would hold for the same real tokens in these layers; `other_layers` and `other_allocated` = keys
            and values of sliding-window layers and their storage, which are the same with and without compression.
        """
        total: dict[str, int] = dict.fromkeys([*KINDS, "headroom", "valid", "other_layers", "other_allocated"], 0)
        for layer in self.layers:
            if not isinstance(layer, CompressedLayer):
                held = [getattr(layer, name, None) for name in ("keys", "values")]
                total["other_layers"] += sum(t.numel() * t.element_size() for t in held if t is not None)
                total["other_allocated"] += sum(storage_bytes(t) for t in held if t is not None)
            elif layer.store is not None:
                for name, value in layer_bytes(layer, self.real).items():
                    total[name] += value
        fed = (self._sequence.fed, self._sequence.passed)
        total["scores"] += sum(storage_bytes(tensor) for tensor in fed if tensor is not None)
        total["valid"] = sum(total[kind] for kind in ("keys_values", "positions", "summaries", "tables"))
        total["headroom"] = total["allocated"] - total["valid"]
        return total

    def fork(self) -> CompressedCache:
        """An independent deep copy: tensors, positions and method state."""
        twin = CompressedCache(self.spec, self._forked, self._sequence.map(torch.clone))
        twin._broken = self._broken
        return twin

    snapshot = fork

    def go_back(self, snapshot: CompressedCache) -> None:
        """Hold what `snapshot`, a fork made earlier, holds: after a forward that failed half-way."""
        self._sequence = snapshot.sequence.map(torch.clone)
        self.layers[:] = snapshot._forked(self)
        self.end()

    def _forked(self, twin: CompressedCache) -> list[Any]:
        return [layer.fork(twin) if isinstance(layer, CompressedLayer) else _fork_plain(layer) for layer in self.layers]

    # ------------------------------------------------------------------ the course of a sequence

    def _update(self, **changes: Any) -> None:
        self._sequence = replace(self._sequence, **changes)

    def begin(self, forward: Forward | None) -> None:
        """A forward starts: the cache is broken until it ends, since an interrupt runs no hook."""
        self._forward, self._broken = forward, True

    def end(self, complete: bool = True) -> None:
        """The forward has ended."""
        self._forward, self._broken = None, not complete

    def restore(self, sequence: SequenceState) -> None:
        """Back to an earlier state of the rows: a refused forward leaves no trace."""
        self._sequence = sequence

    def advance(self, real: Tensor | None, added: Tensor) -> None:
        """Count new columns: `real` bool `[B, n]` on the CPU (None if all are real tokens), `added [B]` of each row."""
        before, old, columns = self.real, self.columns, None
        if real is not None or old is not None:
            length = int(added.max()) if real is None else real.shape[1]
            seen = torch.ones(len(added), self.get_seq_length(), dtype=torch.bool) if old is None else old
            new = torch.ones(len(added), length, dtype=torch.bool) if real is None else real
            columns = torch.cat([seen, new], dim=1)
        self._update(real=added if before is None else before + added, columns=columns)

    def begin_prompt(self, cap: Tensor | None) -> None:
        """The columns counted last end a prompt, after which rows keep `cap [B]` tokens per head."""
        self._update(prompted=self.real, cap=cap, closed=None)

    def close_rows(self, rows: Tensor) -> None:
        """Rows, bool `[B]`, that decode without compression until the next prompt."""
        closed = self._sequence.closed
        self._update(closed=rows if closed is None else closed | rows)

    def note_shift(self, forward: Forward) -> None:
        """Remember how a row's position ids lie to its `positions`: a codec that turns keys back counts on it.

        Raises:
            ValueError: not the same for all tokens of a row.
        """
        rotated = forward.rotated.cpu().expand_as(forward.positions) if len(forward.positions) > 1 else forward.rotated
        positions = forward.positions.expand_as(rotated.cpu())
        ahead, padding = rotated.cpu() - positions, positions < 0
        least = ahead.masked_fill(padding, torch.iinfo(ahead.dtype).max).amin(1)
        most = ahead.masked_fill(padding, torch.iinfo(ahead.dtype).min).amax(1)
        batch, before = len(forward.added), self._sequence.shift
        known = least.expand(batch) if before is None else before
        given = ~padding.all(1).expand(batch)
        if bool((given & ((least != most) | (least != known))).any()):
            raise ValueError(
                "position_ids that jump within a row do not go with a codec that turns keys back before it stores them: "
                "leave position_ids out, or take codec=plain"
            )
        self._update(shift=torch.where(given, known, 0 if before is None else before))

    def note_fed(self, ids: Tensor, passed: Tensor) -> None:
        """Remember ids `[B, L]` fed so far (-1 at padding), and how many tokens `[B, 1]` had their auxiliary forwards."""
        self._update(fed=ids, passed=passed)

    def keep_logits(self, logits: Tensor | None, pending: Tensor | None = None) -> None:
        """Logits `[B, V]` after each row's last token, and what was picked from them but not fed, `[B, 1]`."""
        self._update(logits=logits, pending=pending)

    def keep_pending(self, pending: Tensor | None) -> None:
        """Tokens `[B, 1]` that were picked and not fed; None to go on with others."""
        self._update(pending=pending)

    def note_reuse(self, report: dict[str, Any]) -> None:
        """What a prefill that reuses chunks did, as in the session's report."""
        self._update(reuse=report)

    def note_moment(self, phase: str) -> None:
        """Remember what is held when a forward has ended: the most tokens of a head, and bytes where it was no step."""
        if not self.full_layers:
            return
        self.note_kept()
        if phase == "decode":
            return
        nbytes = self.nbytes()
        moment = {
            "moment": phase,
            "seen": self.get_seq_length(),
            "tokens_held": float(self.kept_tokens().double().mean()),
            "bytes_valid": nbytes["valid"],
            "bytes_allocated": nbytes["allocated"],
        }
        self._update(moments=(*self._sequence.moments, moment))

    def note_clamped(self, rows: Tensor) -> None:
        """Remember that budgets were too small for what is protected in some rows, bool `[B]` on the CPU."""
        before = self._sequence
        changes: dict[str, Any] = {"clamped": before.clamped | bool(rows.any())}
        if len(rows) > 1:
            changes["clamped_rows"] = rows if before.clamped_rows is None else before.clamped_rows | rows
        self._update(**changes)

    def note_kept(self) -> None:
        """Remember how many tokens a head holds at most."""
        before, layers = self._sequence, self.full_layers
        changes: dict[str, Any] = {"kept_max": max(before.kept_max, max(int(layer.counts.max()) for layer in layers))}
        if before.real is not None and len(before.real) > 1:
            rows = torch.stack([layer.counts.amax(1) for layer in layers]).amax(0)
            changes["kept_rows"] = rows if before.kept_rows is None else torch.maximum(before.kept_rows, rows)
        self._update(**changes)

    # ------------------------------------------------------------------ rows

    def row(self, number: int) -> CompressedCache:
        """A copy of one row of a batch, without its padding: what it would hold alone. To look at, not to go on with."""
        assert self.real is not None
        real = int(self.real[number])

        def alone(twin: CompressedCache) -> list[Any]:
            return [
                x.select_row(twin, number, real) if isinstance(x, CompressedLayer) else _one_row(x, number, real)
                for x in self.layers
            ]

        return CompressedCache(self.spec, alone, self._sequence.alone(number))

    def replace_layer(self, index: int, layer: Any) -> None:
        """Put another layer in the place of one that holds nothing yet, or whose tokens the other holds."""
        self.layers[index] = layer

    def fork_other(self, layer: int) -> Any:
        """A copy of a layer of transformers' own class.

        A sliding layer's tensors are shared, since it only ever replaces them: so they stay views of the same storage,
        and count as many bytes.
        """
        held = self.layers[layer]
        return copy.copy(held) if getattr(held, "is_sliding", False) else _fork_plain(held)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        return self.fork()

    def __reduce__(self) -> Any:
        raise TypeError("a CompressedCache belongs to a live session and cannot be pickled; fork() copies it")

    def reset(self) -> None:
        super().reset()
        self._sequence, self._broken = SequenceState(), False

    def _rows(self, index: Tensor) -> None:
        self._sequence = self._sequence.select(index)

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        self._rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._rows(row_index(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.real is not None:
            self._rows(torch.arange(len(self.real)).repeat_interleave(repeats))


def _one_row(layer: Any, number: int, real: int) -> Any:
    """One row of a transformers layer, without the columns that were padding in front of it."""
    twin = object.__new__(type(layer))
    twin.__dict__.update(vars(layer))
    for name in ("keys", "values"):
        held = getattr(layer, name, None)
        if isinstance(held, Tensor) and held.dim() == 4:
            setattr(twin, name, held[number : number + 1, :, -min(real, held.shape[2]) :].clone())
    return twin


def _fork_plain(layer: Any) -> Any:
    """A copy of a transformers layer that shares no tensor with it."""
    copy = object.__new__(type(layer))
    copy.__dict__.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in vars(layer).items()})
    return copy
