"""Link benchmark: copies between host and device, and file reads past the page cache, at many granules.

Each way is fitted as `seconds = a · copies + bytes / b`; the file replaces data-sheet numbers (`--links FILE` of
`python -m kvcompress.measure.offload_cost_model`). Without a GPU, copies within memory and the disk are measured.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvcompress.measure.measuring import synchronize, timed
from kvcompress.measure.transfers import fit_link

GRANULES = tuple(4096 * 4**power for power in range(8))  # 4 KiB to 64 MiB
MOST_COPIES = 1024


@dataclass(frozen=True)
class Point:
    """One measurement: the median of some.

    Attributes:
        way: from where to where and how; granule: bytes of a copy; copies: how many; seconds: for all of them.
    """

    way: str
    granule: int
    copies: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.granule * self.copies / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"bandwidth": self.bandwidth}


class Links:
    """Copies of `total` bytes in pieces.

    Args:
        device: "cuda" measures host and device; else copies within memory.
        total: bytes of a measurement; the most that is taken of memory is twice that, and once of the disk.
        folder: for the file that is read; None leaves the disk out.
    """

    def __init__(
        self,
        device: torch.device | str,
        total: int = 256 << 20,
        repeats: int = 5,
        granules: tuple[int, ...] = GRANULES,
        folder: Path | None = None,
        seed: int = 0,
    ) -> None:
        if total < max(granules) or repeats < 1 or min(granules) < 1:
            raise ValueError(
                f"total={total}, repeats={repeats}: at least {max(granules)} bytes (a granule) and 1 repeat"
            )
        self.device, self.total, self.repeats, self.granules = torch.device(device), total, repeats, granules
        self.folder, self.rng = folder, random.Random(f"links:{seed}")

    def run(self) -> Iterator[Point]:
        """Every way at every granule."""
        yield from self._device() if self.device.type == "cuda" else self._memory()
        if self.folder is not None:
            yield from self._disk(self.folder)

    def _pieces(self, granule: int, scattered: bool) -> list[int]:
        """Offsets of the pieces of a measurement."""
        offsets = list(range(0, self.total - granule + 1, granule))
        if scattered:
            self.rng.shuffle(offsets)
        return offsets[:MOST_COPIES]

    def _ways(self, name: str, copy: Callable[[int, int, int], Any]) -> Iterator[Point]:
        """`copy(from, to, bytes)` for contiguous and scattered pieces."""
        for scattered in (False, True):
            for granule in self.granules:
                offsets = self._pieces(granule, scattered)

                def work(offsets: list[int] = offsets, granule: int = granule) -> None:
                    for place, offset in enumerate(offsets):
                        copy(offset, place * granule, granule)
                    synchronize(self.device)

                work()
                seconds = median(timed(work, self.device)[1] for _ in range(self.repeats))
                yield Point(f"{name}-scattered" if scattered else name, granule, len(offsets), seconds)

    def _memory(self) -> Iterator[Point]:
        source, target = torch.ones(self.total, dtype=torch.uint8), torch.zeros(self.total, dtype=torch.uint8)
        yield from self._ways("memcpy", lambda a, b, n: target[b : b + n].copy_(source[a : a + n]))

    def _device(self) -> Iterator[Point]:
        there = torch.ones(self.total, dtype=torch.uint8, device=self.device)
        back = torch.ones(self.total, dtype=torch.uint8, device=self.device)
        out, home = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        for pinned in (True, False):
            here, too = (torch.ones(self.total, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
            kind = "pinned" if pinned else "pageable"

            def up(a: int, b: int, n: int, here: torch.Tensor = here) -> None:
                there[b : b + n].copy_(here[a : a + n], non_blocking=True)

            def down(a: int, b: int, n: int, too: torch.Tensor = too) -> None:
                too[b : b + n].copy_(back[a : a + n], non_blocking=True)

            def both(a: int, b: int, n: int, up: Any = up, down: Any = down) -> None:
                with torch.cuda.stream(out):
                    up(a, b, n)
                with torch.cuda.stream(home):
                    down(a, b, n)

            for name, copy in (("host-to-device", up), ("device-to-host", down), ("both-ways", both)):
                yield from self._ways(f"{name}-{kind}", copy)

    def _disk(self, folder: Path) -> Iterator[Point]:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="links-") as file:
            block = os.urandom(min(self.total, 16 << 20))
            for start in range(0, self.total, len(block)):
                file.write(block[: self.total - start])
            file.flush()
            os.fsync(file.fileno())
            for scattered in (False, True):
                for granule in self.granules:
                    offsets = self._pieces(granule, scattered)

                    def work(offsets: list[int] = offsets, granule: int = granule) -> None:
                        for offset in offsets:
                            os.pread(file.fileno(), granule, offset)

                    found = []
                    for _ in range(self.repeats):
                        with suppress(
                            AttributeError
                        ):  # where there is none, the page cache answers, and the fit says so
                            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                        found.append(timed(work)[1])
                    yield Point("disk-scattered" if scattered else "disk", granule, len(offsets), median(found))


def fits(points: list[Point]) -> dict[str, dict[str, Any]]:
    """Latency and bandwidth by way; of both ways at once the bytes of one."""
    ways: dict[str, list[Point]] = {}
    for point in points:
        ways.setdefault(point.way, []).append(point)
    return {
        way: fit_link([(one.copies, one.copies * one.granule, one.seconds) for one in found])
        for way, found in ways.items()
        if len(found) > 1
    }
