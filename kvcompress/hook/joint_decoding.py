"""Joint decoding: decode steps of several sessions are taken in one forward, so that the weights are read once.

Each job runs in a thread of its own, and one thread runs at a time: a job goes on until it asks for work of the model,
and once all of them ask for a decode step, one forward answers them all. Work of the model is done in the thread that
called `decode_together`. Sessions that only attend and store are rows of one ragged batch (`hook/ragged_rows.py`); what
is decoded goes back into a session's cache when its answer ends. All others are guests: they take part with their own
caches (`hook/joint_forward.py`). Either way reports and later turns see what they would have seen alone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from kvcompress.cache.cache import CompressedCache
from kvcompress.hook import joint_forward
from kvcompress.hook.generation import Generation
from kvcompress.hook.handoff import Handoff
from kvcompress.hook.joint_forward import JointStep
from kvcompress.hook.ragged_rows import RaggedRows, guest_reason
from kvcompress.hook.session import Session
from kvcompress.hook.shared_prefill import SharedPrefill
from kvcompress.method import Method
from kvcompress.method.parts import Prefilled

logger = logging.getLogger(__name__)
Tensor = torch.Tensor
Job = tuple[Method, Callable[["BatchedSession"], Any]]


@dataclass(frozen=True, eq=False)
class StepRequest:
    """A decode step that a job asks for.

    Attributes:
        ids, real: as of `Session.step`.
        direct: the job takes steps itself and may look at its cache between them, so that it can have no row elsewhere.
    """

    member: BatchedSession
    ids: Tensor
    real: Tensor | None
    direct: bool


@dataclass(frozen=True, eq=False)
class CommonWork:
    """Work that jobs which ask for the same have done once for all of them, see `in_common`."""

    key: Hashable
    work: Callable[[list[Any]], list[Any]]
    asked: Any


@dataclass(eq=False)
class Snapshot:
    """A guest's cache as it was before its first joint step, and what it was fed since: the way back after a fault."""

    cache: CompressedCache
    before: CompressedCache
    fed: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)


class BatchedSession:
    """A job's session: its forwards run in the thread that drives all jobs, its decode steps with those of the others.

    Attributes:
        alone: it takes its own steps from here on, since a joint one failed for it.
        guest_reason: why it cannot be a row of the ragged batch; None if its method allows it.
    """

    handoff: Handoff

    def __init__(self, batch: Batch, method: Method, shared: SharedPrefill | None, tokenizer: Any = None):
        self.batch = batch
        self.alone = self._direct = False
        ask = weakref.WeakMethod(self._ask_step)  # no cycle: what a job holds is freed when it ends

        def step(ids: Tensor, real: Tensor | None) -> Tensor:
            asked = ask()
            assert asked is not None
            return asked(ids, real)

        self.session = Session(batch.model, method, batch.kernel, tokenizer, shared, step=step, attach=False)
        self.session.caches.find_rotations()  # before its first cache is made
        self.guest_reason = guest_reason(self.session.method)

    def __enter__(self) -> Self:
        return self  # it is open as long as its job runs

    def __exit__(self, *exc: object) -> None:
        pass

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
        return self.elsewhere(lambda: self.session.prefill(*args, **kwargs))

    def append(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.elsewhere(lambda: self.session.append(*args, **kwargs))

    def generate(self, *args: Any, **kwargs: Any) -> Generation:
        try:
            return self.session.generate(*args, **kwargs)
        finally:
            self.handoff.ask("call", lambda: self.batch.leave(self))

    def prepare(self, tokens: int) -> None:
        self.session.prepare(tokens)

    def step(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        self._direct = True
        try:
            return self.session.step(ids, real)
        finally:
            self._direct = False

    def report(self, row: int | None = None, kept_map: bool = False) -> dict[str, Any]:
        return self.session.report(row, kept_map)

    def decode_alone(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        """A decode step of this session alone."""
        self.batch.detach()
        return self.session.forward("decode", ids, None if real is None else real[:, None])

    def elsewhere(self, work: Callable[[], Any]) -> Any:
        """What `work` returns, done in the driving thread on a model without hooks, between decode steps."""

        def unhooked() -> Any:  # each forward of the session hooks the model for itself
            self.batch.leave(self)
            self.batch.detach()
            return work()

        return self.handoff.ask("call", unhooked)

    def _ask_step(self, ids: Tensor, real: Tensor | None) -> Tensor:
        return self.handoff.ask("step", StepRequest(self, ids, real, self._direct))


class Batch:
    """Takes the steps that members ask for, in one forward where it can.

    Attributes:
        together, steps: of all members, those taken with others and all.
        broken: a joint forward failed: from then on each takes its own.
    """

    def __init__(self, model: PreTrainedModel, kernel: str, mass: bool = False) -> None:
        self.model, self.kernel = model, kernel
        self.rows = RaggedRows(model, "blockwise" if mass else kernel)
        self.together = self.steps = 0
        self.broken = False
        self._guests: dict[BatchedSession, Snapshot] = {}
        self._attached, self._open = False, ExitStack()

    @property
    def cache(self) -> CompressedCache | None:
        """What the ragged rows hold."""
        return self.rows.cache

    def detach(self) -> None:
        self._open.close()
        self._attached = False

    def _attach(self) -> None:
        if not self._attached:
            self._open.enter_context(self.rows.host)
            self._attached = True

    def leave(self, member: BatchedSession) -> None:
        """A member's answer has ended: its cache holds what was decoded."""
        self.rows.leave(member)
        self._guests.pop(member, None)

    def step(self, asked: Sequence[StepRequest]) -> list[Tensor | Exception]:
        """For each member's next tokens its logits `[b, V]`, or what its step raised."""
        joint = [] if self.broken else [one for one in asked if not one.member.alone]
        found: dict[StepRequest, Tensor | Exception] = self._take(joint) if joint else {}
        for one in asked:
            if one not in found:
                try:
                    found[one] = one.member.decode_alone(one.ids, one.real)
                except Exception as error:
                    found[one] = error
        return [found[one] for one in asked]

    def _take(self, asked: Sequence[StepRequest]) -> dict[StepRequest, Tensor | Exception]:
        """Results of one forward; what is missing takes its own."""
        riding = [one for one in asked if self._can_ride(one)]
        guests = [one for one in asked if one not in riding]
        for one in guests:
            self.rows.leave(one.member)
        try:
            if not self.rows.arrange([one.member for one in riding]):
                riding, guests = [], list(asked)
            if not riding and len(guests) == 1:
                return {}
            for one in guests:
                self._remember(one.member)
            tokens = [(one.member, one.ids) for one in riding]
            row_step = self.rows.step(tokens) if riding else None
            guest_steps = [JointStep(one.member.session, one.ids, one.real) for one in guests]
            self._attach()
            self.rows.host.hooks.check_intact()
            joint_forward.run(self.model, guest_steps if row_step is None else [row_step, *guest_steps])
        except Exception as error:  # say, too little memory for all rows at once
            logger.warning("decoding together failed (%s: %s): each cell decodes alone", type(error).__name__, error)
            self.broken = True
            self.rows.dissolve()
            return self._restored([one for one in guests if one.member in self._guests])
        found: dict[StepRequest, Tensor | Exception] = {}
        if row_step is not None and row_step.logits is not None:
            found.update(zip(riding, self.rows.taken(tokens, row_step.logits), strict=True))
        elif row_step is not None:
            logger.warning("rows cannot decode together (%s): each cell decodes by itself", row_step.error)
            self.rows.closed = True
            self.rows.dissolve()
        for one, step in zip(guests, guest_steps, strict=True):
            if step.logits is not None:
                found[one] = step.logits
                self._guests[one.member].fed.append((one.ids, one.real))
                continue
            name = type(one.member.method).__name__
            logger.warning("%s cannot decode together (%s: %s)", name, type(step.error).__name__, step.error)
            one.member.alone = True
            found |= self._restored([one])
        self.together += sum(not isinstance(result, Exception) for result in found.values())
        return found

    def _can_ride(self, one: StepRequest) -> bool:
        if one.direct or one.member.guest_reason is not None:
            return False
        return one.member in self.rows.riders or self.rows.can_take(one.member.session, len(one.ids))

    def _remember(self, member: BatchedSession) -> None:
        cache, held = member.session.cache, self._guests.get(member)
        assert cache is not None
        if held is None or held.cache is not cache:
            self._guests[member] = Snapshot(cache, cache.fork())

    def _restored(self, guests: Sequence[StepRequest]) -> dict[StepRequest, Tensor | Exception]:
        """Have caches that a fault left half written hold what they held before that step; who cannot gets the reason."""
        found: dict[StepRequest, Tensor | Exception] = {}
        for one in guests:
            held = self._guests.pop(one.member)
            held.cache.go_back(held.before)
            try:
                for ids, real in held.fed:
                    one.member.decode_alone(ids, real)
            except Exception as error:
                found[one] = error
        return found


def decode_together(
    model: PreTrainedModel,
    jobs: Sequence[Job],
    shared: SharedPrefill | None | Sequence[SharedPrefill | None],
    kernel: str = "auto",
    tokenizer: Any = None,
) -> tuple[list[Any], float]:
    """Run jobs that each use a session of their own, their decode steps in common forwards.

    Args:
        jobs: method and what to do with its session, which calls `prefill`, `append`, `generate`, `step` and `report` only.
        shared: the prefill that sessions start from, one for all or one per job; None where a session prefills itself.
        kernel, tokenizer: as in `compress`.

    Returns:
        per job what it returned, or the exception that ended it; and the share of decode steps taken together.

    Raises:
        ValueError: a model whose steps cannot be taken together, and why.
    """
    reason = joint_forward.unsupported_reason(model)
    if reason is not None:
        raise ValueError(f"these jobs cannot decode together: {reason}")
    starts = list(shared) if isinstance(shared, Sequence) else [shared] * len(jobs)
    known = [start for start in starts if start is not None]
    batch = Batch(model, kernel, bool(known) and all(start.needs.mass for start in known))
    results: list[Any] = [None] * len(jobs)
    members: dict[int, BatchedSession] = {}
    for number, ((method, _), start) in enumerate(zip(jobs, starts, strict=True)):
        try:
            members[number] = BatchedSession(batch, method, start, tokenizer)
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


def in_common(
    session: Session | BatchedSession, key: Hashable, work: Callable[[list[Any]], list[Any]], asked: Any
) -> Any:
    """What `work` makes of `asked`, on a model without hooks.

    In jobs that decode together it is called once, when no job has a decode step left to ask for, with what all jobs
    ask under the same `key`; it returns one result for each.
    """
    if isinstance(session, BatchedSession):
        return session.handoff.ask("common", CommonWork(key, work, asked))
    return work([asked])[0]


def _in_session(member: BatchedSession, job: Callable[[BatchedSession], Any]) -> Any:
    with member.session:
        return job(member)


def _turns(batch: Batch, members: Sequence[BatchedSession]) -> None:
    while True:
        for member in members:
            if not member.handoff.ended and member.handoff.request is None:
                member.handoff.resume()
                if member.handoff.ended:
                    batch.leave(member)
        asking = [member for member in members if member.handoff.request is not None]
        if not asking:
            return
        calls = _of_kind(asking, "call")
        for member, work in calls:  # first, so that all come to their steps
            try:
                member.handoff.answer(work())
            except Exception as error:
                member.handoff.refuse(error)
        if calls:
            continue
        asked = [request for _, request in _of_kind(asking, "step")]
        if not asked:
            _do_common(batch, _of_kind(asking, "common"))
            continue
        batch.steps += len(asked)
        for one, found in zip(asked, batch.step(asked), strict=True):
            if isinstance(found, Exception):
                one.member.handoff.refuse(found)
            else:
                one.member.handoff.answer(found)


def _of_kind(members: Sequence[BatchedSession], kind: str) -> list[tuple[BatchedSession, Any]]:
    """What members ask of one kind."""
    requests = [(member, member.handoff.request) for member in members]
    return [(member, request[1]) for member, request in requests if request is not None and request[0] == kind]


def _do_common(batch: Batch, asked: Sequence[tuple[BatchedSession, CommonWork]]) -> None:
    """Do what members ask for in common, each key once."""
    groups: dict[Hashable, list[tuple[BatchedSession, CommonWork]]] = {}
    for member, request in asked:
        batch.leave(member)
        groups.setdefault(request.key, []).append((member, request))
    batch.detach()
    for group in groups.values():
        try:
            results = group[0][1].work([request.asked for _, request in group])
        except Exception as error:
            for member, _ in group:
                member.handoff.refuse(error)
            continue
        for (member, _), result in zip(group, results, strict=True):
            member.handoff.answer(result)
