"""What a record and a row of samples hold, checked once where they are read back from disk.

A file on disk may be cut short, edited, or come from elsewhere: whoever reads it gets what these models allow, or a
`ValueError` that names the field. Values stay as they were read: an int is not made a float.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from kvcompress.sweep.record_keys import FINISHED

RUN_ID = r"^[\w.-]{1,100}$"

# a whole number passes for a real one, as in JSON; true and false, which Python counts as integers, do not
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Difference = Annotated[Number, Field(ge=-1, le=1)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(min_length=1)]
Scalar = str | bool | Number | None
Plain = Scalar | list[Scalar] | list[list[Scalar]] | dict[str, Scalar]
Times = Positive | list[Positive] | None


def _budget(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**63:
        return value
    if isinstance(value, float) and 0 < value <= 1:
        return value
    raise ValueError(f"a budget is a share of the tokens in (0, 1] or a number of tokens, found {value!r:.40}")


Budget = Annotated[Any, AfterValidator(_budget)]


def _dotted(name: str) -> str:
    """Fields of a record have dots in their names, which Python's have not."""
    return name.replace("__", ".")


class Stored(BaseModel):
    """Strict: text is no number, and a number no text. Fields of later versions stay."""

    model_config = ConfigDict(strict=True, extra="allow", alias_generator=_dotted)


# ---------------------------------------------------------------------------------------------------- samples.jsonl


class Held(Stored):
    """`kv` of a report: bytes and tokens of one sample's cache."""

    bytes_held: Positive | None = None  # keys, values and positions of the tokens held
    bytes_allocated: Positive | None = None  # with headroom
    bytes_full: Positive | None = None  # of the uncompressed cache
    ratio: Positive | None = None  # held over full
    bytes_host: Positive | None = None
    bytes_summaries: Positive | None = None
    bytes_tables: Positive | None = None
    bytes_scores: Positive | None = None
    kept_tokens_mean: Positive | None = None  # per KV head
    kept_tokens_max: Positive | None = None
    read_bytes_per_token: Positive | None = None
    moved_bytes_per_token: Positive | None = None
    storage: str | None = None


class Step(Stored):
    """How decode steps ran."""

    how: str = ""
    why: str | None = None
    ready_s: Positive = 0.0


class Report(Stored):
    """What a session says of a cache (`Session.report`), here after the compression."""

    kv: Held | None = None
    active: bool | None = None  # the method did something
    clamped: bool | None = None  # the budget was below what the method protects
    notes: list[str] = []
    kernel: str | None = None
    step: Step | None = None
    time: dict[str, Positive | None] | None = None
    kept_per_layer: list[Positive] | None = None
    kept_per_head: list[list[Positive]] | None = None
    reuse: dict[str, Number | list[Number] | None] | None = None


class End(Report):
    """The same at the end, from which records are made."""

    kv: Held
    active: bool
    clamped: bool


class Out(Stored):
    """What a task's run of one sample returned; each task has fields of its own beside these.

    `compressed` and `end` are None where memory ran out (`oom`).
    """

    compressed: Report | None = None
    end: End | None = None
    oom: Any = None
    finished: list[str] = []  # per answer: stop, length, forced, fixed
    tokens: list[list[Count]] = []
    text: list[str] = []
    held: list[Positive | None] | None = None  # bytes along the decode
    ttft_s: Times = None
    tpot_s: Times = None
    prefill_s: Times = None
    compress_s: Times = None
    prefill_peak: Positive | None = None
    decode_peak: Positive | None = None

    @model_validator(mode="after")
    def _both_reports(self) -> Out:
        if self.end is not None and (self.compressed is None or self.compressed.kv is None):
            raise ValueError("a report of the end, but no kv of one after the compression")
        return self


class Meta(Stored):
    """What a sample's task says of it."""

    length: int | str | None = None
    depth: Number | str | None = None
    prompt_tokens: Count | None = None
    truncated_tokens: Count = 0
    needle_offsets: list[Count] | None = None
    prompt_hash: str | None = None
    prompt_first: str | None = None
    prompt_last: str | None = None


class SampleRow(Stored):
    """One line of `samples.jsonl`: a finished sample."""

    id: Name
    score: Share | None  # None where no answer is known
    source: str | None = None  # hash of the sources it was made with
    scores: dict[str, Number | None] = {}  # of each metric; `score` is among them
    references: list[list[str] | str] = []  # per turn
    protocol: dict[str, Plain] = {}
    meta: Meta | None = None
    unfinished: Share = 0.0  # share of answers that end within a thought
    forced: Share = 0.0  # share of answers whose thought was ended by force
    shared: bool = False  # its prefill was another cell's as well
    rows: Annotated[int, Field(ge=1)] = 1  # samples of its batch
    out: Out | None = None

    @model_validator(mode="after")
    def _one_score(self) -> SampleRow:
        if self.scores.get("score", self.score) != self.score:
            raise ValueError(f"score is {self.score!r}, but scores.score {self.scores['score']!r}")
        return self


# ---------------------------------------------------------------------------------------------------- record.json


class Record(Stored):
    """`record.json`: flat, the keys with dots. Every key is written, with None where there is no value."""

    # what was run
    run_id: Annotated[str, Field(pattern=RUN_ID)]
    status: Literal["ok", "failed", "oom", "inactive", "partial", "unscored"]
    model: str
    task: str
    method: str
    variant: str | None = None  # settings that are not the preset's
    budget: Budget  # a share of the tokens as a float, or tokens as an int
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    dtype: str | None = None
    device: str | None = None
    parts__scorer: str | None = None
    parts__allocator: str | None = None
    parts__codec: str | None = None
    parts__prefill: str | None = None
    parts__reader: str | None = None
    parts__schedule: str | None = None
    parts__preset: str | None = None

    # what came of it
    n_samples: Count
    score: Share | None = None
    score_stderr: Positive | None = None
    metric: str | None = None
    delta_full: Difference | None = None  # mean paired difference to the run `baseline`
    baseline: str | None = None
    share_inactive: Share | None = None
    share_clamped: Share | None = None
    notes: list[str] | None = None
    error: str | None = None

    # bytes and tokens, means over samples
    kv__bytes_held: Positive | None = None
    kv__bytes_allocated: Positive | None = None
    kv__bytes_full: Positive | None = None
    kv__ratio: Positive | None = None
    kv__bytes_host: Positive | None = None
    kv__bytes_summaries: Positive | None = None
    kv__bytes_tables: Positive | None = None
    kv__moment: str | None = None  # when the above were counted
    kv__bytes_scores: Positive | None = None
    kv__bytes_peak: Positive | None = None
    kv__bytes_mean: Positive | None = None
    kv__kept_tokens_mean: Positive | None = None
    kv__kept_tokens_max: Positive | None = None
    kv__read_bytes_per_token: Positive | None = None
    kv__moved_bytes_per_token: Positive | None = None
    kv__storage: str | None = None
    memory__prefill_peak: Positive | None = None
    memory__decode_peak: Positive | None = None

    # seconds: median and quartiles
    time__ttft_s: Positive | None = None
    time__ttft_s__q1: Positive | None = None
    time__ttft_s__q3: Positive | None = None
    time__tpot_s: Positive | None = None
    time__tpot_s__q1: Positive | None = None
    time__tpot_s__q3: Positive | None = None
    time__prefill_s: Positive | None = None
    time__prefill_s__q1: Positive | None = None
    time__prefill_s__q3: Positive | None = None
    time__compress_s: Positive | None = None
    time__compress_s__q1: Positive | None = None
    time__compress_s__q3: Positive | None = None
    time__step_ready_s: Positive | None = None

    # how it was asked
    protocol__question: str | None = None
    protocol__chunking: str | None = None
    protocol__kernel: str | None = None
    protocol__template: str | None = None
    protocol__truncated_share: Share | None = None
    protocol__hit_max_share: Share | None = None
    protocol__unfinished_share: Share | None = None
    protocol__turns: str | None = None
    protocol__questions: Scalar = None
    protocol__batch: Scalar = None
    protocol__lengths: Scalar = None
    protocol__data: str | None = None
    protocol__revision: str | None = None
    protocol__shared: bool | None = None
    protocol__decoding: str | None = None
    protocol__decoding_why: str | None = None
    protocol__step: str | None = None
    protocol__step_why: str | None = None
    protocol__pair: str | None = None  # what runs share that may be compared
    sanity__gold: Number | None = None
    sanity__empty: Number | None = None
    versions__source: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Record:
        if self.status == "unscored" and self.score is not None:
            raise ValueError(f"unscored, but its score is {self.score!r}")
        if self.status in FINISHED and self.status != "unscored" and self.score is None:
            raise ValueError("finished, but its score is None")
        if self.status == "inactive" and self.share_inactive not in (None, 1.0):
            raise ValueError(f"inactive, but share_inactive is {self.share_inactive!r}")
        more = self.__pydantic_extra__ or {}
        for key, value in more.items():
            check_extra(key, value)
        if len({len(value) for key, value in more.items() if key.startswith("metrics.curve_")}) > 1:
            raise ValueError("the lists of metrics.curve_* are of several lengths")
        if self.status == "ok" and more.get("metrics.ttft_to_full") is not None:
            for key in _REUSE:
                if more.get(f"metrics.{key}") is None:
                    raise ValueError(f"metrics.{key} is missing beside metrics.ttft_to_full")
        return self


# what tables and figures of reused chunks reckon with
_REUSE = (
    *("kl", "kl_first", "agreement", "f1_full", "prompt_tokens", "ttft_s", "ttft_s.q1", "ttft_s.q3"),
    *("reuse.recompute_share", "reuse.bytes_loaded"),
)
KEYS = tuple(str(field.alias) for field in Record.model_fields.values())

# keys that are not in every record, by the start of their name, the longest that fits
_EXTRA: dict[str, Any] = {
    "parts.": str | None,
    "kv.": Positive | None,
    "time.": Positive | None,
    "memory.": Positive | None,
    "delta_": Number | None,
    "share_": Share | None,
    "score_": Number | None,
    "p_": Number | None,
    "metrics.": Plain,
    # what boards and figures reckon with
    "metrics.agreement": Number | None,
    "metrics.curve_": list[Number],
    "metrics.curve_q": list[Number | None],  # of rollouts: None where no output is that long
    "metrics.f1_full": Number | None,
    "metrics.kl": Number | None,
    "metrics.perplexity": Number | None,
    "metrics.prompt_tokens": Number | None,
    "metrics.ratio_": Number | None,
    "metrics.reuse.": Number | None,
    "metrics.ttft": Number | None,
    "protocol.": Scalar,
    "sanity.": Number | None,
    "versions.": Scalar,
    "": Plain,
}


@lru_cache(maxsize=1)
def _extra() -> dict[str, TypeAdapter[Any]]:
    kinds = sorted(_EXTRA.items(), key=lambda item: -len(item[0]))
    return {start: TypeAdapter(kind, config=ConfigDict(strict=True)) for start, kind in kinds}


def check_extra(key: str, value: Any) -> None:
    """Refuse a value of another kind than boards take under this key.

    Raises:
        ValueError: names key and value.
    """
    adapter = next(one for start, one in _extra().items() if key.startswith(start))
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{key}: {shown(error)}") from None


class Noted(Stored):
    """A cell as a sweep notes it before it is run (`sweep.json`)."""

    method: str | None = None
    budget: Budget | None = None
    task: str | None = None
    model: str | None = None
    seed: Count | None = None


class Cells(RootModel[dict[Annotated[str, Field(pattern=RUN_ID)], Noted]]):
    """The cells of a sweep by run id."""


_KINDS = ("int", "float", "str", "bool", "none")


def shown(error: ValidationError) -> str:
    """The first thing that is wrong, in one line: field, what it should be, what it is."""
    one = error.errors(include_url=False, include_context=False)[0]
    # a union of kinds is tried kind by kind: their names are no fields
    where = ".".join(str(part) for part in one["loc"] if part not in _KINDS and "[" not in str(part))
    text = str(one["msg"]).removeprefix("Value error, ")
    found = one["input"]
    value = "" if isinstance(found, Mapping) or one["type"] in ("missing", "value_error") else f", found {found!r:.40}"
    return f"{where + ': ' if where else ''}{text}{value}"


def checker(model: type[BaseModel]) -> Callable[[Any], None]:
    """A function that refuses what `model` does not allow, with a ValueError of one line."""

    def check(value: Any) -> None:
        try:
            model.model_validate(value)
        except ValidationError as error:
            raise ValueError(shown(error)) from None

    return check


check_row, check_record, check_cells = checker(SampleRow), checker(Record), checker(Cells)
