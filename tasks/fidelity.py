"""Fidelity: divergence of a compressed model's next-token distribution from the full model's.

A prompt is prefilled and compressed; then tokens that are known are fed one after another, and at each of them the
compressed model's distribution is compared with the one the full model had there: KL(full || compressed) in nats, top-1
agreement, perplexity. The tokens are the text's own (`source=text`) or the full model's own answer
(`source=generation`). One run of the full model per text serves all methods and budgets.

The first token is predicted before a one-shot prefill has evicted anything: there the curves start at nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ClassVar

import torch

from kvcompress.common.prose import Encoder, prose_ids
from kvcompress.common.tokenization import plain_ids
from kvcompress.data import jsonl, prompts
from kvcompress.data.divergence import reference_answer, teacher_forced_divergence
from kvcompress.data.haystack import prompt_template
from kvcompress.data.task import Sample, Task, Turn
from kvcompress.hook.generation import pick

FIELDS = ("text", "context", "input", "problem", "question")
POINTS = 16  # of a curve by position: runs of neighbours are averaged


@lru_cache(maxsize=8)
def read_texts(path: Path, field: str) -> tuple[tuple[str, str], ...]:
    """(id, text) of each record of a JSON Lines file.

    Raises:
        ValueError: names the file, and the line that is no record or lacks the field.
    """
    try:
        lines = jsonl.lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"task.texts={path}: {error}; a JSON Lines file, absolute or inside paths.data") from None
    found = []
    names = FIELDS if field == "auto" else (field,)
    for number, line in lines:
        where = f"task.texts={path}, line {number}"
        record = jsonl.loads(line, where)
        name = next((n for n in names if isinstance(record, dict) and isinstance(record.get(n), str)), None)
        if name is None:
            has = ", ".join(record) if isinstance(record, dict) else "no object"
            raise ValueError(f"{where}: none of {', '.join(names)} (has {has}); set task.field")
        found.append((f"{path.stem}-{number}", jsonl.text(record, name, where)))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Fidelity(Task):
    """Teacher-forced drift from the full model.

    Attributes:
        source: where the fed tokens come from: "text" (what follows the prompt in the text) or "generation" (what the
            full model answers).
        texts: "builtin" (prose made for this project, no data needed) or a JSON Lines file, absolute or inside
            `paths.data`; `field` names its text ("auto": the first of text, context, input, problem, question).
        n_texts: texts used; those too short are passed over. `seed` draws which of a file.
        prompt_tokens: length of the prompt. With `source=generation` a shorter text is taken whole.
        continuation_tokens: tokens fed after it; a generation may end earlier.
        template: "none", "chat" or "auto" (the tokenizer's chat template if it has one); for `source=generation`.
        instruction: text after the prompt's text, e.g. "\\nSummarise this."; for `source=generation`.
        temperature, top_p: of the full model's generation; greedy at 0.
    """

    name: ClassVar[str] = "fidelity"
    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "top1_agreement"
    metric_version: ClassVar[str] = "1"
    wants_reference: ClassVar[bool] = True
    thinks: ClassVar[bool] = False

    source: str = "text"
    texts: str = "builtin"
    field: str = "auto"
    n_texts: int = 5
    prompt_tokens: int = 1000
    continuation_tokens: int = 128
    template: str = "none"
    instruction: str = ""
    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, valid in (("source", ("text", "generation")), ("template", ("none", "chat", "auto"))):
            if getattr(self, name) not in valid:
                raise ValueError(f"task.{name}={getattr(self, name)!r}; valid: {', '.join(valid)}")
        for name in ("n_texts", "prompt_tokens", "continuation_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"task.{name}={getattr(self, name)}; at least 1 is needed")
        if self.source == "text" and (self.template != "none" or self.instruction):
            raise ValueError(
                "source=text goes on where the prompt ends: template and instruction belong to source=generation"
            )
        if self.source == "text" and (self.temperature != 0.0 or self.top_p != 1.0):
            raise ValueError("source=text samples nothing: temperature and top_p belong to source=generation")
        if not self.temperature >= 0.0 or not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"task.temperature={self.temperature}, top_p={self.top_p}: need >= 0, in (0, 1]")

    def _records(self) -> tuple[tuple[str, str], ...]:
        path = Path(self.texts)
        return read_texts(path if path.is_absolute() else Path(self.data or ".") / path, self.field)

    def fingerprint(self) -> dict[str, Any]:
        if self.texts == "builtin":
            return {}
        found = hashlib.sha256(json.dumps(self._records()).encode())
        return {"texts_hash": found.hexdigest()[:16]}

    # ------------------------------------------------------------------ samples

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """As many texts as asked for, cut to length."""
        encode, made = Encoder(tokenizer), 0
        forced = self.continuation_tokens if self.source == "text" else 0
        wrap = prompt_template(tokenizer, encode, "", self.instruction, "", self.template)
        room = self.prompt_tokens - len(wrap.head) - len(wrap.tail)
        if room < 1:
            raise ValueError(f"task.prompt_tokens={self.prompt_tokens}: template and instruction alone need more")
        for name, ids in self._token_ids(tokenizer, room + forced):
            if len(ids) < room + forced and (forced or not ids):
                continue
            prompt = (*wrap.head, *ids[:room], *wrap.tail)
            yield Sample(
                id=f"{self.source}-{name}-P{self.prompt_tokens}-C{self.continuation_tokens}-s{self.seed}",
                segments=(prompt,),
                turns=(Turn(tuple(ids[room : room + forced]), 0 if forced else self.continuation_tokens),),
                protocol={"template": wrap.template, "source": self.source, "texts": self.texts},
                meta=prompts.facts(tokenizer, prompt),
            )
            made += 1
            if made == self.n_texts:
                return
        raise ValueError(
            f"task.texts={self.texts} has {made} texts of at least {room + forced} tokens, task.n_texts={self.n_texts} "
            "are wanted: fewer texts, or fewer tokens"
        )

    def _token_ids(self, tokenizer: Any, need: int) -> Iterator[tuple[str, Sequence[int]]]:
        """(name, token ids) of each text, at least `need` tokens where the text has them."""
        if self.texts == "builtin":
            encode = Encoder(tokenizer)
            for number in range(self.n_texts):
                yield f"builtin-{number}", prose_ids(encode, need, self.seed * 100_003 + number)
            return
        records = list(self._records())
        random.Random(f"fidelity:{self.seed}").shuffle(records)
        for name, text in records:
            # a long document need not be encoded to its end
            ids = plain_ids(tokenizer, text[: 8 * need])
            if len(ids) < need < 8 * need < len(text):
                ids = plain_ids(tokenizer, text)
            yield name, ids

    # ------------------------------------------------------------------ running

    @torch.no_grad()
    def reference(self, session: Any, sample: Sample) -> dict[str, torch.Tensor]:
        """The full model's logits `[n, V]` at each fed token, and the tokens `[n]`."""
        turn, device = sample.turns[0], session.model.device
        prefilled = session.prefill(torch.tensor([sample.segments[0]], device=device))
        if turn.ids:
            forced = torch.tensor([turn.ids], device=device)
            found = [logits[0].cpu() for logits in session.follow(forced)]
            return {"logits": torch.cat(found), "tokens": forced[0].cpu()}
        generator = torch.Generator(device=device).manual_seed(self.seed) if self.temperature > 0 else None
        choose = partial(pick, temperature=self.temperature, top_p=self.top_p, top_k=0, generator=generator)
        return reference_answer(session, prefilled.logits, turn, choose)

    @torch.no_grad()
    def run(self, session: Any, sample: Sample) -> dict[str, Any]:
        """Prefill, then feed the reference's tokens and compare at each.

        Returns:
            beside what any task returns (without times of decoding): `positions`, the lists of `token_divergence`; `held`,
            bytes after the prompt and after each forward of the decode. `tokens` are the compressed model's own top 1.
        """
        reference = sample.reference
        if reference is None:
            raise ValueError("fidelity compares with a reference: run it through the runner, or set sample.reference")
        session.prefill(torch.tensor([sample.segments[0]], device=session.model.device))
        compressed = session.report(kept_map=True)
        held = [compressed["kv"]["bytes_held"]]
        positions: dict[str, list[float]] = {}
        top: list[int] = []
        for ours, found in teacher_forced_divergence(session, reference):
            for name, values in found.items():
                positions.setdefault(name, []).extend(values)
            if top:
                now = session.cache.nbytes()
                held.append(now["valid"] + now["other_layers"])
            top += ours.argmax(-1).tolist()
        return {
            "tokens": [top],
            "finished": ["forced"],
            "compressed": compressed,
            "end": session.report(),
            "prefill_s": compressed["time"]["prefill_s"],
            "compress_s": compressed["time"]["compress_s"],
            "positions": positions,
            "held": held,
        }

    def score(self, sample: Sample, out: dict[str, Any]) -> dict[str, float]:
        """Share of positions at which both would pick the same token; beside it mean KL and perplexities."""
        found = {name: fmean(values) for name, values in out["positions"].items()}
        return {
            "score": found["agree"],
            "kl": found["kl"],
            "perplexity": math.exp(found["nll"]),
            "perplexity_full": math.exp(found["nll_full"]),
            "perplexity_ratio": math.exp(found["nll"] - found["nll_full"]),
        }

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Means over texts, perplexities from the mean -log p of all positions, and curves by position."""
        texts = [row["out"]["positions"] for row in rows]
        kl = [fmean(text["kl"]) for text in texts]
        nll, nll_full = (fmean(v for text in texts for v in text[name]) for name in ("nll", "nll_full"))
        longest = max(len(text["kl"]) for text in texts)
        edges = sorted({round(longest * i / min(POINTS, longest)) for i in range(min(POINTS, longest) + 1)})
        bins = [(a, b) for a, b in zip(edges, edges[1:], strict=False)]

        def curve(name: str) -> list[float]:
            return [fmean(v for text in texts for v in text[name][a:b]) for a, b in bins]

        return {
            "kl": fmean(kl),
            "kl_stderr": stdev(kl) / math.sqrt(len(kl)) if len(kl) > 1 else None,
            "perplexity": math.exp(nll),
            "perplexity_full": math.exp(nll_full),
            "perplexity_ratio": math.exp(nll - nll_full),
            "curve_position": [(a + b - 1) / 2 for a, b in bins],
            "curve_kl": curve("kl"),
            "curve_agreement": curve("agree"),
        }
