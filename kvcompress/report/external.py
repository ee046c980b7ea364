"""External results as rows of a board: published tables, evaluations of kvpress, results of lm-eval.

They have the columns of records (`kvcompress.report.frame.COLUMNS`) as far as they are known, an `origin` that says
whose they are and a `source`. Scores are brought to 0 to 1; `metrics.value` keeps the number as it was printed. Nothing
here is ever averaged with what was measured: prompts, samples and metrics of the same name may differ.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeGuard

import yaml

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
PUBLISHED = ("source", "model", "benchmark", "method", "budget", "metric", "value", "table")
NEEDED = ("source", "benchmark", "method", "metric", "value")
# what a column named `metric` says if it is no data set's name: an average, a measure, a claim
MEASURES = re.compile(r"avg|pass@|rouge|throughput|decode|kv_|lossless|ttft|keeps|.*_(x|s|percent)$|.*_percent_", re.I)
PERCENT = re.compile(r"avg|pass@", re.I)  # of these, those that are scores in percent
KVPRESS_PERCENT = ("ruler", "longbench", "longbench-e")  # its other metrics are 0 to 1
INTEGERS = {"budget", "n_samples", "seed", "protocol.length"}  # a budget is an int of tokens or a float share
FIRST = (
    "origin",
    "source",
    "model",
    "task",
    "method",
    "budget",
    "metric",
    "score",
    "score_stderr",
    "n_samples",
    "status",
)


def load_published(path: str | Path) -> pd.DataFrame:
    """Rows of a csv of published numbers (columns `PUBLISHED`, a source in each row).

    Lines that lack something are left out and listed in `frame.attrs["skipped"]`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no csv with these columns.
    """
    rows: list[Row] = []
    skipped: list[str] = []
    with Path(path).open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        try:
            missing = [name for name in PUBLISHED if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"not a csv of published numbers: no column {', '.join(missing)}")
            for line in reader:
                lacks = [name for name in NEEDED if not (line.get(name) or "").strip()]
                if lacks or None in line:  # None: more fields than columns
                    what = f"no {', '.join(lacks)}" if lacks else "too many fields"
                    skipped.append(f"{path}: line {reader.line_num}: {what}")
                else:
                    rows.append(_published({name: (line[name] or "").strip() for name in PUBLISHED}))
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num}: {error}") from None
    return _frame(rows, skipped)


def load_foreign(folder: str | Path) -> pd.DataFrame:
    """Rows of every evaluation of kvpress and every results file of lm-eval under a folder.

    What is damaged is left out and listed in `frame.attrs["skipped"]`.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there is no such evaluation in it.
    """
    folder = Path(folder)
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: not there")
    rows: list[Row] = []
    skipped: list[str] = []
    for file in [folder] if folder.is_file() else sorted(folder.rglob("*.json")):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if file.name == "metrics.json":
                rows += _kvpress(file.parent, found)
            elif is_lm_eval(found):
                rows += _lm_eval(file, found)
        except (OSError, UnicodeDecodeError, ValueError, TypeError, AttributeError, KeyError, yaml.YAMLError) as error:
            if file.name == "metrics.json" or file.name.startswith("results"):
                text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                skipped.append(f"{file}: {text}")
    if not rows and not skipped:
        raise ValueError("neither an evaluation of kvpress (config.yaml, metrics.json) nor results of lm-eval in it")
    return _frame(rows, skipped)


def _frame(rows: Sequence[Row], skipped: list[str]) -> pd.DataFrame:
    import pandas as pd

    keys = dict.fromkeys([*FIRST, *sorted({key for row in rows for key in row})])
    frame = pd.DataFrame([{key: row.get(key) for key in keys} for row in rows], columns=list(keys))
    for name in INTEGERS & keys.keys():  # with a missing value among them pandas would make floats of them
        values = [math.nan if row.get(name) is None else row[name] for row in rows]
        frame[name] = pd.Series(values, dtype=object, index=frame.index)
    frame.attrs["skipped"] = skipped
    return frame


# ---------------------------------------------------------------------- published tables


def _published(line: Mapping[str, str]) -> Row:
    name, value = line["metric"], _number(line["value"])
    data_set = not MEASURES.match(name)
    suite = re.sub(r"[^a-z0-9.]+", "_", line["benchmark"].lower()).strip("_")
    score = None
    if value is not None:
        score = value / 100 if data_set or PERCENT.match(name) else value if name.startswith("rouge") else None
    budget, plain = _budget(line["budget"])
    notes = [line["table"]] if line["table"] else []
    notes += [] if plain else [f"budget {line['budget']}"]
    notes += [] if value is not None else [f"{name}: {line['value']}"]
    return {
        "origin": "published",
        "source": line["source"],
        "status": "ok",
        "model": line["model"] or None,
        "task": f"{suite}/{name}" if data_set else suite,
        "method": line["method"],
        "budget": budget,
        "metric": "as published" if data_set else name,
        "score": _share(score),
        "metrics.value": value,
        "notes": notes,
    }


def _budget(text: str) -> tuple[float | int | None, bool]:
    """A printed budget as a share or as tokens, None where it is neither; and whether that is all it says."""
    if text == "full":
        return 1.0, True
    if found := re.match(r"(\d+)(?= *(\(|$))", text):
        return int(found[1]), found[1] == text
    if found := re.match(r"(\d+(?:\.\d+)?) *%", text):
        return round(float(found[1]) / 100, 6), False
    return None, not text


# ---------------------------------------------------------------------- kvpress


def _kvpress(folder: Path, metrics: Any) -> list[Row]:
    """One row per task and metric of an evaluation folder: `config.yaml`, `metrics.json`, `predictions.csv`.

    Raises:
        ValueError: there is no configuration, or no metric in it.
    """
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except OSError:
        raise ValueError("no config.yaml beside it, so what was run is unknown") from None
    if not isinstance(config, dict) or not isinstance(config.get("dataset"), str) or not config.get("press_name"):
        raise ValueError("its config.yaml is not kvpress's: no dataset or press_name")
    counts, ratios = predictions(folder / "predictions.csv")
    budget, notes = _kept(config, ratios)
    suite, part = config["dataset"].replace("-", "_"), config.get("data_dir")
    tokens = int(str(part)) if str(part or "").isdigit() else None
    kwargs = config.get("model_kwargs") or {}
    dtype = str(kwargs.get("dtype") or kwargs.get("torch_dtype") or "auto").removeprefix("torch.")
    common: Row = {
        "origin": "kvpress",
        "source": f"kvpress evaluation, {folder}",
        "status": "ok",
        "model": config.get("model"),
        "method": config["press_name"],
        "budget": budget,
        "seed": config.get("seed"),
        "dtype": None if dtype == "auto" else dtype,
        "protocol.question": "seen" if config.get("query_aware") else "hidden",
        "protocol.length": tokens,
        "notes": notes,
    }
    rows = []
    for task, metric, value, n in _kvpress_metrics(metrics):
        name = task or (None if tokens is not None else part)
        count = n or (sum(counts.values()) if task is None else counts.get(task)) or None  # None: a slice of them
        score = value / 100 if config["dataset"] in KVPRESS_PERCENT else value
        rows.append(
            common
            | {
                "task": f"{suite}/{name}" if name else suite,
                "metric": metric,
                "score": _share(score),
                "metrics.value": value,
                "n_samples": count,
            }
        )
    if not rows:
        raise ValueError("no metric in it (kvpress computes none for this data set)")
    return rows


def _kvpress_metrics(metrics: Any) -> Iterator[tuple[str | None, str | None, float, int | None]]:
    """Task (None: the only one), metric, value and number of samples, from the forms that its benchmarks write."""
    if _is_number(metrics):
        yield None, None, float(metrics), None
    elif isinstance(metrics, list):  # needle in a haystack: ROUGE of each sample
        found = [one["rouge-l"]["f"] for one in metrics]
        if found:
            yield None, "rouge-l", fmean(found), len(found)
    elif "accuracy" in metrics and "total" in metrics:
        yield None, "accuracy", float(metrics["accuracy"]), int(metrics["total"])
    else:
        for key, value in metrics.items():
            if isinstance(value, Mapping):
                for metric, number in value.items():
                    if _is_number(number):
                        yield key, metric, float(number), None
            elif _is_number(value):
                yield None if key == "average" else key, None, float(value), None


def _kept(config: Mapping[str, Any], ratios: Sequence[float]) -> tuple[float | int | None, list[str]]:
    """The budget that kvpress's settings come to (it counts what is removed), and what there is to say of it."""
    command = str(config.get("press_init_command") or "")
    notes = [command] if command else []
    if config.get("fraction") not in (None, 1, 1.0):
        notes.append(f"fraction {config['fraction']} of the samples")
    if config.get("key_channel_compression_ratio") is not None:
        notes.append(f"key channels zeroed: {config['key_channel_compression_ratio']}")
    if command.startswith("DecodingPress") and config.get("target_size"):
        return int(config["target_size"]), [*notes, "kept in decode"]
    if config.get("head_compression_ratio") is not None:
        return None, [*notes, f"a share of heads, {config['head_compression_ratio']}, is no budget"]
    if config.get("threshold") is not None:
        kept = round(1 - fmean(ratios), 6) if ratios else None
        return kept, [*notes, f"threshold {config['threshold']}, budget: mean share kept"]
    ratio = config.get("compression_ratio")
    return (round(1 - float(ratio), 6), notes) if _is_number(ratio) else (None, notes)


def predictions(path: Path) -> tuple[Counter[str | None], list[float]]:
    """Samples per task of a `predictions.csv`, and the compression ratios in it; nothing where it cannot be read."""
    counts: Counter[str | None] = Counter()
    ratios: list[float] = []
    csv.field_size_limit(2**27)
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            for line in csv.DictReader(file):
                counts[line.get("task")] += 1
                ratio = _number(line.get("compression_ratio") or "")
                ratios += [] if ratio is None else [ratio]
    except (OSError, csv.Error):
        return Counter(), []
    return counts, ratios


# ---------------------------------------------------------------------- lm-eval


def is_lm_eval(found: Any) -> bool:
    return (
        isinstance(found, dict) and isinstance(found.get("results"), dict) and ("configs" in found or "config" in found)
    )


def _lm_eval(file: Path, found: Mapping[str, Any]) -> list[Row]:
    """One row per task, metric and filter of a results file; groups are averages over tasks and left out.

    Raises:
        ValueError: no task has a metric.
    """
    config = found.get("config") or {}
    groups = {name for name, tasks in (found.get("group_subtasks") or {}).items() if tasks} | set(
        found.get("groups") or ()
    )
    version = found.get("lm_eval_version")
    rows = []
    for task, values in found["results"].items():
        if task in groups or not isinstance(values, Mapping):
            continue
        shots = (found.get("n-shot") or {}).get(task)
        count = ((found.get("n-samples") or {}).get(task) or {}).get("effective")
        better = (found.get("higher_is_better") or {}).get(task) or {}
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not _is_number(value):
                continue  # alias, name, and the errors that belong to another key
            error = values.get(f"{metric}_stderr,{kind}")
            score = _share(float(value)) if better.get(metric, True) else None  # perplexity is no score
            rows.append(
                {
                    "origin": "lm-eval",
                    "source": f"lm-eval{f' {version}' if version else ''}, {file}",
                    "status": "ok",
                    "model": found.get("model_name") or _model(config),
                    "task": task,
                    "metric": metric if kind == "none" else f"{metric} ({kind})",
                    "score": score,
                    "score_stderr": float(error) if score is not None and _is_number(error) else None,
                    "n_samples": count,
                    "seed": config.get("random_seed"),
                    "metrics.value": float(value),
                    "protocol.task_version": _text((found.get("versions") or {}).get(task)),
                    "notes": [] if shots is None else [f"{shots} shots"],
                }
            )
    if not rows:
        raise ValueError("no task with a metric in it")
    return rows


def _model(config: Mapping[str, Any]) -> str | None:
    arguments = config.get("model_args")
    if isinstance(arguments, str):
        arguments = dict(part.partition("=")[::2] for part in arguments.split(","))
    return _text((arguments or {}).get("pretrained") or (arguments or {}).get("model") or config.get("model"))


# ---------------------------------------------------------------------- what measured runs they belong to


def belongs(row: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """True if a foreign row is of the same model and task as a record, as far as both say it."""
    asked = row.get("protocol.question")
    return (
        row.get("task") == record.get("task")
        and _short(row.get("model")) == _short(record.get("model"))
        and asked in (None, record.get("protocol.question"))
        and _same_metric(row.get("metric"), record.get("metric"))
    )


def external_points(
    records: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> list[tuple[float, float, Row]]:
    """Where foreign rows lie beside comparable records: share of the cache as they were asked to keep, score, row.

    Tokens become a share through the mean length of the measured prompts.
    """
    if not records:
        return []
    # at no limit all is kept, so the largest number held is the prompt's length
    length = max((r.get("kv.kept_tokens_mean") or 0 for r in records), default=0)
    full = any(r.get("budget") == 1.0 and isinstance(r["budget"], float) for r in records)
    found = []
    for row in others:
        budget, score = row.get("budget"), row.get("score")
        if budget is None or score is None or not belongs(row, records[0]):
            continue
        if isinstance(budget, int):
            if not (full and length):
                continue
            budget = min(1.0, budget / length)
        found.append((float(budget), float(score), dict(row)))
    return found


def _short(model: Any) -> str:
    return str(model).rpartition("/")[2].lower()


def _same_metric(theirs: Any, ours: Any) -> bool:
    if theirs is None or theirs == "as published":
        return True
    theirs, ours = str(theirs).partition(" ")[0].lower(), str(ours).partition("/")[0].lower()
    return ours.startswith(theirs) or theirs.startswith(ours)


def _share(value: float | None) -> float | None:
    """A score as it may stand on a board, None where it is not 0 to 1."""
    return round(value, 8) if value is not None and math.isfinite(value) and 0.0 <= value <= 1.0 else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
