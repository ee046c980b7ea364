"""Put small faults into the core, one at a time, and see that the fast suite notices each.

python scripts/mutate.py --list            the thirty mutants: what is changed where, and which tests have to notice
python scripts/mutate.py                   run those that have no result yet; --only 3,7 runs these, again if need be

Mutants are drawn from the syntax trees of named modules with a seed. Each is applied in a copy of the tree that is laid
out as installed, and the tests of its topic run there until the first failure: killed if one fails or the time is up,
survived if all pass. Before a topic's first mutant its tests must pass as they are. Results are kept in a file, so that
an interrupted run goes on. Exit status 0 where every mutant asked for is killed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("kvcompress", "methods", "tasks", "conf", "scripts", "tests", "docs")
FILES = ("README.md", "pyproject.toml", "constraints.txt", "Makefile")


@dataclass(frozen=True)
class Topic:
    """What is mutated together: files, or `file::name` for one class or function of it, and the tests that tell."""

    name: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    count: int = 5


TOPICS = (
    Topic(
        "selection",
        (
            "kvcompress/method/selection.py",
            "kvcompress/method/apportion.py",
            "kvcompress/hook/evictor.py",
            "kvcompress/hook/budget_sharing.py",
        ),
        (
            "tests/method",
            "tests/sweep/test_references.py",
            "tests/hook/test_invariants.py",
            "tests/methods/test_adakv.py",
            "tests/methods/test_cake.py",
            "tests/methods/test_criticalkv.py",
            "tests/methods/test_pyramidkv.py",
        ),
    ),
    Topic(
        "protection",
        (
            "kvcompress/method/budget.py::cap",
            "kvcompress/method/budget.py::protect",
            "kvcompress/method/selection.py::_guarded",
            "kvcompress/hook/scoring.py",
        ),
        (
            "tests/hook/test_invariants.py",
            "tests/sweep/test_references.py",
            "tests/hook/test_against_kvpress_faults.py",
            "tests/methods/test_adakv.py",
            "tests/methods/test_cake.py",
            "tests/methods/test_criticalkv.py",
            "tests/methods/test_duoattention.py",
            "tests/methods/test_pyramidkv.py",
        ),
    ),
    Topic(
        "positions",
        (
            "kvcompress/models/rotation.py",
            "kvcompress/cache/forward.py",
            "kvcompress/kernels/blockwise.py",
            "kvcompress/hook/observed.py",
            "kvcompress/cache/query_window.py",
        ),
        (
            "tests/method/test_prerope.py",
            "tests/sweep/test_references.py",
            "tests/hook/test_truth.py",
            "tests/hook/test_hard_cases.py",
            "tests/hook/test_identity.py",
            "tests/kernels/test_mass_kernel.py",
            "tests/methods/test_h2o.py",
            "tests/methods/test_expected_attention.py",
            "tests/methods/test_cacheblend.py",
        ),
    ),
    Topic(
        "layouts",
        (
            "kvcompress/cache/layouts/dense.py",
            "kvcompress/cache/layouts/ragged.py",
            "kvcompress/cache/layouts/score_sorted.py",
            "kvcompress/cache/layouts/paged.py",
            "kvcompress/cache/layer.py",
        ),
        (
            "tests/cache",
            "tests/hook/test_invariants.py",
            "tests/hook/test_against_kvpress_faults.py",
            "tests/hook/test_leaks.py",
            "tests/methods/test_cake.py",
            "tests/methods/test_quest.py",
            "tests/methods/test_shadowkv.py",
        ),
    ),
    Topic(
        "codecs",
        (
            "kvcompress/method/packing.py",
            "kvcompress/method/latents.py",
            "kvcompress/cache/encoding.py",
            "kvcompress/cache/layouts/quantized_groups.py",
            "methods/int8.py",
            "methods/kivi.py",
            "methods/turboquant.py",
        ),
        (
            "tests/method/test_packing.py",
            "tests/methods/test_kivi.py",
            "tests/methods/test_turboquant.py",
            "tests/methods/test_lowrank.py",
            "tests/cache/test_codecs.py",
            "tests/cache/test_codec_reader_seams.py",
            "tests/hook/test_identity.py",
            "tests/hook/test_invariants.py",
        ),
    ),
    Topic(
        "schedules",
        (
            "kvcompress/hook/trigger.py",
            "kvcompress/hook/compression.py::Compressor.after_attention",
            "kvcompress/hook/compression.py::Compressor.decide",
            "kvcompress/cache/incremental_evictor.py",
            "kvcompress/method/parts.py::Schedule",
        ),
        (
            "tests/methods/test_decode_schedules.py",
            "tests/methods/test_rkv.py",
            "tests/sweep/test_references.py",
            "tests/hook/test_invariants.py",
            "tests/hook/test_hard_cases.py",
            "tests/hook/test_together.py",
            "tests/bench/test_longrun.py",
        ),
    ),
)

EQUIVALENT: dict[str, str] = {
    "kvcompress/cache/incremental_evictor.py::IncrementalEvictor.choose: scores.device.type == 'cpu' and "
    "bool(lowest.isnan().any()) -> (scores.device.type == 'cpu' or bool(lowest.isnan().any()))": (
        "on a CPU what is checked a second time is no NaN; on a GPU a look more is taken, which shows in time alone"
    ),
}
"""Mutants that change nothing that could be seen, by `Mutant.key`, with the reason: the next one is taken instead."""

SWAPPED = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin",
    "argmin": "argmax", "argmax": "argmin", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor",
}  # fmt: skip
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
JOINED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one expression: `before` at `span` of the file's bytes becomes `after`."""

    topic: Topic
    path: str
    name: str  # of the class and function it is in
    line: int
    span: tuple[int, int]
    rule: str
    before: str
    after: str

    @property
    def key(self) -> str:
        """What it is, wherever its lines move."""
        return f"{self.path}::{self.name}: {self.before} -> {self.after}"

    def applied(self, source: bytes) -> bytes:
        """The file with this change in it."""
        return source[: self.span[0]] + self.after.encode() + source[self.span[1] :]


def functions(tree: ast.Module, only: str) -> Iterator[tuple[str, ast.AST]]:
    """Functions and methods with their dotted names; those of `only`, or all if it is empty."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                name = prefix + child.name
                if not only or name == only or name.startswith(f"{only}."):
                    yield name, child

    yield from walk(tree, "")


def expressions(function: ast.AST) -> Iterator[ast.expr]:
    """Expressions of a body that decide something: no annotations, messages, checks, or refusals of bad input."""

    def walk(node: ast.AST) -> Iterator[ast.expr]:
        for child in ast.iter_child_nodes(node):
            refusal = isinstance(child, ast.If) and all(isinstance(line, ast.Raise) for line in child.body)
            if refusal or isinstance(child, (ast.Assert, ast.Raise, ast.JoinedStr, ast.arguments)):
                continue
            if isinstance(child, ast.AnnAssign):
                child = ast.Expr(child.value) if child.value is not None else ast.Pass()
            if isinstance(child, ast.expr):
                yield child
            yield from walk(child)

    yield from walk(ast.Module(getattr(function, "body", []), []))


def changes(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """What an expression may become, each with the rule's name."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = COMPARED.get(type(node.ops[0]))
        if other is not None:
            yield "comparison", ast.Compare(node.left, [other()], node.comparators)
        if isinstance(number := node.comparators[0], ast.Constant) and type(number.value) is int:
            yield "off by one", ast.Compare(node.left, node.ops, [ast.Constant(number.value + 1)])
    if isinstance(node, ast.BinOp):
        joined = JOINED.get(type(node.op))
        if joined is not None:
            yield (
                "sign" if isinstance(node.op, (ast.Add, ast.Sub)) else "logic",
                ast.BinOp(node.left, joined(), node.right),
            )
            yield "dropped term", node.left
        if isinstance(node.op, (ast.Add, ast.Sub)) and isinstance(right := node.right, ast.Constant):
            if type(right.value) is int:
                yield "off by one", ast.BinOp(node.left, node.op, ast.Constant(right.value + 1))
    if isinstance(node, ast.Call):
        function, keywords = node.func, node.keywords
        if isinstance(function, ast.Attribute) and function.attr in SWAPPED:
            swapped = ast.Attribute(function.value, SWAPPED[function.attr], ast.Load())
            yield "min and max", ast.Call(swapped, node.args, keywords)
        if isinstance(function, ast.Name) and function.id in SWAPPED:
            yield "min and max", ast.Call(ast.Name(SWAPPED[function.id], ast.Load()), node.args, keywords)
        for at, keyword in enumerate(keywords):
            others = [*keywords[:at], *keywords[at + 1 :]]
            if keyword.arg in ("min", "max") and isinstance(function, ast.Attribute) and function.attr == "clamp":
                yield "dropped bound", function.value if len(keywords) == 1 else ast.Call(function, node.args, others)
            if keyword.arg in ("descending", "stable") and isinstance(keyword.value, ast.Constant):
                flipped = ast.keyword(keyword.arg, ast.Constant(not keyword.value.value))
                yield "order", ast.Call(function, node.args, [*others, flipped])
        if isinstance(function, ast.Attribute) and function.attr == "where" and len(node.args) == 3:
            yield "branches", ast.Call(function, [node.args[0], node.args[2], node.args[1]], keywords)
    if isinstance(node, ast.BoolOp):
        other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "logic", ast.BoolOp(other_op, node.values)
        yield "dropped condition", node.values[0] if len(node.values) == 2 else ast.BoolOp(node.op, node.values[:-1])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
        yield "negation", node.operand
    if isinstance(node, ast.IfExp):
        yield "branches", ast.IfExp(node.test, node.orelse, node.body)
    if isinstance(node, ast.Subscript) and isinstance(part := node.slice, ast.Slice):
        for end in ("lower", "upper"):
            bound = getattr(part, end)
            if bound is not None:
                moved = {"lower": part.lower, "upper": part.upper, end: ast.BinOp(bound, ast.Add(), ast.Constant(1))}
                yield (
                    "off by one",
                    ast.Subscript(node.value, ast.Slice(moved["lower"], moved["upper"], part.step), node.ctx),
                )


def candidates(topic: Topic, root: Path = ROOT) -> Iterator[Mutant]:
    """Every mutant of a topic's modules, in the order of the files.

    Raises:
        ValueError: a module, or a name in it, that is not there.
    """
    for module in topic.modules:
        path, _, only = module.partition("::")
        if not (root / path).is_file():
            raise ValueError(
                f"{path} of topic {topic.name!r} is no file; TOPICS in scripts/mutate.py names what there is"
            )
        source = (root / path).read_bytes()
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        found = list(functions(ast.parse(source), only))
        if not found:
            raise ValueError(f"{path} has no {only}; TOPICS in scripts/mutate.py names what there is")
        for name, function in found:
            for node in expressions(function):
                assert node.end_lineno is not None and node.end_col_offset is not None
                span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
                for rule, change in changes(node):
                    texts = (ast.unparse(node), f"({ast.unparse(ast.fix_missing_locations(change))})")
                    yield Mutant(topic, path, name, node.lineno, span, rule, *texts)


def drawn(seed: int, root: Path = ROOT) -> list[Mutant]:
    """The mutants of a seed: of each topic `count`, spread over its modules and rules, no two of one line."""
    chosen: list[Mutant] = []
    for topic in TOPICS:
        found = list(candidates(topic, root))
        random.Random(f"{seed} {topic.name}").shuffle(found)
        taken: list[Mutant] = []
        while len(taken) < topic.count:
            rest = [one for one in found if one.key not in EQUIVALENT and all(apart(one, other) for other in taken)]
            if not rest:
                raise ValueError(f"topic {topic.name!r} has no {topic.count} mutants of different lines")

            def used(one: Mutant, taken: list[Mutant] = taken) -> tuple[int, int]:
                same = [(other.path, other.name) == (one.path, one.name) for other in taken]
                files = [other.path == one.path for other in taken]
                return sum(other.rule == one.rule for other in taken) + sum(files), sum(same)

            taken.append(min(rest, key=used))
        chosen += taken
    return chosen


def apart(one: Mutant, other: Mutant) -> bool:
    return (one.path, one.line) != (other.path, other.line)


# ---------------------------------------------------------------------------------------------- running them


class Tree:
    """A copy of the tree, laid out as installed, in which tests run on a mutant."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder = folder
        for name in FOLDERS:
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in FILES:
            shutil.copy(root / name, folder)
        for name in ("methods", "tasks", "conf"):
            (folder / "kvcompress" / name).symlink_to(folder / name)

    def run(self, tests: tuple[str, ...], limit: float) -> tuple[str, str, float]:
        """Run tests until the first failure → "passed", "failed" or "time limit", the test that failed, seconds."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
        command += ["-n", "0"] if has_xdist() else []
        quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
        environment = os.environ | quiet | {"PYTHONPATH": str(self.folder)}
        begun = time.monotonic()
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "time limit", "", time.monotonic() - begun
        seconds = time.monotonic() - begun
        if process.returncode == 0:
            return "passed", "", seconds
        named = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
        if process.returncode > 2 or named is None:
            raise RuntimeError(f"pytest ended with {process.returncode}:\n{printed[-2000:]}")
        return "failed", named[1], seconds


def has_xdist() -> bool:
    import importlib.util

    return importlib.util.find_spec("xdist") is not None


def stamp(mutant: Mutant, root: Path = ROOT) -> str:
    """What a result belongs to: the change and the file as it is."""
    return sha256(f"{mutant.key}{mutant.span}".encode() + (root / mutant.path).read_bytes()).hexdigest()[:16]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--list", action="store_true", help="print the mutants and what is known of them")
    parser.add_argument("--only", type=lambda text: [int(n) for n in text.split(",")], help="numbers, such as 3,7")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that the tests of a mutant may take")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants.json", help="file of results")
    parser.add_argument("--no-baseline", action="store_true", help="believe that the tests pass without a mutant")
    asked = parser.parse_args(arguments)
    mutants = dict(enumerate(drawn(asked.seed), 1))
    if asked.only and (wrong := set(asked.only) - set(mutants)):
        parser.error(f"--only {', '.join(map(str, sorted(wrong)))}; valid: 1 to {len(mutants)}")
    known: dict[str, str] = json.loads(asked.results.read_text()) if asked.results.is_file() else {}
    chosen = {number: mutants[number] for number in asked.only or mutants}
    if asked.list:
        for number, mutant in chosen.items():
            print(said(number, mutant, known.get(stamp(mutant), "no result")))
        return 0
    passed: set[str] = {topic.name for topic in TOPICS} if asked.no_baseline else set()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Tree(Path(folder))
        for number, mutant in chosen.items():
            if stamp(mutant) not in known or asked.only:
                if mutant.topic.name not in passed:
                    found = tree.run(mutant.topic.tests, 3 * asked.limit)
                    if found[0] != "passed":
                        print(f"{mutant.topic.name}: without a mutant {found[0]} {found[1]}", file=sys.stderr)
                        return 2
                    passed.add(mutant.topic.name)
                known[stamp(mutant)] = tried(tree, mutant, asked.limit)
                asked.results.parent.mkdir(parents=True, exist_ok=True)
                asked.results.write_text(json.dumps(known, indent=1))
            print(said(number, mutant, known[stamp(mutant)]), flush=True)
    alive = [number for number, mutant in chosen.items() if known[stamp(mutant)].startswith("survived")]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} killed" + (f"; survivors: {alive}" if alive else ""))
    return int(bool(alive))


def tried(tree: Tree, mutant: Mutant, limit: float) -> str:
    """Apply a mutant, run its tests, take it away again → "killed by …" or "survived …"."""
    file = tree.folder / mutant.path
    source = file.read_bytes()
    file.write_bytes(mutant.applied(source))
    try:
        how, test, seconds = tree.run(mutant.topic.tests, limit)
    finally:
        file.write_bytes(source)
    if how == "passed":
        return f"survived ({seconds:.0f} s)"
    return f"killed by {test or 'the time limit'} ({seconds:.0f} s)"


def said(number: int, mutant: Mutant, result: str) -> str:
    """A mutant and what became of it, in three lines."""
    place = f"{mutant.path}:{mutant.line} {mutant.name}"
    return (
        f"{number:2} {mutant.topic.name} · {mutant.rule} · {place}\n   {mutant.before}  →  {mutant.after}\n   {result}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
