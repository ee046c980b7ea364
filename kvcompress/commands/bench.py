"""Benchmarks of the library itself.

kvcompress bench overhead                              what the hook layer costs beside plain transformers
kvcompress bench overhead --only prefill --pairs 21    one check, more pairs
kvcompress bench overhead --only perhead,ragged,floor  decode on ragged layers: beside plain, uniform heads, and the floor
kvcompress bench overhead --only share                 compression of each method, as a share of the prefill
kvcompress bench overhead --model random/llama3-8b --dtype bfloat16 --device cuda --lengths 32768
kvcompress bench decode --methods full,snapkv:0.1 --lengths 4096,8192   methods of your choice beside plain
kvcompress bench decode --methods full,snapkv:0.1 --lengths 8192 --step compiled   the methods' steps compiled
kvcompress bench prefill --methods full,h2o:0.25 --lengths 4096
kvcompress bench peers --kvpress OTHER/bin/python     the same beside QuantizedCache, and kvpress where it is installed
kvcompress bench kernels --tokens 4096,32768          attention kernels beside SDPA and the copy bandwidth
kvcompress bench gpu --out results/reference/h200     all that is asked of a GPU; without one, what it would check
kvcompress bench sweep                                 what sharing prefills and decoding together saves
kvcompress bench chunked --methods SnapKV,H2O          a prompt in chunks beside the same at once
kvcompress bench generation                            bytes and time per token along a long output
kvcompress bench links --json results/reference/links/here.json   memory copies, disk and (with CUDA) the link, fitted
kvcompress bench serving-costs --json costs.json       what methods' requests cost, for task=serving (task.costs=FILE)
kvcompress bench serving-page --costs costs.json --data DATA   tables and figures of docs/serving.md from these costs
kvcompress bench serving-check                         the serving simulation beside really measured batches
kvcompress bench generation --only memory --methods rkv,h2o,snapkv --png results/sawtooth.png
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvcompress.commands.program import program

if TYPE_CHECKING:
    from rich.progress import Progress


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("bench"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", default="smollm2")
    common.add_argument("--threads", type=int, default=None, help="torch threads; default: what torch chooses")
    common.add_argument("--json", type=Path, default=None, help="also write everything to this file")
    placed = argparse.ArgumentParser(add_help=False, parents=[common])
    placed.add_argument("--dtype", default="float32")
    placed.add_argument("--device", default="cpu", help="cpu, cuda, mps or auto")
    placed.add_argument("--seed", type=int, default=0)
    commands = parser.add_subparsers(dest="command", required=True)
    chunked = commands.add_parser("chunked", parents=[placed], help="prompts in chunks: the most held, peak memory")
    chunked.add_argument("--methods", default="SnapKV", help="class names, comma-separated, with their own settings")
    chunked.add_argument("--length", type=int, default=8192, help="tokens of the prompt")
    chunked.add_argument("--budget", type=int, default=512, help="tokens")
    chunked.add_argument("--chunk", type=int, default=512, help="tokens")
    overhead = commands.add_parser("overhead", parents=[placed], help="hook layer against plain")
    overhead.add_argument("--pairs", type=int, default=11, help="pairs per check; A/A runs beside them")
    overhead.add_argument("--lengths", default="", help="tokens, comma-separated; default: each check's own")
    overhead.add_argument(
        "--only", default="", help="prefill,decode,evicted,floor,compression,mass,memory; also perhead,ragged,share"
    )
    overhead.add_argument("--tokens", type=int, default=32, help="decoded tokens per measurement")
    overhead.add_argument("--budget", type=float, default=0.1, help="of the check `evicted`")
    for name, about in (("decode", "decode per token of some methods beside plain"), ("prefill", "prompts likewise")):
        chosen = commands.add_parser(name, parents=[placed], help=about)
        _beside_plain(chosen)
        if name == "decode":
            chosen.add_argument(
                "--step", default="eager", help="how the methods' steps run: static, compiled, graph, auto"
            )
    peers = commands.add_parser(
        "peers", parents=[placed], help="others that compress caches, each beside its own plain"
    )
    _beside_plain(peers)
    peers.add_argument("--kvpress", type=Path, default=None, help="python of an environment with kvpress")
    peers.add_argument("--presses", default="KnormPress,StreamingLLMPress,SnapKVPress", help="of kvpress")
    peers.add_argument("--share", type=float, default=0.9, help="of the tokens that a press drops")
    peers.add_argument("--quantized", default="auto", help="backend of QuantizedCache: auto, none, quanto, hqq or fp8")
    peers.add_argument("--only", default="", help="prefill or decode")
    kernels = commands.add_parser("kernels", parents=[placed], help="attention kernels beside a peer and a reference")
    kernels.add_argument("--only", default="mass,decode,groups,pages", help="comma-separated")
    kernels.add_argument("--tokens", default="4096", help="per row and head, comma-separated")
    kernels.add_argument("--pairs", type=int, default=11)
    for name, size in (("batch", 1), ("kv", 3), ("group", 3), ("dim", 64), ("bits", 4)):
        kernels.add_argument(f"--{name}", type=int, default=size)
    gpu = commands.add_parser("gpu", help="what is asked of a GPU, as one command")
    gpu.add_argument("--out", type=Path, default=Path("results/reference/gpu"), help="folder for JSON and a table")
    gpu.add_argument("--require", action="store_true", help="exit with 2 where there is no CUDA")
    gpu.add_argument("--pairs", type=int, default=11)
    sweep = commands.add_parser(
        "sweep", parents=[common], help="cells one by one, with shared prefills, and decoded together"
    )
    sweep.add_argument("--methods", default="", help="comma-separated; default: six")
    sweep.add_argument("--budgets", default="", help="comma-separated; default: four")
    sweep.add_argument("--length", type=int, default=2000, help="tokens of a prompt")
    sweep.add_argument("--new", type=int, default=16, help="tokens of an answer")
    sweep.add_argument("--samples", type=int, default=1)
    sweep.add_argument("--modes", default="", help="comma-separated; default: all")
    along = commands.add_parser(
        "generation", parents=[placed], help="bytes held and time per token along a long output"
    )
    along.add_argument("--methods", default="rkv", help="comma-separated, all under the same schedule")
    along.add_argument("--budget", type=int, default=256, help="tokens per head")
    along.add_argument("--interval", type=int, default=128, help="tokens between compressions")
    along.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    along.add_argument("--tokens", type=int, default=2048, help="tokens of the output")
    along.add_argument("--only", default="", help="memory or time")
    along.add_argument("--png", type=Path, default=None, help="draw the bytes held into this file")
    links = commands.add_parser("links", help="copies between tiers at many granules, with fits")
    links.add_argument("--device", default="cpu", help="cpu or cuda")
    links.add_argument("--mib", type=int, default=256, help="of a measurement, and of the file on the disk")
    links.add_argument("--repeats", type=int, default=5)
    links.add_argument("--folder", type=Path, default=Path("."), help="on the disk that is measured")
    links.add_argument("--no-disk", action="store_true")
    links.add_argument("--seed", type=int, default=0)
    links.add_argument("--json", type=Path, default=None, help="write points and fits to this file")
    page = commands.add_parser("serving-page", help="tables and figures of docs/serving.md, simulated")
    page.add_argument("--costs", type=Path, required=True, help="file of serving-costs")
    page.add_argument("--data", type=Path, default=None, help="folder of data sets (paths.data)")
    page.add_argument("--out", type=Path, default=Path("results/reference"))
    page.add_argument("--traces", default="mooncake_conversation,mooncake_synthetic")
    page.add_argument("--requests", type=int, default=2000, help="the first so many of each")
    page.add_argument("--length-scale", type=int, default=16, help="lengths and blocks are divided by it")
    page.add_argument("--slots", default="8,32,128", help="memories, as of task.full_slots")
    page.add_argument("--halvings", type=int, default=4, help="of the search for each goodput")
    page.add_argument("--batching", default="chunked", help="iteration, request or chunked")
    page.add_argument("--device", default=None, help="model times for this device instead, at full lengths")
    page.add_argument("--dimensions", default="llama3-8b", help="of the modelled model")
    for name, about in (
        ("serving-costs", "fits for task=serving"),
        ("serving-check", "the simulation beside real batches"),
    ):
        chosen = commands.add_parser(name, parents=[placed], help=about)
        default = SERVED if name == "serving-costs" else "full,snapkv:0.1,kivi"
        chosen.add_argument("--methods", default=default, help="name:budget:setting=value, comma-separated")
        chosen.add_argument("--lengths", default="256,512,1024,2048", help="tokens of measured prompts")
        chosen.add_argument("--batches", default="1,4,8", help="rows of measured steps")
        chosen.add_argument("--steps", type=int, default=8, help="of each")
        chosen.add_argument("--rounds", type=int, default=3)
        chosen.add_argument("--warmup", type=int, default=1, help="rounds thrown away before")
        if name == "serving-check":
            chosen.add_argument("--check", default="2,4,6", help="requests of the real batches, of mixed lengths")
            chosen.add_argument("--output", type=int, default=32, help="tokens of each answer")
    return parser.parse_args(arguments)


SERVED = "full,snapkv:0.25,snapkv:0.1,h2o:0.25,kivi:1.0:bits=4,int8,lowrank:0.5,quest:0.25,cacheblend"


def _beside_plain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", default="full,snapkv:0.1", help="name:budget:setting=value, comma-separated")
    parser.add_argument("--lengths", default="4096", help="tokens, comma-separated")
    parser.add_argument("--pairs", type=int, default=11, help="pairs per row; A/A runs beside them")
    parser.add_argument("--tokens", type=int, default=32, help="decoded tokens per measurement")


def beside_plain(args: argparse.Namespace) -> int:
    from rich.console import Console

    from kvcompress import load
    from kvcompress.bench import overhead
    from kvcompress.bench.peers import check, methods_of
    from kvcompress.measure import measuring

    methods, lengths = methods_of(args.methods), [int(n) for n in args.lengths.split(",") if n]
    model, _ = load(args.model, dtype=args.dtype, device=args.device, seed=args.seed)
    rows = []
    with measuring.threads(args.threads):
        facts = measuring.hardware(model.device)
        step = getattr(args, "step", "eager")
        runner = overhead.Overhead(model, methods, args.pairs, args.tokens, args.seed, judge=False, step=step)
        for length in lengths:
            for name in methods:
                rows.append(runner.run(check(args.command, name), length))
                write(args, facts, rows)
    console = Console()
    Console(width=max(120, console.width)).print(overhead.table(rows))
    return 0


def peers(args: argparse.Namespace) -> int:
    from contextlib import ExitStack

    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from kvcompress import load
    from kvcompress.bench import peers
    from kvcompress.measure import measuring

    whats = [args.only] if args.only else list(peers.WHATS)
    if not set(whats) <= set(peers.WHATS):
        raise ValueError(f"--only {args.only!r}; valid: {', '.join(peers.WHATS)}")
    there = peers.backends()
    if args.quantized not in ("auto", "none", *there):
        raise ValueError(f"--quantized {args.quantized!r}: not installed or unknown; here: {', '.join(there)}, none")
    backend = there[0] if args.quantized == "auto" else args.quantized
    methods, lengths = peers.methods_of(args.methods), [int(n) for n in args.lengths.split(",") if n]
    model, _ = load(args.model, dtype=args.dtype, device=args.device, seed=args.seed)
    console, rows = Console(width=max(120, Console().width)), []
    with measuring.threads(args.threads) as threads, ExitStack() as stack:
        facts = measuring.hardware(model.device)
        runner = peers.Peers(model, methods, args.pairs, args.tokens, args.seed)
        other = None
        if args.kvpress is not None:
            script = Path(peers.__file__).parent / "outside" / "kvpress_worker.py"
            other = stack.enter_context(peers.worker(args.kvpress, script, model, threads))
            facts["kvpress"] = other.versions
        for what in whats:
            for length in lengths:
                for row in runner.ours(what, length):
                    rows.append(row)
                    write(args, facts, rows)
                if backend != "none":
                    rows.append(runner.quantized(what, length, backend))
                if other is not None:
                    presses = [press for press in args.presses.split(",") if press]
                    rows.extend(runner.kvpress(other, presses, args.share, what, length))
                write(args, facts, rows)
    out = Table(
        "peer", "side", "what", "tokens", "to its plain", "quartiles", "A/A", "plain", "side's", "KV bytes", box=SIMPLE
    )
    for cells in peers.lines(rows):
        out.add_row(*cells)
    console.print(out)
    if other is not None:
        console.print(", ".join(f"{name} {version}" for name, version in other.versions.items()), highlight=False)
    return 0


def bars() -> Progress:
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn())
    times = (rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
    return rich.Progress(*columns, *times, console=Console(stderr=True))


def overhead(args: argparse.Namespace) -> int:
    from rich.console import Console

    from kvcompress import load
    from kvcompress.bench import overhead
    from kvcompress.measure import measuring
    from kvcompress.methods import H2O, METHODS, AdaKV, Full, SnapKV

    planned = overhead.plan(filter(None, args.only.split(",")), [int(n) for n in args.lengths.split(",") if n])
    model, _ = load(args.model, dtype=args.dtype, device=args.device, seed=args.seed)
    methods = {
        "full": Full(),
        "evicting": SnapKV(budget=args.budget),
        "window": SnapKV(budget=0.25),
        "mass": H2O(budget=0.25),
        **{f"perhead@{budget}": AdaKV(budget=budget) for budget in (0.5, 0.2)},
        **{f"uniform@{budget}": SnapKV(budget=budget) for budget in (0.5, 0.2)},
        **{name.lower(): cls(budget=0.25) for name, cls in METHODS.items() if cls.budget_kind == "held_tokens"},
    }
    console = Console()
    with measuring.threads(args.threads) as threads, bars() as progress:
        facts = measuring.hardware(model.device)
        console.print(
            f"{args.model} {args.dtype} on {facts['device']}, {threads} threads of {facts['cores']} cores, "
            f"{args.pairs} pairs beside A/A, {model.config._attn_implementation} attention and DynamicCache as baseline"
        )
        task = progress.add_task("overhead", total=overhead.measurements(planned, args.pairs))
        judge = (args.model, args.dtype, model.device.type) == ("smollm2", "float32", "cpu")
        step = partial(progress.advance, task)
        runner = overhead.Overhead(model, methods, args.pairs, args.tokens, args.seed, step, judge)  # type: ignore[arg-type]
        rows = []
        for check, length in planned:
            progress.update(task, description=f"{check.name} at {length}")
            rows.append(runner.run(check, length))
            write(args, facts, rows)
    Console(width=max(120, console.width)).print(overhead.table(rows))
    return 1 if any(row.missed for row in rows) else 0


def sweep(args: argparse.Namespace) -> int:
    import tempfile

    from rich.console import Console

    from kvcompress.bench.sweep import BUDGETS, METHODS, MODES, SweepBench
    from kvcompress.measure import measuring

    methods = args.methods.split(",") if args.methods else METHODS
    budgets = [json.loads(budget) for budget in args.budgets.split(",")] if args.budgets else BUDGETS
    modes = args.modes.split(",") if args.modes else list(MODES)
    if not set(modes) <= set(MODES):
        raise ValueError(f"--modes {args.modes!r}; valid: {', '.join(MODES)}")
    console, totals = Console(width=140), []
    with measuring.threads(args.threads) as threads, tempfile.TemporaryDirectory() as folder:
        console.print(
            f"{args.model} on {threads} threads: {len(methods)} methods x {len(budgets)} budgets, {args.samples} needle "
            f"samples of {args.length} tokens, {args.new} new tokens",
            highlight=False,
        )
        overhead = SweepBench(Path(folder), args.model, methods, budgets, args.length, args.new, args.samples)
        for total in overhead.run(modes):
            totals.append(total)
            console.print(
                f"{total.mode:16} {total.seconds:7.1f} s, CPU {total.cpu:7.1f} s: {total.ratio:.3f} ({total.cpu_ratio:.3f}) "
                f"of {modes[0]}; {total.full:.1f} ({total.cpu_full:.1f}) times one run of the full cache",
                highlight=False,
            )
    if args.json is not None:
        args.json.write_text(
            json.dumps({"settings": {**vars(args), "json": None}, "totals": [t.as_dict() for t in totals]})
        )
    return 0


def generation(args: argparse.Namespace) -> int:
    """0, or 1 where a method held more than budget and interval or became slower along the output."""
    from rich.console import Console

    from kvcompress import load
    from kvcompress.bench import longrun
    from kvcompress.measure import measuring
    from kvcompress.method import Schedule
    from kvcompress.methods import METHODS
    from kvcompress.report.decode import draw_sawtooth

    known = {name.lower(): cls for name, cls in METHODS.items() if cls.budget_kind == "held_tokens"}
    names = [name for name in args.methods.split(",") if name]
    for name in names:
        if name not in known:
            raise ValueError(f"--methods {name!r} is unknown; valid: {', '.join(known)}")
    if args.only not in ("", "memory", "time"):
        raise ValueError(f"--only {args.only!r}; valid: memory, time")
    schedule = Schedule(every=args.interval)
    methods = {name: known[name](budget=args.budget, schedule=schedule) for name in names}
    model, _ = load(args.model, dtype=args.dtype, device=args.device, seed=args.seed)
    console = Console()
    facts = measuring.hardware(model.device)
    traces: list[longrun.Trace] = []
    flats: list[longrun.Flat] = []
    with measuring.threads(args.threads) as threads, bars() as progress:
        console.print(
            f"{args.model} {args.dtype} on {facts['device']}, {threads} threads of {facts['cores']} cores, budget "
            f"{args.budget}, interval {args.interval}, {args.prompt} + {args.tokens} tokens"
        )
        if args.only != "time":
            task = progress.add_task("memory", total=len(methods) * args.tokens)
            step = partial(progress.advance, task)
            for name, method in methods.items():
                traces.append(longrun.trace(model, name, method, args.prompt, args.tokens, args.seed, step))
        if args.only != "memory":
            task = progress.add_task("time", total=longrun.steps(len(methods), args.tokens))
            step = partial(progress.advance, task)
            sizes = (args.prompt, args.tokens, args.interval, args.seed)
            flats = longrun.flatness(model, methods, *sizes, step)
    for line in (*map(longrun.trace_words, traces), *map(longrun.flat_words, flats)):
        console.print(line)
    if args.png is not None and traces:
        draw_sawtooth(traces, f"{args.model}, {args.dtype}: budget {args.budget}, interval {args.interval}", args.png)
        console.print(f"wrote {args.png}")
    if args.json is not None:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        content: dict = {"settings": settings, "hardware": facts}
        content |= {"traces": [one.as_dict() for one in traces], "flat": [one.as_dict() for one in flats]}
        args.json.write_text(json.dumps(content) + "\n")
    return int(any(trace.broken() for trace in traces) or any(flat.missed for flat in flats))


def chunked(args: argparse.Namespace) -> int:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from kvcompress import load
    from kvcompress.bench import chunked
    from kvcompress.measure import measuring
    from kvcompress.methods import METHODS

    names = list(filter(None, args.methods.split(",")))
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise ValueError(f"no method named {', '.join(unknown) or '(none)'}; valid: {', '.join(METHODS)}")
    methods = [METHODS[name](budget=args.budget) for name in names]
    model, _ = load(args.model, dtype=args.dtype, device=args.device, seed=args.seed)
    console, rows = Console(), []
    with measuring.threads(args.threads) as threads:
        facts = measuring.hardware(model.device)
        for method in methods:
            rows.append(chunked.compare(model, method, args.length, args.chunk, args.seed))
            write(args, facts, rows)
    title = (
        f"{args.model} {args.dtype} on {facts['device']}, {threads} threads: a prompt of {args.length} tokens, budget "
        f"{args.budget}, in chunks of {args.chunk}"
    )
    heads = "method,most held / stored,limit; MiB,peak growth,at once,ratio,seconds,off at 1.0".split(",")
    out = Table(*(head.replace(";", ",") for head in heads), box=SIMPLE, title=title)
    for cells in chunked.lines(rows):
        out.add_row(*cells)
    Console(width=max(120, console.width)).print(out)
    return 0 if all(row.within for row in rows) else 1


def links(args: argparse.Namespace) -> int:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from kvcompress.bench import links
    from kvcompress.measure import measuring

    facts = measuring.hardware(args.device)
    folder = None if args.no_disk else args.folder
    points = []
    out = Table(
        "way", *(f"{granule >> 10} KiB" for granule in links.GRANULES), box=SIMPLE, title="GB/s by bytes of a copy"
    )
    for point in links.Links(args.device, args.mib << 20, args.repeats, folder=folder, seed=args.seed).run():
        points.append(point)
    for way in dict.fromkeys(point.way for point in points):
        out.add_row(way, *(f"{point.bandwidth / 1e9:.2f}" for point in points if point.way == way))
    console, fits = Console(), links.fits(points)
    Console(width=max(120, console.width)).print(out)
    for way, fit in fits.items():
        said = f"{1e6 * fit['latency']:.2f} µs a copy, {fit['bandwidth'] / 1e9:.2f} GB/s (R² {fit['r2']:.3f})"
        console.print(f"{way}: {said}", highlight=False)
    if args.json is not None:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        content = {"settings": settings, "hardware": facts, "links": fits, "points": [one.as_dict() for one in points]}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise ValueError(f"--{name} {text!r}: whole numbers, comma-separated") from None


def serving(args: argparse.Namespace) -> int:
    """Costs, or 1 where the simulation is farther from a real batch than it may be."""
    from rich.console import Console

    from kvcompress import load
    from kvcompress.bench import serving
    from kvcompress.bench.peers import methods_of
    from kvcompress.measure import measuring
    from kvcompress.measure.serving.measured_costs import Plan

    console, missed = Console(), False
    made, rows = list[serving.Measured](), list[serving.Agreement]()
    batches = _numbers("batches", args.batches)
    plan = Plan(
        _numbers("lengths", args.lengths), batches=batches, steps=args.steps, rounds=args.rounds, warmup=args.warmup
    )
    methods = methods_of(args.methods)
    model, tokenizer = load(args.model, dtype=args.dtype, device=args.device, seed=args.seed)
    with measuring.threads(args.threads):
        facts = measuring.hardware(model.device)
        if args.command == "serving-costs":
            for one_method in serving.measure(model, tokenizer, methods, plan, args.seed):
                made.append(one_method)
                costs = one_method.costs
                console.print(f"{costs.shown()}; {costs.ratio:.3f} of the bytes, reuse {costs.reuse}", highlight=False)
                write(args, facts, made, "costs")
            return 0
        for one in serving.check(
            model, tokenizer, methods, plan, _numbers("check", args.check), args.output, args.seed
        ):
            rows.append(one)
            missed |= one.missed
            low, high = one.throughput_quartiles
            console.print(
                f"{one.method}, {len(one.lengths)} requests of {min(one.lengths)}-{max(one.lengths)} tokens: simulated over real "
                f"throughput {one.throughput:.3f} ({low:.3f}-{high:.3f}), median first token {one.first_token:.3f}"
                f"{', MISSED' if one.missed else ''}",
                highlight=False,
            )
            write(args, facts, rows)
    return int(missed)


def serving_page(args: argparse.Namespace) -> int:
    from kvcompress.bench import serving_page
    from kvcompress.methods import METHODS

    sides, machine = serving_page.read_costs(args.costs)
    slots, names = _numbers("slots", args.slots), [name for name in args.traces.split(",") if name]
    scale: int | None = args.length_scale
    what = f"costs measured, lengths divided by {scale}"
    if args.device is not None:
        sides, scale = serving_page.on(args.device, args.dimensions, sides), None
        what = f"times modelled for {args.dimensions} on {args.device}, bytes measured, full lengths"
    stem = args.out / ("serving" if args.device is None else "serving-modelled")
    rows = []
    for name in names:
        requests = serving_page.requests_of(name, args.data, args.requests, scale)
        for made in serving_page.serve(
            name, requests, sides, slots, {"batching": args.batching}, halvings=args.halvings
        ):
            rows += made
            gained = ", ".join(
                f"{row['method']} {row['goodput']:.3g} ({row['to_full']:.2f})" for row in made if row["to_full"]
            )
            print(f"{name}, {made[0]['memory']}: {gained}", flush=True)
            note = f"{what[0].upper()}{what[1:]}; LRU, host 4x, batching by {args.batching}."
            written = serving_page.write(rows, sides, machine, stem, "Serving, simulated", note)
    if args.device is None:
        from kvcompress.report.serving import draw_classes

        classes: dict[str, list[str]] = {"prefix": [], "whole": []}
        for name, cls in METHODS.items():
            kind = {"read_tokens": 64, "bytes": 0.5, "held_tokens": 0.5, "none": 1.0}[cls.budget_kind]
            classes[cls(budget=kind).cache_reuse].append(name)
        limits = serving_page.unlimited(names, args.data)
        written += draw_classes(limits, classes, args.out / "serving-classes", "Whole traces, hits exact.")
        written += serving_page.tiers(sides, args.out)
    for path in written:
        print(f"wrote {path}")
    return 0


def kernels(args: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from kvcompress.bench import kernels
    from kvcompress.measure import measuring

    sizes = [int(n) for n in args.tokens.split(",") if n]
    shapes, rows = [kernels.Shape(args.batch, args.kv, args.group, args.dim, n) for n in sizes], []
    with measuring.threads(args.threads):
        device = "cuda" if args.device == "auto" and torch.cuda.is_available() else args.device.replace("auto", "cpu")
        facts = measuring.hardware(torch.device(device))
        overhead = kernels.Kernels(device, getattr(torch, args.dtype), args.pairs, args.bits, seed=args.seed)
        for row in kernels.run(overhead, [name for name in args.only.split(",") if name], shapes):
            rows.append(row)
            write(args, facts, rows)
    Console(width=max(150, Console().width)).print(kernels.table(rows))
    return 0


def gpu(args: argparse.Namespace) -> int:
    """0 if nothing was missed; 1 if so; 2 without CUDA if it is required."""
    import torch

    from kvcompress.bench import gpu_checks

    if not torch.cuda.is_available():
        print(f"no CUDA device here; on one this command checks\n{gpu_checks.plan()}")
        return 2 if args.require else 0
    missed = 0
    for outcome in gpu_checks.run(args.out, args.pairs):
        print(
            f"{outcome.name}: {outcome.verdict}: {outcome.figure}" + (f" ({outcome.target})" if outcome.target else "")
        )
        missed += outcome.verdict == "missed"
    return int(missed > 0)


def write(args: argparse.Namespace, facts: dict, rows: list, name: str = "rows") -> None:
    """After every check, so that a run that is cut short leaves what it has."""
    if args.json is not None:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        content = {"settings": settings, "hardware": facts, name: [row.as_dict() for row in rows]}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark that a command line asks for; what it refuses ends the process in one line."""
    options = parse(arguments)
    commands_of = {"overhead": overhead, "chunked": chunked, "generation": generation, "sweep": sweep}
    commands_of |= {"decode": beside_plain, "prefill": beside_plain, "peers": peers, "kernels": kernels, "gpu": gpu}
    commands_of |= {"links": links, "serving-costs": serving, "serving-check": serving, "serving-page": serving_page}
    try:
        return commands_of[options.command](options)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
