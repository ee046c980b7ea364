"""Kernel benchmark: each attention kernel beside a slow reference and a peer, with its floor in bytes and operations.

A kernel's floor is the bytes it has to read and write over the device's bandwidth, or the operations over the matrix
rate, whichever takes longer; both rates are measured in the same process (`kvcompress.measure.roofline`). The peer is PyTorch's
SDPA: the flash forward of the same prompt for the attention mass, SDPA over all tokens for a decode step. On a GPU the
Triton kernels run, on a CPU the torch paths that take their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE
from rich.table import Table

from kvcompress.cache.layouts import PagedStore, RaggedStore
from kvcompress.cache.layouts.quantized_groups import GroupSegment
from kvcompress.kernels import triton_decode, triton_groups, triton_mass, triton_pages
from kvcompress.kernels.blockwise import AttentionParams, blocks, sdpa_block, softmax_blocks, units
from kvcompress.kernels.online_softmax import piecewise_attention
from kvcompress.kernels.varlen_decode import lane_attention
from kvcompress.measure import roofline
from kvcompress.measure.measuring import Ratios, Timer, paired_ratios

Tensor = torch.Tensor

IN_A_ROW = 20  # runs within one measurement on a fast device, as one is over before it is waited for
PAGE, SHARE = 16, 0.25  # tokens of a page, and the share of the pages that a step reads
REFERENCE_ROWS = 256


@dataclass(frozen=True)
class Shape:
    """`batch` rows, `kv` KV heads of `group` query heads each, heads of `dim`, `tokens` per row and head."""

    batch: int
    kv: int
    group: int
    dim: int
    tokens: int


@dataclass(frozen=True)
class Job:
    """What is measured: `run` and `peer` take nothing; `bytes` and `operations` are the least `run` can do."""

    path: str
    run: Callable[[], Any]
    peer: Callable[[], Any]
    peer_name: str
    reference: Callable[[], Tensor]
    found: Callable[[], Tensor]
    bytes: int
    operations: int


@dataclass(frozen=True)
class KernelRow:
    """One kernel at one shape.

    Attributes:
        path: "triton" or "torch".
        ratios: of the kernel (b) to its peer (a), in seconds.
        reference_s: seconds of the slow reference, run once; error: largest difference to it.
        floor_s: predicted least seconds; of_floor: measured over predicted.
        bytes_per_s, of_copy: the least bytes over the measured time, absolute and as a share of the copy bandwidth.
    """

    kernel: str
    path: str
    peer: str
    shape: Shape
    dtype: str
    ratios: Ratios
    reference_s: float
    error: float
    bytes: int
    operations: int
    floor_s: float
    of_floor: float
    bytes_per_s: float
    of_copy: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Kernels:
    """Measurements on one device.

    Args:
        pairs: pairs per row, each with one more run of the peer for A/A.
        bits, group: of packed codes.
    """

    def __init__(
        self,
        device: str | torch.device,
        dtype: torch.dtype,
        pairs: int = 11,
        bits: int = 4,
        group: int = 32,
        seed: int = 0,
    ) -> None:
        self.device, self.dtype, self.pairs = torch.device(device), dtype, pairs
        self.bits, self.group, self.seed = bits, group, seed

    @torch.no_grad()
    def run(self, kernel: str, shape: Shape) -> KernelRow:
        """Measure one of `KERNELS` at one shape.

        Raises:
            ValueError: a kernel that is not known, or a shape without tokens.
        """
        if kernel not in KERNELS:
            raise ValueError(f"no kernel named {kernel!r}; valid: {', '.join(KERNELS)}")
        if min(asdict(shape).values()) < 1:
            raise ValueError(f"{shape}: every size must be at least 1")
        torch.manual_seed(self.seed)
        job: Job = getattr(self, f"_{kernel}")(shape)
        with Timer(self.device) as timer:
            expected = job.reference()
        error = float((job.found().float() - expected.float()).abs().max())
        ratios = paired_ratios(lambda: self._seconds(job.peer), lambda: self._seconds(job.run), pairs=self.pairs)
        rates = roofline.rates(self.device, self.dtype)
        floor = roofline.Step(0, job.bytes, job.operations).floor(rates)
        speed = job.bytes / ratios.b
        return KernelRow(
            kernel,
            job.path,
            job.peer_name,
            shape,
            str(self.dtype).removeprefix("torch."),
            ratios,
            timer.seconds,
            error,
            job.bytes,
            job.operations,
            floor,
            ratios.b / floor,
            speed,
            speed / rates.copy,
        )

    def _seconds(self, job: Callable[[], Any]) -> float:
        times = 1 if self.device.type == "cpu" else IN_A_ROW
        with Timer(self.device) as timer:
            for _ in range(times):
                job()
        return timer.seconds / times

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def _qkv(self, shape: Shape, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        held = (shape.batch, shape.kv, shape.tokens, shape.dim)
        return (
            self._random(shape.batch, shape.kv * shape.group, queries, shape.dim),
            self._random(*held),
            self._random(*held),
        )

    def _mass(self, shape: Shape) -> Job:
        """Triton: the sums alone, beside the forward whose log-sum-exp they need. CPU: output and sums in one pass."""
        n, features = shape.tokens, AttentionParams(shape.dim**-0.5)
        q, k, v = self._qkv(shape, n)
        at = torch.arange(n, dtype=torch.int32, device=self.device)[None]
        triton = triton_mass.usable(q, features)
        pairs = shape.batch * q.shape[1] * n * (n + 1) // 2

        def blocked() -> Tensor:
            sums = torch.zeros(shape.batch, shape.kv, shape.group, n, device=self.device)
            unit = units(q, k)[0]
            spans = [(rows, rows.start, rows.stop) for rows in blocks(n, q[unit[0], unit[2]], k)]
            softmax_blocks(q, k, v, at[:, None], at, features, spans, sums)
            return sums

        lse = None
        if triton:
            both = triton_mass.flash(q, k, v, features.scaling)
            lse = None if both is None else both[1]

        def summed() -> Tensor:
            return triton_mass.mass(q, k, at, at[:, None], features, True, True, None, lse)

        found = summed if triton else blocked
        lse_and_sums = 4 * 2 * q.shape[0] * q.shape[1] * n
        moved = (q.numel() + k.numel()) * q.element_size() + lse_and_sums
        if not triton:
            moved += (v.numel() + q.numel()) * q.element_size()
        return Job(
            "triton" if triton else "torch",
            found,
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            "flash forward" if q.dtype != torch.float32 or not q.is_cuda else "SDPA forward",
            lambda: dense_mass(q, k, features.scaling),
            found,
            moved,
            (2 if triton else 4) * shape.dim * pairs,
        )

    def _single(self, shape: Shape) -> tuple[Tensor, Tensor, Tensor, Callable[[], Tensor]]:
        q, k, v = self._qkv(shape, 1)
        return q, k, v, lambda: sdpa_block(q, k, v, None, shape.dim**-0.5)

    def _decode(self, shape: Shape) -> Job:
        """Ragged lanes: heads hold from half to one and a half of `tokens`, as much as the peer's in all."""
        q, _, _, peer = self._single(shape)
        segments, features = shape.batch * shape.kv, AttentionParams(shape.dim**-0.5)
        spread = torch.linspace(0.5, 1.5, segments) if segments > 1 else torch.ones(1)
        counts = (spread * shape.tokens).long().clamp(min=1).view(shape.batch, shape.kv)
        total = int(counts.sum())
        packed = {"keys": self._random(total, shape.dim), "values": self._random(total, shape.dim)}
        at = [torch.arange(n) for n in counts.flatten().tolist()]
        packed["positions"] = torch.cat(at).int().to(self.device)
        store = RaggedStore(packed, counts)
        owners, k, v, positions = (store.owners(), *(store.in_lanes(x) for x in ("keys", "values", "positions")))
        table, empty = store.table(), positions < 0
        in_place = triton_decode.usable(q, k, v, shape.kv)

        def run() -> Tensor:
            if in_place:
                return triton_decode.decode(q, k, v, positions, table, features)
            return lane_attention(q, k, v, empty, owners, shape.kv, features)[0]

        def reference() -> Tensor:
            keys, values, held = store.get("keys"), store.get("values"), store.get("positions") >= 0
            return one_by_one(q, keys, values, held, features.scaling)

        return self._step(in_place, q, run, peer, reference, 2 * total * shape.dim * q.element_size(), total, shape)

    def _groups(self, shape: Shape) -> Job:
        """Packed codes of KIVI."""
        from kvcompress.methods.kivi import KIVICodec

        q, k, v, peer = self._single(shape)
        unit = GroupSegment(
            KIVICodec(bits=self.bits, group=min(self.group, shape.dim), residual=128), k.clone(), v.clone()
        )
        unit.flush()
        features = AttentionParams(shape.dim**-0.5)
        in_place = triton_groups.usable(q, shape.kv, shape.dim, self.bits)

        def run() -> Tensor:
            if in_place:
                return triton_groups.decode(q, unit.packed(), features)
            return piecewise_attention(q, unit.pieces("keys"), unit.pieces("values"), features)[0]

        def reference() -> Tensor:
            keys, values = unit.whole("keys"), unit.whole("values")
            held = torch.ones(keys.shape[:3], dtype=torch.bool, device=self.device)
            return one_by_one(q, keys, values, held, features.scaling)

        moved = sum(size for _, _, size in unit.tensors())
        return self._step(in_place, q, run, peer, reference, moved, shape.batch * shape.kv * shape.tokens, shape)

    def _pages(self, shape: Shape) -> Job:
        """A quarter of the pages, chosen at random, beside SDPA over all."""
        q, k, v, peer = self._single(shape)
        counts = torch.full((shape.batch, shape.kv), shape.tokens)
        at = torch.arange(shape.tokens, dtype=torch.int32, device=self.device).repeat(shape.batch * shape.kv)
        packed = {"keys": k.flatten(0, 2), "values": v.flatten(0, 2), "positions": at}
        store, features = PagedStore(packed, counts, packed["keys"], PAGE, True, ()), AttentionParams(shape.dim**-0.5)
        order = torch.rand(shape.batch, shape.kv, store.most, device=self.device).argsort(-1)
        chosen = order[..., : max(1, int(SHARE * store.most))]
        asked = torch.full((1, 1), shape.tokens, dtype=torch.int32, device=self.device)
        slots = (chosen[..., None] * PAGE + torch.arange(PAGE, device=self.device)).flatten(2)
        allowed = (slots < shape.tokens)[:, :, None]
        in_place = triton_pages.usable(q, *store.block_table()[:2], shape.kv)

        def run() -> Tensor:
            if in_place:
                return triton_pages.decode(q, *store.block_table(), chosen, asked, features)
            keys, values = (store.read(name, chosen).view(*slots.shape, -1) for name in ("keys", "values"))
            return sdpa_block(q, keys, values, allowed, features.scaling)

        def reference() -> Tensor:
            held = torch.zeros(shape.batch, shape.kv, store.most * PAGE, dtype=torch.bool, device=self.device)
            held.scatter_(2, slots, True)
            return one_by_one(q, k, v, held[..., : shape.tokens], features.scaling)

        read = int(allowed.sum())
        return self._step(in_place, q, run, peer, reference, 2 * read * shape.dim * q.element_size(), read, shape)

    def _step(
        self,
        in_place: bool,
        q: Tensor,
        run: Callable[[], Tensor],
        peer: Callable[[], Tensor],
        reference: Callable[[], Tensor],
        moved: int,
        attended: int,
        shape: Shape,
    ) -> Job:
        """A decode step's job: `moved` bytes of keys and values, `attended` of them over all rows and KV heads."""
        path = "triton" if in_place else "torch"
        ends = 2 * q.numel() * q.element_size()
        operations = 4 * shape.dim * shape.group * attended
        return Job(path, run, peer, "SDPA over all", reference, run, moved + ends, operations)


KERNELS = ("mass", "decode", "groups", "pages")


def dense_mass(q: Tensor, k: Tensor, scaling: float) -> Tensor:
    """Column sums `[B, H_kv, G, P]` of causal softmax, one head and a few rows after the other, in float32."""
    batch, heads, n, _ = q.shape
    group = heads // k.shape[1]
    sums = torch.zeros(batch, heads, n, device=q.device)
    for b in range(batch):
        for h in range(heads):
            for first in range(0, n, REFERENCE_ROWS):
                rows = torch.arange(first, min(first + REFERENCE_ROWS, n), device=q.device)
                logits = q[b, h, rows].float() @ k[b, h // group].float().T * scaling
                later = torch.arange(n, device=q.device) > rows[:, None]
                sums[b, h] += torch.softmax(logits.masked_fill(later, float("-inf")), -1).sum(0)
    return sums.view(batch, -1, group, n)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, held: Tensor, scaling: float) -> Tensor:
    """Output `[B, H, 1, D]` of single queries over the slots that are `held [B, H_kv, P]`, head by head in float32."""
    output = torch.zeros(*q.shape[:3], v.shape[-1], device=q.device)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            mine = held[b, h // group]
            keys, values = k[b, h // group, mine].float(), v[b, h // group, mine].float()
            output[b, h, 0] = torch.softmax(keys @ q[b, h, 0].float() * scaling, 0) @ values
    return output


def run(bench: Kernels, kernels: Sequence[str], shapes: Sequence[Shape]) -> Iterator[KernelRow]:
    """Each kernel at each shape."""
    for kernel in kernels:
        for shape in shapes:
            yield bench.run(kernel, shape)


HEADINGS = (
    "kernel", "path", "peer", "B x H/KV x D", "tokens", "to peer", "quartiles", "A/A", "floor, ms", "ms", "GB/s",
    "of copy", "reference", "error",
)  # fmt: skip


def table(rows: Sequence[KernelRow]) -> Table:
    """The rows: ratio to the peer with its spread, the floor beside what was measured, and how slow the reference is."""
    out = Table(*HEADINGS, box=SIMPLE)
    for row in rows:
        r, s = row.ratios, row.shape
        ratios = (
            f"{r.median:.3f}",
            f"{r.quartiles[0]:.3f}–{r.quartiles[1]:.3f}",
            "" if r.aa is None else f"{r.aa:.3f}",
        )
        speed = (f"{1000 * row.floor_s:.3f}", f"{1000 * r.b:.3f}", f"{row.bytes_per_s / 1e9:.1f}", f"{row.of_copy:.0%}")
        size = f"{s.batch}x{s.kv * s.group}/{s.kv}x{s.dim}", str(s.tokens)
        slow = f"{row.reference_s / r.b:.0f}x", f"{row.error:.0e}"
        out.add_row(row.kernel, row.path, row.peer, *size, *ratios, *speed, *slow)
    return out
