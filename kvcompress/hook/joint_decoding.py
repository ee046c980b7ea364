"""Joint decoding: steps of several sessions run as rows of one ragged batch, so that the weights are read once.

Each job runs in a thread of its own, and one thread runs at a time: a job goes on until it asks for work of the model,
and once all of them ask for a decode step, one forward answers them all. Work of the model is done in the thread that
called `decode_together`. A row holds what its session's cache holds; what is decoded goes back into that cache when
the answer ends, so that reports and later turns see what they would have seen alone.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.cache.layer import CompressedLayer
from kvcompress.cache.layouts import RaggedStore
from kvcompress.hook.generation import Generation
from kvcompress.hook.session import Session
from kvcompress.hook.shared_prefill import SharedPrefill
from kvcompress.method import Method
from kvcompress.method.parts import Prefilled

logger = logging.getLogger(__name__)
Tensor = torch.Tensor
Job = tuple[Method, Callable[["BatchedSession"], Any]]


def unsupported_reason(method: Method) -> str | None:
    """Why the decode steps of this method cannot be rows of a batch with others', or None if they can."""
    parts = method.parts()
    if method.limited and parts.schedule.in_decode:
        return "it evicts while decoding"
    if not parts.reader.reads_all:
        return f"reader={parts.reader.name} reads a selection"
    if parts.codec.name != "plain":
        return f"codec={parts.codec.name} holds tokens in a form of its own"
    return None


class Cancelled(BaseException):
    """Ends a job's thread where the whole run has been given up."""


class Handoff:
    """A job in its thread. Exactly one side runs: the job between `resume` and its next request, or the caller."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.request: tuple[str, Any] | None = None
        self.ended = self._cancelled = False
        self._answer: tuple[bool, Any] = (True, None)
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run, work), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        self._go.acquire()
        try:
            if not self._cancelled:
                self.result = work()
        except BaseException as error:
            self.error = error
        finally:
            self.request, self.ended = None, True
            self._back.release()

    def ask(self, kind: str, work: Any) -> Any:
        """From the job's thread: wait until the request is answered."""
        if self._cancelled:
            raise Cancelled
        self.request = (kind, work)
        self._back.release()
        self._go.acquire()
        if self._cancelled:
            raise Cancelled
        good, answer = self._answer
        if not good:
            raise answer
        return answer

    def answer(self, value: Any) -> None:
        self.request, self._answer = None, (True, value)

    def refuse(self, error: BaseException) -> None:
        self.request, self._answer = None, (False, error)

    def resume(self) -> None:
        """Let the job run to its next request or its end."""
        self._go.release()
        self._back.acquire()

    def cancel(self) -> None:
        """Have the job's thread end, wherever it is."""
        self._cancelled = True
        self._go.release()
        self._thread.join()


class BatchedSession:
    """A job's session: its forwards run in the thread that drives all jobs, its decode steps as a row of the batch."""

    handoff: Handoff

    def __init__(self, batch: Batch, method: Method, shared: SharedPrefill | None):
        self.batch = batch
        ask = weakref.WeakMethod(self._ask_step)  # no cycle: what a job holds is freed when it ends

        def step(ids: Tensor, real: Tensor | None) -> Tensor:
            asked = ask()
            assert asked is not None
            return asked(ids, real)

        self.session = Session(batch.model, method, batch.kernel, shared=shared, step=step, attach=False)

    @property
    def model(self) -> PreTrainedModel:
        return self.session.model

    @property
    def method(self) -> Method:
        return self.session.method

    @property
    def tokenizer(self) -> Any:
        return self.session.tokenizer

    @property
    def full_layers(self) -> list[int]:
        return self.session.full_layers

    @property
    def cache(self) -> CompressedCache | None:
        return self.session.cache

    @cache.setter
    def cache(self, cache: CompressedCache | None) -> None:
        self.session.cache = cache

    def prefill(self, *args: Any, **kwargs: Any) -> Prefilled:
        return self._elsewhere(lambda: self.session.prefill(*args, **kwargs))

    def append(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._elsewhere(lambda: self.session.append(*args, **kwargs))

    def generate(self, *args: Any, **kwargs: Any) -> Generation:
        try:
            return self.session.generate(*args, **kwargs)
        finally:
            self.handoff.ask("call", lambda: self.batch.leave(self))

    def step(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        return self.session.step(ids, real)

    def report(self, row: int | None = None, kept_map: bool = False) -> dict[str, Any]:
        return self.session.report(row, kept_map)

    def decode_alone(self, ids: Tensor) -> Tensor:
        """A decode step of this session alone."""
        self.batch.detach()
        return self.session.forward("decode", ids)

    def _elsewhere(self, work: Callable[[], Any]) -> Any:
        def unhooked() -> Any:  # each forward of the session hooks the model for itself
            self.batch.detach()
            return work()

        return self.handoff.ask("call", unhooked)

    def _ask_step(self, ids: Tensor, real: Tensor | None) -> Tensor:
        return self.handoff.ask("step", ids)


class Batch:
    """The rows that decode together now, one per member, in a cache of their own."""

    def __init__(self, model: PreTrainedModel, kernel: str, mass: bool = False) -> None:
        self.model, self.kernel = model, kernel
        self.host = Session(model, Method(), "blockwise" if mass else kernel)
        self.rows: list[BatchedSession | None] = []
        self.cache: CompressedCache | None = None
        self.lives: list[int] = []  # steps that each row took part in
        self.together = self.steps = 0
        self.broken = False  # a joint step failed: from then on each takes its own
        self._before: list[Tensor] = []
        self._logits: list[Tensor | None] = []
        self._attached, self._open = False, ExitStack()

    def detach(self) -> None:
        self._open.close()
        self._attached = False

    def step(self, asked: Sequence[tuple[BatchedSession, Tensor]]) -> list[Tensor]:
        """Logits `[1, V]` for each member's next token `[1, 1]`."""
        members = [member for member, _ in asked]
        # rows that have ended ride along, while they are the fewer
        if not set(members) <= set(self.rows) or 2 * len(members) < len(self.rows):
            self.dissolve()
            if len(asked) > 1:
                self._gather(members)
        if not self.rows:
            return [members[0].decode_alone(asked[0][1])]
        place = {member: row for row, member in enumerate(self.rows) if member is not None}
        device = self.model.device
        ids = torch.zeros(len(self.rows), 1, dtype=torch.long, device=device)
        for member, token in asked:
            ids[place[member]] = token.view(1).to(device)
        real = torch.tensor([row is not None for row in self.rows])
        self._attach()
        self.host.cache = self.cache
        with torch.no_grad():
            logits = self.host.step(ids, None if bool(real.all()) else real)
        self.together += len(asked)
        for member, _ in asked:
            self.lives[place[member]] += 1
            self._logits[place[member]] = logits[place[member]][None]
        return [logits[place[member]][None] for member in members]

    def _attach(self) -> None:
        if not self._attached:
            self._open.enter_context(self.host)
            self._attached = True

    def _gather(self, members: Sequence[BatchedSession]) -> None:
        self._attach()
        self.cache = cache = self.host.new_cache()
        caches = [member.cache for member in members]
        assert all(c is not None for c in caches)
        self.rows, self.lives, self._before = list(members), [0] * len(members), []
        self._logits = [None] * len(members)
        for index, layer in enumerate(cache.layers):
            held = [c.layers[index] for c in caches if c is not None]
            assert isinstance(layer, CompressedLayer)
            layer.concat_rows([one for one in held if isinstance(one, CompressedLayer)])
            self._before.append(layer.counts.clone())
        cache.advance(None, torch.cat([c.real for c in caches if c is not None and c.real is not None]))

    def leave(self, member: BatchedSession) -> None:
        """Put what a row has decoded into its session's cache."""
        if member not in self.rows or self.cache is None or member.cache is None:
            return
        row = self.rows.index(member)
        self.rows[row] = None
        new = self.lives[row]
        if not new:
            return
        one = torch.ones(1, dtype=torch.long)
        for index, (joint, own) in enumerate(zip(self.cache.layers, member.cache.layers, strict=True)):
            assert isinstance(joint, CompressedLayer) and isinstance(own, CompressedLayer)
            store = joint.held()
            assert isinstance(store, RaggedStore)
            channels = store.part(row, self._before[index][row], new)
            channels["positions"] = channels["positions"][:, :1]
            mine, done = own.held(), 0
            while done < new:  # buffers grow at the token at which they would have
                n = min(max(1, mine.spare), new - done)
                mine.append({name: value[:, :, done : done + n] for name, value in channels.items()}, None, n * one)
                done += n
            own.seen += new
        cache = member.cache
        assert cache.real is not None
        cache.advance(None, torch.full_like(cache.real, new))
        cache.keep_logits(self._logits[row], cache.pending)
        cache.note_kept()
        member.session.compressor.stats.merge(self.host.compressor.stats.kernels)

    def abort(self) -> None:
        """Give every row back to its session for good."""
        self.broken = True
        self.dissolve()

    def dissolve(self) -> None:
        """Give every row back to its session."""
        for member in self.rows:
            if member is not None:
                self.leave(member)
        self.rows, self.cache, self.lives, self._before, self._logits = [], None, [], [], []


def decode_together(
    model: PreTrainedModel, jobs: Sequence[Job], shared: SharedPrefill, kernel: str = "auto"
) -> tuple[list[Any], float]:
    """Run jobs that each use a session of their own, their decode steps as rows of one batch.

    Args:
        jobs: method and what to do with its session, which calls `prefill`, `append`, `generate` and `report` only.
        shared: the prefill that all sessions start from.
        kernel: as in `compress`.

    Returns:
        per job what it returned, or the exception that ended it; and the share of decode steps taken together.
    """
    if any(not isinstance(layer, CompressedLayer) for layer in shared.cache.layers):
        raise ValueError("rows can be put together only where every layer is a full-attention layer")
    batch = Batch(model, kernel, shared.needs.mass)
    results: list[Any] = [None] * len(jobs)
    members: dict[int, BatchedSession] = {}
    for number, (method, _) in enumerate(jobs):
        try:
            members[number] = BatchedSession(batch, method, shared)
        except Exception as error:  # a method that has no data for this model, say
            results[number] = error
    for number, member in members.items():
        member.handoff = Handoff(lambda member=member, job=jobs[number][1]: _in_session(member, job))  # type: ignore[misc]
    try:
        _turns(batch, list(members.values()))
    finally:
        for member in members.values():
            if not member.handoff.ended:
                member.handoff.cancel()
        batch.detach()
    for number, member in members.items():
        results[number] = member.handoff.result if member.handoff.error is None else member.handoff.error
    return results, batch.together / max(1, batch.steps)


def _in_session(member: BatchedSession, job: Callable[[BatchedSession], Any]) -> Any:
    with member.session:
        return job(member)


def _turns(batch: Batch, members: Sequence[BatchedSession]) -> None:
    while True:
        for member in members:
            if not member.handoff.ended and member.handoff.request is None:
                member.handoff.resume()
        asking = [member for member in members if member.handoff.request is not None]
        if not asking:
            return
        calls = [member for member in asking if member.handoff.request and member.handoff.request[0] == "call"]
        for member in calls:  # first, so that all come to their steps
            _, work = member.handoff.request  # type: ignore[misc]
            try:
                member.handoff.answer(work())
            except Exception as error:
                member.handoff.refuse(error)
        if calls:
            continue
        _step(batch, [(member, member.handoff.request[1]) for member in asking if member.handoff.request])


def _step(batch: Batch, asked: Sequence[tuple[BatchedSession, Tensor]]) -> None:
    batch.steps += len(asked)
    if not batch.broken:
        try:
            for (member, _), logits in zip(asked, batch.step(asked), strict=True):
                member.handoff.answer(logits)
            return
        except Exception as error:  # say, too little memory for all rows at once
            logger.warning("decoding together failed (%s: %s): each cell decodes alone", type(error).__name__, error)
            batch.abort()
    for member, ids in asked:
        try:
            member.handoff.answer(member.decode_alone(ids))
        except Exception as error:
            member.handoff.refuse(error)
