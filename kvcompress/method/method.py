"""Method: a frozen set of hyper-parameters, with the paper's defaults, that builds parts."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, Self

from kvcompress.common.budget_text import RATIO, kept_of
from kvcompress.method.budget import Budget, NotTogether, cap, check_budget, is_unlimited
from kvcompress.method.codec import GroupedCodec
from kvcompress.method.field_kinds import CheckedFields
from kvcompress.method.parts import (
    Allocator,
    Codec,
    OneShot,
    Parts,
    Plain,
    Prefill,
    ReadAll,
    Reader,
    Schedule,
    Scorer,
    Uniform,
)
from kvcompress.method.view import Tensor


def _observes_all(scorer: Scorer, allocator: Allocator) -> bool:
    """True if more than the last queries of a prompt are looked at."""
    needs = scorer.needs | allocator.needs
    return needs.mass or needs.hidden or needs.prerope or scorer.observes


# One row per rule: (what is refused, test on (method, parts)). Any combination no row refuses is legal.
ILLEGAL: list[tuple[str, Any]] = [
    (
        "a reader that reads a selection hides attention that a scorer with a decode schedule needs",
        lambda m, p: (
            not p.reader.reads_all
            and p.schedule.in_decode
            and p.scorer is not None
            and (p.scorer.needs.mass or p.scorer.needs.window == 1)
        ),
    ),
    (
        "a reader of pages cannot follow a schedule that drops tokens in decode, which would move them between pages: "
        "schedule=prompt",
        lambda m, p: p.reader.in_pages and p.scorer is not None and p.schedule.in_decode,
    ),
    (
        "a reader of pages needs a codec whose tokens can be read one by one: int8, turboquant, kivi or plain",
        lambda m, p: p.reader.in_pages and not p.codec.in_lanes and not isinstance(p.codec, GroupedCodec),
    ),
    (
        "a page must not lie across two groups of a codec, which are encoded at different times: a page_size that divides "
        "the codec's group",
        lambda m, p: (
            p.reader.in_pages and isinstance(p.codec, GroupedCodec) and p.codec.group % p.reader.page_size != 0
        ),
    ),
    (
        "a reader of pages keeps each head's own, and this codec holds one form of all heads together",
        lambda m, p: p.reader.in_pages and p.codec.joint,
    ),
    (
        "a reader that chooses for all heads at once, or holds their keys together, needs the same tokens in each, which an "
        "eviction per head changes",
        lambda m, p: p.reader.across_heads and p.scorer is not None,
    ),
    (
        "a reader that offloads pages cannot move parts of a codec's groups: codec=plain, int8 or turboquant",
        lambda m, p: p.reader.in_pages and isinstance(p.codec, GroupedCodec) and p.reader.offloads,
    ),
    (
        "a reader that makes keys from factors holds them in a form of its own: codec=plain",
        lambda m, p: p.reader.rank is not None and p.codec.name != "plain",
    ),
    (
        "a reader of pages hides attention that a scorer of attention mass sums up over all turns",
        lambda m, p: p.reader.in_pages and p.scorer is not None and p.scorer.needs.mass,
    ),
    (
        "a prefill that takes keys and values from a store makes no query of their tokens, which this scorer observes: use "
        "prefill=oneshot, or a method that scores by keys or by the last queries",
        lambda m, p: not p.prefill.all_queries and p.scorer is not None and _observes_all(p.scorer, p.allocator),
    ),
    (
        "an allocator needs a scorer to rank what it hands out",
        lambda m, p: p.scorer is None and not p.allocator.uniform,
    ),
    (
        "compact positions need equal numbers in every layer and head: use allocator=uniform or positions=original",
        lambda m, p: m.compact_positions and not p.allocator.uniform,
    ),
    (
        "a reader that selects pages cannot follow compact positions, which move with every eviction",
        lambda m, p: m.compact_positions and not p.reader.reads_all,
    ),
    (
        "compact positions rotate queries anew, so that they cannot be seen before rotation",
        lambda m, p: m.compact_positions and (p.allocator.needs.prerope or (p.scorer and p.scorer.needs.prerope)),
    ),
    (
        "what is evicted differs from head to head, and this codec holds several heads together: take one by head "
        "(form=palu with head_group=1, or pool=1)",
        lambda m, p: p.codec.joint and p.scorer is not None,
    ),
    (
        "a codec other than plain cannot follow compact positions, whose stored keys are rotated again",
        lambda m, p: m.compact_positions and p.codec.name != "plain",
    ),
    (
        "compact positions renumber what is kept, and a prefill that reuses chunks puts them at the prompt's positions: "
        "use positions=original or prefill=oneshot",
        lambda m, p: p.prefill.needs_segments and m.compact_positions,
    ),
    (
        "a method that is itself a codec holds tokens in its own form, and takes no other: leave codec out, or choose a method "
        "that has none, such as full",
        lambda m, p: type(m).make_codec is not Method.make_codec and p.codec.name != m.make_codec().name,
    ),
    (
        "a codec that encodes tokens in groups cannot drop them one by one in decode: schedule=prompt",
        lambda m, p: p.scorer is not None and p.schedule.in_decode and isinstance(p.codec, GroupedCodec),
    ),
]


@dataclass(frozen=True, kw_only=True)
class Method(CheckedFields):
    """A published method: hyper-parameters with the paper's defaults, and the parts they build.

    Attributes:
        budget: float share of each row's real tokens in (0, 1] (1.0 = no limit) or an int number of tokens; per KV
            head, sinks and window included.
        preset: whose settings fill the fields left at None: the paper's, the released code's or kvpress's.
        allocator, codec, reader, prefill, schedule: replace the method's own part. For `codec` a method that evicts
            nothing may stand for its codec: `SnapKV(budget=0.25, codec=KIVI(bits=2))`.

    Every method says in class variables of its own what the table of methods shows beside its parts and presets:
    `family`; what it `keeps`; its `source` (paper, released code); the `differences` from that code; and, where it
    applies, what its scorer `reads` beside attention (keys, values) and what data of a model it needs (`needs_data`).
    """

    family: ClassVar[str] = ""
    keeps: ClassVar[str] = ""
    reads: ClassVar[str] = ""
    needs_data: ClassVar[str] = ""
    source: ClassVar[str] = ""
    differences: ClassVar[str] = ""

    said: ClassVar[tuple[str, ...]] = ()  # settings that boards say even where they are the method's own
    budget_kind: ClassVar[Literal["held_tokens", "read_tokens", "bytes", "none"]] = "held_tokens"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {}}

    budget: Budget = 1.0
    preset: str = "paper"
    allocator: Allocator | None = None
    codec: Codec | Method | None = None
    reader: Reader | None = None
    prefill: Prefill | None = None
    schedule: Schedule | None = None

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        if RATIO in settings:
            raise TypeError(f"{cls.__name__}: {kept_of(settings[RATIO])}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.preset not in self.presets:
            raise ValueError(f"{type(self).__name__} has no preset {self.preset!r}; valid: {', '.join(self.presets)}")
        for name, value in self.presets[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if isinstance(self.codec, Method):
            object.__setattr__(self, "codec", self.codec.as_codec())
        self.check()
        scorer = self.make_scorer()
        check_budget(self.budget, self.reserved() if scorer is not None else 0)
        parts = self.parts()
        for reason, refused in ILLEGAL:
            if refused(self, parts):
                raise NotTogether(f"{type(self).__name__}: {reason} (parts: {parts.names()})")

    def check(self) -> None:
        """Raise ValueError for illegal hyper-parameters. Called once the preset has filled them in."""

    def bind(self, model: Any) -> Method:
        """This method ready for a model: called once by a session before it builds the parts.

        A method that needs data of the model (calibrated filters, head classes) returns a copy with it filled in.
        Such data goes into fields declared with `repr=False, compare=False`: they are no hyper-parameters, so they are
        neither on the command line nor in a record. By default the allocator is asked, and replaced by its answer.

        Raises:
            ValueError: if there is none for this model, naming the command that makes it.
        """
        if not self.limited:
            return self
        allocator = self.parts().allocator
        bound = allocator.bind(model)
        return self if bound is allocator else replace(self, allocator=bound)

    def ready(self, model: Any) -> Method:
        """What a session works with: this method bound to a model, its codec and reader too.

        Raises:
            ValueError: as of `bind`, or codec or reader do not fit the model.
        """
        bound = self.bind(model)
        parts = bound.parts()
        codec, reader = parts.codec.bind(model), parts.reader.bind(model)
        bound = bound if codec is parts.codec else replace(bound, codec=codec)
        return bound if reader is parts.reader else replace(bound, reader=reader)

    def as_codec(self) -> Codec:
        """The codec of a method that only says how tokens are held.

        Raises:
            ValueError: it drops tokens.
        """
        if self.make_scorer() is not None:
            raise ValueError(
                f"codec={type(self).__name__}(…) evicts tokens: a codec is a method without a scorer, such as KIVI"
            )
        return self.parts().codec

    def notes(self, model: Any) -> list[str]:
        """What a user should know of this method on this model: warned when attached, kept in the session's report."""
        return []

    def fingerprint(self) -> dict[str, str]:
        """Facts beside the settings that change results: what files hold that a codec or reader names. Part of the run id."""
        parts = self.parts()
        named = {"codec": parts.codec.fingerprint(), "reader": parts.reader.fingerprint()}
        return {f"{part}.{key}": value for part, facts in named.items() for key, value in facts.items()}

    def reserved(self) -> int:
        """Sinks plus window, in tokens: what an int budget must exceed."""
        return 0

    @property
    def compact_positions(self) -> bool:
        """True if kept keys are re-rotated to positions 0, 1, … and queries follow at the number held."""
        return False

    def cap(self, real: Tensor) -> Tensor | None:
        """Tokens that rows of `real [B]` tokens keep per KV head, LongTensor `[B]`; None without limit."""
        return cap(self.budget, real)

    def for_tokenizer(self, tokenizer: Any) -> Method:
        """This method with what it says in text (a schedule's `newline` and `until`) as ids of a tokenizer.

        Raises:
            ValueError: the tokenizer has no such token.
        """
        schedule = self.parts().schedule
        return self.replace(schedule=schedule.resolve(tokenizer)) if schedule.unresolved else self

    @property
    def limited(self) -> bool:
        """False if this method can never drop a token: no scorer, or budget 1.0."""
        return self.budget_kind == "held_tokens" and not is_unlimited(self.budget)

    @property
    def cache_reuse(self) -> Literal["prefix", "whole"]:
        """What of a compressed cache another prompt can go on from.

        "prefix": any part from the start, as what is held of a token follows from the tokens before it (groups of a
        codec whole). "whole": nothing but all of it, as what is kept, or in which directions, depends on the rest of the
        prompt: eviction, and parts that say `by_prompt`.
        """
        parts = self.parts()
        evicts = parts.scorer is not None and self.limited
        chosen = parts.codec.by_prompt or parts.reader.by_prompt or parts.prefill.by_prompt
        return "whole" if evicts or chosen else "prefix"

    def make_scorer(self) -> Scorer | None:
        return None

    def make_schedule(self) -> Schedule:
        return Schedule()

    def make_allocator(self) -> Allocator:
        return Uniform()

    def make_codec(self) -> Codec:
        return Plain()

    def make_reader(self) -> Reader:
        return ReadAll()

    def make_prefill(self) -> Prefill:
        return OneShot()

    def parts(self) -> Parts:
        """The parts this method answers with, its own unless replaced by a field."""
        return Parts(
            prefill=self.prefill or self.make_prefill(),
            scorer=self.make_scorer(),
            allocator=self.allocator or self.make_allocator(),
            codec=self.codec or self.make_codec(),  # type: ignore[arg-type]  # a method was replaced by its codec
            reader=self.reader or self.make_reader(),
            schedule=self.schedule or self.make_schedule(),
        )

    def replace(self, **changes: Any) -> Method:
        """A copy with other hyper-parameters, checked again."""
        return replace(self, **changes)

    def variant(self) -> str:
        """What differs from the method's own settings under preset "paper", e.g. "allocator=ada window=16"; "" if nothing.

        Boards print it beside the method's name. Settings in `said`, of the method or a replaced part, are always in it.
        """
        parts = {"allocator", "codec", "reader", "prefill", "schedule"}
        own = type(self)(budget=self.budget, preset=self.preset)
        changed = [] if self.preset == "paper" else [f"preset={self.preset}"]
        here, there = self.parts().names(), own.parts().names()
        for name in sorted(parts):
            changed += [f"{name}={here[name]}"] if here[name] != there[name] else []
            if getattr(self, name) is not None and name != "schedule":  # whose name says all of it
                changed += _settings(name, getattr(self.parts(), name), getattr(own.parts(), name))
        for item in fields(self):
            if item.name not in parts | {"budget", "preset"} and item.repr:
                value = getattr(self, item.name)
                if value != getattr(own, item.name) or item.name in self.said:
                    changed.append(f"{item.name}={value}")
        return " ".join(changed)

    def describe(self) -> dict[str, Any]:
        """Plain values of every hyper-parameter for a record; parts by name."""
        described = {}
        for field in fields(self):
            if not field.repr:  # data of a model that bind() filled in
                continue
            value = getattr(self, field.name)
            if isinstance(value, (int, float, str, bool, type(None))):
                described[field.name] = value
            else:
                described[field.name] = repr(value)
        return described


def _settings(name: str, part: Any, own: Any) -> list[str]:
    """What a part was told that it, or the method's own of the same kind, would not say by itself: "codec.bits=4"."""
    if not is_dataclass(part):
        return []
    always = getattr(part, "said", ())
    if type(own) is not type(part):
        required = any(i.default is MISSING and i.default_factory is MISSING for i in fields(part))
        kind: Any = type(part)
        own = None if required else kind(**({"preset": part.preset} if hasattr(part, "preset") else {}))
    said = [
        (i.name, getattr(part, i.name), i.default if i.name == "preset" else getattr(own, i.name, i.default))
        for i in fields(part)
        if i.repr
    ]
    return [f"{name}.{key}={value}" for key, value, usual in said if value != usual or key in always]
