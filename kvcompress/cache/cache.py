"""A cache whose every slot knows which token it holds.

Logical length L is what the model has seen, physical length P what is held. Masks, rotation, reports and tests derive
from positions: int, the token's index among the real tokens of its row, -1 where a slot is empty or padding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer, row_index
from kvcompress.cache.layouts import PagedStore
from kvcompress.cache.nbytes import KINDS, layer_bytes, storage_bytes
from kvcompress.method.codec import Codec
from kvcompress.models.compat import Cache, Rotation

Tensor = torch.Tensor


class CompressedCache(Cache):
    """The layers of one sequence batch, and what they share: real tokens per row, caps, codec, rotation.

    Made by a session; `fork()` gives an independent copy.
    """

    def __init__(self, layers: Iterable[Any], codec: Codec, limited: bool, rotations: list[Rotation] | None = None):
        """Args:
        layers: built by `compat.new_layers`; may be filled in later.
        codec: in what form keys and values are held.
        limited: tokens will be evicted, so a prompt's buffers get no headroom.
        rotations: per layer, given if positions are compact.
        """
        super().__init__(layers=list(layers))
        self.codec = codec
        self.limited = limited
        self.rotations = rotations
        self.latents = False  # what a layer is given are MLA latents and the rotated key beside them
        self.turns: list[Rotation] | None = None  # per layer, given if the codec turns keys back
        self.shift: Tensor | None = (
            None  # [B] how far the position ids lie ahead of `positions`, where `turns` are given
        )
        self.forward: Forward | None = None
        self.real: Tensor | None = None  # [B] real tokens seen
        self.prompted: Tensor | None = None  # [B] real tokens when the last prompt ended
        self.cap: Tensor | None = None  # [B] tokens kept per head, None without limit
        self.closed: Tensor | None = None  # bool [B] on the CPU: rows that decode without compression from here on
        self.columns: Tensor | None = None  # bool [B, L] on the CPU, None while no column was padding
        self.clamped = False
        self.broken = False  # a forward failed half-way
        self.logits: Tensor | None = None  # [B, V] of the last position, where a session ran the last forward
        self.pending: Tensor | None = None  # [B, 1] picked by generate(), not fed yet
        self.moments: list[dict[str, Any]] = []
        self.kept_max = 0
        self.reuse: dict[str, Any] | None = None  # what a prefill that reuses chunks did, as in the session's report
        self.by_row: dict[str, Tensor] = {}  # of a batch: `clamped` bool [B], `kept_max` [B]
        self.owner: Any = None
        self.model: Any = None  # weak reference to the model that fills it

    def __repr__(self) -> str:
        if self.real is None or not self.full_layers:
            return f"CompressedCache({len(self.layers)} layers, nothing evictable held)"
        seen, kept = int(self.real.max()), float(self.kept_tokens().double().mean())
        held = self.nbytes()["valid"] / 2**20
        return f"CompressedCache({len(self.layers)} layers, {kept:.0f} of {seen} tokens per head, {held:.1f} MiB held)"

    @property
    def full_layers(self) -> list[CompressedLayer]:
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer) and not layer.temporary]

    def rotation(self, layer: int) -> Rotation | None:
        return None if self.rotations is None else self.rotations[layer]

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
        total["valid"] = sum(total[kind] for kind in ("keys_values", "positions", "summaries", "tables"))
        total["headroom"] = total["allocated"] - total["valid"]
        return total

    def fork(self) -> CompressedCache:
        """An independent deep copy: tensors, positions and method state."""
        twin = CompressedCache([], self.codec, self.limited, self.rotations)
        twin.layers = [
            layer.fork(twin) if isinstance(layer, CompressedLayer) else _fork_plain(layer) for layer in self.layers
        ]
        twin.real, twin.cap, twin.prompted = _clone(self.real), _clone(self.cap), _clone(self.prompted)
        twin.columns, twin.clamped, twin.owner = _clone(self.columns), self.clamped, self.owner
        twin.closed, twin.by_row = _clone(self.closed), {name: value.clone() for name, value in self.by_row.items()}
        twin.moments, twin.kept_max = [dict(m) for m in self.moments], self.kept_max
        twin.logits, twin.pending, twin.broken = _clone(self.logits), _clone(self.pending), self.broken
        twin.model, twin.reuse = self.model, copy.copy(self.reuse)
        twin.latents, twin.turns, twin.shift = self.latents, self.turns, _clone(self.shift)
        return twin

    snapshot = fork

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
        batch = len(forward.added)
        known = least.expand(batch) if self.shift is None else self.shift
        given = ~padding.all(1).expand(batch)
        if bool((given & ((least != most) | (least != known))).any()):
            raise ValueError(
                "position_ids that jump within a row do not go with a codec that turns keys back before it stores them: "
                "leave position_ids out, or take codec=plain"
            )
        self.shift = torch.where(given, known, 0 if self.shift is None else self.shift)

    def note_clamped(self, rows: Tensor) -> None:
        """Remember that budgets were too small for what is protected in some rows, bool `[B]` on the CPU."""
        self.clamped |= bool(rows.any())
        if len(rows) > 1:
            self.by_row["clamped"] = self.by_row["clamped"] | rows if "clamped" in self.by_row else rows

    def note_kept(self) -> None:
        """Remember how many tokens a head holds at most."""
        self.kept_max = max(self.kept_max, max(int(layer.counts.max()) for layer in self.full_layers))
        if self.real is not None and len(self.real) > 1:
            rows = torch.stack([layer.counts.amax(1) for layer in self.full_layers]).amax(0)
            self.by_row["kept_max"] = torch.maximum(self.by_row.get("kept_max", rows), rows)

    def row(self, number: int) -> CompressedCache:
        """A copy of one row of a batch, without its padding: what it would hold alone. To look at, not to go on with."""
        one = torch.tensor([number])
        twin = CompressedCache([], self.codec, self.limited, self.rotations)
        assert self.real is not None
        twin.real, real = self.real[one], int(self.real[number])
        twin.latents, twin.turns = self.latents, self.turns
        twin.shift = None if self.shift is None else self.shift[one]
        twin.layers = [
            layer.alone(twin, number, real) if isinstance(layer, CompressedLayer) else _one_row(layer, number, real)
            for layer in self.layers
        ]
        twin.reuse = copy.copy(self.reuse)
        twin.clamped = bool(self.by_row["clamped"][number]) if "clamped" in self.by_row else self.clamped
        twin.kept_max = int(self.by_row["kept_max"][number]) if "kept_max" in self.by_row else self.kept_max
        return twin

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
        self.real = self.cap = self.prompted = self.columns = self.closed = self.shift = None
        self.clamped, self.moments, self.kept_max, self.by_row = False, [], 0, {}
        self.logits = self.pending = self.reuse = None

    def _rows(self, index: Tensor) -> None:
        index = index.cpu()
        for name in ("real", "cap", "prompted", "columns", "closed", "shift", "logits", "pending"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value.index_select(0, index.to(value.device)))
        self.by_row = {name: value.index_select(0, index) for name, value in self.by_row.items()}

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


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


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
