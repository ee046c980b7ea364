"""GPU checks in one command: kernels near the copy bandwidth, decode near the roofline.

`scripts/bench.py gpu --out results/reference/h200` runs every check on a full-size model with random weights and writes
JSON and a table. Without CUDA it says what would be checked.
"""

from __future__ import annotations

import inspect
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvcompress import load
from kvcompress.bench.kernels import KernelRow, Kernels, Shape
from kvcompress.cache.layouts import DenseStore
from kvcompress.hook.session import Session, compress
from kvcompress.measure import measuring, roofline
from kvcompress.methods import Full

MODEL, DTYPE = "random/llama3-8b", "bfloat16"
LONG, KEPT = 131_072 - 512, 0.05  # tokens of a full cache that leave room to decode, and the share that is kept
ROUNDS, NEW = 5, 64

LANES = Shape(batch=8, kv=8, group=4, dim=128, tokens=32_768)
PROMPT = Shape(batch=1, kv=8, group=4, dim=128, tokens=32_768)


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
        says: what is measured; target: what it should be.
        verdict: "met", "missed", "skipped" or "noted" (nothing is asked).
        figure: the measured figure in words, or why it was skipped.
        detail: everything measured.
    """

    name: str
    says: str
    target: str
    verdict: str
    figure: str
    detail: dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One line of the table; `run` gives (verdict, figure, detail)."""

    name: str
    says: str
    target: str
    run: Callable[[], tuple[str, str, dict[str, Any]]]


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def checks(pairs: int = 11) -> list[Check]:
    """All checks, in the order in which they run."""

    def kernel(name: str, shape: Shape, judge: Callable[[KernelRow], str]) -> Callable[[], tuple[str, str, dict]]:
        def run() -> tuple[str, str, dict]:
            row = Kernels("cuda", torch.bfloat16, pairs).run(name, shape)
            figure = f"{row.of_copy:.0%} of copy bandwidth, {row.ratios.median:.2f}x {row.peer}, error {row.error:.0e}"
            return judge(row), figure, row.as_dict()

        return run

    def step(batch: int) -> Callable[[], tuple[str, str, dict]]:
        return lambda: decode_check(batch)

    return [
        Check("decode", f"ragged decode attention, {_words(LANES)}", "at least 80% of the measured copy bandwidth",
              kernel("decode", LANES, lambda row: verdict(row.of_copy >= 0.8))),
        Check("mass", f"attention mass from the log-sum-exp, {_words(PROMPT)}", "at most 0.7 of the flash forward's time",
              kernel("mass", PROMPT, lambda row: verdict(not row.ratios.missed(0.7)))),
        Check("groups", f"decode attention over 4-bit codes, {_words(LANES)}", "", kernel("groups", LANES, _noted)),
        Check("pages", f"decode attention over a quarter of the pages, {_words(LANES)}", "", kernel("pages", LANES, _noted)),
        *(
            Check(f"step-{batch}", f"time per token, {LONG} tokens, budget {KEPT}, step as a graph, batch {batch}",
                  "at least 0.8 of (weights + full KV) / (weights + kept KV)", step(batch))
            for batch in (1, 6)
        ),
    ]  # fmt: skip


def _words(shape: Shape) -> str:
    return f"{shape.tokens} tokens, batch {shape.batch}, {shape.kv * shape.group}/{shape.kv} heads of {shape.dim}"


def _noted(row: KernelRow) -> str:
    return "noted"


# ---------------------------------------------------------------------- the decode step


def graphs() -> bool:
    """True if a session's decode steps can be captured as a graph."""
    return "decode" in inspect.signature(compress).parameters


def decode_check(batch: int) -> tuple[str, str, dict[str, Any]]:
    """Time per token of a full cache over that of a budgeted one, beside what their bytes allow."""
    if not graphs():
        return "skipped", "no decode step as a graph in this version", {}
    model, _ = load(MODEL, dtype=DTYPE, device="cuda")
    found = {name: step_time(model, tokens, batch, "graph") for name, tokens in
             (("full", LONG), ("kept", round(KEPT * LONG)))}  # fmt: skip
    moved = {name: roofline.weights(model, batch)[0] + one["cache_bytes"] for name, one in found.items()}
    allowed = moved["full"] / moved["kept"]
    speedup = found["full"]["tpot_s"] / found["kept"]["tpot_s"]
    rates = roofline.rates(model.device, model.dtype)
    detail = {**found, "step_bytes": moved, "allowed": allowed, "speedup": speedup, "rates": asdict(rates)}
    figure = (
        f"{speedup:.2f}x faster, {speedup / allowed:.2f} of {allowed:.2f}; {1000 * found['kept']['tpot_s']:.2f} ms a token, "
        f"{moved['kept'] / found['kept']['tpot_s'] / rates.bandwidth:.0%} of the bandwidth"
    )
    return verdict(speedup >= 0.8 * allowed), figure, detail


@torch.no_grad()
def step_time(
    model: Any, tokens: int, batch: int, decode: str | None, new: int = NEW, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Seconds per token behind `tokens` tokens per row, the cache filled with noise: median and all rounds.

    Args:
        decode: how steps run, as of `compress`; None for versions that know one way.
    """
    options = {} if decode is None else {"decode": decode}
    with compress(model, Full(), **options) as session:  # type: ignore[arg-type]
        ids = torch.randint(model.config.get_text_config().vocab_size, (batch, 8), device=model.device)
        session.prefill(ids)
        fill(session, tokens)
        session.generate(new)  # kernels are chosen, graphs captured
        times = []
        for _ in range(rounds):
            with measuring.Timer(model.device) as timer:
                session.generate(new)
            times.append(timer.seconds / new)
        report = session.report()
    held = report["kv"]["read_bytes_per_token"] * batch
    return {"tpot_s": statistics.median(times), "rounds_s": times, "cache_bytes": int(held), "kernel": report["kernel"]}


def fill(session: Session, tokens: int) -> None:
    """Have every layer hold `tokens` tokens of noise per row and head in place of the prompt."""
    cache = session.cache
    assert cache is not None and cache.real is not None
    for layer in cache.full_layers:
        held = layer.held()
        batch, heads = held.counts.shape
        at = torch.arange(tokens, dtype=torch.int32, device=held.get("positions").device)
        channels = {"positions": at.expand(batch, 1, -1).contiguous()}
        for name in ("keys", "values"):
            like = held.get(name)
            channels[name] = like.new_empty(batch, heads, tokens, like.shape[-1]).normal_()
        layer.store, layer.seen = DenseStore(channels, torch.full((batch, heads), tokens)), tokens
    cache.restore(replace(cache.sequence, real=torch.full_like(cache.real, tokens)))


# ---------------------------------------------------------------------- all of them


def plan() -> str:
    """What would be checked, with the targets."""
    lines = [f"{MODEL}, {DTYPE}, on CUDA:"]
    for check in checks():
        lines.append(f"  {check.name}: {check.says}" + (f": {check.target}" if check.target else ""))
    if not graphs():
        lines.append("  step-1 and step-6 would be skipped: this version has no decode step as a graph")
    return "\n".join(lines)


def run(out: Path, pairs: int = 11) -> Iterator[Outcome]:
    """Run every check; `checks.json` and `checks.md` under `out` are written after each.

    What fails is recorded as skipped with its error, and the others go on.
    """
    out.mkdir(parents=True, exist_ok=True)
    facts, outcomes = measuring.hardware(torch.device("cuda")), []
    for check in checks(pairs):
        try:
            found = check.run()
        except (RuntimeError, ValueError) as error:
            found = "skipped", f"{type(error).__name__}: {error}".splitlines()[0], {}
        torch.cuda.empty_cache()
        outcomes.append(Outcome(check.name, check.says, check.target, *found))
        content = {"model": MODEL, "dtype": DTYPE, "hardware": facts, "checks": [asdict(one) for one in outcomes]}
        (out / "checks.json").write_text(json.dumps(content, indent=2) + "\n")
        (out / "checks.md").write_text(markdown(facts, outcomes))
        yield outcomes[-1]


def markdown(facts: dict[str, Any], outcomes: list[Outcome]) -> str:
    """The outcomes as a table below what they were measured on."""
    rows = [f"| {o.name} | {o.says} | {o.target or '–'} | {o.figure} | {o.verdict} |" for o in outcomes]
    known = ", ".join(f"{key} {value}" for key, value in facts.items() if isinstance(value, str | int | float))
    head = ["| check | measured | target | found | verdict |", "|---|---|---|---|---|"]
    return "\n".join([f"# {MODEL} in {DTYPE}", "", known, "", *head, *rows, "", "Made by `scripts/bench.py gpu`.", ""])
