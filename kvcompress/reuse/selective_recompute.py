"""Selective recompute (CacheBlend): load stored chunk KV and recompute the selected tokens only.

The model's own forward runs once over the prompt. Up to and with a check layer it computes every token; there the
new keys and values are compared with the reused ones, and from then on hooks on the decoder layers let only selected
tokens through. What they leave in each layer's cache is the reused rows with the computed ones in their places, and
each query sees exactly the tokens up to its own position, wherever the others of its layer stand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.method.parts import Prefilled, PromptRunner
from kvcompress.models import compat
from kvcompress.reuse.chunk_loader import ChunkLoader, disable_windows, precompute, restore_windows
from kvcompress.reuse.kv_store import ChunkKV, Damaged

Tensor = torch.Tensor


class Plan(Protocol):
    """What a prefill that reuses chunks decides; the engine applies it.

    Attributes:
        check_layer: the first layer that is compared, and the last that computes every token.
        ratio: the share of the context to compute anew behind the check layer.
        mix: hold the reused rows of unselected tokens in the check layer too, instead of the computed ones.
    """

    @property
    def check_layer(self) -> int: ...

    @property
    def ratio(self) -> float: ...

    @property
    def mix(self) -> bool: ...

    def distance(self, keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]) -> Tensor:
        """How far computed rows lie from reused ones: of two pairs (computed, reused) `[1, H_kv, n, D]`, float32 `[n]`."""
        ...

    def selected(self, layer: int, n_layers: int, context: int) -> int:
        """How many of `context` tokens are computed in the layer after `layer`, by what deviates there."""
        ...


class SelectiveRecompute:
    """One fused forward: which tokens pass which layer. `rows` counts the tokens each layer has computed."""

    def __init__(self, plan: Plan, reused: ChunkLoader, length: int, n_layers: int):
        self.plan, self.reused, self.length, self.n_layers = plan, reused, length, n_layers
        self.context = reused.length
        self.rows: list[int] = []
        self.fresh: list[int] = []  # context tokens per layer whose rows are the computed ones
        self.passing: Tensor | None = None  # [m] positions of the tokens that this layer computes; None: all
        self.stay: Tensor | None = None  # which of them attend in this layer and go on; None: all
        self._narrowed: Forward | None = None
        self._cut: dict[str, Any] = {}  # of the last layer's arguments: the same as long as the same tokens pass
        self._cut_from: dict[str, Any] = {}

    # ------------------------------------------------------------------ between layers

    def before_layer(self, hidden: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Hidden states and arguments of the tokens that pass the next layer."""
        if self.stay is not None:
            stay = self.stay.to(hidden.device)
            hidden = hidden.index_select(1, stay)
            self.passing = stay if self.passing is None else self.passing.to(stay.device).index_select(0, stay)
            self.stay, self._cut_from = None, {}
        if self.passing is None:
            return hidden, arguments
        known = self._cut_from
        same = {name for name, value in arguments.items() if name in known and known[name] is value}
        other = {name: value for name, value in arguments.items() if name not in same}
        cut = {name: self._cut[name] for name in same} | compat.only_rows(other, self.passing, self.length)
        self._cut_from, self._cut = dict(arguments), cut
        return hidden, {name: cut[name] for name in arguments}

    # ------------------------------------------------------------------ inside a layer

    def fuse(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The whole prompt's rows of a layer, from those of the tokens that pass it; decides which of them go on."""
        self.rows.append(keys.shape[2])
        check, context = self.plan.check_layer, self.context
        if layer < check:
            self.fresh.append(context)
            return keys, values
        whole_keys, whole_values = (t.to(keys.device) for t in self.reused.take())
        inside = keys.shape[2] - (self.length - context)  # context tokens among those that pass
        at = torch.arange(self.length, device=keys.device) if self.passing is None else self.passing.to(keys.device)
        self._select(layer, (keys, whole_keys), (values, whole_values), at, inside)
        self.fresh.append(inside)
        if layer == check:
            if not self.plan.mix:
                return keys, values
            if self.stay is not None:
                self.fresh[-1] = len(self.stay) - (self.length - context)
                at = self.stay
                keys, values = keys.index_select(2, at), values.index_select(2, at)
        whole_keys.index_copy_(2, at, keys)
        whole_values.index_copy_(2, at, values)
        return whole_keys, whole_values

    def _select(
        self, layer: int, keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor], at: Tensor, inside: int
    ) -> None:
        """Choose which of the context tokens that pass this layer stay, by their deviation; the question always does."""
        wanted = min(inside, self.plan.selected(layer, self.n_layers, self.context))
        if wanted == inside:
            return
        pairs = []
        for computed, reused in (keys, values):
            old = reused[:, :, :inside] if self.passing is None else reused.index_select(2, at[:inside])
            pairs.append((computed[:, :, :inside], old))
        deviation = self.plan.distance(pairs[0], pairs[1])
        best = torch.sort(deviation, descending=True, stable=True).indices[:wanted]  # of equals the earlier
        question = torch.arange(inside, len(at), device=at.device)
        self.stay = torch.cat([best.sort().values, question])
        self._narrowed = None

    def asked(self, q: Tensor) -> Tensor:
        return q if self.stay is None else q.index_select(2, self.stay.to(q.device))

    def narrowed(self, forward: Forward) -> Forward:
        if self.passing is None and self.stay is None:
            return forward
        if self._narrowed is None:
            at = torch.arange(self.length) if self.passing is None else self.passing.cpu()
            at = at if self.stay is None else at.index_select(0, self.stay.cpu())
            rotated = forward.rotated.index_select(-1, at.to(forward.rotated.device))
            positions = forward.positions.index_select(-1, at)
            self._narrowed = replace(forward, positions=positions, rotated=rotated)
        return self._narrowed

    def widened(self, output: Tensor) -> Tensor:
        return widened(output, self.stay, self.rows[-1])


def widened(output: Tensor, rows: Tensor | None, length: int) -> Tensor:
    """`[1, n, ...]` at `rows [n]` among zeros, `[1, length, ...]`; as it is where `rows` is None."""
    if rows is None:
        return output
    whole = output.new_zeros(output.shape[0], length, *output.shape[2:])
    return whole.index_copy_(1, rows.to(output.device), output)


@contextmanager
def attached(session: PromptRunner, fusion: SelectiveRecompute) -> Iterator[None]:
    """Hooks on the decoder layers, and on their MLPs, which let pass what `fusion` says."""
    undo: list[Any] = []
    windows = compat.new_layers(session.model, lambda index: CompressedLayer(session.new_cache(), index))

    def ours() -> bool:  # other forwards run in between: extra passes of a scorer
        cache = session.cache
        return cache is not None and cache.forward is not None and cache.forward.fusion is fusion

    def before_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not ours():
            return None
        hidden = args[0] if args else kwargs.pop("hidden_states")
        if len(args) > 1:
            raise ValueError(
                f"a {type(module).__name__} is called with arguments that have no name: not known to reuse"
            )
        if kwargs.get("attention_mask") is not None:  # transformers' for a window, which positions say as well
            kwargs["attention_mask"] = None
        hidden, kwargs = fusion.before_layer(hidden, kwargs)
        return (hidden,), kwargs

    def after_layer(index: int) -> Any:
        def let_window_go(module: Any, args: Any, output: Any) -> None:
            if ours():
                assert session.cache is not None
                restore_windows(session.cache, index, windows[index])

        return let_window_go

    def before_mlp(module: Any, args: tuple[Any, ...]) -> Any:
        if not ours() or fusion.stay is None:
            return None
        return args[0].index_select(1, fusion.stay.to(args[0].device)), *args[1:]

    def after_mlp(module: Any, args: Any, output: Any) -> Any:
        if not ours() or fusion.stay is None:
            return None
        if isinstance(output, tuple):
            return widened(output[0], fusion.stay, fusion.rows[-1]), *output[1:]
        return widened(output, fusion.stay, fusion.rows[-1])

    try:
        for index, layer in enumerate(compat.decoder_layers(session.model)):
            undo.append(layer.register_forward_pre_hook(before_layer, with_kwargs=True))
            if not isinstance(windows[index], CompressedLayer):
                undo.append(layer.register_forward_hook(after_layer(index)))
            mlp = compat.feed_forward(layer)
            if mlp is not None:  # in a layer that some tokens leave, nothing is wasted on them
                undo += [mlp.register_forward_pre_hook(before_mlp), mlp.register_forward_hook(after_mlp)]
        yield
    finally:
        for handle in undo:
            handle.remove()


def prefill(session: PromptRunner, segments: Sequence[Tensor], mask: Tensor | None, plan: Plan) -> Prefilled:
    """Run a prompt `[prefix or first chunk, chunk, …, question]`; one segment, or a later turn, is computed whole.

    Raises:
        ValueError: an empty segment, several rows or padding, a prompt longer than the model's positions, or a model
            with no layer behind the check layer.
    """
    cache = session.cache
    assert cache is not None
    if len(segments) < 2 or cache.real is not None:
        return session.forward_prompt(torch.cat(list(segments), dim=1), mask)
    _check(session, segments, mask, plan)
    start, damaged = time.perf_counter(), 0
    while True:
        disk = damaged < len(segments)  # where others go on damaging what is there
        chunks, computed = precompute(session, segments[:-1], disk)
        precompute_s = time.perf_counter() - start
        try:
            return _fused(session, segments, chunks, plan, computed, precompute_s)
        except Damaged:  # found while it was read: the store has forgotten it, so that it is computed now
            damaged += 1
            session.cache = session.new_cache()


def _fused(
    session: PromptRunner,
    segments: Sequence[Tensor],
    chunks: list[ChunkKV],
    plan: Plan,
    computed: int,
    precompute_s: float,
) -> Prefilled:
    ids, cache = torch.cat(list(segments), dim=1), session.cache
    assert cache is not None
    length, n_layers = ids.shape[1], len(cache.layers)
    disable_windows(cache)
    with ChunkLoader(session, chunks, plan.check_layer, segments[-1].shape[1]) as reused:
        fusion = SelectiveRecompute(plan, reused, length, n_layers)
        with attached(session, fusion):
            logits = session.forward("prompt", ids, recompute=fusion)
        assert cache.real is not None
        cache.note_reuse({"ratio": plan.ratio, **_report(fusion, reused, len(chunks), computed, precompute_s)})
    return Prefilled(cache, logits, cache.real.clone())


def _report(
    fusion: SelectiveRecompute, reused: ChunkLoader, chunks: int, computed: int, precompute_s: float
) -> dict[str, Any]:
    """What was computed and what reused, in tokens per layer and shares of a whole prefill."""
    layers, length, context = fusion.n_layers, fusion.length, fusion.context
    recomputed = sum(fusion.fresh) / layers
    return {
        "context_tokens": context,
        "question_tokens": length - context,
        "tokens_recomputed": recomputed,
        "tokens_reused": context - recomputed,
        "recompute_share": sum(fusion.rows) / (layers * length),
        "context_share": recomputed / context,
        "rows_per_layer": list(fusion.rows),
        "chunks": chunks,
        "chunks_computed": computed,
        "precompute_s": precompute_s,
        "bytes_loaded": reused.bytes_loaded,
        "load_s": reused.load_s,
        "wait_s": reused.wait_s,
    }


def _check(session: PromptRunner, segments: Sequence[Tensor], mask: Tensor | None, plan: Plan) -> None:
    if not session.reuse_rotations:
        raise ValueError("this session was not opened to reuse chunks: give the method this prefill, not the prompt")
    for number, segment in enumerate(segments):
        if segment.shape[1] == 0:
            name = "the question (the last segment)" if number == len(segments) - 1 else f"segment {number}"
            raise ValueError(f"{name} is empty: leave empty chunks out, and give the question at least one token")
    rows = segments[0].shape[0]
    if rows > 1:
        raise ValueError(f"chunks are reused for one prompt at a time, not for {rows} rows: prefill them one by one")
    if mask is not None and not bool(mask.bool().all()):
        raise ValueError("chunks are reused without padding: leave out the tokens whose attention_mask is 0")
    length, limit = sum(s.shape[1] for s in segments), compat.max_positions(session.model)
    if limit is not None and length > limit:
        longest = max(range(len(segments)), key=lambda i: segments[i].shape[1])
        raise ValueError(
            f"the prompt reaches {length} tokens, its longest segment ({longest}) {segments[longest].shape[1]}, but "
            f"{session.model.config.model_type!r} has {limit} positions: give fewer or shorter chunks"
        )
    layers = len(compat.layer_types(session.model))
    if plan.check_layer >= layers - 1:
        raise ValueError(
            f"check_layer={plan.check_layer} leaves no layer to reuse: this {session.model.config.model_type!r} has "
            f"{layers}, so at most {layers - 2}"
        )
