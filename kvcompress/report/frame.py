"""Records as a pandas data frame with statistics: `kvcompress.report.load(path)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompress.report import stats
from kvcompress.report.run_index import Entry, Loaded, baselines, flags, gather, interval

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]
ORIGINS = ("measured", "published", "kvpress", "lm-eval")
MEASURED = "measured"

# every column that a frame has beside those of the prefixes below; None where a run does not have it
COLUMNS: dict[str, str] = {
    "origin": "measured: a record of this library; published, kvpress, lm-eval: numbers of others, never averaged with it",
    "sweep": "name of the sweep's folder",
    "path": "folder of the run, with record.json, samples.jsonl and config.yaml",
    "run_id": "hash of the configuration as far as it bears on results",
    "status": "ok, failed, oom, inactive, partial or unscored (no answers are known); only ok rows are on the board",
    "on_board": "true where the row counts: status ok",
    "flags": "list of what a reader must know: status, stale, simulated, inactive, clamped, truncated, hit-max shares",
    "model": "model name",
    "task": "task name, suite/dataset for suites",
    "method": "method name on the command line",
    "variant": "settings of the method that are not its preset's",
    "budget": "what was asked: a share of the tokens (float) or tokens (int)",
    "seed": "seed of the run",
    "dtype": "of the weights",
    "device": "type of device",
    "metric": "name and version of the metric, such as string_match_all/1",
    "n_samples": "samples finished",
    "score": "mean over samples, 0 to 1",
    "score_stderr": "its standard error",
    "score_low": "lower end of its 95% interval (Wilson's for scores 0 or 1, else Student's t; never of width zero)",
    "score_high": "upper end",
    "baseline": "run id of the uncompressed run it is compared with",
    "delta_full": "mean paired difference to the baseline, on the samples both have",
    "delta_stderr": "standard error of that difference",
    "delta_low": "lower end of its 95% interval (paired bootstrap, never narrower than Student's)",
    "delta_high": "upper end",
    "delta_n": "samples that both have",
    "delta_needed": "samples that would tell a difference of this size with 80% power, all comparisons corrected",
    "p_value": "two-sided p-value of no difference (sign-flip test over the paired samples)",
    "p_corrected": "the same, corrected after Holm over all comparisons of the same sweep and protocol.pair",
    "significant": "true where p_corrected is below 0.05",
    "share_inactive": "share of samples that the method did not touch",
    "share_clamped": "share of samples whose budget was below what the method protects",
    "notes": "list of remarks of the run",
    "error": "traceback of a failed run",
    "source": "where a number of others was taken from",
}
PREFIXES: dict[str, str] = {
    "parts.": "the parts of the composition: scorer, allocator, codec, prefill, reader, schedule, preset",
    "kv.": "measured bytes of the cache on the device: bytes_held, bytes_full, ratio (held over full), …, when kv.moment says; "
    "bytes_host; per token read",
    "memory.": "peaks of the process or device, bytes",
    "time.": "seconds, medians and quartiles; None in shared sweeps",
    "protocol.": "how it was asked; rows of one protocol.pair may be compared with each other, others may not",
    "sanity.": "scores that right answers and empty ones got before the run",
    "metrics.": "further measures of a task",
    "versions.": "code, packages and hardware",
}


def load(
    path: str | Path | Iterable[str | Path], published: str | Path | None = None, foreign: Sequence[str | Path] = ()
) -> pd.DataFrame:
    """One row per record under `path`, with what the samples say of its certainty.

    Columns: `COLUMNS`, and record keys as they are under `PREFIXES`. What could not be read is in
    `frame.attrs["skipped"]`, one text per file.

    Args:
        path: a folder, a record file, or several.
        published: a csv of published numbers to add as rows of other origins.
        foreign: result folders of other programs to add likewise.

    Raises:
        ValueError: there is not one record or number of others; says what was skipped.

    Example:
        >>> frame = kvcompress.report.load("results/demo")
        >>> frame[frame.on_board].pivot_table("score", "method", "budget")
    """
    import pandas as pd

    paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(one) for one in path]
    found = gather(paths)
    rows = measured(found) + as_foreign(found.foreign) + others(published, foreign, found.damaged)
    if not rows:
        skipped = "".join(f"\nskipped {text}" for text in found.damaged)
        places = ", ".join(map(str, paths))
        raise ValueError(f"no records under {places}: make some with kvcompress run, or name another folder{skipped}")
    keys = dict.fromkeys([*COLUMNS, *sorted({key for row in rows for key in row})])
    frame = pd.DataFrame([{key: row.get(key) for key in keys} for row in rows], columns=list(keys))
    # a budget is an int of tokens or a float share: one type for both would lose which
    frame["budget"] = pd.Series([row.get("budget") for row in rows], dtype=object, index=frame.index)
    frame.attrs["skipped"] = found.damaged
    return frame


def measured(found: Loaded) -> list[Record]:
    """Rows of records, statistics included, in the order of `found.entries`."""
    weigh(found.entries)
    return [
        entry.record
        | {
            "origin": MEASURED,
            "sweep": entry.sweep,
            "path": str(entry.path.parent),
            "on_board": entry.record["status"] == "ok",
            "flags": flags(entry.record),
        }
        for entry in found.entries
    ]


def weigh(entries: Sequence[Entry]) -> None:
    """Add intervals, p-values and marks to the records, in place.

    The comparisons of one table (a sweep and `protocol.pair`, all its runs against the baseline) are corrected together;
    runs that are not on the board neither count nor get a mark.
    """
    bases = baselines(entries)
    tables: dict[tuple[str, Any], list[tuple[Record, stats.Difference]]] = {}
    for entry in entries:
        record = entry.record
        if record["status"] != "ok" or not entry.scores:
            continue
        record |= interval(record, entry.scores)
        base = bases.get(entry.table)
        if base is None or base is entry:
            continue
        found = stats.difference(stats.paired(entry.scores, base.scores))
        if found is None:
            continue
        record["baseline"], record["delta_full"], record["delta_n"] = base.record["run_id"], found.mean, found.n
        record["delta_stderr"], record["delta_low"], record["delta_high"] = found.stderr, found.low, found.high
        tables.setdefault(entry.table, []).append((record, found))
    for compared in tables.values():
        corrected = stats.holm([found.p for _, found in compared])
        for (record, found), p in zip(compared, corrected, strict=True):
            record["p_value"], record["p_corrected"], record["significant"] = found.p, p, p < stats.SIGNIFICANT


def others(published: str | Path | None, foreign: Sequence[str | Path], skipped: list[str]) -> list[Record]:
    """Rows that this library did not measure; what cannot be read is added to `skipped`.

    Raises:
        ValueError: a reader gave a row that passes for a measured one.
    """
    wanted = [("load_published", path) for path in [published] if path is not None]
    wanted += [("load_foreign", path) for path in foreign]
    if not wanted:
        return []
    if find_spec("kvcompress.report.external") is None:
        skipped.extend(f"{path}: this version reads no results of others" for _, path in wanted)
        return []
    module = import_module("kvcompress.report.external")
    rows: list[Record] = []
    for name, path in wanted:
        try:
            made = getattr(module, name)(Path(path))
            rows += as_rows(made)
            skipped.extend(getattr(made, "attrs", {}).get("skipped", ()))
        except (OSError, ValueError) as error:
            skipped.append(f"{path}: {error}")
    return as_foreign(rows)


def as_foreign(rows: list[Record]) -> list[Record]:
    """Rows of others with what every row has.

    Raises:
        ValueError: one passes for a measured one.
    """
    for row in rows:
        if row.get("origin") not in ORIGINS or row["origin"] == MEASURED:
            raise ValueError(f"origin={row.get('origin')!r} of a foreign row; valid: {', '.join(ORIGINS[1:])}")
        row.setdefault("on_board", False)
        row.setdefault("flags", [])
    return rows


def as_rows(rows: Any) -> list[Record]:
    """Rows of a frame or of a sequence of mappings; NaN becomes None."""
    if hasattr(rows, "to_dict"):
        rows = rows.to_dict("records")
    return [{key: None if _missing(value) else value for key, value in row.items()} for row in rows]


def _missing(value: Any) -> bool:
    return isinstance(value, float) and value != value


def documented(column: str) -> bool:
    """True for a column whose meaning is said here."""
    return column in COLUMNS or column.startswith(tuple(PREFIXES))


def method_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two rows runs of the same method: its name, settings and parts."""
    parts = "scorer allocator codec prefill reader schedule preset".split()
    return (row.get("method"), row.get("variant"), *(row.get(f"parts.{part}") for part in parts))
