"""Static decode step: fixed shapes, tensors in and out, so that it can be compiled or captured as a CUDA graph.

Each layer takes part as a form (`kvcompress.hook.fixed`), which names its buffers, of one of few capacities. A step writes
each layer's new token into a slot that a tensor names, masks by position and, where the method evicts after each step,
empties a slot: nothing in it depends on a number that Python knows, so that one step serves every token of a sequence and
later sequences of the same capacities. What a cache holds after it is what eager steps would have left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.forward import Forward
from kvcompress.cache.layer import CompressedLayer
from kvcompress.common.memory import is_oom
from kvcompress.hook.compression import Compressor
from kvcompress.hook.fixed import choice
from kvcompress.hook.fixed.form import LayerForm, StaticDecodeCache, StaticDecodeLayer, StepRows
from kvcompress.models import compat
from kvcompress.models.model_hash import adapter_state, foreign_modules, state_of

Tensor = torch.Tensor

FEW = 8  # rows of a product for which torch's own is slow on a CPU: measured, see docs/LOG.md
DECODES = ("eager", "static", "compiled", "graph", "auto")


def step(model: PreTrainedModel, forms: Sequence[LayerForm], ids: Tensor, table: Tensor, *flat: Tensor) -> Tensor:
    """One decode step → logits `[B, V]`; it writes into the buffers.

    Args:
        forms: of the layers, whose tensors `flat` has one layer after the other.
        ids: LongTensor `[B, 1]`.
        table: LongTensor `[B, 3]`, see `StepRows`.
    """
    rows, left = StepRows.of(table), list(flat)
    layers: list[Any] = []
    for form in forms:
        layers.append(StaticDecodeLayer(form, left[: len(form.tensors)], rows))
        del left[: len(form.tensors)]
    output = model(
        input_ids=ids, position_ids=rows.ids, cache=StaticDecodeCache(layers), use_cache=True, logits_to_keep=1
    )
    return output.logits[:, -1]


# ---------------------------------------------------------------------- which sequences can be decoded so


def unsupported_reason(model: PreTrainedModel, compressor: Compressor) -> str | None:
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
    return choice.unsupported_method(compressor)


def unsupported_cache(cache: CompressedCache, compressor: Compressor) -> str | None:
    """Why what this cache holds cannot be decoded with fixed shapes, or None."""
    layers = cache.full_layers
    reasons = (choice.unsupported_layer(layer, compressor) for layer in layers)
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        return reason
    if len({layer.device for layer in layers}) != 1 or layers[0].device != cache.spec.model().device:
        return "the model is spread over several devices"
    return None


# ---------------------------------------------------------------------- how a step is run


class CompileError(ValueError):
    """The step of a model cannot be compiled or captured."""


_compiled: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def compiled(model: PreTrainedModel, forms: Sequence[LayerForm], inputs: Sequence[Tensor]) -> Callable[..., Tensor]:
    """The step of a model for forms and tensors such as these, compiled when first asked for and kept with the model.

    The forward is traced once, with stand-ins for the numbers: whatever depends on them in Python is refused.

    Raises:
        CompileError: a forward that depends on data, or no compiler.
    """
    shapes = tuple((tuple(t.shape), t.stride(), t.dtype, str(t.device)) for t in inputs)
    weights = tuple(held.data_ptr() for held in (*model.parameters(), *model.buffers()))  # which it holds on to
    signatures = tuple(form.signature for form in forms)
    key = (shapes, signatures, torch.get_num_threads(), weights, adapter_state(model))
    known = _compiled.setdefault(model, {})
    if key not in known:
        try:
            known[key] = _compile(model, forms, list(inputs))
        except Exception as fault:
            if is_oom(fault):
                raise
            lines = str(fault).strip().splitlines() or [""]
            known[key] = f"{type(fault).__name__}: {lines[0][:200]}"
    if isinstance(known[key], str):
        raise CompileError(f"the step of {model.config.model_type!r} cannot be compiled ({known[key]})")
    return known[key]


def _compile(model: PreTrainedModel, forms: Sequence[LayerForm], inputs: list[Any]) -> Callable[..., Tensor]:
    from torch._inductor import compile as inductor

    graph = traced(model, forms, inputs)
    if inputs[0].device.type == "cpu" and torch.backends.mkldnn.is_available():
        _thread_products(graph)
    return inductor(graph, inputs)


def traced(model: PreTrainedModel, forms: Sequence[LayerForm], inputs: list[Any]) -> torch.fx.GraphModule:
    """A step as one graph of tensor operations; whatever asks a tensor for a number is refused by torch."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(*tensors: Tensor) -> Tensor:
        return step(model, forms, *tensors)

    # not through dynamo: its guards would be on the session's hooks, which come and go
    return make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


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
        forms: of its cache's layers.
        how: "static" runs the model's own Python each time, "compiled" what inductor made of it, "graph" replays what
            a static step launched on a CUDA device.

    Raises:
        CompileError: see `compiled`.
    """

    def __init__(self, model: PreTrainedModel, forms: Sequence[LayerForm], how: str):
        self.forms, self.how = list(forms), how
        self._foreign = [] if how == "static" else foreign_modules(model)  # adapters, as they are in what is recorded
        self._state = state_of(self._foreign)
        batch, device = self.forms[0].batch, self.forms[0].tensors[0].device
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.table = torch.tensor([[-1, 1, 1]] * batch, device=device)  # no row gets a token
        inputs = [self.ids, self.table, *(tensor for form in self.forms for tensor in form.tensors)]
        self._run: Callable[[], Tensor] = lambda: step(model, forms, *inputs)
        if how == "compiled":
            made = compiled(model, self.forms, inputs)
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
        for form in self.forms:  # what trying it out has written
            form.clear()

    def serves(self, layers: Sequence[CompressedLayer], tokens: int = 1) -> bool:
        """True if these layers hold what it writes into, with room for `tokens` more, and no adapter has changed."""
        if len(layers) != len(self.forms) or state_of(self._foreign) != self._state:
            return False
        return all(form.serves(layer, tokens) for form, layer in zip(self.forms, layers, strict=True))

    def is_of(self, layers: Sequence[CompressedLayer]) -> bool:
        """True if it was these layers that stepped in its buffers last."""
        return any(form.is_of(layer) for form, layer in zip(self.forms, layers, strict=False))

    def adopt(self, layers: Sequence[CompressedLayer], tokens: int) -> bool:
        """Have these layers hold what they hold in its buffers, where that fits and nothing else is held there."""
        if len(layers) != len(self.forms) or state_of(self._foreign) != self._state:
            return False
        pairs = list(zip(self.forms, layers, strict=True))
        return all(form.serves(layer, tokens) or form.adopt(layer, tokens) for form, layer in pairs)

    def due(self, forward: Forward) -> bool:
        """True if this forward is to be an eager step, after which some layer drops many tokens."""
        return any(form.due(forward) for form in self.forms)

    def __call__(self, ids: Tensor, forward: Forward, cache: CompressedCache) -> Tensor:
        """Logits `[B, V]` after `ids [B, 1]`, which the layers hold then."""
        for form in self.forms:
            form.begin(forward)
        real = cache.real
        assert real is not None
        kept = real if cache.cap is None else torch.minimum(real, cache.cap)
        self.ids.copy_(ids)
        self.table.copy_(torch.stack([forward.positions[:, 0].long().expand_as(real), real, kept], dim=1))
        logits = self._run()
        for form in self.forms:
            form.written(forward)
        return logits
