"""Head profile (FlexiCache): which KV heads change their top pages fast, measured on texts and kept in a file.

Stability as in FlexiCache (Takbir et al., arXiv 2511.00868; TopK-Analysis of the released code): decode steps are cut
into windows; within one, the overlap of each step's top-K pages with the first step's, corrected for chance. The heads
that are among the least stable ones most often are unstable. Stability is a model's own and means nothing for another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvcompress.cache.pages import PagedReader, PageIndex, top_pages
from kvcompress.calibrate import calibration
from kvcompress.common.prose import built_in_prose
from kvcompress.common.tokenization import plain_ids
from kvcompress.hook.session import compress
from kvcompress.method import Method, Reader, State, Tensor
from kvcompress.models import compat

KIND = "flexicache"
DATA = Path(__file__).parent / "data"
COMMAND = "kvcompress profile-heads --model"
WINDOW = 16  # steps
SEED = 43  # of the shuffle that makes the two halves, as in the released code


class _Log(PagedReader):
    """Attends to everything and notes each step's top pages: per layer a list of `[H_kv, K]` and of page counts."""

    name: ClassVar[str] = "log"

    def __init__(self, pages: int, page_size: int):
        self.page_size, self.budget, self.pages = page_size, pages * page_size, pages
        self.found: dict[int, list[tuple[Tensor, int]]] = {}

    def select(self, q: Tensor, index: PageIndex, state: State) -> Tensor | None:  # type: ignore[override]
        scores = index.upper(q).amax(2)
        top = top_pages(scores, torch.tensor([self.pages]), index.pages - 1)
        self.found.setdefault(index.layer, []).append((top[0].cpu(), int(index.pages[0, 0])))
        return None


@dataclass(frozen=True, kw_only=True)
class _Logging(Method):
    log: _Log = field(repr=False, compare=False)

    def make_reader(self) -> Reader:
        return self.log


def prose(tokenizer: Any, texts: int, length: int, seed: int) -> list[Tensor]:
    """Generated prose, `texts` LongTensors `[length]` of seeds of their own."""
    found = []
    for number in range(texts):
        sentences, ids = built_in_prose(seed + number), list[int]()
        while len(ids) < length:
            ids += plain_ids(tokenizer, " ".join(next(sentences) for _ in range(20)) + " ")
        found.append(torch.tensor(ids[:length]))
    return found


def pieces(tokenizer: Any, text: str, texts: int, length: int) -> list[Tensor]:
    """The first `texts` pieces of `length` tokens of a text; fewer if it is shorter.

    Raises:
        ValueError: not one piece.
    """
    ids = torch.tensor(plain_ids(tokenizer, text))
    count = min(texts, len(ids) // length)
    if count == 0:
        raise ValueError(
            f"the text has {len(ids)} tokens, fewer than the {length} of --prompt and --steps: lower these"
        )
    return list(ids[: count * length].view(count, length))


def overlap(sets: Sequence[Tensor], pages: Sequence[int]) -> Tensor:
    """Stability of heads over one window, `[H_kv]`: 1 for equal sets, 0 for what chance gives.

    The mean over steps s of max(0, (o - c) / (1 - c)) with o the share of the first step's top pages that step s has
    too, and c = K / pages, the share that a random set would have.

    Args:
        sets: top pages `[H_kv, K]` of each step.
        pages: pages held at each step, more than K.
    """
    first, k = sets[0], sets[0].shape[1]
    found = []
    for top, n in zip(sets[1:], pages[1:], strict=True):
        shared = (first[:, :, None] == top[:, None, :]).any(2).float().mean(1)
        chance = k / n
        found.append(((shared - chance) / (1 - chance)).clamp(min=0))
    return torch.stack(found).mean(0)


def trace(model: Any, ids: Tensor, prompt: int, pages: int, page_size: int) -> Tensor:
    """Instability of all heads along a text, `[windows, full-attention layers, H_kv]`.

    Args:
        ids: LongTensor `[n]`: a prompt of `prompt` tokens, the others decoded one by one.
        pages: K.

    Raises:
        ValueError: the prompt has not more than K pages, or fewer than a window of tokens follow it.
    """
    if prompt <= pages * page_size:
        raise ValueError(
            f"a prompt of {prompt} tokens has no more than K = {pages} pages of {page_size}, so that every set is the "
            "same: take longer texts or fewer pages"
        )
    if len(ids) - prompt <= WINDOW:
        raise ValueError(f"{len(ids) - prompt} tokens follow the prompt: more than one window of {WINDOW} is needed")
    method = _Logging(log=_Log(pages, page_size))
    with compress(model, method) as session:
        session.prefill(ids[None, :prompt].to(model.device))
        for _ in session.follow(ids[None, prompt:].to(model.device)):
            pass
    found = []
    for layer in sorted(method.log.found):
        steps = method.log.found[layer]
        windows = [steps[i : i + WINDOW] for i in range(0, len(steps) - WINDOW + 1, WINDOW)]
        found.append(torch.stack([1 - overlap(*zip(*window, strict=True)) for window in windows]))  # type: ignore[arg-type]
    return torch.stack(found, dim=1)


def frequency(instability: Tensor, count: int) -> Tensor:
    """How often each head is among the `count` least stable ones, `[layers, H_kv]`, from `[windows, layers, H_kv]`."""
    flat = instability.flatten(1)
    order = torch.sort(flat, dim=1, descending=True, stable=True).indices[:, :count]
    found = torch.zeros_like(flat).scatter_(1, order, 1.0)
    return found.mean(0).view(instability.shape[1:])


def least_stable(share: Tensor, mean: Tensor, count: int) -> list[int]:
    """Flat numbers of the `count` heads that are unstable: most often among the least stable, then by mean."""
    keys = zip(share.flatten().tolist(), mean.flatten().tolist(), strict=True)
    ranked = sorted((-often, -how, number) for number, (often, how) in enumerate(keys))
    return [number for *_, number in ranked[:count]]


def profile(
    model: Any,
    texts: Sequence[Tensor],
    *,
    prompt: int,
    pages: int = 64,
    page_size: int = 16,
    unstable: float = 0.25,
    note: Callable[[str], None] = print,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What the file of a model holds: `frequency` and `instability [layers, H_kv]`; and how far two halves agree.

    Args:
        texts: LongTensors `[n]`; their first `prompt` tokens are the prompt.
        pages: K.
        unstable: share of the heads that counts as least stable in a window.
        note: called with a line of progress per text.

    Raises:
        ValueError: no text, or as of `trace`.
    """
    if not texts:
        raise ValueError("no text to profile on: give at least one LongTensor of token ids")
    traces = []
    for number, ids in enumerate(texts):
        traces.append(trace(model, ids, prompt, pages, page_size))
        note(f"text {number + 1} of {len(texts)}: {len(traces[-1])} windows of {WINDOW} steps")
    found = torch.cat(traces)
    count = max(1, round(unstable * found[0].numel()))
    order = list(range(len(found)))
    random.Random(SEED).shuffle(order)
    halves = [found[order[: len(order) // 2]], found[order[len(order) // 2 :]]]
    tensors = {"frequency": frequency(found, count), "instability": found.mean(0)}
    said: dict[str, Any] = {
        "windows": len(found),
        "pages": pages,
        "page_size": page_size,
        "unstable": unstable,
        "prompt": prompt,
    }
    if len(halves[0]):
        a, b = (set(least_stable(frequency(half, count), half.mean(0), count)) for half in halves)
        ranks = torch.stack([half.mean(0).flatten().argsort().argsort().double() for half in halves])
        said["halves"] = {
            "unstable_in_common": round(len(a & b) / count, 3),
            "by_chance": round(count / found[0].numel(), 3),
            "rank_correlation": round(float(torch.corrcoef(ranks)[0, 1]), 3),
        }
    return tensors, said


def unstable_heads(heads: str, model: Any, count: int) -> set[tuple[int, int]]:
    """(layer of the model, KV head) of the `count` unstable heads.

    Args:
        heads: "profile", or the path of a file that `scripts/profile_heads.py` made.

    Raises:
        ValueError: no file for this model, or a file of another; names the command that makes one.
    """
    name = model.config.name_or_path or model.config.model_type
    fix = f"make one with `{COMMAND} {name}`, or take heads=random, stable or unstable for a control"
    full = [i for i, kind in enumerate(compat.layer_types(model)) if kind == "full_attention"]
    if heads == "profile":
        found = calibration.find(model, calibration.folders(KIND, DATA))
        if found is None:
            raise ValueError(f"FlexiCache has no head profile for {name!r}{calibration.adapters_noted(model)}: {fix}")
    else:
        path = Path(heads).expanduser()
        if not path.is_file():
            raise ValueError(f"heads={heads!r} is neither a file nor one of profile, random, stable, unstable: {fix}")
        found = calibration.find(model, [path])
        if found is None:
            raise ValueError(
                f"heads={heads!r} is a profile of another model than {name!r}{calibration.adapters_noted(model)}: {fix}"
            )
    share, mean = found["frequency"], found["instability"]
    kv = share.shape[1]
    return {(full[number // kv], number % kv) for number in least_stable(share, mean, count)}
