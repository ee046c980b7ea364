"""FlexiCache: stable heads hold their top pages on the device and all on the host (Takbir et al., arXiv 2511.00868)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from kvcompress.cache.pages import PagedReader, PageIndex, top_pages
from kvcompress.calibrate.head_profile import unstable_heads
from kvcompress.common.constants import constant, flags, numbers
from kvcompress.common.hashing import content_hash
from kvcompress.common.transfer import upload
from kvcompress.method import Method, ReadAll, Reader, State, Tensor
from kvcompress.method.budget import Budget, is_unlimited
from kvcompress.models import compat

PAGE = 16
Classes = tuple[tuple[bool, ...], ...]


@dataclass(frozen=True)
class FlexiCacheReader(PagedReader):
    """Unstable heads choose their pages at every step, stable ones when ranked: at steps 1, rerank, 2 rerank, ...

    A page's score is the largest of the group's bounds on q·k; the last page is always chosen. What a stable head
    ranks at step 1 is read at once; later rankings are read from the next step on, when promoted pages are there.
    Between rankings it also reads every page that is new since.

    Attributes:
        budget: tokens to read, a share of the row's prompt or a number; in whole pages, rounded down.
        page_size: tokens to a page.
        rerank: steps from one ranking of stable heads to the next.
        heads: "profile" takes the model's file, a path another one, "stable", "unstable" or "random" are controls.
        unstable: share of all KV heads that are unstable.
        bound_width: 1 ranks by the upper bound, as the paper; 0 by the middle of the bounds; between them by both.
        classes: per layer of the model, True for its stable heads; `bind` fills them in.
    """

    name: ClassVar[str] = "flexicache"
    offloads: ClassVar[bool] = True

    budget: Budget = 1024
    page_size: int = PAGE
    rerank: int = 16
    heads: str = "profile"
    unstable: float = 0.25
    bound_width: float = 1.0
    classes: Classes = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        self.check()
        if self.rerank < 1:
            raise ValueError(f"rerank={self.rerank}; stable heads are ranked every 1 or more steps (the paper: 16)")
        if not 0.0 <= self.unstable <= 1.0:
            raise ValueError(f"unstable={self.unstable} is not a share of the heads in [0, 1] (the paper: 0.25)")

    def bind(self, model: Any) -> FlexiCacheReader:
        if self.classes:
            return self
        full = [i for i, kind in enumerate(compat.layer_types(model)) if kind == "full_attention"]
        kv, layers = compat.kv_heads(model), len(compat.layer_types(model))
        everyone = [(i, h) for i in full for h in range(kv)]
        if self.heads == "stable":
            chosen = set()
        elif self.heads == "unstable":
            chosen = set(everyone)
        elif self.heads == "random":
            chosen = set(random.Random(0).sample(everyone, round(self.unstable * len(everyone))))
        else:
            chosen = unstable_heads(self.heads, model, round(self.unstable * len(everyone)))
        classes = tuple(tuple(i in full and (i, h) not in chosen for h in range(kv)) for i in range(layers))
        return replace(self, classes=classes)

    def fingerprint(self) -> dict[str, str]:
        path = Path(self.heads).expanduser()
        named = self.heads not in ("profile", "stable", "unstable", "random") and path.is_file()
        return {"heads": content_hash(path)} if named else {}

    def stable(self, layer: int) -> tuple[bool, ...]:
        """Which KV heads of a layer are stable."""
        if not self.classes:
            raise ValueError("head classes belong to a model: bind(model) fills them in, as a session does")
        return self.classes[layer]

    def offloaded(self, layer: int) -> tuple[int, ...]:
        return tuple(h for h, stable in enumerate(self.stable(layer)) if stable)

    def select(self, q: Tensor, index: PageIndex, state: State) -> Tensor:  # type: ignore[override]
        stable, pages, device = self.stable(index.layer), index.pages, q.device
        first, due = index.step == 1, (index.step > 0) & (index.step % self.rerank == 0)
        ranks = any(stable) and bool((first | due).any())
        wanted = self.count(index.real)
        most = min(int(wanted.max()), index.bounds.shape[2])
        found = torch.full((*pages.shape, most), -1, device=device)
        scored = [h for h, is_stable in enumerate(stable) if ranks or not is_stable]
        if scored:
            heads = constant(numbers, tuple(scored)).on(device)
            scores = index.upper(q, None if len(scored) == len(stable) else heads, self.bound_width).amax(2)
            found[:, heads] = top_pages(scores, wanted, pages[:, heads] - 1)
        if not any(stable):
            return found
        if "ranked" not in state:
            state["ranked"], state["known"] = found, pages.clone()
        elif bool(first.any()):
            self._install(state, found, pages, upload(first, device))
        if bool((due & ~first).any()):
            state["next"], state["next_known"] = found, pages.clone()
            state["due"] = upload(due & ~first, device)
        ranked, known = state["ranked"], state["known"]
        tail = max(0, int((pages - known).max()))
        new = known[..., None] + torch.arange(tail, device=device)
        mine = torch.cat([ranked, new.masked_fill(new >= pages[..., None], -1)], dim=2)
        if all(stable):
            return mine
        found = torch.nn.functional.pad(found, (0, mine.shape[2] - found.shape[2]), value=-1)
        return torch.where(constant(flags, stable).on(device)[:, None], mine, found)

    def hold(self, index: PageIndex, state: State) -> Tensor | None:
        if "due" in state:
            self._install(state, state.pop("next"), state.pop("next_known"), state.pop("due"))
        elif not bool((index.step == 1).any()) or "ranked" not in state:
            return None
        new = state["known"][..., None] + torch.arange(
            max(0, int((index.pages - state["known"]).max())), device=index.pages.device
        )
        return torch.cat([state["ranked"], new.masked_fill(new >= index.pages[..., None], -1)], dim=2)

    @staticmethod
    def _install(state: State, found: Tensor, pages: Tensor, rows: Tensor) -> None:
        """Take a ranking over in the rows `[B]` in which it was made."""
        before, more = state["ranked"], found.shape[2] - state["ranked"].shape[2]
        before = torch.nn.functional.pad(before, (0, max(0, more)), value=-1)
        found = torch.nn.functional.pad(found, (0, max(0, -more)), value=-1)
        state["ranked"] = torch.where(rows[:, None, None], found, before)
        state["known"] = torch.where(rows[:, None], pages, state["known"])


@dataclass(frozen=True, kw_only=True)
class FlexiCache(Method):
    """Keep every token in two tiers; each decode step attends to the top pages of each KV head.

    Which pages a head needs changes slowly for most heads and fast for others (section 3). Unstable heads stay on the
    device whole and are ranked anew at every step; stable ones are ranked every `rerank` steps, hold those pages on the
    device and have a copy of everything in host memory. `budget` is what a step reads per head, pages that are new since
    a ranking not counted. Prompts, and later ones, attend to everything.

    Head classes are the model's: `scripts/profile_heads.py` measures them once and stores them in a file that is found
    by the model's weights; SmolLM2's ships with the package.
    """

    family = "reading"
    keeps = "everything, in two tiers; a step reads each head's top pages"
    needs_data = "head classes of the model"
    source = "arXiv 2511.00868; NazmulTakbir/FlexiCache"
    differences = "one block pool per layer; a longer forward (a question) starts the schedule again at step 1"

    budget_kind: ClassVar[Literal["read_tokens"]] = "read_tokens"

    page_size: int = PAGE
    rerank: int = 16
    heads: str = "profile"
    unstable: float = 0.25
    bound_width: float = 1.0

    def make_reader(self) -> Reader:
        if is_unlimited(self.budget):
            return ReadAll()
        return FlexiCacheReader(
            budget=self.budget,
            page_size=self.page_size,
            rerank=self.rerank,
            heads=self.heads,
            unstable=self.unstable,
            bound_width=self.bound_width,
        )
