"""Overhead of the hook layer: the same work with and without it, interleaved in one process.

The baseline is plain transformers: its own attention, a `DynamicCache`, no session. Prompts are seeded random token
ids (time does not depend on what they say). Decoding continues copies of one prefilled cache per side, made outside
the timed region, with the same loop `model(token) → argmax` on both sides; what a growing cache costs (a `cat` per
token there, amortised buffers here) is inside.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from rich.box import SIMPLE
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from kvcompress.hook.session import compress
from kvcompress.measure.measuring import PeakMemory, Ratios, Timer, paired_ratios
from kvcompress.method import Method

Tensor = torch.Tensor
Role = str  # "full", "evicting", "window", "mass"; in EVICTION "perhead@0.5", "uniform@0.5" and methods' names


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        name: what `--only` calls it.
        title: what is compared with plain transformers.
        role: which of the methods handed to `Overhead` it runs.
        lengths: prompt lengths it runs at unless told, in tokens.
        targets: highest ratio allowed, by length, for smollm2 in float32 on a CPU.
        kind: "ratio" to plain, or "share": a part of plain's time, whose tolerance is relative.
    """

    name: str
    title: str
    role: Role
    lengths: tuple[int, ...]
    targets: Mapping[int, float]
    kind: Literal["ratio", "share"] = "ratio"


CHECKS = (
    Check("prefill", "prefill, nothing evicted", "full", (4096,), {4096: 1.02, 8192: 1.02}),
    Check("decode", "decode per token, nothing evicted", "full", (4096, 8192), {4096: 0.90, 8192: 0.86}),
    Check("evicted", "decode per token, evicted to the budget", "evicting", (4096,), {4096: 0.60}),
    Check(
        "floor",
        "plain transformers itself on a prompt of the budget's length: no eviction gets lower",
        "evicting",
        (4096,),
        {},
    ),
    Check(
        "compression", "window scorer's compression, share of plain prefill", "window", (4096,), {4096: 0.04}, "share"
    ),
    Check("mass", "prefill with attention mass, and compression", "mass", (4096,), {4096: 1.35}),
    Check("memory", "its peak memory above the start", "mass", (4096,), {4096: 1.15}),
)
# Not run unless asked for by name or by what stands before the dash.
EVICTION = (
    *(
        check
        for budget, target in ((0.5, 0.85), (0.2, 0.70))
        for check in (
            Check(
                f"perhead-{budget}", "decode per token, budgets per head", f"perhead@{budget}", (4096,), {4096: target}
            ),
            Check(
                f"ragged-{budget}",
                "the same beside a uniform method that holds as many bytes (as plain)",
                f"perhead@{budget}",
                (4096,),
                {4096: 1.15},
            ),
            Check(
                f"floor-{budget}",
                "plain transformers itself on a prompt of the budget's length",
                f"perhead@{budget}",
                (4096,),
                {},
            ),
        )
    ),
    *(
        Check(f"share-{name}", f"compression by {name}, share of plain prefill", name, (4096,), {4096: target}, "share")
        for target, names in ((0.01, "knorm streamingllm keydiff tova"), (0.035, "snapkv pyramidkv adakv cake"))
        for name in names.split()
    ),
)
FEW_PAIRS = 3  # where a pair costs prefills and what is measured hardly varies: peaks, and compression by itself


@dataclass(frozen=True)
class Row:
    """A check at one length: `ratios` of ours (b) to plain (a), in seconds, seconds per token or bytes."""

    check: str
    title: str
    method: str
    length: int
    kind: str
    target: float | None
    ratios: Ratios
    role: str = ""

    @property
    def name(self) -> str:
        """The method in few letters: as it was given, where its role is its own name, else class and budget."""
        kind, _, budget = self.method.removesuffix(")").partition("(budget=")
        return self.role if self.role.partition(":")[0] == kind.lower() else f"{kind} {budget}"

    @property
    def missed(self) -> bool:
        """True if the ratio exceeds the target by more than |A/A - 1| (of the target, where it is a share)."""
        if self.target is None:
            return False
        if self.kind == "share":
            stray = abs((self.ratios.aa if self.ratios.aa is not None else 1.0) - 1.0)
            return self.ratios.median > self.target * (1.0 + stray)
        return self.ratios.missed(self.target)

    @property
    def verdict(self) -> str:
        return "" if self.target is None else "missed" if self.missed else "met"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


class Overhead:
    """The checks of `CHECKS` on one model.

    Args:
        model: in eval mode, on its device, with an attention implementation of transformers.
        methods: who plays each role: "full" evicts nothing, "evicting" holds a small budget while decoding, "window"
            scores by the last queries, "mass" by attention mass.
        pairs: pairs per check, each with one more baseline for A/A.
        tokens: decoded tokens per measurement; decoding ends at the stated length.
        seed: of the prompts.
        progress: called after each measurement.
        judge: hold rows against the checks' targets, which mean smollm2 in float32 on a CPU.
        step: how the methods' decode steps run, as `decode` of `compress`; plain's run as they do in transformers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        methods: Mapping[Role, Method],
        pairs: int = 11,
        tokens: int = 32,
        seed: int = 0,
        progress: Callable[[], None] | None = None,
        judge: bool = True,
        step: str = "eager",
    ) -> None:
        if tokens < 1:
            raise ValueError(f"tokens={tokens} must be at least 1")
        self.model, self.methods, self.pairs, self.tokens = model, methods, pairs, tokens
        self.seed, self.progress, self.judge = seed, progress, judge
        self.device, self.step = model.device, step

    @torch.no_grad()
    def run(self, check: Check, length: int) -> Row:
        """Measure one check at one prompt length.

        Raises:
            ValueError: a length that does not fit the model's positions, or leaves no prompt before decoding.
        """
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if not self.tokens < length <= (limit or length):
            raise ValueError(
                f"length={length} must lie above tokens={self.tokens} and within the model's {limit} positions"
            )
        measure = {
            "prefill": self._prefill,
            "decode": self._decode,
            "evicted": self._decode,
            "floor": self._floor,
            "compression": self._compression,
            "mass": self._prefill,
            "memory": self._memory,
            "perhead": self._decode,
            "ragged": self._ragged,
            "share": self._share,
        }[check.name.partition("-")[0]]
        method = self.methods[check.role]
        ratios = measure(method, length)
        name = f"{type(method).__name__}(budget={method.budget})"
        target = check.targets.get(length) if self.judge else None
        return Row(check.name, check.title, name, length, check.kind, target, ratios, check.role)

    def _pairs(self, plain: Callable[[], float], ours: Callable[[], float], pairs: int | None = None) -> Ratios:
        gc.collect()
        return paired_ratios(plain, ours, pairs=pairs or self.pairs, progress=self.progress)

    def prompt(self, length: int) -> Tensor:
        """Seeded random ids `[1, length]`."""
        generator = torch.Generator().manual_seed(self.seed)
        vocabulary = self.model.config.get_text_config().vocab_size
        return torch.randint(vocabulary // 8, vocabulary, (1, length), generator=generator).to(self.device)

    # --- prefill -----------------------------------------------------------------------------------------------

    def _plain_prefill(self, ids: Tensor) -> tuple[DynamicCache, float]:
        with Timer(self.device) as timer:
            cache = DynamicCache(config=self.model.config)
            self.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        return cache, timer.seconds

    def _our_prefill(self, method: Method, ids: Tensor) -> tuple[Any, float, float]:
        """The session's cache, seconds of prefill with compression, and of compression alone."""
        with compress(self.model, method) as session:
            with Timer(self.device) as timer:
                session.prefill(ids)
            return session.cache, timer.seconds, session.report()["time"]["compress_s"]

    def _prefill(self, method: Method, length: int) -> Ratios:
        ids = self.prompt(length)
        return self._pairs(lambda: self._plain_prefill(ids)[1], lambda: self._our_prefill(method, ids)[1])

    def _compression(self, method: Method, length: int) -> Ratios:
        ids = self.prompt(length)
        return self._pairs(lambda: self._plain_prefill(ids)[1], lambda: self._our_prefill(method, ids)[2])

    def _share(self, method: Method, length: int) -> Ratios:
        ids = self.prompt(length)
        pairs = min(self.pairs, FEW_PAIRS)
        return self._pairs(lambda: self._plain_prefill(ids)[1], lambda: self._our_prefill(method, ids)[2], pairs)

    def _memory(self, method: Method, length: int) -> Ratios:
        ids = self.prompt(length)

        def growth(prefill: Callable[[], Any]) -> float:
            with PeakMemory(self.device) as memory:
                prefill()
            return float(memory.growth)

        return self._pairs(
            partial(growth, lambda: self._plain_prefill(ids)),
            partial(growth, lambda: self._our_prefill(method, ids)),
            pairs=min(self.pairs, FEW_PAIRS),
        )

    # --- decode ------------------------------------------------------------------------------------------------

    def _decode(self, method: Method, length: int) -> Ratios:
        ids = self.prompt(length - self.tokens)
        plain_cache, _ = self._plain_prefill(ids)
        return self._pairs(lambda: self.decode_seconds(copy.deepcopy(plain_cache)), self._decoding(method, ids))

    def _ragged(self, method: Method, length: int) -> Ratios:
        ids, uniform = self.prompt(length - self.tokens), self.methods[f"uniform@{method.budget}"]
        return self._pairs(self._decoding(uniform, ids), self._decoding(method, ids))

    def _decoding(self, method: Method, ids: Tensor) -> Callable[[], float]:
        """Seconds per decoded token after a prompt compressed by a method, each time from the same state."""
        cache, _, _ = self._our_prefill(method, ids)

        def run() -> float:
            fork = cache.fork()
            with compress(self.model, method, decode=self.step) as session:
                if self.step == "eager":
                    return self.decode_seconds(fork)
                session.cache = fork
                session.prepare(self.tokens)  # compiles in the first run, which is thrown away, and is never timed
                return self._seconds(lambda token: session.step(token))

        return run

    def _floor(self, method: Method, length: int) -> Ratios:
        """Plain on the few tokens that `method` would keep, to plain on all: the weights are read all the same."""
        budget = method.budget if isinstance(method.budget, int) else round(method.budget * length)
        caches = [self._plain_prefill(self.prompt(n))[0] for n in (length - self.tokens, max(1, min(budget, length)))]
        full, short = (partial(copy.deepcopy, cache) for cache in caches)
        return self._pairs(lambda: self.decode_seconds(full()), lambda: self.decode_seconds(short()))

    def decode_seconds(self, cache: Any) -> float:
        """Seconds per token of greedy decoding on `cache`."""

        def step(token: Tensor) -> Tensor:
            return self.model(input_ids=token, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

        return self._seconds(step)

    def _seconds(self, step: Callable[[Tensor], Tensor]) -> float:
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with Timer(self.device) as timer:
            for _ in range(self.tokens):
                token = step(token).argmax(-1, keepdim=True)
        return timer.seconds / self.tokens


def plan(only: Iterable[str] = (), lengths: Sequence[int] = ()) -> list[tuple[Check, int]]:
    """The checks to run and at which length: `lengths` for all of them, else each one's own.

    Args:
        only: names, or what stands before the dash of several; all of CHECKS by default.

    Raises:
        ValueError: a name that is no check, with those that are.
    """
    known = {check.name: check for check in (*CHECKS, *EVICTION)}
    groups = {name: [n for n in known if n == name or n.startswith(f"{name}-")] for name in only}
    chosen = [n for found in groups.values() for n in found] or [check.name for check in CHECKS]
    unknown = [name for name, found in groups.items() if not found]
    if unknown:
        raise ValueError(f"no check named {', '.join(unknown)}; valid: {', '.join(known)}")
    return [(known[name], length) for name in chosen for length in (lengths or known[name].lengths)]


def measurements(planned: Sequence[tuple[Check, int]], pairs: int) -> int:
    """How many times progress will be called for the plan: three runs a pair, and one warm-up of each side."""
    return sum(
        3 * (min(pairs, FEW_PAIRS) if check.name.startswith(("memory", "share")) else pairs) + 2 for check, _ in planned
    )


def figure(value: float, check: str) -> str:
    """An absolute figure of a row with its unit."""
    if check == "memory":
        return f"{value / 2**20:,.0f} MiB"
    return f"{value * 1000:,.1f} ms" if value < 10 else f"{value:,.2f} s"


def table(rows: list[Row]) -> Table:
    """The rows as a table that fits 120 columns (narrower terminals wrap it), what each check compares below it."""
    out = Table(
        "check", "method", "tokens", "target", "measured", "quartiles", "A/A", "plain", "ours", "verdict", box=SIMPLE
    )
    for row in rows:
        r = row.ratios
        target = "" if row.target is None else f"≤ {row.target:.2f}"
        spread = f"{r.quartiles[0]:.3f}–{r.quartiles[1]:.3f}"
        style = {"missed": "bold red", "met": "green"}.get(row.verdict, "")
        cells = (
            target,
            f"{r.median:.3f}",
            spread,
            f"{r.aa:.3f}",
            figure(r.a, row.check),
            figure(r.b, row.check),
            row.verdict,
        )
        out.add_row(row.check, row.name, str(row.length), *cells, style=style)
    for column in out.columns:
        column.no_wrap = True
    titles = {(row.check, row.title): f"{row.check}: {row.title}" for row in rows}
    rule = "missed: the median exceeds the target by more than |A/A - 1|"
    out.caption = "\n".join([*titles.values(), rule])
    out.caption_justify = "left"
    return out
