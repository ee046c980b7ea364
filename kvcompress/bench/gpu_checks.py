"""GPU checks in one command: kernels near the copy bandwidth, decode near the roofline.

`scripts/bench.py gpu --out results/reference/h200` runs every check on a full-size model with random weights, the most
telling first, and writes JSON and a table after each. Every check is a part of its own: a process that is ended after a few
minutes, so that a short loan of a GPU fills most of the table; what an earlier command found stays. Without CUDA it
says what would be checked.
"""

from __future__ import annotations

import inspect
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvcompress import load
from kvcompress.bench.kernels import KernelRow, Kernels, Shape
from kvcompress.cache.layouts import DenseStore
from kvcompress.hook.session import Session, compress
from kvcompress.measure import measuring, roofline
from kvcompress.methods import H2O, KIVI, TOVA, AdaKV, FlexiCache, Full, Quest, SnapKV

MODEL, DTYPE = "random/llama3-8b", "bfloat16"
LONG, KEPT = 131_072 - 512, 0.05  # tokens of a full cache that leave room to decode, and the share that is kept
ROUNDS, NEW = 5, 64

LANES = Shape(batch=8, kv=8, group=4, dim=128, tokens=32_768)
STEP = f"time per token, {LONG} tokens, budget {KEPT}, step as a graph, batch {{}}"
STEP_TARGET = "at least 0.8 of (weights + full KV) / (weights + kept KV)"
MINUTES = 4.0  # of a part at most
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
    """All checks, in the order in which they run: the most telling first."""

    def kernel(name: str, shape: Shape, judge: Callable[[KernelRow], str]) -> Callable[[], tuple[str, str, dict]]:
        def run() -> tuple[str, str, dict]:
            row = Kernels("cuda", torch.bfloat16, pairs).run(name, shape)
            figure = f"{row.of_copy:.0%} of copy bandwidth, {row.ratios.median:.2f}x {row.peer}, error {row.error:.0e}"
            return judge(row), figure, row.as_dict()

        return run

    def step(batch: int) -> Callable[[], tuple[str, str, dict]]:
        return lambda: decode_check(batch)

    return [
        Check("tokens", "tokens of methods on the GPU beside those on the CPU, small model in float32",
              "equal, and logits within 1e-3", tokens_check),
        Check("step-1", STEP.format(1), STEP_TARGET, step(1)),
        Check("decode", f"ragged decode attention, {_words(LANES)}", "at least 80% of the measured copy bandwidth",
              kernel("decode", LANES, lambda row: verdict(row.of_copy >= 0.8))),
        Check("mass", f"attention mass from the log-sum-exp, {_words(PROMPT)}", "at most 0.7 of the flash forward's time",
              kernel("mass", PROMPT, lambda row: verdict(not row.ratios.missed(0.7)))),
        Check("step-6", STEP.format(6), STEP_TARGET, step(6)),
        Check("groups", f"decode attention over 4-bit codes, {_words(LANES)}", "", kernel("groups", LANES, _noted)),
        Check("pages", f"decode attention over a quarter of the pages, {_words(LANES)}", "", kernel("pages", LANES, _noted)),
    ]  # fmt: skip


def _words(shape: Shape) -> str:
    return f"{shape.tokens} tokens, batch {shape.batch}, {shape.kv * shape.group}/{shape.kv} heads of {shape.dim}"


def _noted(row: KernelRow) -> str:
    return "noted"


# ---------------------------------------------------------------------- the same tokens


@torch.no_grad()
def tokens_check(
    device: str = "cuda", new: int = 24, only: Sequence[str] = (), steps: Sequence[str] = ("eager", "auto")
) -> tuple[str, str, dict[str, Any]]:
    """Greedy tokens and logits of methods of every kind (or `only` some), on the device and on the CPU."""
    made = {
        "full": Full(), "snapkv": SnapKV(budget=40, window=8), "h2o": H2O(budget=40), "tova": TOVA(budget=40),
        "adakv": AdaKV(budget=40, window=8), "kivi": KIVI(bits=4, residual=32, group=16),
        "quest": Quest(budget=48, page_size=16, skip_layers=0),
        "flexicache": FlexiCache(budget=48, page_size=16, heads="random", rerank=4),
    }  # fmt: skip
    ids = torch.randint(4, 250, (1, 160), generator=torch.Generator().manual_seed(0))
    sides: dict[str, dict[str, Any]] = {}
    for side, decode in (("cpu", "eager"), *((device, how) for how in steps)):
        model, _ = load("random/llama", dtype="float32", device=side)
        for name, method in made.items():
            if only and name not in only:
                continue
            seen: list[torch.Tensor] = []
            with compress(model, method, decode=decode) as session:
                prompt = session.prefill(ids.to(model.device))
                seen.append(prompt.logits.float().cpu())
                tokens = session.generate(new, watch=lambda: seen.append(_last(session))).tokens  # noqa: B023
                how = session.report()["step"]["how"], session.report()["kernel"]
            sides.setdefault(name, {})[f"{side} {decode}"] = tokens, torch.stack(seen), how
    detail: dict[str, Any] = {}
    for name, by_side in sides.items():
        (tokens, logits, _), *others = by_side.values()
        for side, (theirs, found, how) in zip(list(by_side)[1:], others, strict=True):
            error = float((found - logits).abs().max()) if found.shape == logits.shape else math.inf
            detail[f"{name}, {side}"] = {"equal": theirs == tokens, "error": error, "step": how[0], "kernel": how[1]}
    wrong = [name for name, one in detail.items() if not (one["equal"] and one["error"] <= 1e-3)]
    worst = max(one["error"] for one in detail.values())
    figure = f"{len(detail) - len(wrong)} of {len(detail)} equal, logits within {worst:.0e}"
    return verdict(not wrong), figure + (f"; not: {', '.join(wrong)}" if wrong else ""), detail


def _last(session: Session) -> torch.Tensor:
    assert session.cache is not None and session.cache.logits is not None
    return session.cache.logits.float().cpu()


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


def chosen(only: Sequence[str], pairs: int = 11) -> list[Check]:
    """The checks of these names in the order in which they run; all by default.

    Raises:
        ValueError: a name that is no check.
    """
    known = checks(pairs)
    unknown = set(only) - {check.name for check in known}
    if unknown:
        names = ", ".join(check.name for check in known)
        raise ValueError(f"no part named {', '.join(sorted(unknown))}; valid: {names}")
    return [check for check in known if not only or check.name in only]


def run(out: Path, pairs: int = 11, only: Sequence[str] = (), minutes: float = MINUTES) -> Iterator[Outcome]:
    """Run checks one by one; `checks.json` and `checks.md` under `out` are written after each, and keep what others found.

    What fails, or takes longer than `minutes`, is recorded as skipped with the reason, and the others go on.

    Args:
        only: names of checks; all by default.
        minutes: of each at most, in a process of its own; 0: in this one, for as long as it takes.
    """
    out.mkdir(parents=True, exist_ok=True)
    for check in chosen(only, pairs):
        found = in_part(check, pairs, minutes) if minutes else outcome(check)
        save(out, found)
        yield found


def outcome(check: Check) -> Outcome:
    """Run a check here. What fails is skipped, whatever it is: Triton's errors are of no kind of Python's."""
    try:
        found = check.run()
    except Exception as error:
        found = "skipped", (f"{type(error).__name__}: {error}".splitlines() or [""])[0], {}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Outcome(check.name, check.says, check.target, *found)


def in_part(check: Check, pairs: int, minutes: float, command: Sequence[str] = ()) -> Outcome:
    """Run a check in a process of its own, which is ended after `minutes`."""
    asked = command or [sys.executable, "-m", "kvcompress.bench.gpu_checks", check.name, str(pairs)]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60 * minutes)
    except subprocess.TimeoutExpired:
        return Outcome(check.name, check.says, check.target, "skipped", f"took more than {minutes:g} minutes", {})
    lines = done.stdout.strip().splitlines()
    try:
        return Outcome(**json.loads(lines[-1]))
    except (IndexError, TypeError, json.JSONDecodeError):
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
        figure = f"its process ended with {done.returncode}: {said}"
        return Outcome(check.name, check.says, check.target, "skipped", figure, {})


def save(out: Path, found: Outcome) -> None:
    """Put an outcome in place of an earlier one of its name, among those of the same folder."""
    file = out / "checks.json"
    before = json.loads(file.read_text())["checks"] if file.is_file() else []
    by_name = {one["name"]: Outcome(**one) for one in before} | {found.name: found}
    order = [check.name for check in checks()]
    outcomes = sorted(by_name.values(), key=lambda one: order.index(one.name) if one.name in order else len(order))
    facts = measuring.hardware(torch.device("cuda"))
    content = {"model": MODEL, "dtype": DTYPE, "hardware": facts, "checks": [asdict(one) for one in outcomes]}
    file.write_text(json.dumps(content, indent=2) + "\n")
    (out / "checks.md").write_text(markdown(facts, outcomes))


def markdown(facts: dict[str, Any], outcomes: list[Outcome]) -> str:
    """The outcomes as a table below what they were measured on."""
    rows = [f"| {o.name} | {o.says} | {o.target or '–'} | {o.figure} | {o.verdict} |" for o in outcomes]
    known = ", ".join(f"{key} {value}" for key, value in facts.items() if isinstance(value, str | int | float))
    head = ["| check | measured | target | found | verdict |", "|---|---|---|---|---|"]
    return "\n".join([f"# {MODEL} in {DTYPE}", "", known, "", *head, *rows, "", "Made by `scripts/bench.py gpu`.", ""])


if __name__ == "__main__":  # one part, asked for by `in_part`
    (part,) = chosen([sys.argv[1]], int(sys.argv[2]))
    print(json.dumps(asdict(outcome(part))))
