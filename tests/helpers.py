"""What several test files ask of a session."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcompress.method import Method
from kvcompress.methods import METHODS

ROOT = Path(__file__).parent.parent
THROUGH_MODEL = sorted(name for name, cls in METHODS.items() if not cls().make_prefill().needs_segments)
EXACT = [name for name in THROUGH_MODEL if METHODS[name]().parts().codec.name == "plain"]
CODED = sorted(name for name, cls in METHODS.items() if cls().parts().codec.name != "plain")  # hold another form
EVICTING = sorted(name for name, cls in METHODS.items() if cls.budget_kind == "held_tokens")
LONG = False  # with --long (conftest.py)


def examples(few: int, many: int) -> int:
    """How many examples hypothesis draws: `many` with `--long`."""
    return many if LONG else few


# One method for each way in which methods differ for cache, hooks and layouts: observed window, mass and eviction in
# every step, compact positions, ragged heads, layers that wait for each other, a forward of its own.
REPRESENTATIVE = ("SnapKV", "H2O", "StreamingLLM", "AdaKV", "CAKE", "KVzip")
# Of all methods: every layout, codec and reader of pages comes up
OTHERWISE_HELD = (*REPRESENTATIVE, *CODED, "Quest", "FlexiCache", "ShadowKV", "DuoAttention")


def grid(*axes: Iterable[Any], short: Callable[..., bool]) -> list[Any]:
    """The product of `axes` as parameters; those for which `short(...)` is false only run with `--long`."""
    found = []
    for values in itertools.product(*axes):
        found.append(pytest.param(*values, marks=() if short(*values) else pytest.mark.long))
    return found


def thinned(*axes: Sequence[Any], every: int) -> list[Any]:
    """The product of `axes` as parameters, of which one in `every` runs without `--long`.

    Those whose indices add up to a multiple of `every`: with `every` the length of one axis, all values of the others
    are combined, each with one value of that axis, which takes turns.
    """
    found = []
    for indices in itertools.product(*(range(len(axis)) for axis in axes)):
        marks = () if sum(indices) % every == 0 else pytest.mark.long
        found.append(pytest.param(*(axis[i] for axis, i in zip(axes, indices, strict=True)), marks=marks))
    return found


def every_method(names: Iterable[str] = EVICTING, *, short: Iterable[str] = REPRESENTATIVE) -> list[Any]:
    """Methods by name, for a test that asks the same of each; those not in `short` only run with `--long`.

    All of them (`EVICTING`) belong to a test of what the engine promises to any scorer; a property of the cache, the
    hooks or a layout shows with the `REPRESENTATIVE` ones.
    """
    return grid(names, short=set(short).__contains__)


def make(name: str, budget: float | int, **options: Any) -> Method:
    """A method by class name, with a small window and interval where it has one, so that tiny prompts exercise it.

    What is measured once per model (head classes) is replaced by its control: small models have no data.
    """
    cls = METHODS[name]
    fields = cls.__dataclass_fields__
    small = {"window": 3, "sinks": 2, "lag": 3, "interval": 3, "recent": 3, "history": 5, "drop": 3, "heads": "random"}
    small |= {"group": 4, "residual": 8, "tokens": 128, "length": 32, "page_size": 4, "skip_layers": 1, "rerank": 3}
    small |= {"outliers": 1, "local": 1}
    for field, value in small.items():
        if field in fields and field not in options and (field != "interval" or fields[field].default is not None):
            options[field] = value
    return cls(budget=budget, **options)


def coded(name: str) -> Method:
    """A method of `CODED` with nothing evicted; one with a budget of bytes gets half of them."""
    return make(name, 0.5 if METHODS[name].budget_kind == "bytes" else 1.0)


def as_published(name: str, budget: float | int) -> Method:
    """A method with its own settings, but for what is measured once per model: small models have no data."""
    cls = METHODS[name]
    narrow = {"heads": "random", "group": 16, "tokens": 128, "length": 32}  # heads of small models have 16 numbers
    return cls(budget=budget, **{name: value for name, value in narrow.items() if name in cls.__dataclass_fields__})


def grows(method: Method) -> bool:
    """True if the allocator lets heads that hold a whole prompt grow beyond the budget in decode."""
    limit = method.parts().allocator.limit(torch.tensor([[100]]), torch.tensor([100]))
    return int(limit) > 100


def position_ids(mask: Tensor, new: int) -> Tensor:
    """Positions of the last `new` columns, counted over real tokens."""
    return (mask.cumsum(1) - 1).clamp(min=0)[:, -new:]


@torch.no_grad()
def feed(model: Any, cache: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits `[B, n, V]` of the next columns through `model(...)`; `mask` covers all columns, these included."""
    positions = position_ids(mask, ids.shape[1])
    return model(ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True).logits


def held(cache: Any, layer: int) -> list[list[list[int]]]:
    """Positions held per row and head, in stored order, empty slots left out."""
    return [[[int(p) for p in head if p >= 0] for head in row] for row in cache.positions(layer).tolist()]


def all_held(session: Any, cache: Any = None) -> dict[int, list[list[list[int]]]]:
    cache = session.cache if cache is None else cache
    return {layer: held(cache, layer) for layer in session.full_layers}


def keep_positions(cache: Any, layer: int, wanted: Tensor) -> None:
    """Make a layer keep the positions marked in `wanted [B, H_kv, n]` (by original position)."""
    positions = cache.positions(layer)
    marked = wanted.gather(2, positions.clamp(min=0)) & (positions >= 0)
    cache.layers[layer].retain(marked)


def tensors_of(thing: Any) -> list[Tensor]:
    """Every tensor reachable from a cache or layer through attributes, dicts, lists and tuples."""
    seen: set[int] = set()

    def walk(value: Any) -> Iterator[Tensor]:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            for inner in value.values():
                yield from walk(inner)
        elif isinstance(value, (list, tuple, set)):
            for inner in value:
                yield from walk(inner)
        elif type(value).__module__.startswith("kvcompress.") and not isinstance(value, (type, Method)):
            if type(value).__name__ in ("Session", "CompressedCache") and value is not thing:
                return
            for inner in getattr(value, "__dict__", {}).values():
                yield from walk(inner)
            for slot in getattr(type(value), "__slots__", ()):
                yield from walk(getattr(value, slot, None))

    return list(walk(thing))


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def live_storages() -> dict[int, int]:
    """Distinct storages of every tensor alive in the process: pointer -> bytes."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def fingerprint(cache: Any) -> list[bytes]:
    """The bytes of everything a cache holds, to see whether it changes."""
    return [t.detach().contiguous().cpu().numpy().tobytes() for layer in cache.layers for t in tensors_of(layer)]


def row_of(compressed: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
    """A row of `samples.jsonl` of a sample with these reports."""
    out = {"compressed": compressed, "end": end, "finished": ["length"], "tokens": [[]], "text": [""]}
    return {"id": "a", "source": "s", "score": 1.0, "protocol": {}, "meta": {}, "out": out}


BY_HEAD = [name for name in CODED if not coded(name).parts().codec.joint]  # those that evictions go with


def load_script(name: str) -> Any:
    """A command of `scripts/` as a module: of a thin door what it leads to, else a module of its own."""
    if importlib.util.find_spec(f"kvcompress.commands.{name}") is not None:
        return importlib.import_module(f"kvcompress.commands.{name}")
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module
