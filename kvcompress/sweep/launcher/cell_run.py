"""Cell run: a cell on its way to a record, from a lock on its folder to its outcome."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcompress.common.memory import is_oom
from kvcompress.sweep import record, record_builder
from kvcompress.sweep.baseline import fill_deltas
from kvcompress.sweep.cell_spec import CellSpec
from kvcompress.sweep.disk import written
from kvcompress.sweep.faults import text_of
from kvcompress.sweep.launcher.lock import Lock, locked
from kvcompress.sweep.outcome import Outcome, last_line
from kvcompress.sweep.sanity import Sanity
from kvcompress.sweep.stored_config import plain_yaml, typed_paths


class CellRun:
    """State of one cell in this process: to do → acquired → an outcome.

    Attributes:
        spec: what is run.
        folder: where it is written.
        finished_ids: samples that are on disk.
        outcome: None while there is something to do.
    """

    def __init__(self, spec: CellSpec) -> None:
        self.spec = spec
        self.folder = record.RunFolder(spec.sweep.parent, spec.sweep.name, spec.run_id)
        self.finished_ids: set[str] = set()
        self.outcome: Outcome | None = None
        self._order: list[str] = []  # ids of all samples, as the task has them
        self._sanity = Sanity()
        self._lock = Lock(self.folder.path / "lock")
        self._stamp = self.folder.stamp()  # of a record that was there before
        self._rows_hold = True  # False where a record says otherwise than its samples: either may be wrong

    @property
    def open(self) -> bool:
        return self.outcome is None

    def set_outcome(
        self, status: str, found: Mapping[str, Any] | None = None, note: str = "", fresh: bool = False
    ) -> Outcome:
        """Close the cell with what became of it."""
        self.outcome = Outcome(
            str(self.spec.config.method.name),
            self.spec.config.budget,
            status,
            run_id=self.spec.run_id,
            record=found or {},
            note=note,
            folder=self.folder.path,
            fresh=fresh,
        )
        return self.outcome

    def reopen(self) -> None:
        """Try again a cell that another process had: it may have ended, or died."""
        if self.outcome is not None and self.outcome.status == "running":
            self.outcome = None

    def check_finished(self) -> Outcome | None:
        """The outcome if there is nothing to do: finished before, or by other sources."""
        found = self.folder.record()
        if found is None:
            return None
        if found["status"] not in record.FINISHED:
            if found["status"] != "partial" and self.folder.stamp() != self._stamp:  # since this sweep began
                return self.set_outcome(found["status"], found, "in another process: " + last_line(found["error"]))
            return None
        stale, resume = found.get("versions.source") != self.spec.source, self.spec.config.resume
        if stale and resume == "auto":
            note = "made with other sources: resume=refresh runs it again, resume=any keeps it"
            return self.set_outcome("stale", found, note)
        wrong = self._fault(found)
        if wrong is not None:
            record.warn_once(f"{self.folder.path / 'record.json'}: {wrong.text}; it is made again")
            self._rows_hold &= wrong.rows_hold
            return None
        return self.set_outcome("done", found, "finished before") if not stale or resume == "any" else None

    def _fault(self, found: Mapping[str, Any]) -> record.Fault | None:
        """Why a finished record is not this cell's, or not what its samples say."""
        spec = self.spec
        mine = {key: spec.identity[key] for key in ("budget", "seed", "dtype", "device")}
        mine |= {"run_id": spec.run_id, "method": spec.config.method.name, "protocol.pair": spec.pair}
        mine |= {f"parts.{name}": value for name, value in spec.identity["parts"].items()}
        for key, value in mine.items():
            if found.get(key) != value:
                return record.Fault(f"{key} is {found.get(key)!r}, but {value!r} in its cell", True)
        return self.folder.fault(found)

    def stored_rows(self) -> dict[str, dict[str, Any]]:
        """Finished samples by id that this run would keep: with `resume=any` those of other sources too."""
        if not self._rows_hold:
            return {}
        return self.folder.rows(None if self.spec.config.resume == "any" else self.spec.source)

    def acquire(self) -> Outcome | None:
        """Take the cell for this process: None if it is ours to run now, else what became of it."""
        if self.check_finished() is not None:
            return self.outcome
        try:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            if not self._lock.acquire():
                return self.set_outcome("running", note="another process has it")
            if self.check_finished() is not None:  # another process finished it before we had the lock
                self._lock.release()
                return self.outcome
            kept = self.stored_rows()
            with locked(self.spec.sweep / ".lock"):
                self.folder.open(plain_yaml(self.spec.config))
                self.folder.start(kept.values())
        except OSError as error:
            self._lock.release()
            return self.set_outcome(
                "refused", note=f"cannot write to paths.results={self.spec.config.paths.results}: {error}"
            )
        self.finished_ids = set(kept)
        return None

    def release(self) -> None:
        """Let other processes have it."""
        self._lock.release()

    def expect(self, ids: Iterable[str], sanity: Sanity) -> None:
        """Take note of the samples there are, in the task's order, and how their right and empty answers score.

        Of the samples that are finished those stay that the task has and can summarise; others are told and run again.

        Raises:
            OSError: what stays cannot be written.
        """
        self._order, self._sanity = list(ids), sanity
        kept, known = {}, set(self._order)
        for name, row in self.stored_rows().items():
            try:
                if name not in known:
                    raise ValueError("the task has no such sample")
                if not row["out"].get("oom"):
                    self.spec.task.summarise([row])
                kept[name] = row
            except Exception as error:  # whatever a damaged row makes of a task's code
                where = self.folder.path / "samples.jsonl"
                record.warn_once(f"{where}: sample {name!r:.60}: {type(error).__name__}: {error}; left out")
        if kept.keys() != self.finished_ids:
            self.folder.keep(kept.values())
            self.finished_ids = set(kept)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Write one finished sample.

        Raises:
            OSError: it cannot be written.
            ValueError: it could not be read back.
        """
        self.folder.append(record.readable_row(row))
        self.finished_ids.add(row["id"])

    def finish(self, status: str, error: str | None = None) -> Outcome:
        """Write the record and close the cell.

        Raises:
            OSError: it cannot be written; and whatever the task raises over its rows.
        """
        self.folder.arrange(self._order)
        rows = list(self.folder.rows().values())
        built = record_builder.build(self.spec, rows, status, error, len(self._order), self._sanity)
        with written(self.folder.path / "record.json"), locked(self.spec.sweep / ".lock"):
            self.folder.finish(record.readable_record(built))
            fill_deltas(self.spec.sweep, self.spec.run_id)
        found = self.folder.record() or built
        return self.set_outcome(found["status"], found, last_line(found["error"]), fresh=True)

    def fail(self, fault: BaseException) -> Outcome:
        """Close the cell that `fault` ended; its traceback goes into the record. Raises no exception."""
        status = "oom" if is_oom(fault) else "failed"
        text = text_of(fault, typed_paths(self.spec.config))
        try:
            return self.finish(status, text)
        except Exception as again:  # a full disk, a folder that was taken away
            return self.set_outcome(status, note=f"{last_line(text)}; no record could be written: {again}")
