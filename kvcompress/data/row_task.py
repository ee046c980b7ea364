"""Base class of tasks whose samples are rows of a published JSON Lines file, one prompt per row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvcompress.common.hashing import content_hash
from kvcompress.common.tokenization import plain_ids
from kvcompress.data import hub, jsonl, prompts
from kvcompress.data.task import Sample, Task, Turn


@dataclass(frozen=True)
class RowPrompt:
    """One row as a prompt: `text` ends with `tail`, the question; `prefix` starts the answer after any wrapper."""

    text: str
    tail: str
    references: tuple[str, ...]
    prefix: str = ""


@dataclass(frozen=True, kw_only=True)
class RowTask(Task):
    """Rows of one file.

    Attributes:
        source: "auto" (`paths.data`, then the Hub where the data set is there), or a file or folder of JSON Lines.
        question: "seen" during compression, or "hidden": what follows the context is appended after it.
        template: "auto" (chat where the tokenizer has a template), "chat" or "none".
        max_length: tokens of a prompt at most, cut in the middle as LongBench does; None: nothing is cut.
    """

    version: ClassVar[str] = "1"
    metric_version: ClassVar[str] = "1"
    folder: ClassVar[str]  # under paths.data
    fields: ClassVar[tuple[str, ...]]  # that a row must have
    answer_tokens: ClassVar[int]
    ending: ClassVar[str] = ".jsonl"  # of its file
    whole_answers: ClassVar[bool] = False  # True where an answer counts only if all of it is there
    templates: ClassVar[tuple[str, ...]] = prompts.TEMPLATES

    source: str = "auto"
    question: str = "seen"
    template: str = "auto"
    max_length: int | None = None

    def __post_init__(self) -> None:
        for field, values in {"question": ("seen", "hidden"), "template": self.templates}.items():
            if getattr(self, field) not in values:
                raise ValueError(f"task.{field}={getattr(self, field)!r}; valid: {', '.join(values)}")
        if self.max_length is not None and self.max_length < 16:
            raise ValueError(f"task.max_length={self.max_length}; at least 16 tokens")

    @abstractmethod
    def names(self) -> Sequence[str]:
        """What the file may be called, without its ending; a part of it may end in `_first<n>`."""

    @abstractmethod
    def row_prompt(self, row: Mapping[str, Any], where: str) -> RowPrompt:
        """The prompt of a row, `where` it stands for errors."""

    def hub(self) -> hub.Source | hub.File | None:
        """The data set on the Hub; None where it is not there."""
        return None

    def new_tokens(self, row: Mapping[str, Any]) -> int:
        """Length of the answer to a row at most."""
        return self.answer_tokens

    def about(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Facts about a row for reports."""
        return {}

    # ------------------------------------------------------------------ data

    def file(self) -> Path | None:
        """The file to read, or None for the Hub.

        Raises:
            ValueError: `source` is neither a file nor a folder that has it.
        """
        if self.source != "auto":
            path = Path(self.source).expanduser()
            found = path if path.is_file() else self._within(path)
            if found is None:
                raise ValueError(f"task.source={self.source!r} is no file and no folder with {self._wanted()}")
            return found
        return next(filter(None, map(self._within, self.places())), None)

    def places(self) -> list[Path]:
        """Folders to look in where no source is named."""
        return [Path(self.data) / self.folder] if self.data else []

    def _within(self, folder: Path) -> Path | None:
        for name in self.names():
            found = [folder / f"{name}{self.ending}", *sorted(folder.glob(f"{name}_first*{self.ending}"))]
            for path in found:
                if path.is_file():
                    return path
        return None

    def _wanted(self) -> str:
        return " or ".join(f"{name}{self.ending}" for name in self.names())

    def read(self, path: Path) -> Sequence[tuple[str, dict[str, Any]]]:
        """All rows of a file, each with where it stands, for errors."""
        return [(f"{path} line {number}", row) for number, row in jsonl.numbered(path, self.fields)]

    def rows(self) -> Sequence[dict[str, Any]]:
        """All rows, in the order of the file; raises as `located`."""
        return [row for _, row in self.located()]

    def located(self) -> Sequence[tuple[str, dict[str, Any]]]:
        """All rows, each with where it stands, for errors.

        Raises:
            ValueError: a broken or incomplete file, or no data where it was looked for.
        """
        path = self.file()
        if path is not None:
            return self.read(path)
        looked = f"{self.data}/{self.folder}" if self.data else "paths.data (not set)"
        text, cause = f"no data for {self.name}: looked for {self._wanted()} in {looked}", None
        source = self.hub()
        if source is not None:
            try:
                fetched = hub.fetch(source).rows
            except Exception as error:  # whatever the Hub's client raises without a network
                text, cause = f"{text}, then for {source} on the Hub ({type(error).__name__}: {error})", error
            else:
                places = [f"{source} row {number}" for number in range(1, len(fetched) + 1)]
                rows = zip(places, map(self.from_hub, fetched), strict=True)
                return [(where, jsonl.check(row, self.fields, where)) for where, row in rows]
        raise ValueError(f"{text}. Set paths.data or task.source") from cause

    def from_hub(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of the Hub's data set in the fields of the published files."""
        return row

    def row_prompts(self) -> Iterator[tuple[dict[str, Any], RowPrompt]]:
        """Every row with its prompt."""
        for number, (where, row) in enumerate(self.located()):
            try:
                asked = self.row_prompt(row, where)
                jsonl.identifier(row.get("_id"), number, where)
                self.about(row)
            except (TypeError, AttributeError, LookupError) as error:  # fields of another type than is published
                raise ValueError(f"{where}: not a row of this data set ({type(error).__name__}: {error})") from error
            yield row, asked

    def fingerprint(self) -> dict[str, Any]:
        """Which data; every row is made a prompt, so that bad ones are refused before a model is loaded."""
        rows = sum(1 for _ in self.row_prompts())
        return {"data": self.provenance()["data"].removeprefix("file:"), "records": rows}

    def provenance(self) -> dict[str, Any]:
        path, source = self.file(), self.hub()
        if path is not None or source is None:
            return {"data": None if path is None else f"file:{content_hash(path)}"}
        revision = hub.fetch(source).revision
        return {"data": f"hub:{source}@{revision}", "revision": revision}

    def settings(self) -> dict[str, Any]:
        # where the data lies is no setting: what it holds is in the fingerprint
        return {name: value for name, value in super().settings().items() if name not in ("source", "revision")}

    # ------------------------------------------------------------------ samples

    def limit(self, tokenizer: Any) -> int | None:
        """Tokens of a prompt at most."""
        return self.max_length

    def build(self, tokenizer: Any, row: Mapping[str, Any], asked: RowPrompt, where: str) -> prompts.Prompt:
        """A row's prompt as token ids, cut to the limit.

        Raises:
            ValueError: what must not be cut does not fit.
        """
        hide, limit = self.question == "hidden", self.limit(tokenizer)
        return prompts.build(tokenizer, asked.text, asked.tail, self.template, limit, "text", hide, answer=asked.prefix)

    def _fits(self, tokenizer: Any, references: Sequence[str], most: int, where: str) -> None:
        """Refuse a row of which no expected answer can be given in so many tokens."""
        needed = min(len(plain_ids(tokenizer, text)) for text in references)
        if needed > most:
            raise ValueError(
                f"{where}: the expected answer {references[0][:40]!r} takes {needed} tokens, and an answer may have {most}: "
                "it cannot be given; mend the row, or leave it out"
            )

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        limit = self.limit(tokenizer)
        places = (where for where, _ in self.located())
        for number, (where, (row, asked)) in enumerate(zip(places, self.row_prompts(), strict=True)):
            with named(where):
                prompt = self.build(tokenizer, row, asked, where)
            if self.whole_answers and asked.references:
                self._fits(tokenizer, asked.references, self.new_tokens(row), where)
            yield Sample(
                id=str(row.get("_id") or number),
                segments=(prompt.context,),
                turns=(Turn(prompt.question, self.new_tokens(row), references=asked.references),),
                protocol={"question": self.question, "template": prompt.template, "max_length": limit},
                meta={**self.about(row), **prompts.describe(tokenizer, prompt)},
                where=where,
            )


@contextmanager
def named(where: str) -> Iterator[None]:
    """What is wrong with a row, with where it stands."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def check_fits(tokenizer: Any, answer: str, most: int, where: str) -> None:
    """Refuse a right answer that is longer than answers may be: no run could give it.

    Raises:
        ValueError: names the row, the answer, its length and the limit.
    """
    tokens = len(plain_ids(tokenizer, answer))
    if tokens > most:
        raise ValueError(
            f"{where} {answer!r:.60} takes {tokens} tokens, and an answer may have {most}: set task.max_new_tokens to "
            f"{tokens} or more, or leave the row out"
        )


def place(where: str) -> str:
    """Where a row stands without its folder: `passkey.jsonl line 3`."""
    return where.rpartition("/")[2]
