"""Triton's kernels compiled for real GPUs through their own wrappers, without one: shared memory, registers and spills.

    python -m kvcompress.bench.compiled_kernels --targets 80,90,100 --json kernels.json

Runs in a process of its own: a driver that names a target takes the place of the machine's, and Triton must not have been
imported for its interpreter (`TRITON_INTERPRET`). ptxas and cuobjdump come with Triton. What is compiled is kept in
Triton's cache folder, so that a second run takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvcompress.kernels import launch, triton_decode, triton_groups, triton_mass
from kvcompress.kernels.blockwise import AttentionParams

Tensor = torch.Tensor

# bytes of shared memory that one block may take, by compute capability (CUDA C++ Programming Guide, technical specifications)
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target.

    Attributes:
        case: which call of its wrapper it comes from; dim: channels of a head.
        shared: bytes of shared memory of a block; bound: what its wrapper takes it to need at most, None where it does not
            ask.
        registers: of a thread; stack: bytes of a thread, above 0 is spilled.
    """

    kernel: str
    case: str
    target: int
    dtype: str
    dim: int
    shared: int
    bound: int | None
    registers: int
    stack: int

    @property
    def fits(self) -> bool:
        """True if the target's cards can run it."""
        return self.shared <= SHARED_MEMORY[self.target]


@dataclass(frozen=True)
class Case:
    """A call of a wrapper: what is asked of it for a head size, and the bytes that it takes for shared memory."""

    name: str
    call: Callable[[int, torch.dtype], int]
    dtypes: tuple[str, ...] = (*HALF, "float32")


# ---------------------------------------------------------------------- calls


def lanes(slots: int, group: int = 4, width: int | None = None, softcap: float | None = None) -> Case:
    """Decode over lanes (or pages) of `slots`."""

    def call(dim: int, dtype: torch.dtype) -> int:
        q, at = torch.zeros(2, 2 * group, 1, dim, dtype=dtype), torch.zeros(10, slots, dtype=torch.int32)
        k, v = torch.zeros(10, slots, dim, dtype=dtype), torch.zeros(10, slots, width or dim, dtype=dtype)
        table = torch.zeros(4, 5, dtype=torch.int32)
        triton_decode.decode(q, k, v, at, table, AttentionParams(dim**-0.5, softcap=softcap))
        return triton_decode.shared_bytes(*triton_decode._shape(q, k, v, 2), q.element_size())

    return Case(f"lanes of {slots}" + (", soft cap" if softcap else ""), call)


def codes(bits: int, group: int = 32) -> Case:
    """Decode over packed codes of `bits` in groups of `group`."""

    def call(dim: int, dtype: torch.dtype) -> int:
        heads, tokens = 2, 512
        kinds = {}
        for kind, shape in (("keys", (tokens // group, dim)), ("values", (tokens, dim // group))):
            made = {name: torch.zeros(1, heads, *shape, dtype=dtype) for name in ("scale", "zero")}
            kinds[kind] = made | {"codes": torch.zeros(1, heads, tokens, dim * bits // 8, dtype=torch.uint8)}
        tail = torch.zeros(1, heads, 16, dim, dtype=dtype), torch.zeros(1, heads, 16, dim, dtype=dtype)
        held = triton_groups.PackedTokens(kinds["keys"], kinds["values"], tokens, bits, group, tail)
        q = torch.zeros(1, 4 * heads, 1, dim, dtype=dtype)
        triton_groups.decode(q, held, AttentionParams(dim**-0.5))
        return triton_groups.shared_bytes(*triton_groups._shape(q, heads, dim, bits), q.element_size())

    return Case(f"codes of {bits} bits", call, HALF)


def mass(plain: bool) -> Case:
    """Attention mass of a plain prompt whose log-sum-exp is known, or with a window and weights and without it."""

    def call(dim: int, dtype: torch.dtype) -> int:
        n = 200
        q, k = torch.zeros(1, 4, n, dim, dtype=dtype), torch.zeros(1, 2, n, dim, dtype=dtype)
        at = torch.arange(n, dtype=torch.int32)[None]
        features = AttentionParams(dim**-0.5, window=None if plain else 64)
        weights, lse = (None, torch.zeros(1, 4, n)) if plain else (torch.ones(1, n), None)
        triton_mass.mass(q, k, at, at[:, None], features, True, plain, weights, lse)
        cut = triton_mass.tiles(q)
        assert cut is not None
        return cut.shared_bytes(q.element_size())

    return Case("mass of a prompt" if plain else "mass, window and weights", call, HALF)


CASES = {
    case.name: case
    for case in (lanes(16), lanes(32), lanes(64), lanes(64, softcap=30.0), codes(2), codes(4), codes(8), mass(True), mass(False))
}  # fmt: skip


# ---------------------------------------------------------------------- compiling


class _Compile:
    """Stands in for a kernel: a launch compiles it for the target, and notes what came out."""

    def __init__(self, kernel: Any, name: str, found: list[dict[str, Any]]):
        self.kernel, self.name, self.found = kernel, name, found

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def compiled(*args: Any, **sizes: Any) -> None:
            if "UPCAST" in sizes:  # only the interpreter needs it
                sizes["UPCAST"] = False
            made = self.kernel.run(*args, grid=grid, warmup=True, **sizes)
            made = made.result() if hasattr(made, "result") else made
            registers, stack = resources(made.asm["cubin"])
            said = {"kernel": self.name, "shared": made.metadata.shared, "registers": registers, "stack": stack}
            self.found.append(said)

        return compiled


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread of a compiled kernel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {said.stdout.strip()[:200]}")
    return int(found[1]), int(found[2])


def compiled(
    targets: Sequence[int], dims: Sequence[int], dtypes: Sequence[str], cases: Sequence[str]
) -> Iterator[Compiled]:
    """Every kernel that the cases launch, for every target, head size and type.

    Raises:
        RuntimeError: Triton was imported for its interpreter.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 is set: compile in a process without it")
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    from kvcompress.bench.emulated_cuda import KERNELS

    class Nowhere(DriverBase):
        """A driver without a device."""

        arch = 0

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", self.arch, 32)

        def get_current_device(self) -> int:
            return self.arch  # Triton holds kernels apart by device

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_benchmarker(self) -> Any:
            raise NotImplementedError("there is nothing to time")

        @classmethod
        def is_active(cls) -> bool:
            return True

    found: list[dict[str, Any]] = []
    from kvcompress.kernels import mass_kernels, triton_kernels  # noqa: F401

    for module, kernels in KERNELS.items():
        place = sys.modules[f"kvcompress.kernels.{module}"]
        for name in kernels:
            setattr(place, name, _Compile(getattr(place, name), name, found))
    for target in targets:
        here = Nowhere()
        here.arch = target
        driver.set_active(here)
        for dtype in dtypes:
            for dim in dims:
                for name in cases:
                    if dtype not in CASES[name].dtypes:
                        continue
                    found.clear()
                    bound = CASES[name].call(dim, getattr(torch, dtype)) + launch.SPARE
                    for said in found:
                        asked = None if said["kernel"] == "merge" else bound
                        yield Compiled(case=name, target=target, dtype=dtype, dim=dim, bound=asked, **said)


def main(arguments: list[str] | None = None) -> int:
    """0 if every kernel that its wrapper would take for a target fits it and spills nothing, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="80,90,100", help="compute capabilities, comma-separated")
    parser.add_argument("--dims", default="64,128", help="channels of a head")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--cases", default="", help=f"of {', '.join(CASES)}; default: all (separated by ;)")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args(arguments)
    targets, dims = ([int(n) for n in text.split(",")] for text in (args.targets, args.dims))
    cases = args.cases.split(";") if args.cases else list(CASES)
    rows = []
    for row in compiled(targets, dims, args.dtypes.split(","), cases):
        rows.append(asdict(row))
        text = " ".join(f"{key}={value}" for key, value in asdict(row).items())
        print(text, flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
