"""Samples of the HTML board: one JavaScript file per run, which a page opened from disk can load.

A page from disk may not fetch its neighbours, but it may load scripts: each file calls one function with plain JSON. The
prompts, which all runs of a group have in common, are in a file of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvcompress.common.hashing import digest
from kvcompress.report.page_data import number

LONGEST = 8000  # characters of one output; the record's own file has the rest
PREFIX = "run-", "prompts-"


def prompts_file(sweep: str, pair: str) -> str:
    return f"prompts-{digest([sweep, pair])}.js"


def prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the question: both ends of the prompt, what was expected, where the needle lies."""
    meta = row.get("meta") or {}
    found = {
        "first": meta.get("prompt_first"),
        "last": meta.get("prompt_last"),
        "tokens": meta.get("prompt_tokens"),
        "length": meta.get("length"),
        "depth": meta.get("depth"),
        "needles": meta.get("needle_offsets"),
        "hash": meta.get("prompt_hash"),
        "references": [_texts(one) for one in row.get("references") or []],
    }
    return {key: value for key, value in found.items() if value not in (None, [])}


def _texts(references: Any) -> list[str]:
    return [str(text) for text in references] if isinstance(references, (list, tuple)) else [str(references)]


def answer(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a run made of a sample."""
    out = row.get("out") or {}
    text = out.get("text") or []
    texts = [str(one) for one in text] if isinstance(text, list) else [str(text)]
    found: dict[str, Any] = {
        "id": row["id"],
        "score": number(row["score"]),
        "text": [one[:LONGEST] for one in texts],
        "end": out.get("finished") or [],
    }
    cut = sum(max(0, len(one) - LONGEST) for one in texts)
    if cut:
        found["cut"] = cut
    kept = (out.get("compressed") or {}).get("kept_map")
    if kept:
        found["kept"] = kept
    return found


def script(call: str, *values: Any) -> str:
    """A script that hands plain data to the page. No `<` is left in it, so that it may stand inside HTML as well."""
    return f"{call}({','.join(map(plain, values))});\n"


def plain(value: Any) -> str:
    """JSON for a script: compact, and without what HTML or old JavaScript would take for the end of it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)
    for mark in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    # half of a pair of code units cannot be written as UTF-8
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class Writer:
    """Writes the files of runs into a folder, one setting after the other; what an earlier page left goes first.

    Attributes:
        count: samples written so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self._group: tuple[str, str] | None = None
        self._known: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.js"):
            if path.name.startswith(PREFIX):
                path.unlink()

    def add(self, file: str, sweep: str, pair: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """The samples of one run; runs of one sweep and pair come one after the other."""
        if self._group != (sweep, pair):
            self.close()
            self._group, self._known = (sweep, pair), {}
        answers = []
        for row in rows:
            asked, found = prompt(row), answer(row)
            if self._known.setdefault(row["id"], asked).get("hash") != asked.get("hash"):
                found["prompt"] = asked  # asked otherwise than the first run's
            answers.append(found)
        self.count += len(answers)
        (self.folder / file).write_text(script("KV.samples", file, answers), encoding="utf-8")

    def close(self) -> None:
        """Write the prompts of the setting at hand."""
        if self._group is not None:
            name = prompts_file(*self._group)
            (self.folder / name).write_text(script("KV.prompts", name, self._known), encoding="utf-8")
            self._group = None
