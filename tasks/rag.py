"""Retrieval-augmented questions: answers, divergence and time to first token of prefills that reuse chunks.

A prompt is a prefix, passages in an order of its own, and the question, each tokenised by itself, so that a passage has
the same ids wherever it stands. Each is prefilled three ways, one after the other in rotating order: whole, with exact
prefix reuse, and as the method does; what the method's first logits take is compared with the other two of the same
prompt. Template, questions and F1 are CacheBlend's (YaoJiayi/CacheBlend 55ad026, example/utils.py, blend_musique.py).
Differences: an answer counts as "yes" or "no" by its first word, not its first letters (there Norway is a no); the
wrapper is the model's chat template.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, ClassVar

import torch

from kvcompress.common.hashing import content_hash
from kvcompress.common.prose import Encoder
from kvcompress.common.tokenization import plain_ids
from kvcompress.data import passages, prompts, thinking
from kvcompress.data.divergence import reference_answer, teacher_forced_divergence
from kvcompress.data.haystack import prompt_template
from kvcompress.data.task import Sample, Task, Turn, ended_by_force
from kvcompress.measure.measuring import PeakMemory, quartiles, synchronize
from kvcompress.method.parts import OneShot, Prefill
from kvcompress.metrics.scores import normalise, qa_f1
from kvcompress.metrics.words import token_f1
from kvcompress.reuse.kv_store import store_of
from kvcompress.reuse.prefix import PrefixReuse

SOURCES = {  # files inside paths.data, the first that is there
    "musique_s": ("cacheblend/musique_s.json",),
    **{
        name: (f"longbench_v1/{name}.jsonl", f"longbench_v1/mini/{name}.jsonl", f"{name}.jsonl")
        for name in ("hotpotqa", "2wikimqa", "musique")
    },
}
PREFIX = (
    "You will be asked a question after reading several passages. Please directly answer the question based on the given "
    "passages. Do NOT repeat the question. The answer should be within 5 words..\nPassages:\n"
)
ASK = (
    "\n\nAnswer the question directly based on the given passages. Do NOT repeat the question. The answer should be within "
    "5 words. \nQuestion:"
)
WAYS: dict[str, Prefill | None] = {"full": OneShot(), "prefix": PrefixReuse(), "own": None}
TIERS = ("memory", "disk")


def asked(question: str) -> str:
    """A question as the released code writes it."""
    question = question if question.endswith("?") else question + "?"
    return f"{ASK}{question[0].lower()}{question[1:]}\nAnswer:"


def answer_of(text: str) -> str:
    """What is scored of an answer: its first line, or yes or no where that is how it begins."""
    line = text.lstrip("\n").split("\n")[0]
    word = re.match(r"\W*(yes|no)\b", line, re.IGNORECASE)
    return word[1] if word else line


def f1(text: str, references: Sequence[str], tokenizer: Any) -> float:
    """The best F1 over the references of the normal forms' token ids; 1 where both are empty."""
    best = 0.0
    for reference in references:
        got, wanted = (plain_ids(tokenizer, normalise(one)) for one in (answer_of(text), reference))
        best = max(best, token_f1(got, wanted) if got and wanted else float(got == wanted))
    return best


@dataclass(frozen=True, kw_only=True)
class Rag(Task):
    """Passages, a question, an answer; and what it took to get to its first token.

    Attributes:
        source: "musique_s" (CacheBlend's file), "hotpotqa", "2wikimqa", "musique" (LongBench's) inside `paths.data`, or
            a file of your own, absolute or inside it; fields as in `kvcompress/data/passages.py`.
        max_tokens: of a prompt at most, question and instructions included; None: passages stay whole.
        fit: how passages are made to fit: "drop" (whole ones) or "cut" (each at its end).
        n_passages: of a prompt at most; None: all.
        shuffle: an order of its own for each prompt, drawn by `seed`, so that prompts share no prefix.
        template: "auto" (chat where the tokenizer has a template), "chat" or "none".
        answer_tokens: generated at most.
        tier: where chunks are when a prompt begins: "memory", or "disk" (read anew, past the system's own cache).
        memory_mb: of each of the two stores, for chunks and for prefixes.
        rounds: how often each way of prefilling is timed.
        baselines: what the method is compared with in the same run: "full", "prefix".
    """

    name: ClassVar[str] = "rag"
    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "qa_f1_tokens"
    metric_version: ClassVar[str] = "1"
    shares_prefill: ClassVar[bool] = False
    wants_reference: ClassVar[bool] = True

    source: str = "musique_s"
    max_tokens: int | None = 2000
    fit: str = "drop"
    n_passages: int | None = None
    shuffle: bool = True
    template: str = "auto"
    answer_tokens: int = 32
    tier: str = "memory"
    memory_mb: int = 2048
    rounds: int = 1
    baselines: tuple[str, ...] = ("full", "prefix")

    def __post_init__(self) -> None:
        choices = {"fit": passages.FITS, "template": prompts.TEMPLATES, "tier": TIERS}
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                raise ValueError(f"task.{name}={getattr(self, name)!r}; valid: {', '.join(valid)}")
        for name in ("max_tokens", "n_passages", "answer_tokens", "rounds"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"task.{name}={getattr(self, name)}; at least 1 is needed")
        if self.memory_mb < 0:
            raise ValueError(f"task.memory_mb={self.memory_mb}; 0 MiB or more")
        object.__setattr__(self, "baselines", tuple(self.baselines))
        if wrong := [name for name in self.baselines if name not in ("full", "prefix")]:
            raise ValueError(f"task.baselines={wrong[0]!r}; valid: full, prefix")

    # ------------------------------------------------------------------ data

    def file(self) -> Path:
        """The file to read.

        Raises:
            ValueError: there is none, with where it was looked for.
        """
        names = SOURCES.get(self.source, (self.source,))
        for name in names:
            path = Path(name).expanduser()
            path = path if path.is_absolute() or self.data is None else Path(self.data) / path
            if path.is_file():
                return path
        places = " or ".join(names)
        raise ValueError(
            f"task.source={self.source!r}: no {places} in paths.data={self.data}; set paths.data, or name a file (named "
            f"sources: {', '.join(SOURCES)})"
        )

    def fingerprint(self) -> dict[str, Any]:
        return {"data": content_hash(self.file()), "records": len(passages.read(self.file()))}

    def provenance(self) -> dict[str, Any]:
        return {"data": f"file:{content_hash(self.file())}"}

    def settings(self) -> dict[str, Any]:
        # where the data lies is no setting: what it holds is in the fingerprint
        return {name: value for name, value in super().settings().items() if name != "source"}

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        encode = Encoder(tokenizer)
        for number, record in enumerate(passages.read(self.file())):
            wrap = prompt_template(tokenizer, encode, PREFIX, asked(record.question), "", self.template)
            room = None if self.max_tokens is None else self.max_tokens - len(wrap.head) - len(wrap.tail)
            shuffle = f"rag:{self.seed}:{number}" if self.shuffle else None
            fitted = passages.fit(record, encode, room, self.fit, self.n_passages, shuffle)
            segments = (wrap.head, *fitted.chunks, wrap.tail)
            yield Sample(
                id=record.id,
                segments=segments,
                turns=(Turn((), self.answer_tokens, references=record.answers),),
                protocol={
                    "question": "seen",
                    "template": wrap.template,
                    "source": self.source if self.source in SOURCES else Path(self.source).name,
                    "max_length": self.max_tokens,
                    "fit": self.fit,
                    "order": "shuffled" if self.shuffle else "as in the file",
                    "tier": self.tier,
                },
                meta={
                    "number": number,
                    "order": list(fitted.order),
                    "dropped": fitted.dropped,
                    "segment_tokens": [len(segment) for segment in segments],
                    **prompts.facts(tokenizer, [token for segment in segments for token in segment], fitted.cut),
                },
            )

    # ------------------------------------------------------------------ running

    def effort(self, sample: Sample) -> tuple[float, float]:
        """Chunks once, each way in each round, and the full model's answer, which is followed too."""
        return 2.0 + self.rounds * (1 + len(self.baselines)), 3.0

    @torch.no_grad()
    def reference(self, session: Any, sample: Sample) -> dict[str, torch.Tensor]:
        """The full model's greedy answer, its end token included, and the logits `[n, V]` that predicted each token."""
        logits = session.prefill(_tensors(session, sample)).logits
        return reference_answer(session, logits, sample.turns[0], partial(torch.argmax, dim=-1))

    @torch.no_grad()
    def run(self, session: Any, sample: Sample) -> dict[str, Any]:
        """Prefill in each way, timed; answer, and follow the full model's answer, after the method's own.

        Returns:
            beside what any task returns: `seconds` (per way a list, one per round) and `precompute_s` of chunks that
            were not in the store, outside of them; `reuse` and `prefix_reuse`, what was computed and what reused;
            `positions`, the lists of `token_divergence` along the full model's answer; `f1`, and `f1_full` of that answer.
        """
        if sample.reference is None:
            raise ValueError("rag compares with a reference: run it through the runner, or set sample.reference")
        if session.tokenizer is None:
            raise ValueError("rag scores token ids: compress(model, method, tokenizer=tokenizer)")
        segments, turn, device = _tensors(session, sample), sample.turns[0], session.model.device
        stores = {"own": store_of(session.model, "chunks", self.memory_mb, self.tier == "disk")}
        stores["full"] = session.store = stores["own"]
        start = time.perf_counter()
        computed = session.precompute(segments)
        precompute_s = time.perf_counter() - start
        ways = [*self.baselines, "own"]
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        found: dict[str, Any] = {}
        for turned in range(self.rounds):
            stores["prefix"] = self._history(session, turned)
            first = (sample.meta.get("number", 0) + turned) % len(ways)
            for way in ways[first:] + ways[:first]:
                session.store, session.cache = stores[way], None
                if way == "own" and self.tier == "disk":
                    session.store.forget()
                try:
                    took, peak = _timed(session, segments, WAYS[way])
                except ValueError as error:
                    if way != "prefix":
                        raise
                    raise ValueError(f"{error}; to go without this baseline: task.baselines=[full]") from error
                seconds[way].append(took)
                report = session.report(kept_map=way == "own")
                found[way] = report | {"peak": peak}
                if way == "own":
                    held = session.cache
        session.cache, compressed = held.fork(), found["own"]
        with PeakMemory(device) as decode_peak:
            answer = session.generate(turn.max_new_tokens, stop=turn.stop, guides=turn.guides())
        end, tokens = session.report(), [int(token) for token in answer.tokens[0]]
        session.cache = held
        positions = _followed(session, sample.reference)
        prompt_end = session.tokenizer.decode(sample.segments[-1])
        outputs = (tokens, sample.reference["tokens"].tolist())
        text, full = (one.answer for one in thinking.decoded(session.tokenizer, sample, outputs, prompt_end))
        sizes = [segment.shape[1] for segment in segments]
        return {
            "tokens": [tokens],
            "finished": [answer.finished[0]],
            "compressed": compressed,
            "end": end,
            "ttft_s": median(seconds["own"]),
            "prefill_s": compressed["time"]["prefill_s"],
            "compress_s": compressed["time"]["compress_s"],
            "tpot_s": [float(step) for step in answer.step_s],
            "prefill_peak": compressed["peak"],
            "decode_peak": decode_peak.peak,
            **ended_by_force([answer]),
            "seconds": seconds,
            "precompute_s": precompute_s,
            "precomputed": computed,
            "reuse": _reuse(compressed, sizes),
            "prefix_reuse": _reuse(found.get("prefix", {}), sizes),
            "positions": positions,
            "f1": f1(text, turn.references, session.tokenizer),
            "f1_full": f1(full, turn.references, session.tokenizer),
        }

    def _history(self, session: Any, turned: int) -> Any:
        """The prompts that prefix reuse has seen: those before this one of the same cell and round, never itself."""
        return store_of(session.model, f"prefixes {turned}", self.memory_mb, False).serve(f"{session.method} {self}")

    # ------------------------------------------------------------------ scores

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """F1 of token ids as `run` found it (of words where there is only a text), divergence, and paired times."""
        words = max(qa_f1(answer_of(out["text"][0]), reference) for reference in sample.turns[0].references)
        scores = {"score": out.get("f1", words), "f1_words": words}
        if "positions" in out:
            scores["f1_full"] = out["f1_full"]
            scores["kl"], scores["kl_first"] = fmean(out["positions"]["kl"]), out["positions"]["kl"][0]
            scores["agree"] = fmean(out["positions"]["agree"])
            scores |= {f"ttft_to_{way}": median(_ratios(out, way)) for way in self.baselines}
        return scores

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Means of divergence, medians of times and of their paired ratios, and what was reused."""
        outs = [row["out"] for row in rows]
        kl = [fmean(out["positions"]["kl"]) for out in outs]
        found: dict[str, Any] = {
            "f1_full": fmean(out["f1_full"] for out in outs),
            "kl": fmean(kl),
            "kl_stderr": stdev(kl) / math.sqrt(len(kl)) if len(kl) > 1 else None,
            "kl_first": fmean(out["positions"]["kl"][0] for out in outs),
            "agreement": fmean(fmean(out["positions"]["agree"]) for out in outs),
            "prompt_tokens": fmean(sum(row["meta"]["segment_tokens"]) for row in rows),
            "precompute_s": fmean(out["precompute_s"] for out in outs),
        }
        for way in ("own", *self.baselines):
            times = [one for out in outs for one in out["seconds"][way]]
            low, high = quartiles(times)
            name = "ttft" if way == "own" else f"ttft_{way}"
            found |= {f"{name}_s": median(times), f"{name}_s.q1": low, f"{name}_s.q3": high}
        for way in self.baselines:
            ratios = [ratio for out in outs for ratio in _ratios(out, way)]
            low, high = quartiles(ratios)
            found |= {f"ttft_to_{way}": median(ratios), f"ttft_to_{way}.q1": low, f"ttft_to_{way}.q3": high}
        for kind in ("reuse", *(["prefix_reuse"] if "prefix" in self.baselines else [])):
            for name in outs[0][kind]:
                found[f"{kind}.{name}"] = fmean(out[kind][name] for out in outs)
        return found


def _tensors(session: Any, sample: Sample) -> list[torch.Tensor]:
    return [torch.tensor([segment], device=session.model.device) for segment in sample.segments]


def _timed(session: Any, segments: Sequence[torch.Tensor], how: Prefill | None) -> tuple[float, int]:
    """Seconds from the prompt to its logits, compression included, and peak memory."""
    device = session.model.device
    with PeakMemory(device) as peak:
        synchronize(device)
        start = time.perf_counter()
        session.prefill(segments, how=how)
        synchronize(device)
        seconds = time.perf_counter() - start
    return seconds, peak.peak


def _followed(session: Any, reference: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """How far the logits along the full model's answer lie from its own."""
    positions: dict[str, list[float]] = {}
    for _, found in teacher_forced_divergence(session, reference):
        for name, values in found.items():
            positions.setdefault(name, []).extend(values)
    return positions


def _reuse(report: Mapping[str, Any], sizes: Sequence[int]) -> dict[str, float]:
    """What of the context was computed and what reused, in the same terms where nothing was."""
    found = report.get("reuse") or {}
    usual: dict[str, float] = dict.fromkeys("tokens_reused bytes_loaded load_s wait_s chunks_computed".split(" "), 0.0)
    usual |= {"tokens_recomputed": sum(sizes[:-1]), "recompute_share": 1.0}
    usual |= {"ratio": found["ratio"]} if "ratio" in found else {}
    return {name: float(found.get(name, value)) for name, value in usual.items()}


def _ratios(out: Mapping[str, Any], way: str) -> list[float]:
    return [own / base for own, base in zip(out["seconds"]["own"], out["seconds"][way], strict=True)]
