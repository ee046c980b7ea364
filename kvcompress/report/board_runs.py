"""Runs of a results folder as entries of a board file, each looked at as closely as its samples and settings allow."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcompress.common.hashing import digest, source_hash
from kvcompress.data import prompts
from kvcompress.report.board_file import COUNTED, close, run_name, seal_of, settings_of
from kvcompress.report.command import from_hydra, shown
from kvcompress.sweep import record, stored_config
from kvcompress.sweep.aggregate import aggregate, held_at
from kvcompress.sweep.cell_spec import CellSpec, identity, pair_id
from kvcompress.sweep.components import TASKS
from kvcompress.sweep.config import composing, register_model
from kvcompress.sweep.launcher.model_pool import ModelPool
from kvcompress.sweep.launcher.sample import samples_of

FILES = ("record.json", "samples.jsonl", "config.yaml")
ALONE = ("time.", "memory.")  # not in records of cells that shared something
FILLED_LATER = ("notes",)  # which a record has from elsewhere too
MOST_TOLD = 3  # samples that are named

Rows = Mapping[str, Mapping[str, Any]]


@dataclass
class Collected:
    """What a folder came to: entries of a board file, what is wrong with the rest, and what could not be looked at."""

    protocols: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def task_versions() -> dict[str, tuple[str, str]]:
    """Version and metric of each task of these sources."""
    return {name: (cls.version, f"{cls.metric}/{cls.metric_version}") for name, cls in TASKS.items()}


def collect(folder: Path, other_sources: bool = False) -> Collected:
    """Look at every run under `folder`; with `other_sources` also at those that another version of the sources ran."""
    found = Collected()
    finished = {path.parent for path in folder.rglob("record.json")}
    # folders of trackers may hold a file of this name as well
    begun = {path.parent for path in folder.rglob("config.yaml") if (path.parent.parent / "sweep.json").is_file()}
    runs = sorted(finished | begun)
    if not runs:
        found.problems.append(f"{folder}: no runs here: give the folder of a sweep, such as results/default")
    with composing() as compose:
        look = Look(found, compose, other_sources)
        for run in runs:
            look.at(run)
    return found


class Look:
    """A look at one run after the other; prompts of a protocol are made again once."""

    def __init__(self, found: Collected, compose: Any, other_sources: bool = False) -> None:
        self.other_sources = other_sources
        self.found, self.compose, self.commands = found, compose, from_hydra()
        self.models = ModelPool()
        self._prompts: dict[str, dict[str, str] | None] = {}

    def at(self, run: Path) -> None:
        """Add a run to what was found, or what is wrong with it."""
        wrong: list[str] = []
        for name in FILES:
            if not (run / name).is_file():
                wrong.append(
                    f"{run / name}: missing" + ("; the sweep's command finishes it" if name == FILES[0] else "")
                )
        if not wrong:
            try:
                said = record.read_record(run / "record.json")
                wrong += self._entry(run, said)
            except ValueError as error:
                wrong.append(str(error))
        self.found.problems += wrong

    def _entry(self, run: Path, said: dict[str, Any]) -> list[str]:
        """What is wrong with a run; the run is added where nothing is."""
        damaged: list[str] = []
        rows = record.RunFolder(run.parent.parent, run.parent.name, run.name).rows(told=damaged.append)
        at = f"{run / 'record.json'} ({run_name(said)})"
        if said["status"] not in record.FINISHED:
            return [f"{at}: status is {said['status']!r}: a board takes finished runs; the sweep's command finishes it"]
        if said["run_id"] != run.name:
            damaged.append(f"{at}: run_id is {said['run_id']}, its folder is {run.name}")
        made = self._cell(run, said)
        if isinstance(made, str):
            return [*damaged, f"{run / 'config.yaml'}: {made}"]
        spec, found, command = made
        wrong = [*damaged, *(f"{at}: {text}" for text in contradictions(spec, said, rows, self.other_sources))]
        hashes = {name: str((row.get("meta") or {}).get("prompt_hash")) for name, row in rows.items()}
        wrong += [
            f"{run / 'samples.jsonl'}: {text}" for text in self._samples(spec, hashes, str(said["protocol.pair"]))
        ]
        settings, mine = settings_of(found)
        pair = str(said["protocol.pair"])
        protocol = self.found.protocols.setdefault(
            pair, {"settings": settings, "samples": dict(sorted(hashes.items()))}
        )
        wrong += [f"{run / 'samples.jsonl'}: {text}" for text in unlike(hashes, protocol["samples"], "another run's")]
        if not wrong:
            self.found.runs.append(entry(run, said, rows, list(protocol["samples"]), mine, command))
        return wrong

    def _cell(self, run: Path, said: Mapping[str, Any]) -> tuple[CellSpec, dict[str, Any], list[str]] | str:
        """The cell that a stored configuration describes, its identity and its command; or why there is none."""
        overrides = self.commands.overrides(run, said)
        if overrides is None:
            return "it is no configuration of a run"
        data = ((stored_config.read(run / "config.yaml") or {}).get("paths") or {}).get("data")
        where = [f"paths.data={shown(data)}"] if isinstance(data, str) and "$" not in data else []
        model = str(said["model"])
        if model.count("/") == 1 and not model.startswith("random/"):
            register_model(model)
        try:
            config = self.compose([*overrides, *where, "device=cpu"])  # where it ran need not be here
            config.device = "cpu"
            spec = CellSpec.from_config(config)
            found = identity(config, spec.method, spec.task) | {"device": said["device"], "dtype": said["dtype"]}
        except Exception as error:  # whatever a stored configuration makes of Hydra, a task or a method
            return f"it describes no cell of these sources: {(str(error).splitlines() or [type(error).__name__])[0]}"
        if digest(found) != run.name:
            return f"it describes run {digest(found)}, its folder is {run.name}: it was edited, or a setting means something else"
        if pair_id(found) != said["protocol.pair"]:
            return f"its protocol hashes to {pair_id(found)}, protocol.pair of the record is {said['protocol.pair']}"
        return spec, found, [override for override in overrides if not override.startswith("device=")]

    def _samples(self, spec: CellSpec, hashes: Mapping[str, str], pair: str) -> Iterator[str]:
        """Samples that the task has and the file has not, the other way round, and prompts that are not the task's."""
        if pair not in self._prompts:
            try:
                self._prompts[pair] = prompt_hashes(spec, self.models.tokenizer(spec.config))
            except Exception as error:  # no tokenizer or data set here
                why = (str(error).splitlines() or [type(error).__name__])[0]
                self.found.notes.append(
                    f"prompts of {spec.task.name} are taken as they are: they cannot be made here ({why})"
                )
                self._prompts[pair] = None
        wanted = self._prompts[pair]
        if wanted is not None:
            yield from unlike(hashes, wanted, "the task's")


def prompt_hashes(spec: CellSpec, tokenizer: Any) -> dict[str, str]:
    """Hash of each prompt of a cell's task, by sample."""
    return {
        sample.id: str(sample.meta.get("prompt_hash") or prompts.facts(tokenizer, sample.prompt_ids())["prompt_hash"])
        for sample in samples_of(spec, tokenizer)
    }


def unlike(mine: Mapping[str, str], wanted: Mapping[str, str], whose: str) -> Iterator[str]:
    """How samples and their prompts differ from those they should be."""
    absent, extra = sorted(wanted.keys() - mine.keys()), sorted(mine.keys() - wanted.keys())
    if absent:
        yield f"{len(absent)} of {whose} {len(wanted)} samples missing: {named(absent)}"
    if extra:
        yield f"{len(extra)} samples that are not {whose}: {named(extra)}"
    other = sorted(name for name in mine.keys() & wanted.keys() if mine[name] != wanted[name])
    if other:
        one = other[0]
        yield f"{len(other)} prompts are not {whose}: meta.prompt_hash of {one} is {mine[one]}, {whose} {wanted[one]}"


def named(names: Sequence[str]) -> str:
    """The first names, and how many there are more."""
    return ", ".join(names[:MOST_TOLD]) + (f" and {len(names) - MOST_TOLD} more" if len(names) > MOST_TOLD else "")


def contradictions(spec: CellSpec, said: Mapping[str, Any], rows: Rows, other_sources: bool = False) -> Iterator[str]:
    """What a record says otherwise than its samples, its task and these sources.

    Args:
        other_sources: the run may be another version's: what that one did not write is not missed.
    """
    source = source_hash()
    origins = [said.get("versions.source"), *(row.get("source") for row in rows.values())]
    other = next((origin for origin in origins if origin != source), None)
    if other is not None and not other_sources:
        yield (
            f"versions.source is {other}, of these sources {source}: run it again with resume=refresh, submit "
            "with the version that ran it, or take it as it is with --other-sources"
        )
        return
    if len(rows) != said["n_samples"]:
        yield f"n_samples is {said['n_samples']}, but samples.jsonl has {len(rows)}"
        return
    if said.get("protocol.task_version") != spec.task.version:
        yield f"protocol.task_version is {said.get('protocol.task_version')!r}, of these sources {spec.task.version!r}"
    made = aggregate(list(rows.values()))
    together = any(row.get("shared") or row.get("rows", 1) > 1 for row in rows.values())
    made = {key: None if together and key.startswith(ALONE) else value for key, value in made.items()}
    made |= {f"metrics.{key}": value for key, value in spec.task.summarise(list(rows.values())).items()}
    for key, value in made.items():
        if other_sources and said.get(key) is None:
            continue
        if key not in FILLED_LATER and not alike(said.get(key), value):
            yield f"{key} is {shortly(said.get(key))}, by its samples {shortly(value)}"


def alike(one: Any, other: Any) -> bool:
    """Equal, numbers but for rounding, in lists as well; what is not finite is stored as nothing."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(other, float) and (other != other or other in (float("inf"), float("-inf"))):
        return one is None
    return close(one, other)


def shortly(value: Any) -> str:
    """A value in few characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def entry(
    run: Path,
    said: Mapping[str, Any],
    rows: Rows,
    names: Sequence[str],
    mine: Mapping[str, Any],
    command: Sequence[str],
) -> dict[str, Any]:
    """A run as a board file has it."""
    standing = {name: held_at(row["out"])[1] for name, row in rows.items()}
    kept = {key.removeprefix("bytes_"): [standing[name].get(key) for name in names] for key in COUNTED}
    made: dict[str, Any] = {
        "record": dict(said),
        "identity": dict(mine),
        "scores": [rows[name]["score"] for name in names],
        **kept,
        "command": list(command),
        "files": {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in FILES},
    }
    return made | {"seal": seal_of(made)}
