"""Reading pages: what a reader of pages is told and answers, and a decode query's attention over what it chose.

Nothing is dropped. A page is `page_size` consecutive tokens of those that a row and KV head holds; two bounds per
channel on its keys limit what any query can score there (Quest, arXiv 2406.10774, section 3.2). A layer is put into
pages at the first decode step after a prompt, and back when another prompt begins.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from kvcompress.cache.layouts import LowRankKeyPages, PagedStore, keep_slots
from kvcompress.kernels import triton_pages
from kvcompress.kernels.blockwise import AttentionParams, sdpa_block, softmax_block
from kvcompress.method.budget import Budget, NotTogether, cap, check_budget
from kvcompress.method.parts import Reader
from kvcompress.method.view import State

if TYPE_CHECKING:
    from kvcompress.cache.forward import Forward
    from kvcompress.cache.layer import CompressedLayer

Tensor = torch.Tensor

PREFIX = "page_"  # of what readers of pages keep in a layer's state: it ends with the pages


@dataclass
class PageIndex:
    """What a reader of pages may look at.

    Attributes:
        layer: index of the layer in the model.
        size: tokens to a page.
        pages: LongTensor `[B, H_kv]`, pages of each row and head, the last of which may be partial.
        bounds: `[B, H_kv, P, 2D]`: of each page the largest key and the largest negated key, by channel.
        real: LongTensor `[B]`, real tokens of each row when its prompt ended.
        step: LongTensor `[B]` on the CPU, which decode step of its row this is since the last longer forward, from 1;
            -1 for a row that has no token in it.
        scaling: the model's factor on q·k.
        scored: heads whose bounds were read.
    """

    layer: int
    size: int
    pages: Tensor
    bounds: Tensor
    real: Tensor
    step: Tensor
    scaling: float = 1.0
    scored: int = field(default=0, init=False)

    def upper(self, q: Tensor, heads: Tensor | None = None, width: float = 1.0) -> Tensor:
        """At least the largest q·k of each page, `[B, H_kv, G, P]` float32; -inf where there is no page.

        sum_d max(q_d min_d, q_d max_d), before the model's scaling: the middle of the bounds, and half their distance
        on top, sum_d q_d (max_d + min_d) / 2 + |q_d| (max_d - min_d) / 2.

        Args:
            q: `[B, H, 1, D]`.
            heads: LongTensor, the KV heads wanted; all by default.
            width: share of that half distance that counts; below 1 it is no upper bound any more, 0 the middle.
        """
        batch, kv = self.pages.shape
        asked = q.view(batch, kv, -1, q.shape[-1])
        bounds, pages = self.bounds, self.pages
        if heads is not None:
            asked, bounds, pages = (x.index_select(1, heads) for x in (asked, bounds, pages))
        self.scored += asked.shape[1]
        both = torch.cat([asked.clamp(min=0), asked.neg().clamp_(min=0)], dim=-1)
        if width != 1.0:
            both = torch.lerp(torch.cat([asked, -asked], dim=-1) / 2, both, width)
        scores = torch.matmul(both.float(), bounds.float().transpose(2, 3))
        beyond = torch.arange(scores.shape[-1], device=q.device) >= pages[..., None]
        return scores.masked_fill_(beyond[:, :, None], float("-inf"))


def top_pages(scores: Tensor, wanted: Tensor, last: Tensor | None = None) -> Tensor:
    """The best pages per head, LongTensor `[B, h, n]`, -1 where a row wants or has fewer; the first of equal ones.

    Args:
        scores: `[B, h, P]`, -inf where there is no page.
        wanted: LongTensor `[B]` on the CPU.
        last: LongTensor `[B, h]`: a page that is always among them.
    """
    n = min(int(wanted.max()), scores.shape[2])
    if last is not None:
        scores = scores.scatter(2, last[..., None], float("inf"))
    found, order = scores.topk(min(n + 1, scores.shape[2]), dim=-1)
    equal = (found[..., n - 1 : n] == found[..., n:]) & (found[..., n:] > float("-inf"))
    if int(wanted.min()) < n or bool(equal.any()):  # which of equal ones is chosen matters
        found, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    rank, wanted = torch.arange(n, device=scores.device), wanted.to(scores.device)
    none = (found[..., :n] == float("-inf")) | (rank >= wanted[:, None, None])
    return order[..., :n].masked_fill(none, -1)


class PagedReader(Reader):
    """A reader that chooses pages.

    Attributes:
        page_size: tokens to a page.
        budget: tokens to read per step, per head: a share of the row's prompt or a number.
        bound_width: share of the distance from the middle of a page's bounds to the upper one that counts in its score.
    """

    in_pages: ClassVar[bool] = True
    across_heads: ClassVar[bool] = False  # heads share something of a token, and so must hold the same tokens
    bounded: ClassVar[bool] = True  # wants `PageIndex.bounds`
    page_size: int
    budget: Budget
    bound_width: float = 1.0

    def reads_layer(self, layer: int) -> bool:
        """False for a layer whose queries attend to all that it holds."""
        return True

    def offloaded(self, layer: int) -> tuple[int, ...]:
        """KV heads of a layer that keep on the device only what `hold` says, and everything on the host."""
        return ()

    @abstractmethod
    def select(self, q: Tensor, index: PageIndex, state: State) -> Tensor | None:  # type: ignore[override]
        """Pages to attend to, for query `q [B, H, 1, D]`: LongTensor `[B, H_kv or H, n]` (-1 = none), or None for all.

        What `state` is given under names that begin with `page_` stays until the next prompt; dim 0 is the row.
        """

    def begin(self, keys: Tensor, counts: Tensor, state: State) -> None:
        """For a reader without bounds, when a layer is put into pages: keys `[B, H_kv, n, D]` as attention sees them, of
        which the first `counts [B, H_kv]` (LongTensor on the CPU) are held. `state["page_summaries"]` counts as summaries.
        """

    def hold(self, index: PageIndex, state: State) -> Tensor | None:
        """After the step's attention: pages `[B, H_kv, m]` that offloaded heads hold from now on; None for no change."""
        return None

    def hosted(self, key: int, value: int) -> int:
        """Numbers of a token and head that go to the host, of a key of `key` numbers and a value of `value`."""
        return key + value if self.rank is None else value

    def count(self, real: Tensor) -> Tensor:
        """Pages that `budget` is for rows of `real [B]` tokens, LongTensor `[B]` on the CPU; at least 1."""
        tokens = cap(self.budget, real.cpu())
        assert tokens is not None
        return torch.div(tokens, self.page_size, rounding_mode="floor").clamp(min=1)

    def check(self) -> None:
        """Raises:
        ValueError: a page without tokens, or a number of tokens that is less than a page.
        """
        if self.page_size < 1:
            raise ValueError(f"page_size={self.page_size}; a page holds at least 1 token (the papers: 16)")
        check_budget(self.budget)
        if isinstance(self.budget, int) and self.budget < self.page_size:
            raise NotTogether(
                f"budget={self.budget} tokens is less than one page of page_size={self.page_size}, so that no page is "
                f"read (K = 0): give at least {self.page_size}"
            )
        if isinstance(self.budget, float) and self.budget == 1.0:
            raise ValueError("budget=1.0 reads everything: leave the reader out, or give a share below 1")
        if not 0.0 <= self.bound_width <= 1.0:
            raise ValueError(
                f"bound_width={self.bound_width} is not in [0, 1]: 1 ranks pages by their upper bound (the papers), 0 by the "
                "middle of their bounds"
            )


def read_pages(
    layer: CompressedLayer,
    reader: PagedReader,
    q: Tensor,
    forward: Forward,
    features: AttentionParams,
    math: bool = False,
) -> Tensor:
    """Output `[B, H, 1, D]` of single queries over the pages that the reader selects; without SDPA if `math`."""
    store = paged(layer, reader)
    layer.step = layer.step + (forward.added > 0)
    cache = layer.holder()
    real = cache.real if cache.prompted is None else cache.prompted
    assert real is not None
    step = torch.where(forward.added > 0, layer.step, -1)
    index = PageIndex(
        layer.index, store.size, store.pages().to(q.device), store.shown_bounds(), real, step, features.scaling
    )
    chosen = reader.select(q, index, layer.state)
    if chosen is None:
        ids = torch.arange(store.most, device=q.device).expand(*index.pages.shape, -1)
        chosen = ids.masked_fill(ids >= index.pages[..., None], -1)
    if chosen.shape[1] not in (store.heads, q.shape[1]):
        raise ValueError(f"a reader's selection needs {store.heads} or {q.shape[1]} heads, got {chosen.shape[1]}")
    store.bring(chosen)
    if kernel(layer, reader, q, math) == "triton":
        output = triton_pages.decode(q, *store.block_table(), chosen, forward.on("positions", q.device), features)
    else:
        output = _attend(layer, store, chosen, q, forward, features, math)
    _note(layer, store, chosen, index, forward)
    held = reader.hold(index, layer.state)
    if held is not None:
        store.hold(held)
    return output


def kernel(layer: CompressedLayer, reader: PagedReader, q: Tensor, math: bool) -> str:
    """What attends to a layer's pages: "triton" where they lie, else gathered, "blockwise" without SDPA or "pages"."""
    holder = layer.holder()
    as_given = not layer.sealed and layer.blocks is None and not holder.latents and holder.rotations is None
    if not math and as_given and triton_pages.usable(q, reader.page_size):
        return "triton"
    return "blockwise" if math else "pages"


def _attend(
    layer: CompressedLayer,
    store: PagedStore,
    chosen: Tensor,
    q: Tensor,
    forward: Forward,
    features: AttentionParams,
    math: bool,
) -> Tensor:
    batch, heads, n = chosen.shape
    size = store.size
    slots = chosen[..., None] * size + torch.arange(size, device=q.device)
    counts = store.counts.to(q.device)
    if heads != store.heads:
        counts = counts.repeat_interleave(heads // store.heads, dim=1)
    allowed = (slots < counts[:, :, None, None]) & (chosen >= 0)[..., None]
    if features.window is not None:
        positions = store.positions.expand(batch, store.heads, -1)
        positions = positions.repeat_interleave(heads // store.heads, dim=1)
        seen = positions.gather(2, slots.clamp(min=0).flatten(2)).view_as(slots)
        asked = forward.on("positions", q.device)[:, :1, None, None]
        allowed &= (seen > asked - features.window) | (asked < 0)
    allowed = allowed.flatten(2)[:, :, None]
    asked, keys, values = _picked(layer, store, chosen, q)
    if layer.blocks is not None:
        return (
            sdpa_block(q, keys, values, allowed, features.scaling)
            if features.plain and not math
            else softmax_block(q, keys, values, allowed, features)[0]
        )
    if features.plain and not math:
        return layer.expand(sdpa_block(asked, keys, values, allowed, features.scaling))
    return layer.expand(softmax_block(asked, keys, values, allowed, features)[0])


def _picked(layer: CompressedLayer, store: PagedStore, chosen: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The query, and the keys and values `[B, h, n * size, ...]` of the chosen pages, in the codec's own terms."""
    plain = not layer.sealed or layer.blocks is not None
    channels = {name: store.read(name, chosen) for name in (("keys", "values") if plain else layer.coded())}
    shape = (*chosen.shape[:2], -1)
    if plain:
        keys, values = (channels[name].view(*shape, channels[name].shape[-1]) for name in ("keys", "values"))
        return q, *layer.attended(keys, values)
    batch, heads, n = chosen.shape
    positions = store.positions.expand(batch, store.heads, -1).unflatten(2, (-1, store.size))
    segments = torch.arange(batch * heads, device=q.device)
    owners = segments // heads * store.heads + segments % heads * store.heads // heads
    lanes = chosen.clamp(min=0).flatten(0, 1)
    at = positions.flatten(0, 1)[owners[:, None], lanes].flatten(0, 1)[None]
    slots = layer.told(at, owners=owners.repeat_interleave(n))
    codec = layer.holder().codec
    keys, values = codec.read({name: value[None] for name, value in channels.items()}, slots)
    keys, values = (x[0].reshape(*shape, x.shape[-1]) for x in (keys, values))
    return layer.asked(q), *layer.attended(keys, values)


# ---------------------------------------------------------------------- into pages and back


def paged(layer: CompressedLayer, reader: PagedReader) -> PagedStore:
    """The layer's slots in pages: put there if they are not yet.

    What a grouped codec holds is decoded into pages anew at every step, and so is read whole.
    """
    store = layer.held()
    if isinstance(store, PagedStore):
        return store
    keys, values = layer.keys_values()
    positions = store.get("positions")
    mask = (positions >= 0).expand(-1, store.heads, -1)
    shared = positions.shape[1] == 1
    keys, packed = keys[mask], store.packed(mask)
    if layer.blocks is not None:  # groups of codes stay as they are: the pages are this step's own
        packed |= {"keys": keys, "values": values[mask]}
        return PagedStore(packed, store.counts.clone(), keys, reader.page_size, shared, ())
    rebuilt = None if reader.rank is None else factored(layer, reader.page_size, reader.rank)
    bounded = keys if reader.bounded else keys[:, :0]
    host = reader.offloaded(layer.index)
    found = PagedStore(packed, store.counts.clone(), bounded, reader.page_size, shared, host, rebuilt)
    layer.store, layer.fresh = found, None  # keys of this forward lie as they did before
    if not reader.bounded:
        reader.begin(layer.keys_values()[0], found.counts, layer.state)
    return found


def factored(layer: CompressedLayer, size: int, rank: int) -> LowRankKeyPages:
    """Keys of a layer's full pages in `rank` numbers per token, all heads together."""
    store, cache = layer.held(), layer.holder()
    assert cache.turns is not None
    mask = store.get("positions") >= 0
    order = torch.sort(
        mask[:, 0].to(torch.uint8), dim=1, descending=True, stable=True
    ).indices  # held slots to the left
    at = layer.slots().rotated[:, 0].gather(1, order)
    keys = layer.keys_values()[0]
    keys = keys.gather(2, order[:, None, :, None].expand(-1, store.heads, -1, keys.shape[-1]))
    turns = cache.turns[layer.index]
    return LowRankKeyPages.of(turns.unrotate(keys, at[:, None]), at, store.counts[:, 0], size, rank, turns.rotate)


def unpaged(layer: CompressedLayer) -> None:
    """Before a prompt: hold the layer's slots as before, in one tier."""
    store = layer.store
    if not isinstance(store, PagedStore):
        return
    fetch(store)
    _keep_account(layer, store)
    everything = (store.get("positions") >= 0).expand(-1, store.heads, -1)
    layer.store = keep_slots(store, everything, grow=not layer.holder().limited)  # type: ignore[arg-type]
    for name in [name for name in layer.state if name.startswith(PREFIX)]:
        del layer.state[name]


def fetch(store: PagedStore) -> None:
    """Note that a forward reads all that is held, for which host pages have to be brought in."""
    if store.host is not None:
        away = (store.table < 0) & (torch.arange(store.table.shape[2]) < store.pages()[..., None])
        store.host.moved["fetched"] += away.sum((1, 2)) * store.host.page_bytes


# ---------------------------------------------------------------------- what was read and moved


def _note(layer: CompressedLayer, store: PagedStore, chosen: Tensor, index: PageIndex, forward: Forward) -> None:
    """Count this step's bytes by row: whole pages and the bounds that were looked at."""
    read, pages = (chosen >= 0).sum((1, 2)), index.pages.sum(1)
    bounds = index.bounds.shape[-1] * index.bounds.element_size()
    scored = torch.div(pages * min(index.scored, store.heads), store.heads, rounding_mode="floor") * bounds
    own = layer.state.get("page_summaries")
    if own is not None:
        scored = scored + pages * own.shape[-1] * own.element_size()
    stepped = (forward.added > 0).to(read.device)
    skipped = (pages * (chosen.shape[1] // store.heads) - read).clamp(min=0)
    whole = read * store.size * store.slot_bytes + scored
    if layer.blocks is not None:
        held = sum(size for _, _, unit in layer.blocks.each() for _, _, size in unit.tensors())
        whole = torch.full_like(read, held // len(read))
    values = {"read": whole, "skipped": skipped, "steps": torch.ones_like(read)}
    for name, value in values.items():
        value = value * stepped
        layer.traffic[name] = layer.traffic[name] + value if name in layer.traffic else value


def _keep_account(layer: CompressedLayer, store: PagedStore) -> None:
    if store.host is not None:
        for name, value in store.host.moved.items():
            layer.traffic[name] = layer.traffic[name] + value if name in layer.traffic else value


def host_bytes(reader: PagedReader, layers: Sequence[int], rows: int, tokens: int, per_token: int) -> int:
    """Bytes of the host tier for prompts of `tokens` tokens; `per_token` bytes of a token's keys and values per head."""
    heads = sum(len(reader.offloaded(layer)) for layer in layers)
    return heads * rows * tokens * per_token


def check_host(reader: PagedReader, layers: Sequence[int], rows: int, tokens: int, per_token: int) -> None:
    """Raises:
    ValueError: the host tier of a prompt would not fit into free memory. Arguments as of `host_bytes`.
    """
    wanted = host_bytes(reader, layers, rows, tokens, per_token)
    if wanted == 0:
        return
    free = free_memory()
    if wanted > free:
        raise ValueError(
            f"the host tier needs {wanted / 2**30:.2f} GiB for {rows} x {tokens} tokens, but {free / 2**30:.2f} GiB of "
            "memory are free: shorten the prompt, take a smaller batch, or offload fewer heads (reader.unstable)"
        )


def free_memory() -> int:
    """Bytes of main memory that a process can still take."""
    import psutil  # comes with accelerate

    return int(psutil.virtual_memory().available)
