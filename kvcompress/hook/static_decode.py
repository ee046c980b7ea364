"""Static decode step: fixed shapes, tensors in and out, so that it can be compiled or captured as a CUDA graph.

Dense stores are given spare slots up to one of few capacities. A step writes each layer's new key, value and position into
the column that a tensor names, and masks by position: nothing in it depends on a length that Python knows, so that one
step serves every token of a sequence and later sequences of the same capacities. It writes where the eager step
would have written, and what a cache holds after it is the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcompress.cache.forward import Forward, hand_over
from kvcompress.cache.layouts import DenseStore, RaggedStore
from kvcompress.common.memory import is_oom
from kvcompress.kernels.blockwise import AttentionParams, sdpa_block, softmax_block, visible
from kvcompress.models import compat
from kvcompress.models.model_hash import adapter_state, foreign_modules, state_of

Tensor = torch.Tensor
Buffers = tuple[Tensor, Tensor, Tensor]  # of one layer: keys, values, positions

FEW = 8  # rows of a product for which torch's own is slow on a CPU: measured, see docs/LOG.md
DECODES = ("eager", "static", "compiled", "graph", "auto")


class StaticDecodeLayer(compat.CacheLayerMixin):
    """One layer's buffers as a step sees them."""

    is_sliding = False

    def __init__(self, buffers: Buffers, column: Tensor, position: Tensor):
        """Args:
        buffers: keys and values `[B, H_kv, capacity, D]`, positions int32 `[B, H_kv or 1, capacity]`, -1 where empty.
        column: LongTensor `[1]`, where the new token goes.
        position: int32 `[B, 1, 1]`, the new token's; -1 for a row that gets none.
        """
        super().__init__()
        self.keys, self.values, self.positions = buffers
        self.column, self.position = column, position
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, kwargs: dict[str, Any] | None = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a new token `[B, H_kv, 1, D]`, and hand this layer on to the attention function."""
        hand_over(kwargs, self)
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self.column, key_states)
        self.values.index_copy_(2, self.column, value_states)
        self.positions.index_copy_(2, self.column, self.position.expand(-1, self.positions.shape[1], -1))
        return self.keys, self.values

    def attend(self, q: Tensor, features: AttentionParams) -> Tensor:
        """Output `[B, H, 1, D]` of a single query `[B, H, 1, D]` over all slots that hold a token."""
        assert self.keys is not None and self.values is not None
        allowed = visible(self.positions, self.position[:, 0], features.window)
        if features.plain:
            return sdpa_block(q, self.keys, self.values, allowed, features.scaling)
        return softmax_block(q, self.keys, self.values, allowed, features)[0]

    def get_seq_length(self) -> int:
        return self.positions.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.positions.shape[2], 0

    def get_max_length(self) -> int:
        return self.positions.shape[2]


class StaticDecodeCache(compat.Cache):
    """The cache of one step: a session's hooks let a forward on it pass."""


def step(
    model: PreTrainedModel, ids: Tensor, columns: Tensor, rotated: Tensor, position: Tensor, *flat: Tensor
) -> Tensor:
    """One decode step → logits `[B, V]`; it writes into the buffers.

    Args:
        ids: LongTensor `[B, 1]`.
        columns: LongTensor `[layers]`, where each layer's new token goes.
        rotated: LongTensor `[B, 1]`, position ids.
        position: int32 `[B, 1, 1]`, of the new token, -1 in rows that get none.
        flat: keys, values and positions of each layer, one layer after the other.
    """
    layers: list[Any] = [
        StaticDecodeLayer((flat[3 * i], flat[3 * i + 1], flat[3 * i + 2]), columns[i : i + 1], position)
        for i in range(len(flat) // 3)
    ]
    output = model(
        input_ids=ids, position_ids=rotated, cache=StaticDecodeCache(layers), use_cache=True, logits_to_keep=1
    )
    return output.logits[:, -1]


# ---------------------------------------------------------------------- which sequences can be decoded so


def unsupported_reason(model: PreTrainedModel, compressor: Any) -> str | None:
    """Why no sequence of this model and method can be decoded with fixed shapes, or None."""
    kinds = set(compat.layer_types(model)) - {"full_attention"}
    if kinds:
        return (
            f"{model.config.model_type!r} has layers with {', '.join(sorted(kinds))}, whose cache is transformers' own"
        )
    if not model.can_generate():
        return f"a {type(model).__name__} has no language-modelling head"
    if compat.holds_latents(model):
        return f"{model.config.model_type!r} holds latents"
    parts = compressor.parts
    if parts.codec.name != "plain":
        return f"codec={parts.codec.name} encodes new tokens as they come"
    if not parts.reader.reads_all:
        return f"reader={parts.reader.name} chooses what each step reads"
    if compressor.limited and parts.schedule.in_decode:
        return f"schedule={parts.schedule} evicts while decoding"
    if compressor.wants_probabilities:
        return "attention weights are wanted of every step (kernel=blockwise, or attention mass)"
    if compressor.limited and compressor.method.compact_positions:
        return "positions are compact, and keys are rotated anew at each step"
    return None


def unsupported_cache(cache: Any) -> str | None:
    """Why what this cache holds cannot be decoded with fixed shapes, or None."""
    for layer in cache.full_layers:
        if layer.store is None:
            return "nothing is held yet"
        if isinstance(layer.store, RaggedStore):
            return f"layer {layer.index} holds different numbers of tokens in its rows or heads, as allocators per head leave"
        if not isinstance(layer.store, DenseStore) or layer.encoding.is_encoded:
            return f"layer {layer.index} holds another form than keys and values"
        if {*layer.store.channels} < {"keys", "values", "positions"} or layer.store.get("keys").shape[
            1
        ] != layer.store.heads:
            return f"layer {layer.index} holds one head's tensors for several"
    if (
        len({layer.device for layer in cache.full_layers}) != 1
        or cache.full_layers[0].device != cache.spec.model().device
    ):
        return "the model is spread over several devices"
    return None


# ---------------------------------------------------------------------- how a step is run


class CompileError(ValueError):
    """The step of a model cannot be compiled or captured."""


_compiled: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def compiled(model: PreTrainedModel, inputs: Sequence[Tensor]) -> Callable[..., Tensor]:
    """The step of a model for tensors of these shapes, compiled when first asked for and kept with the model.

    The forward is traced once, with stand-ins for the numbers: whatever depends on them in Python is refused.

    Raises:
        CompileError: a forward that depends on data, or no compiler.
    """
    shapes = tuple((tuple(t.shape), t.stride(), t.dtype, str(t.device)) for t in inputs)
    weights = tuple(held.data_ptr() for held in (*model.parameters(), *model.buffers()))  # which it holds on to
    key = (shapes, torch.get_num_threads(), weights, adapter_state(model))
    known = _compiled.setdefault(model, {})
    if key not in known:
        try:
            known[key] = _compile(model, list(inputs))
        except Exception as fault:
            if is_oom(fault):
                raise
            lines = str(fault).strip().splitlines() or [""]
            known[key] = f"{type(fault).__name__}: {lines[0][:200]}"
    if isinstance(known[key], str):
        raise CompileError(f"the step of {model.config.model_type!r} cannot be compiled ({known[key]})")
    return known[key]


def _compile(model: PreTrainedModel, inputs: list[Any]) -> Callable[..., Tensor]:
    from torch._inductor import compile as inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(*tensors: Tensor) -> Tensor:
        return step(model, *tensors)

    # not through dynamo: its guards would be on the session's hooks, which come and go
    traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    if inputs[0].device.type == "cpu" and torch.backends.mkldnn.is_available():
        _thread_products(traced)
    return inductor(traced, inputs)


def _threaded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


# inductor's own name for this product wants weights that it has copied
_ops = torch.library.Library("kvcompress", "DEF")
_ops.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_ops.impl("linear", _threaded, "CPU")
_ops.impl("linear", lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]), "Meta")


def _thread_products(traced: torch.fx.GraphModule) -> None:
    """Have oneDNN multiply few float32 rows with weights: what torch takes for them on a CPU uses one thread."""
    aten = torch.ops.aten
    for node in traced.graph.nodes:
        if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default):
            continue
        bias, x, turned = node.args if node.target is aten.addmm.default else (None, *node.args)
        if turned.target is not aten.t.default or turned.args[0].op != "get_attr" or node.kwargs:
            continue
        found = node.meta["val"]
        if found.dtype != torch.float32 or found.shape[0] > FEW or (bias is not None and bias.op != "get_attr"):
            continue
        node.target, node.args = torch.ops.kvcompress.linear.default, (x, turned.args[0], bias)
    traced.graph.eliminate_dead_code()
    traced.recompile()


def captured(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """A CUDA graph of what `run` launches on `device`: each call of the result does it again, on the same tensors."""
    with torch.cuda.device(device):  # streams and graphs belong to the current one
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):  # libraries choose kernels and allocate before the capture
            for _ in range(3):
                run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                output = run()
        finally:
            torch.cuda.set_stream(current)  # torch leaves the capture's own where the capture failed

    def replay() -> Tensor:
        graph.replay()
        return output.clone()  # the next replay writes over it

    return replay


class StaticDecodeStep:
    """The step of one sequence batch, as long as its buffers last.

    Args:
        layers: of its cache, fit for it (see `unsupported_cache`), with spare slots (`DenseStore.fix`).
        how: "static" runs the model's own Python each time, "compiled" what inductor made of it, "graph" replays what
            a static step launched on a CUDA device.

    Raises:
        CompileError: see `compiled`.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[Any], how: str):
        self.stores: list[DenseStore] = [layer.held() for layer in layers]
        self._foreign = [] if how == "static" else foreign_modules(model)  # adapters, as they are in what is recorded
        self._state = state_of(self._foreign)
        batch, device = self.stores[0].counts.shape[0], layers[0].device
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.columns = torch.tensor([store.length for store in self.stores], device=device)
        self.rotated = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(batch, 1, 1, dtype=torch.int32, device=device)
        self.buffers: list[Buffers] = [
            (store.channels["keys"], store.channels["values"], store.channels["positions"]) for store in self.stores
        ]
        inputs = [self.ids, self.columns, self.rotated, self.position, *(t for held in self.buffers for t in held)]
        self._run: Callable[[], Tensor] = lambda: step(model, *inputs)
        if how == "compiled":
            made = compiled(model, inputs)
            self._run = lambda: made(*inputs)
            self._run()  # loads what was compiled
        elif how == "graph":
            try:
                self._run = captured(self._run, device)
            except RuntimeError as fault:  # torch's own are such: a step that waits for the device cannot be captured
                if is_oom(fault):
                    raise
                said = str(fault).splitlines() or [type(fault).__name__]
                raise CompileError(f"the step of {model.config.model_type!r} cannot be captured ({said[0]})") from fault
        for store in self.stores:  # what trying it out has written
            store.clear_spare()

    def serves(self, layers: Sequence[Any], tokens: int = 1) -> bool:
        """True if these layers hold what it writes into, with room for `tokens` more, and no adapter has changed."""
        same = len(layers) == len(self.stores) and all(
            layer.store is store and store.channels["keys"] is held[0] and store.spare >= tokens
            for layer, store, held in zip(layers, self.stores, self.buffers, strict=True)
        )
        return same and state_of(self._foreign) == self._state

    def __call__(self, ids: Tensor, forward: Forward) -> Tensor:
        """Logits `[B, V]` after `ids [B, 1]`, which the stores hold then."""
        self.ids.copy_(ids)
        self.columns.copy_(torch.tensor([store.length for store in self.stores]))
        self.rotated.copy_(forward.positions.clamp(min=0))
        self.position.copy_(forward.positions[:, :, None])
        logits = self._run()
        for store in self.stores:
            store.written(forward.real, forward.added)
        return logits
