"""Peer benchmark: other programs that compress caches, each beside plain transformers of its own environment.

Three kinds: our methods, transformers' own QuantizedCache, and kvpress in another environment that a worker process
runs (outside/kvpress_worker.py). A peer's ratio is to plain transformers in the same process, so that releases of
libraries are compared with themselves.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, QuantizedCache
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from kvcompress.bench.overhead import Check, Overhead
from kvcompress.measure.measuring import Ratios, Timer, paired_ratios
from kvcompress.method import Method

WHATS = ("prefill", "decode")


@dataclass(frozen=True)
class PeerRow:
    """One peer beside plain transformers of its environment.

    Attributes:
        peer: whose it is; side: what of it; what: "prefill" (seconds, compression included) or "decode" (per token).
        ratios: of the side to plain.
        bytes: keys and values after the prompt over plain's, None where it was not counted.
    """

    peer: str
    side: str
    what: str
    length: int
    ratios: Ratios
    bytes: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(what: str, name: str) -> Check:
    """A check of `Overhead` without a target, for the method that plays the role `name`."""
    return Check(what, f"{name}, {what} beside plain transformers", name, (), {})


def methods_of(text: str) -> dict[str, Method]:
    """`full,snapkv:0.1,flexicache:512:heads=stable` as methods by that name.

    Raises:
        ValueError: an unknown method or setting, no budget, or nothing.
    """
    from kvcompress.sweep.components import method_classes

    known, found = method_classes(), dict[str, Method]()
    for item in filter(None, text.split(",")):
        name, budget, *settings = item.split(":") if ":" in item else (item, "1.0")
        if name not in known:
            raise ValueError(f"--methods {name!r} is unknown; valid: {', '.join(known)}")
        try:
            options = {key: yaml.safe_load(value) for key, value in (one.split("=") for one in settings)}
            found[item] = known[name](budget=json.loads(budget), **options)
        except json.JSONDecodeError:
            raise ValueError(f"--methods {item!r}: {budget!r} is no budget; as in snapkv:0.1 or snapkv:512") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"--methods {item!r}: {error}; settings as in flexicache:512:heads=stable") from None
    if not found:
        raise ValueError("--methods is empty: name one, as in snapkv:0.1")
    return found


def lines(rows: Sequence[PeerRow]) -> list[tuple[str, ...]]:
    """Cells of a table, one line per row: ratios, milliseconds, share of bytes."""
    found: list[tuple[str, ...]] = []
    for row in rows:
        r = row.ratios
        spread = f"{r.quartiles[0]:.3f}–{r.quartiles[1]:.3f}"
        figures = (f"{r.median:.3f}", spread, f"{r.aa:.3f}", f"{1000 * r.a:,.1f} ms", f"{1000 * r.b:,.1f} ms")
        share = "" if row.bytes is None else f"{row.bytes:.3f}"
        found.append((row.peer, row.side, row.what, str(row.length), *figures, share))
    return found


def backends() -> list[str]:
    """Backends of QuantizedCache that can be used here; `fp8` needs no package."""
    found = [("quanto", is_optimum_quanto_available()), ("hqq", is_hqq_available()), ("fp8", True)]
    return [name for name, there in found if there]


class Peers:
    """Measurements on one model.

    Args:
        methods: ours, by the name they get.
        pairs, tokens, seed, progress: as for `Overhead`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        methods: Mapping[str, Method],
        pairs: int = 11,
        tokens: int = 32,
        seed: int = 0,
        progress: Callable[[], None] | None = None,
    ) -> None:
        self.overhead = Overhead(model, methods, pairs, tokens, seed, progress, judge=False)
        self.model, self.methods, self.pairs, self.tokens, self.progress = model, methods, pairs, tokens, progress

    def ours(self, what: str, length: int) -> Iterator[PeerRow]:
        """Each of our methods beside plain."""
        for name in self.methods:
            row = self.overhead.run(check(what, name), length)
            yield PeerRow("kvcompress", name, what, length, row.ratios, self._bytes(name, length))

    def _bytes(self, name: str, length: int) -> float:
        from kvcompress.hook.session import compress

        with compress(self.model, self.methods[name]) as session:
            session.prefill(self.overhead.prompt(length))
            return float(session.report()["kv"]["ratio"])

    @torch.no_grad()
    def quantized(self, what: str, length: int, backend: str) -> PeerRow:
        """QuantizedCache beside DynamicCache."""
        ids = self.overhead.prompt(length if what == "prefill" else length - self.tokens)

        def filled(quantized: bool) -> tuple[Any, float]:
            with Timer(self.model.device) as timer:
                cache = QuantizedCache(backend, self.model.config) if quantized else None
                output = self.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
            return output["cache"], timer.seconds

        def run(quantized: bool) -> float:
            cache, seconds = filled(quantized)  # codes cannot be copied in every backend, so that each run has its own
            return seconds if what == "prefill" else self.overhead.decode_seconds(cache)

        ratios = paired_ratios(lambda: run(False), lambda: run(True), pairs=self.pairs, progress=self.progress)
        return PeerRow("transformers", f"QuantizedCache {backend}", what, length, ratios)

    def kvpress(
        self, worker: KVPress, presses: Sequence[str], share: float, what: str, length: int
    ) -> Iterator[PeerRow]:
        """Each press, dropping `share` of the tokens, beside plain in the worker's environment."""
        ids = self.overhead.prompt(length if what == "prefill" else length - self.tokens)
        worker.ask({"ids": ids[0].tolist()})
        for press in presses:
            asked = {"what": what, "tokens": self.tokens}
            ours = asked | {"press": press, "options": {"compression_ratio": share}}
            plain = worker.ask(asked | {"press": None})["bytes"]
            held = worker.ask(ours)["bytes"]
            ratios = paired_ratios(
                lambda asked=asked: worker.ask(asked | {"press": None})["seconds"],  # type: ignore[misc]
                lambda ours=ours: worker.ask(ours)["seconds"],  # type: ignore[misc]
                pairs=self.pairs,
                progress=self.progress,
            )
            yield PeerRow("kvpress", f"{press} {share:g}", what, length, ratios, held / plain)


class KVPress:
    """A worker process in an environment with kvpress.

    Args:
        python: its interpreter; script: the worker.
        model: a folder that transformers reads.

    Raises:
        ValueError: it cannot be started, says which and why.
    """

    def __init__(self, python: Path, script: Path, model: str, dtype: str, device: str, threads: int) -> None:
        command = [str(python), str(script), model, "--dtype", dtype, "--device", device, "--threads", str(threads)]
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError as error:
            raise ValueError(f"--kvpress {python}: {error}; give the python of an environment with kvpress") from None
        try:
            self.versions = self._answer()["versions"]
        except ValueError as error:
            self.close()
            raise ValueError(f"--kvpress {python}: {error}") from None

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Raises:
        ValueError: what went wrong there.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise ValueError(f"the kvpress worker has ended: {error}") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(f"the worker ended with code {self.process.wait()} and no answer")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(f"the kvpress worker: {answer['error']}")
        return answer

    def close(self) -> None:
        """End it."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def worker(python: Path, script: Path, model: PreTrainedModel, threads: int) -> Iterator[KVPress]:
    """A worker with the same weights; a model that lies in no folder is saved to a temporary one."""
    dtype, device = str(model.dtype).removeprefix("torch."), str(model.device)
    with tempfile.TemporaryDirectory() as folder:
        source = str(getattr(model.config, "_name_or_path", ""))
        if not (source and Path(source).is_dir()):
            model.save_pretrained(folder)
            source = folder
        found = KVPress(python, script, source, dtype, device, threads)
        try:
            yield found
        finally:
            found.close()
