"""Choice of the form in which a layer takes part in steps with fixed shapes, or the reason why there is none."""

from __future__ import annotations

from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import DenseStore, RaggedStore
from kvcompress.hook.compression import Compressor
from kvcompress.hook.fixed.appending import AppendForm, Firing
from kvcompress.hook.fixed.coded import CodedForm
from kvcompress.hook.fixed.evicting import EvictForm
from kvcompress.hook.fixed.form import LayerForm
from kvcompress.hook.fixed.lanes import LaneForm
from kvcompress.method import GroupedCodec, Plain, Scorer

# A layer that evicts in each step is held with padding where rows and heads differ: up to so many times what is valid.
MOST_PADDING = 2.0
PLAIN = {"keys", "values", "positions"}


def unsupported_method(compressor: Compressor) -> str | None:
    """Why no layer of this method can take part, or None."""
    parts, scorer = compressor.parts, compressor.parts.scorer
    if isinstance(parts.codec, GroupedCodec):
        return f"codec={parts.codec.name} encodes new tokens in groups"
    if not isinstance(parts.codec, Plain) and compressor.limited and parts.schedule.in_decode:
        return f"codec={parts.codec.name} holds codes, and schedule={parts.schedule} evicts while decoding"
    if not parts.reader.reads_all:
        return f"reader={parts.reader.name} chooses what each step reads"
    if not compressor.limited or scorer is None:
        return None
    schedule, name = parts.schedule, type(scorer).__name__
    if schedule.in_decode and scorer.observes:
        return f"{name} observes each step"
    if not compressor.trigger.every_step:
        if schedule.in_decode and compressor.method.compact_positions:
            return f"schedule={schedule} drops several tokens at once, and positions are compact"
        return None
    if schedule.newline or schedule.until:
        return f"schedule={schedule} fires after each token, and reads it"
    if not scorer.traceable or type(scorer).second is not Scorer.second:
        return f"schedule={schedule} drops a token after each step, by scores ({name}) that may ask the host"
    return None


def unsupported_layer(layer: CompressedLayer, compressor: Compressor) -> str | None:
    """Why what a layer holds cannot be part of a step with fixed shapes, or None."""
    store = layer.store
    if store is None:
        return "nothing is held yet"
    if not isinstance(store, DenseStore | RaggedStore) or layer.encoding.groups is not None:
        return f"layer {layer.index} holds another form than keys and values"
    if not isinstance(compressor.parts.codec, Plain):
        return _unsupported_codes(layer, store)
    if not {*store.channels} >= PLAIN:
        return f"layer {layer.index} holds no keys and values of its own"
    if isinstance(store, DenseStore) and store.get("keys").shape[1] != store.heads:
        return f"layer {layer.index} holds one head's tensors for several"
    if compressor.needs.mass and compressor.limited and "mass" not in store.channels:
        return f"layer {layer.index} holds no attention mass yet"
    if _evicts(compressor) or layer.encoding.compact_rope is not None:
        if layer.target is None:
            return "no prompt has been compressed yet"
        padded = store.counts.numel() * int(store.counts.max())
        if isinstance(store, RaggedStore) and padded > MOST_PADDING * int(store.counts.sum()):
            return (
                f"layer {layer.index} evicts in each step, and its rows and heads hold very different numbers of tokens"
            )
        if layer.encoding.compact_rope is not None:
            return _unsupported_ranks(layer, store, compressor)
    return None


def _unsupported_codes(layer: CompressedLayer, store: DenseStore | RaggedStore) -> str | None:
    if not layer.encoding.is_encoded:
        return f"layer {layer.index} holds nothing in the form of its codec yet"
    if isinstance(store, RaggedStore):
        return f"layer {layer.index} holds codes, of different numbers of tokens in its rows or heads"
    shift = layer.context().sequence.shift
    if shift is not None and bool(shift.any()):
        return "position ids lie ahead of positions, by which codes are turned back"
    return None


def _evicts(compressor: Compressor) -> bool:
    return compressor.limited and compressor.trigger.every_step


def _unsupported_ranks(layer: CompressedLayer, store: DenseStore | RaggedStore, compressor: Compressor) -> str | None:
    """Why sinks and others are not as `SinkRotation` counts on: all sinks held, and no gap behind them."""
    scorer, positions = compressor.parts.scorer, store.get("positions")
    sinks = 0 if scorer is None else scorer.sinks
    assert layer.target is not None
    if int(store.counts.min()) <= sinks or int(layer.target.min()) <= sinks:
        return f"layer {layer.index} holds no more than its {sinks} sinks, at compact positions"
    behind = (positions >= 0) & ((positions >= 0).cumsum(-1) > sinks)
    oldest = positions.masked_fill(~behind, positions.max()).amin(-1)
    if bool((positions.amax(-1) - oldest + 1 != behind.sum(-1)).any()):
        return f"layer {layer.index} holds tokens with gaps behind its sinks, at compact positions"
    return None


def forms(layers: list[CompressedLayer], compressor: Compressor, tokens: int) -> list[LayerForm]:
    """A form for each layer, none of which is `unsupported_layer`, with room for `tokens` more."""
    return [_form(layer, compressor, tokens) for layer in layers]


def _form(layer: CompressedLayer, compressor: Compressor, tokens: int) -> LayerForm:
    if layer.encoding.is_encoded:
        return CodedForm(layer, compressor, tokens)
    schedule, window = compressor.parts.schedule, compressor.needs.window
    decides = compressor.limited and schedule.in_decode
    ring = window if decides and window > 1 else 0
    if _evicts(compressor) or layer.encoding.compact_rope is not None:
        store = layer.store
        if isinstance(store, RaggedStore):
            layer.store = DenseStore({name: store.get(name) for name in store.channels}, store.counts.clone())
        return EvictForm(layer, compressor, tokens, _evicts(compressor), ring)
    fires = Firing(compressor.trigger, schedule) if decides else None
    kind = LaneForm if isinstance(layer.store, RaggedStore) else AppendForm
    return kind(layer, compressor, tokens, ring, fires)
