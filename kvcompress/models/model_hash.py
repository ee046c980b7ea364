"""Model hash: of all that a forward follows from, and a sample of the weights.

A model is more than its state dict: an adapter that is switched on, off or to another changes no weight. What modules
that are neither torch's nor transformers' say of themselves, and the hooks that others have put in, are part of it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from kvcompress.models.loading import folder_hash

Tensor = torch.Tensor

WHOLE = 2 << 30  # bytes of weights that are hashed whole; of larger models the edges of every tensor
EDGE = 1 << 20
SAMPLE = 16  # numbers of each tensor that are looked at, about
STOCK = ("torch.", "transformers.", "accelerate.", "kvcompress.")  # whose modules follow from configuration and weights
PER_MATRIX = 4  # numbers of each matrix in a sample
FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # the coarsest first
DEPTH = 4  # of containers in a module's settings
FORWARDS = {"_hf_hook", "_old_forward", "forward"}  # accelerate's, which change where a forward runs
BASE = frozenset(vars(torch.nn.Module())) | {"name_or_path", "generate"}
_known: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


# ---------------------------------------------------------------------- all of it


def model_hash(model: Any) -> str:
    """16 hex digits of configuration, weights and adapters. Remembered until one of these changes."""
    state = model_state(model)
    if model in _known and _known[model][0] == state:
        return _known[model][1]
    named = _tensors(model)
    found = hashlib.sha256((_config(model) + adapter_state(model)).encode())
    whole = sum(tensor.numel() * tensor.element_size() for tensor in named.values()) <= WHOLE
    if any(
        tensor.is_meta for tensor in named.values()
    ):  # weights off every device: the files they come from have to do
        place = str(getattr(model.config, "_name_or_path", ""))
        found.update(json.dumps([place, folder_hash(place) if place else {}]).encode())
    seen: set[int] = set()
    for name, tensor in sorted(named.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        if tensor.data_ptr() in seen or tensor.is_meta:  # tied weights, and those above
            continue
        seen.add(tensor.data_ptr())
        for part in _bytes(tensor, whole):
            found.update(part)
    _known[model] = state, found.hexdigest()[:16]
    return _known[model][1]


def model_state(model: torch.nn.Module) -> tuple[Any, ...]:
    """Equal as long as a model in this process computes the same: no weight replaced or written to, no adapter switched.

    Name, address and version of each tensor, the state of adapters, and a few numbers of each tensor: what is written
    through `.data`, as when adapters are merged, counts no version.
    """
    named = _tensors(model)
    versions = tuple((n, t.data_ptr(), 0 if t.is_inference() else t._version) for n, t in named.items())
    return versions, adapter_state(model), _few_numbers(named.values())


def _tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def _few_numbers(tensors: Iterable[Tensor]) -> bytes:
    """A few numbers of each tensor."""
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            some = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLE)]
            found.setdefault(tensor.device, []).append(some.contiguous().view(torch.uint8))
    return b"".join(torch.cat(parts).cpu().numpy().tobytes() for parts in found.values())


def _bytes(tensor: Tensor, whole: bool) -> Iterator[Any]:
    """A tensor's bytes in pieces, or those of its edges."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for part in [flat] if whole or len(flat) <= 2 * EDGE else [flat[:EDGE], flat[-EDGE:]]:
        yield part.cpu().numpy().data


def _config(model: Any) -> str:
    """What the configuration says of the computation; not where it came from or which attention kernel runs."""
    settings = model.config.get_text_config(decoder=True).to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation"):
        settings.pop(name, None)
    return json.dumps(settings, sort_keys=True, default=str)


# ---------------------------------------------------------------------- adapters, hooks, patched forwards


def foreign_modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Modules of a model, by name, whose forward does not follow from configuration and weights alone: adapters, modules
    of other libraries, and those with a hook or a forward that someone else put in."""
    return [(name, module) for name, module in model.named_modules() if not _is_stock(type(module)) or _patches(module)]


def adapter_state(model: torch.nn.Module) -> str:
    """What a model's foreign modules say of themselves, "" where it has none: changes when an adapter is activated,
    switched off, replaced or merged. Weights are not part of it."""
    return state_of(foreign_modules(model))


def state_of(modules: Iterable[tuple[str, torch.nn.Module]]) -> str:
    """16 hex digits of the settings of modules, "" of none."""
    found = [
        f"{name}:{type(module).__module__}.{type(module).__qualname__}{_settings(module)}{_patches(module)}"
        for name, module in modules
    ]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16] if found else ""


def _is_stock(thing: Any) -> bool:
    return f"{getattr(thing, '__module__', None)}.".startswith(STOCK)


def _patches(module: torch.nn.Module) -> list[str]:
    """Hooks and a replaced forward of a module that are not its library's, in words."""
    put_in: list[Any] = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    own = vars(module)
    if "forward" in own and "_hf_hook" not in own:
        put_in.append(own["forward"])
    return [_described_function(function) for function in put_in if not _is_stock(_innermost(function))]


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _settings(module: torch.nn.Module) -> str:
    """The plain attributes of a module of another library."""
    if _is_stock(type(module)):
        return ""
    own = {
        name: value
        for name, value in vars(module).items()
        if name not in BASE
        and not name.startswith("_kvcompress")
        and not ("_hf_hook" in vars(module) and name in FORWARDS)
    }
    return _described(own, DEPTH)


def _described(value: Any, depth: int) -> str:
    """A value in words that are the same in every process; objects that we cannot look into by their class."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, Tensor):
        return _described_tensor(value)
    if depth and isinstance(value, Mapping):
        return str(sorted(f"{_described(k, 0)}: {_described(v, depth - 1)}" for k, v in value.items()))
    if depth and isinstance(value, (set, frozenset)):
        return str(sorted(_described(item, depth - 1) for item in value))
    if depth and isinstance(value, (list, tuple)):
        return str([_described(item, depth - 1) for item in value])
    if depth and is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__ + str([_described(getattr(value, f.name), depth - 1) for f in fields(value)])
    if callable(value) and hasattr(_innermost(value), "__qualname__"):
        return _described_function(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _described_function(function: Callable[..., Any]) -> str:
    """A function's name, with the numbers and tensors that it was given: a hook that steers may be given others."""
    inner = _innermost(function)
    given: list[Any] = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or () if _is_filled(cell)]
    given += vars(getattr(function, "__self__", object)).values() if hasattr(function, "__self__") else []
    while isinstance(function, functools.partial):
        given += [*function.args, *function.keywords.values()]
        function = function.func
    said = [_described(value, 0) for value in given if isinstance(value, (Tensor, float, str))]
    return f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner).__qualname__)}{said}"


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _described_tensor(tensor: Tensor) -> str:
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for part in () if tensor.is_meta else _bytes(tensor, False):
        found.update(part)
    return found.hexdigest()[:16]


# ---------------------------------------------------------------------- a sample of the weights


def weight_sample(model: torch.nn.Module) -> Tensor:
    """The number of weights, then `PER_MATRIX` numbers of every matrix in the order of their names, float64.

    Numbers of weights that are kept off every device are NaN.
    """
    matrices = [p.detach() for _, p in sorted(model.named_parameters()) if p.dim() > 1]
    values = [torch.tensor([float(sum(p.numel() for p in matrices))], dtype=torch.float64)]
    for matrix in matrices:
        flat = torch.full((PER_MATRIX,), torch.nan) if matrix.is_meta else matrix.reshape(-1)
        at = (2 * torch.arange(PER_MATRIX) + 1) * len(flat) // (2 * PER_MATRIX)
        values.append(flat.index_select(0, at.to(flat.device)).cpu().double())
    return torch.cat(values)


def same_weights(known: Tensor | Sequence[float], found: Tensor) -> bool:
    """True if two samples are of the same weights, each in any float type: equal in the coarser of their types."""
    known = torch.as_tensor(known, dtype=torch.float64)
    if known.shape != found.shape or known[:1].tolist() != found[:1].tolist():
        return False
    both = ~(known.isnan() | found.isnan())
    both[0] = False
    a, b = known[both].float(), found[both].float()
    kinds = {_float_type(a), _float_type(b)}
    if kinds == {torch.float16, torch.bfloat16}:  # each rounded by itself
        return torch.allclose(a, b, rtol=2**-7, atol=1e-7)
    kind = min(kinds, key=FLOATS.index)
    return len(a) > 0 and torch.equal(a.to(kind), b.to(kind))


def _float_type(values: Tensor) -> torch.dtype:
    """The coarsest float type that holds these float32 values."""
    return next(kind for kind in FLOATS if torch.equal(values.to(kind).float(), values))
