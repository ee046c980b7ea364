"""What a decode step of each method does on a GPU, counted on an emulated one: launches, host waits, bytes moved.

    python scripts/bench.py device --out docs/device.md

Counts do not depend on a machine. Per layer and per step they are separated by models of two depths, bytes per held
token by prompts of two lengths. The page is a ratchet: what is counted may fall below what it says, not rise above.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import DynamicCache

from kvcompress.bench.emulated_cuda import EmulatedCUDA
from kvcompress.hook.session import compress
from kvcompress.method import Method
from kvcompress.methods import METHODS
from kvcompress.models.random_models import random_model

Tensor = torch.Tensor

DEPTHS, LENGTHS = (2, 4), (128, 256)  # layers, tokens of the prompt
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 128, "heads": 16, "kv_heads": 8, "head_dim": 32}
DTYPE = torch.bfloat16  # in which a GPU runs, and its kernels are taken
WARM, STEPS = 4, 16  # steps that are left out, and counted
HALF = 0.5

SPECS: dict[str, Callable[[], Method | None]] = {
    "stock": lambda: None,  # plain transformers with a DynamicCache
    "full": lambda: METHODS["Full"](),
    **{name.lower(): lambda name=name: METHODS[name](budget=HALF) for name in (  # type: ignore[misc]
        "Random", "SnapKV", "PyramidKV", "Knorm", "ChunkKV", "CriticalKV", "ExpectedAttention", "KeyDiff", "H2O", "TOVA",
        "StreamingLLM", "CAKE", "AdaKV", "KVzip")},
    "streamingllm original": lambda: METHODS["StreamingLLM"](budget=HALF, positions="original"),
    "h2o prompt": lambda: METHODS["H2O"](budget=HALF, decode=False),
    "keydiff prompt": lambda: METHODS["KeyDiff"](budget=HALF, decode=False),
    "qfilters": lambda: METHODS["QFilters"](budget=HALF, window=16, filters=_filters()),
    "rkv": lambda: METHODS["RKV"](budget=HALF),
    "lagkv": lambda: METHODS["LagKV"](budget=HALF, lag=16, sinks=4),
    "scissorhands": lambda: METHODS["Scissorhands"](budget=HALF),
    "duoattention": lambda: METHODS["DuoAttention"](budget=HALF, heads="random", sinks=4, window=16),
    "kivi": lambda: METHODS["KIVI"](bits=4, residual=32),
    "int8": lambda: METHODS["Int8"](),
    "turboquant": lambda: METHODS["TurboQuant"](),
    "lowrank": lambda: METHODS["LowRank"](budget=HALF),
    "lowrank mla": lambda: METHODS["LowRank"](budget=HALF, form="mla"),
    "think": lambda: METHODS["ThinK"](),
    "gqapool": lambda: METHODS["GQAPool"](),
    "quest": lambda: METHODS["Quest"](budget=HALF, skip_layers=0),
    "quest page 8": lambda: METHODS["Quest"](budget=HALF, skip_layers=0, page_size=8),
    "indexer": lambda: METHODS["Indexer"](budget=HALF),
    "flexicache": lambda: METHODS["FlexiCache"](budget=HALF, heads="random", rerank=8),
    "shadowkv": lambda: METHODS["ShadowKV"](budget=HALF, outliers=2, local=1, rank=40),
}  # fmt: skip


def _filters() -> Tensor:
    shape = max(DEPTHS), SIZES["kv_heads"], SIZES["head_dim"]
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


@dataclass(frozen=True)
class Counts:
    """One decode step, as the mean of some: `launches` and `waits` of the host, `moved` bytes, where the host waited."""

    launches: float
    waits: float
    moved: float
    kernel: str
    places: Counter[tuple[str, str]]


@dataclass(frozen=True)
class Costs:
    """A method's decode step.

    Attributes:
        step: "eager" or "static".
        launches, waits: per layer, and `..._once` per step whatever the depth.
        reads: bytes moved per token of the prompt, in reads of its keys and values.
        why: why there is no such step; the counts are 0 then.
    """

    method: str
    step: str
    launches: float = 0.0
    launches_once: float = 0.0
    waits: float = 0.0
    waits_once: float = 0.0
    reads: float = 0.0
    kernel: str = ""
    why: str | None = None


# ---------------------------------------------------------------------- counting


def model_of(layers: int) -> Any:
    """The model that steps are counted on: seeded, its weights of no matter."""
    return random_model("llama", layers=layers, dtype=DTYPE, **SIZES)


def count(name: str, step: str, layers: int, length: int) -> Counts:
    """Counts of one method's decode steps behind a prompt.

    Raises:
        ValueError: the method's step cannot run so.
    """
    method = SPECS[name]()
    with EmulatedCUDA(triton="count") as cuda, torch.no_grad():
        model = cuda.place(model_of(layers))
        ids = torch.randint(4, 250, (1, length + WARM + STEPS), generator=torch.Generator().manual_seed(length))
        prompt, tokens = cuda.put(ids[:, :length]), [cuda.put(x.clone()) for x in ids[:, length:].split(1, dim=1)]
        if method is None:
            cache = DynamicCache(config=model.config)
            options = {"cache": cache, "use_cache": True, "logits_to_keep": 1}
            model(input_ids=prompt, **options)
            return _steps(cuda, tokens, lambda token: model(input_ids=token, **options), lambda: "sdpa")
        with compress(model, method, decode=step) as session:
            session.prefill(prompt)
            session.prepare(WARM + STEPS)
            return _steps(cuda, tokens, session.step, lambda: session.report()["kernel"])


def _steps(
    cuda: EmulatedCUDA, tokens: Sequence[Tensor], step: Callable[[Tensor], Any], kernel: Callable[[], str]
) -> Counts:
    for token in tokens[:WARM]:
        step(token)
    cuda.account.clear()
    for token in tokens[WARM:]:
        step(token)
    found = cuda.account
    places = Counter(found.waits)
    launches, waits, moved = sum(found.launches.values()), len(found.waits), found.moved
    return Counts(launches / STEPS, waits / STEPS, moved / STEPS, kernel(), places)


def costs(name: str, step: str = "eager") -> Costs:
    """A method's step, from models of two depths and prompts of two lengths."""
    try:
        shallow, deep = (count(name, step, layers, LENGTHS[0]) for layers in DEPTHS)
        longer = count(name, step, DEPTHS[0], LENGTHS[1])
    except ValueError as refused:
        if step == "eager":
            raise
        return Costs(name, step, why=str(refused).partition("; use")[0].removeprefix(f"decode={step}: "))
    per, apart = DEPTHS[1] - DEPTHS[0], LENGTHS[1] - LENGTHS[0]
    launches, waits = (deep.launches - shallow.launches) / per, (deep.waits - shallow.waits) / per
    token = 2 * SIZES["kv_heads"] * SIZES["head_dim"] * DTYPE.itemsize * DEPTHS[0]
    return Costs(
        name,
        step,
        round(launches, 1),
        round(shallow.launches - DEPTHS[0] * launches, 1),
        round(waits, 1),
        round(shallow.waits - DEPTHS[0] * waits, 1),
        round((longer.moved - shallow.moved) / apart / token, 2),
        deep.kernel,
    )


def all_costs(names: Iterable[str] = SPECS, steps: Iterable[str] = ("eager", "static")) -> Iterator[Costs]:
    """Costs of methods, eager and with fixed shapes; low-rank bases are measured into a folder that goes again."""
    from kvcompress.calibrate import low_rank

    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels are only counted, but have to be importable
    steps = list(steps)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(low_rank, "folder", lambda: Path(folder)):
        for name in names:
            if name.startswith("lowrank"):
                for layers in DEPTHS:
                    with compress(model_of(layers), SPECS[name]()):  # type: ignore[arg-type]
                        pass
            for step in steps:
                if name != "stock" or step == "eager":
                    yield costs(name, step)


# ---------------------------------------------------------------------- the page

HEAD = "| method | step | launches, layer | step | host waits, layer | step | reads of full KV | kernels, or why not |"


def line(row: Costs) -> str:
    """A row of the table."""
    if row.why is not None:
        return f"| {row.method} | {row.step} | – | – | – | – | – | {row.why} |"
    numbers = f"{row.launches:.1f} | {row.launches_once:.1f} | {row.waits:.1f} | {row.waits_once:.1f}"
    return f"| {row.method} | {row.step} | {numbers} | {row.reads:.2f} | {row.kernel} |"


def markdown(rows: Iterable[Costs]) -> str:
    """`docs/device.md`."""
    lines = [line(row) for row in rows]
    return "\n".join([INTRODUCTION, HEAD, "|" + "---|" * HEAD.count(" | ") + "---|", *lines, ""])


INTRODUCTION = f"""# What a decode step does on a GPU

Made by `scripts/bench.py device --out docs/device.md` on an emulated CUDA device (`kvcompress/bench/emulated_cuda.py`): no
GPU was used, and none of these numbers is a time. An eager step of an 8B model is bound by its launches (about
10 µs each) and by every wait of the host (about 15 µs and more), not by the bytes that a method saves.

- **launches**: kernels, one for each operation that is no view and no allocation; of each layer, and of each step beside its
  layers. SDPA counts 1, and 2 more where its mask is made into a bias.
- **host waits**: the host reads from the device, or copies to it from memory that is not pinned, or a shape depends on data.
- **reads of full KV**: bytes that all kernels move per token of the prompt, in reads of that token's keys and values in
  {str(DTYPE).removeprefix("torch.")}; 1 is what attention over everything costs. Heads of {SIZES["head_dim"]} numbers: what
  is held per slot beside keys and values weighs more than in a large model.

A llama of {SIZES["kv_heads"]} KV heads for {SIZES["heads"]} query heads, prompts of {LENGTHS[0]} and {LENGTHS[1]} tokens, half
of them kept or read, batch 1, mean of {STEPS} steps. `static` is the step with fixed shapes that is compiled or captured:
as a CUDA graph all of its launches are one.

A test counts some methods anew and fails where a number has risen; where it has fallen, make this page again.
"""


def stated(page: str) -> dict[tuple[str, str], Costs]:
    """The numbers that a page says, by method and step."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if len(cells) == 8 and re.fullmatch(r"[\d.–-]+", cells[2]):
            name, step, *numbers, said = cells
            if numbers[0] == "–":
                found[name, step] = Costs(name, step, why=said)
            else:
                launches, once, waits, waits_once, reads = (float(n) for n in numbers)
                found[name, step] = Costs(name, step, launches, once, waits, waits_once, reads, said)
    return found


def risen(found: Costs, said: Costs) -> list[str]:
    """Which numbers are higher than a page says, in words."""
    if found.why is not None:
        return [f"there is no {found.step} step any more: {found.why}"] if said.why is None else []
    if said.why is not None:
        return []
    names = ("launches", "launches_once", "waits", "waits_once", "reads")
    pairs = ((name, getattr(found, name), getattr(said, name)) for name in names)
    return [f"{name}: {now:g}, was {before:g}" for name, now, before in pairs if now > before + 0.051]
