"""Retrieval heads (DuoAttention): a calibration on synthetic passkeys, its file, and how a model finds it.

DuoAttention trains a gate per KV head so that the answer to passkey questions stays the same (Xiao et al., ICLR 2025,
arXiv 2410.10819, section 2.2). Here nothing is trained: a text with passkeys is run once with the answers behind it, and
a KV head is as much a retrieval head as its attention goes from the answer's tokens to the passkey's first occurrence
(retrieval heads: Wu et al., 2024, arXiv 2404.15574; found on repeated tokens without training: Tang et al., 2024,
arXiv 2407.15891, section 3). Scores are per model and mean nothing for another.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvcompress.calibrate.calibration import adapters_noted
from kvcompress.common.prose import Encoder
from kvcompress.data.haystack import NOUNS, build_haystack, load_haystack, prompt_template
from kvcompress.hook.session import compress
from kvcompress.method import LayerView, Method, Needs, Observed, Scorer, State, Tensor
from kvcompress.models import compat
from kvcompress.models.model_hash import adapter_state, same_weights, weight_sample

FOLDER = Path(__file__).parent / "data" / "duoattention"
COMMAND = "kvcompress calibrate-duo --model NAME"
FORMAT = 1

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
HEAD = "Several passkeys to a vault are hidden in the following book. Remember them.\n\n"
NEEDLE = "The {ordinal} passkey to the vault is this sequence of words: {words}."
QUESTION = "\n\nWhat is the {ordinal} passkey to the vault? The {ordinal} passkey is this sequence of words:"


# ---------------------------------------------------------------------- samples


@dataclass(frozen=True)
class PasskeySample:
    """A text with passkeys, and the answers to all questions about them behind it.

    Attributes:
        ids: the whole, LongTensor `[n]`; the questions and answers begin at `context`.
        pairs: per passkey the positions of its first occurrence, and of the queries that repeat it: (first, queries).
    """

    ids: Tensor
    context: int
    pairs: list[tuple[range, range]]


def passkey_sample(tokenizer: Any, length: int, passkeys: int, words: int, seed: int) -> PasskeySample:
    """A sample of at most `length` tokens with `passkeys` passkeys of `words` random words at random depths.

    Raises:
        ValueError: the passkeys do not fit, or there are more than ordinals.
    """
    if not 1 <= passkeys <= len(ORDINALS):
        raise ValueError(f"passkeys={passkeys}; from 1 to {len(ORDINALS)}")
    rng, encode = random.Random(f"passkeys:{seed}"), Encoder(tokenizer)
    keys = [" ".join(rng.choices(NOUNS, k=words)) for _ in range(passkeys)]
    needles = [NEEDLE.format(ordinal=o, words=key) for o, key in zip(ORDINALS, keys, strict=False)]
    hay = load_haystack("essay", essays="builtin")
    wrap = prompt_template(tokenizer, encode, HEAD, "", "", "none")
    tail: list[int] = []
    spans: list[range] = []
    for ordinal, key in zip(ORDINALS, keys, strict=False):
        tail += encode(QUESTION.format(ordinal=ordinal))
        answer = encode(" " + key)
        spans.append(range(len(tail), len(tail) + len(answer)))
        tail += answer
    depths = sorted(rng.uniform(0.05, 0.9) for _ in keys)
    filled = build_haystack(
        encode, hay, needles, depths, length - len(wrap.head) - len(tail), rng.randrange(len(hay.sentences))
    )
    ids = [*wrap.head, *filled.ids, *tail]
    context = len(ids) - len(tail)
    pairs = []
    for offset, span in zip(filled.offsets, spans, strict=True):
        answer = tuple(tail[span.start : span.stop])
        start = _find(ids[:context], answer, len(wrap.head) + offset)
        # the query before a token predicts it
        pairs.append((range(start, start + len(answer)), range(context + span.start - 1, context + span.stop - 1)))
    return PasskeySample(torch.tensor(ids), context, pairs)


def _find(ids: Sequence[int], piece: tuple[int, ...], start: int) -> int:
    for at in range(start, len(ids) - len(piece) + 1):
        if tuple(ids[at : at + len(piece)]) == piece:
            return at
    raise ValueError("this tokenizer writes a passkey's words otherwise when they are repeated: no calibration with it")


# ---------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class _Watcher(Scorer):
    """Notes what a prompt's last queries attend to, per layer, `[H_kv]`, and keeps the most recent tokens."""

    sample: PasskeySample
    found: dict[int, Tensor] = field(default_factory=dict, compare=False)

    @property
    def needs(self) -> Needs:
        return Needs(window=len(self.sample.ids) - self.sample.context)

    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        attention, _ = observed.window(self.needs.window)
        self.found[view.layer] = retrieval(attention[0], self.sample)
        return view.positions.float()


@dataclass(frozen=True, kw_only=True)
class _Watch(Method):
    watcher: _Watcher

    def make_scorer(self) -> Scorer:
        return self.watcher


def retrieval(attention: Tensor, sample: PasskeySample) -> Tensor:
    """Attention from a repeated passkey to its first occurrence, `[H_kv]`: the mean over its tokens and passkeys.

    Args:
        attention: `[H_kv, G, W, P]` of the queries behind the context. A KV head counts as its best query head does:
            it has to serve that one too.
    """
    shift = len(sample.ids) - attention.shape[2]
    means = [
        attention[:, :, queries.start - shift : queries.stop - shift, first.start : first.stop].sum(-1).mean(-1)
        for first, queries in sample.pairs
    ]
    return torch.stack(means).mean(0).amax(-1).cpu()


def measure(model: Any, sample: PasskeySample) -> Tensor:
    """Scores of one sample, `[full-attention layers, H_kv]` float32, in one forward."""
    watcher = _Watcher(sample)
    with compress(model, _Watch(budget=1, watcher=watcher)) as session:
        session.prefill(sample.ids[None].to(model.device))
    return torch.stack([watcher.found[layer] for layer in sorted(watcher.found)])


def calibrate(
    model: Any,
    tokenizer: Any,
    name: str,
    *,
    lengths: Sequence[int] = (1000, 2000),
    samples: int = 8,
    passkeys: int = 4,
    words: int = 12,
    seed: int = 0,
    note: Callable[[str], None] = print,
) -> dict[str, Any]:
    """What the file of a model holds: its scores, what they were measured on, and how far two halves agree.

    Args:
        name: of the model, for the record.
        lengths: tokens per sample; `samples` of each, with seeds that no other sample has.
        passkeys, words: passkeys per sample and words per passkey.
        note: called with a line of progress per sample.

    Raises:
        ValueError: fewer than two samples in all, or passkeys that do not fit.
    """
    if samples * len(lengths) < 2:
        raise ValueError(f"samples={samples}; two in all are the least, whose halves can be compared")
    scores: list[Tensor] = []
    for _ in range(samples):
        for length in lengths:
            sample = passkey_sample(tokenizer, length, passkeys, words, seed * 10_000 + len(scores))
            scores.append(measure(model, sample))
            note(f"sample {len(scores)} of {samples * len(lengths)}: {len(sample.ids)} tokens")
    found = torch.stack(scores)
    halves = [found[: len(found) // 2].mean(0), found[len(found) // 2 :].mean(0)]
    return {
        "format": FORMAT,
        "model": {"name": name, **model_facts(model)},
        "measured": {
            "what": "attention from the tokens that repeat a passkey to its first occurrence; best query head per KV head",
            "lengths": list(lengths),
            "samples": len(found),
            "passkeys": passkeys,
            "words": words,
            "seed": seed,
            "dtype": str(next(iter(model.parameters())).dtype).removeprefix("torch."),
        },
        "halves": agreement(*halves),
        "scores": [[round(x, 5) for x in layer] for layer in found.mean(0).tolist()],
    }


def agreement(a: Tensor, b: Tensor) -> dict[str, float]:
    """How far two sets of scores agree: rank correlation, and the shares of the top quarter and half they have in common."""
    first, second = (torch.tensor(ranks(x.tolist())).flatten().double() for x in (a, b))
    size = len(first)
    result = {"rank_correlation": float(torch.corrcoef(torch.stack([first, second]))[0, 1])}
    for name, part in (("top_quarter", max(1, size // 4)), ("top_half", max(1, size // 2))):
        result[name] = float(((first < part) & (second < part)).sum()) / part
    return {key: round(value, 3) for key, value in result.items()}


# ---------------------------------------------------------------------- the file


def ranks(scores: Sequence[Sequence[float]]) -> tuple[tuple[int, ...], ...]:
    """Rank of every head, 0 the highest score; of equal ones the first layer and head comes first."""
    flat = sorted((-score, layer, head) for layer, row in enumerate(scores) for head, score in enumerate(row))
    rank = {(layer, head): at for at, (_, layer, head) in enumerate(flat)}
    return tuple(tuple(rank[layer, head] for head in range(len(row))) for layer, row in enumerate(scores))


def model_facts(model: Any) -> dict[str, Any]:
    """What tells a model from another: sizes, a sample of its weights, and its adapters where it has any."""
    config, adapters = compat.text_config(model), adapter_state(model)
    full = [i for i, kind in enumerate(compat.layer_types(model)) if kind == "full_attention"]
    return {
        "model_type": config.model_type,
        "layers": full,
        "kv_heads": compat.kv_heads(model),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "weights": [float(f"{number:.9g}") for number in weight_sample(model).tolist()],
        **({"adapters": adapters} if adapters else {}),
    }


def same_model(known: dict[str, Any], found: dict[str, Any]) -> bool:
    """True if two sets of facts are of the same model, in whatever precision."""
    names = {*known, *found} - {"name", "weights"}
    if any(known.get(name) != found.get(name) for name in names):
        return False
    return same_weights(known["weights"], torch.tensor(found["weights"], dtype=torch.float64))


def head_order(heads: str, model: Any) -> tuple[tuple[int, ...], ...]:
    """Ranks of a model's heads, per full-attention layer.

    Args:
        heads: "calibrated", "random" or the path of a file that `calibrate` made.

    Raises:
        ValueError: no file for this model, or a file of another; names the command that makes one.
    """
    found = model_facts(model)
    what = f"{found['model_type']} with {len(found['layers'])} full-attention layers of {found['kv_heads']} KV heads"
    if heads == "random":
        return ranks([[random.Random(f"{i}:{h}").random() for h in range(found["kv_heads"])] for i in found["layers"]])
    if heads != "calibrated":
        known = _read(Path(heads).expanduser())
        if any(known["model"].get(key) != found[key] for key in ("layers", "kv_heads")):
            raise ValueError(f"heads={heads!r} was made for {known['model'].get('name')}, not for this model ({what})")
        return ranks(known["scores"])
    for path in sorted(FOLDER.glob("*.json")):
        known = _read(path)
        if same_model(known["model"], found):
            return ranks(known["scores"])
    names = ", ".join(path.stem for path in sorted(FOLDER.glob("*.json"))) or "none"
    raise ValueError(
        f"no head classes are known for this model ({what}){adapters_noted(model)}; known: {names}. Measure them with "
        f"`{COMMAND} --out FILE` and give heads=FILE, or heads=random for a control"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["format"] == FORMAT and known["model"] and known["scores"]:
            return known
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"heads={str(path)!r} cannot be read as head classes ({error}); make it: {COMMAND}") from error
    raise ValueError(f"heads={str(path)!r} is of another format; make it again: {COMMAND}")
