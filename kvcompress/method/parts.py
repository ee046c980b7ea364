"""Base classes of a method's parts: prefill, scorer, budget allocator, codec, reader; and the schedule that triggers them.

`Prefill` how the prompt's KV comes to be, `Scorer` how much each cached token matters, `Allocator` who gets how much
of the budget, `Codec` in what form the kept is held, `Reader` what a decode query attends to; and a `Schedule`, when.
Parts decide; the session applies. None touches a cache tensor or holds state between sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

import torch

from kvcompress.common.tokenization import plain_ids
from kvcompress.method.codec import Codec, Plain
from kvcompress.method.field_kinds import CheckedFields
from kvcompress.method.view import LayerView, Needs, Observed, Pass, State, Tensor

__all__ = [
    "Allocator",
    "Chunked",
    "Codec",
    "OneShot",
    "Parts",
    "Plain",
    "Prefill",
    "Prefilled",
    "PromptRunner",
    "ReadAll",
    "Reader",
    "Schedule",
    "Scorer",
    "Uniform",
]


class Scorer(CheckedFields, ABC):
    """How much each cached token matters. `sinks` and `window` are protected by construction, never by a score.

    Attributes:
        first_share, protected_first: how a selection in two stages is divided, see `second`.
        traceable: `score`, in a decode step that evicts one token, is made of tensor operations whose shapes are fixed: it
            asks nothing of the host, and looks at keys, values, positions, `real` and `kept` (on the device there),
            `observed.window(1)` and mass alone. Then steps with fixed shapes call it, on slots in any order.
        in_order: there it wants slots by position, all empty ones first, and looks at no key or value.
    """

    sinks: int = 0
    prompt_state: ClassVar[tuple[str, ...]] = ()
    """State keys needed only between the chunks of a chunked prefill: deleted at its end, unless the schedule goes on in
    decode."""
    first_share: float = 1.0
    protected_first: bool = False
    traceable: ClassVar[bool] = False
    in_order: ClassVar[bool] = False

    @property
    def needs(self) -> Needs:
        return Needs()

    def window(self, kept: Tensor) -> Tensor:
        """Protected most recent tokens per row, LongTensor `[B]`, for rows that keep `kept [B]` slots per head."""
        return torch.zeros_like(kept)

    @abstractmethod
    def score(self, view: LayerView, observed: Observed, state: State) -> Tensor:
        """Scores `[B, H_kv, P]` float32, higher is kept; values at empty slots are ignored."""

    def observe(self, view: LayerView, observed: Observed, state: State) -> None:
        """See a forward, whether or not anything is evicted after it; what must last goes into `state`.

        Called after each prompt's or chunk's attention, before `score`, and with a decode schedule after every other
        forward too.
        """
        return None

    @property
    def observes(self) -> bool:
        """True if `observe` does something."""
        return type(self).observe is not Scorer.observe

    def second(self, scores: Tensor, view: LayerView, observed: Observed) -> Tensor | None:
        """Scores `[B, H_kv, P]` for a second stage of selection, given those of the first; None for a single stage.

        Allocators look at the first stage's. Of the slots a head keeps, `first_share` are the best by the first scores
        (protected ones counted if `protected_first`), and the others the best of the rest by the second.
        """
        return None

    def passes(self, ids: Tensor, tokenizer: Any, first: int = 0) -> Iterable[Pass]:
        """Extra inputs run against the un-evicted cache and not stored (KVzip). None by default.

        Args:
            ids: LongTensor `[n]` on the CPU, all real tokens of one row so far.
            tokenizer: the model's.
            first: tokens before it had their passes when an earlier prompt or chunk ended.
        """
        return ()


class Allocator(CheckedFields, ABC):
    """Who gets how much of the budget."""

    scope: ClassVar[Literal["layer", "cascade", "all"]] = "layer"
    uniform: ClassVar[bool] = False  # the same count for every layer and head: what compact positions need

    @property
    def needs(self) -> Needs:
        return Needs()

    def bind(self, model: Any) -> Allocator:
        """This allocator ready for a model, as `Method.bind`: one that needs data of the model returns a copy with it."""
        return self

    def stat(self, view: LayerView, observed: Observed) -> Any:
        """What to remember of a layer when a prompt's scores are made: handed back as its entry of `stats`.

        Per row of the batch, so that rows stay independent. It lives until the prompt's forward ends.
        """
        return None

    @abstractmethod
    def allocate(
        self, scores: list[Tensor], stats: list[Any], layers_seen: int, n_layers: int, total: Tensor
    ) -> list[Tensor]:
        """Slots to keep.

        Args:
            scores: one `[B, H_kv, P]` per layer in scope (a single one for scope `layer`): +inf where a slot is
                protected by the scorer's sinks and window, -inf where it is empty, finite elsewhere.
            stats: what `stat` returned for each layer in scope.
            layers_seen: layers whose scores have been seen so far, this one included.
            n_layers: full-attention layers that share the budget.
            total: LongTensor `[B]`, slots of the row's whole budget: cap x H_kv x n_layers.

        Returns:
            one LongTensor `[B, H_kv]` per layer in scope, at least the protected slots of each head and at least 1.
            Totals over all layers equal `total`; what a head cannot fill it may grow into in decode.
        """

    def limit(self, counts: Tensor, real: Tensor) -> Tensor:
        """Slots each head may hold in decode, where a prompt of `real [B]` tokens gave it `counts [B, H_kv]`.

        The same, unless heads are to grow beyond the budget with every token; then `MOST_TOKENS` of the budget module.
        """
        return counts


@dataclass(frozen=True)
class Uniform(Allocator):
    """Every layer and head keeps the same number of tokens."""

    uniform: ClassVar[bool] = True

    def allocate(self, scores, stats, layers_seen, n_layers, total):
        heads = scores[0].shape[1]
        per_head = torch.div(total, n_layers * heads, rounding_mode="floor")
        return [per_head[:, None].expand(-1, heads).clone() for _ in scores]


class Reader(CheckedFields, ABC):
    """What a single-token decode query attends to."""

    name: ClassVar[str]
    reads_all: ClassVar[bool] = False
    in_pages: ClassVar[bool] = False  # a `pages.PagedReader`
    offloads: ClassVar[bool] = False  # may hold pages on the host
    across_heads: ClassVar[bool] = False
    page_size: int
    rank: int | None = None  # of what it holds keys as, all heads together and before rotation

    @property
    def by_prompt(self) -> bool:
        """What a token is held as depends on the prompt's later tokens, as of `Method.cache_reuse`: factors are of all keys."""
        return self.rank is not None

    def bind(self, model: Any) -> Reader:
        """This reader ready for a model, as `Method.bind`: one that needs data of the model returns a copy with it."""
        return self

    def fingerprint(self) -> dict[str, str]:
        """Facts beside the settings that change results, as of `Method.fingerprint`."""
        return {}

    @abstractmethod
    def select(self, q: Tensor, index: LayerView, state: State) -> Tensor | None:
        """Slots to attend, for query `q [B, H_q, 1, D]`.

        Returns:
            LongTensor `[B, H_kv or H_q, n]` of slots (-1 = none), or None for all that is held.
        """


@dataclass(frozen=True)
class ReadAll(Reader):
    """A decode query attends to everything that is held."""

    name: ClassVar[str] = "all"
    reads_all: ClassVar[bool] = True

    def select(self, q, index, state):
        return None


@dataclass(frozen=True)
class Prefilled:
    """What a prompt leaves behind: the cache, logits `[B, V]` of its last position, real tokens seen `[B]`."""

    cache: Any
    logits: Tensor
    seen: Tensor


class PromptRunner(Protocol):
    """A session, as a prefill sees it.

    Attributes:
        cache: the sequence that the prompt goes into.
        store: where chunks are kept, from `Prefill.open_store` or the caller.
        reuse_rotations: RoPE per layer, where the method's prefill `needs_segments`.
        observed_queries: how many of a prompt's last queries the method looks at: they are made in one forward.
    """

    cache: Any
    store: Any

    @property
    def model(self) -> Any: ...

    @property
    def reuse_rotations(self) -> list[Any]: ...

    @property
    def observed_queries(self) -> int: ...

    def new_cache(self, headroom: bool = True, exact: bool = False) -> Any:
        """An empty cache; with `exact` one that holds keys and values as the model makes them, all of them."""
        ...

    def forward(
        self, phase: str, ids: Tensor, mask: Tensor | None = None, every: bool = False, recompute: Any = None
    ) -> Tensor:
        """One forward of the current cache in a phase ("prompt", "append") → logits `[B, V]` of the last position.

        `recompute` (a `cache.forward.Fusing`) puts reused keys and values in the place of the model's own.
        """
        ...

    def load(self, ids: Tensor, rows: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        """Append keys and values `rows(layer)` of `ids [1, n]` that were computed before."""
        ...

    def forward_prompt(self, ids: Tensor, mask: Tensor | None, chunk: int | None = None) -> Prefilled:
        """Run `ids [B, n]` on the current cache, whole or in chunks, each compressed when it ends."""
        ...


class Prefill(CheckedFields, ABC):
    """How the prompt's KV comes to be."""

    name: ClassVar[str]
    all_queries: ClassVar[bool] = True
    """False where keys and values are taken from elsewhere, so that their tokens' queries are never made."""
    needs_segments: ClassVar[bool] = False
    """True if the prompt's segments say what is reused: then prompts come through `session.prefill`, and one that is
    given to `model(...)` is refused."""

    @property
    def by_prompt(self) -> bool:
        """What a token's keys and values are depends on the prompt's later tokens, as of `Method.cache_reuse`."""
        return self.needs_segments

    @abstractmethod
    def run(self, session: PromptRunner, segments: list[Tensor], mask: Tensor | None) -> Prefilled:
        """Run the prompt, given as one or more `[B, n]` id tensors, into `session.cache`."""

    def open_store(self, model: Any) -> Any:
        """The store of a session that was given none; None where nothing is reused."""
        return None

    def precompute(self, session: PromptRunner, segments: list[Tensor]) -> int:
        """Put the chunks of a prompt `[prefix or first chunk, chunk, …, question]` into `session.store`.

        Returns:
            how many were not there yet and were prefilled now.
        """
        return 0


@dataclass(frozen=True)
class OneShot(Prefill):
    """The whole prompt in one forward."""

    name: ClassVar[str] = "oneshot"

    def run(self, session, segments, mask):
        return session.forward_prompt(torch.cat(segments, dim=1), mask)


@dataclass(frozen=True)
class Chunked(Prefill):
    """The prompt in chunks; each is compressed when it ends, so memory stays at the cap plus one chunk."""

    name: ClassVar[str] = "chunked"
    chunk: int = 1024

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk={self.chunk}; a chunk holds at least 1 token")

    def run(self, session, segments, mask):
        return session.forward_prompt(torch.cat(segments, dim=1), mask, chunk=self.chunk)


@dataclass(frozen=True)
class Schedule(CheckedFields):
    """When a method compresses: at the end of each prompt, and in decode row by row.

    Without `every` and `newline` decoded tokens are appended beyond the cap.

    Attributes:
        prompt: when a prompt ends.
        every: in decode, when a row holds cap + `every` tokens.
        align: "total" fires at multiples of `every` of the row's total length instead, as R-KV's released code does.
        newline: in decode, when a token with a line break is fed to a row above its cap.
        until: a token's text, such as "</think>": once it is decoded, its row is not compressed in decode any more.
        newline_ids, until_ids: token ids for the two, filled in by `resolve`.
    """

    prompt: bool = True
    every: int | None = None
    align: Literal["row", "total"] = "row"
    newline: bool = False
    until: str = ""
    newline_ids: tuple[int, ...] = field(default=(), repr=False)
    until_ids: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"every={self.every}; a decode schedule fires after at least 1 token, or None for never")
        if self.align not in ("row", "total"):
            raise ValueError(f"align={self.align!r}; valid: row, total")

    @property
    def in_decode(self) -> bool:
        """True if it may fire in decode."""
        return self.every is not None or self.newline

    @property
    def unresolved(self) -> bool:
        """True if it speaks of tokens whose ids are not known yet."""
        return (self.newline and not self.newline_ids) or bool(self.until and not self.until_ids)

    def resolve(self, tokenizer: Any) -> Schedule:
        """This schedule with the token ids of a tokenizer filled in.

        Raises:
            ValueError: no token holds a line break, or `until` is no single token.
        """
        newline_ids, until_ids = self.newline_ids, self.until_ids
        if self.newline and not newline_ids:
            texts = tokenizer.batch_decode([[number] for number in range(len(tokenizer))])
            newline_ids = tuple(number for number, text in enumerate(texts) if "\n" in text)
            if not newline_ids:
                raise ValueError("schedule.newline=true, but no token of this tokenizer holds a line break")
        if self.until and not until_ids:
            until_ids = tuple(plain_ids(tokenizer, self.until))
            if len(until_ids) != 1:
                raise ValueError(
                    f"schedule.until={self.until!r} is {len(until_ids)} tokens of this tokenizer; it must be one"
                )
        return replace(self, newline_ids=newline_ids, until_ids=until_ids)

    def __str__(self) -> str:
        parts = ["prompt"] if self.prompt else []
        if self.every is not None:
            parts.append(f"every{self.every}" + ("(total)" if self.align == "total" else ""))
        parts += ["newline"] if self.newline else []
        text = "+".join(parts) or "never"
        return text + (f" until {self.until}" if self.until else "")


@dataclass(frozen=True)
class Parts:
    """A method taken apart: what answers each question for one session."""

    prefill: Prefill
    scorer: Scorer | None
    allocator: Allocator
    codec: Codec
    reader: Reader
    schedule: Schedule

    def names(self) -> dict[str, str]:
        """Class names for records: `parts.scorer`, `parts.allocator`, …"""
        return {
            "prefill": self.prefill.name,
            "scorer": type(self.scorer).__name__ if self.scorer else "none",
            "allocator": getattr(self.allocator, "name", type(self.allocator).__name__.lower()),
            "codec": self.codec.name,
            "reader": self.reader.name,
            "schedule": str(self.schedule),
        }
