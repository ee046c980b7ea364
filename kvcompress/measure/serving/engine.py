"""One serving instance, iteration by iteration: prompts, decode steps, loads and swaps.

Batches are formed anew each iteration (Orca). Waiting prompts are computed before the next decode step, or in chunks
beside it (Sarathi). A request is admitted when its cache fits to its end, so that none gives way but to a priority.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvcompress.measure.serving.cache_pool import Admission, CachePool
from kvcompress.measure.serving.costs import MethodCosts
from kvcompress.measure.serving.job import Job
from kvcompress.measure.serving.orders import Order
from kvcompress.measure.serving.swapping import Swap
from kvcompress.measure.transfers import TierPath

BATCHING = ("iteration", "request", "chunked")


class World(Protocol):
    """What an instance needs of the simulation around it."""

    def at(self, time: float, act: Callable[[float], None]) -> None: ...

    def due(self, job: Job, now: float) -> Sequence[float] | None: ...

    def expected(self) -> list[tuple[float, str, Sequence[int]]]: ...

    def prompt_done(self, job: Job, engine: Engine, now: float) -> None: ...

    def finished(self, job: Job, now: float) -> None: ...


class Engine:
    """An instance.

    Args:
        decodes: False for one of a pool that computes prompts only.
        chunk: prompt tokens and decodes of an iteration, where `batching` is "chunked".
        most: running requests at most, or None.
        prefetch: agents whose fixed prefix is brought up from the host ahead of their return, at once at most.
    """

    def __init__(
        self,
        world: World,
        costs: MethodCosts,
        pool: CachePool,
        order: Order,
        swap: Swap,
        batching: str = "iteration",
        chunk: int = 512,
        decodes: bool = True,
        most: int | None = None,
        prefetch: int = 0,
        disk: TierPath | None = None,
    ) -> None:
        if batching not in BATCHING:
            raise ValueError(f"batching={batching!r}; valid: {', '.join(BATCHING)}")
        if batching == "chunked" and chunk < 1:
            raise ValueError(f"budget={chunk}: at least 1 token per iteration")
        self.world, self.costs, self.pool, self.order, self.swap = world, costs, pool, order, swap
        self.batching, self.chunk, self.decodes, self.most = batching, chunk, decodes, most
        self.prefetch, self.disk = prefetch, disk
        self.waiting: list[Job] = []
        self.ready: deque[Job] = deque()
        self.chunks: deque[Job] = deque()
        self.running: dict[int, Job] = {}
        self.kept = 0.0
        self.ends: list[float] = []
        self.busy: Callable[[float], None] | None = None
        self.until = 0.0
        self.promised = 0.0
        self.blocked = self.stepping = False
        self.loading = 0
        self.fetching: set[str] = set()
        self.link_free = self.stall = 0.0
        self.preemptions, self.most_rows, self.busy_s = 0, 0, 0.0
        self.out_bytes = self.in_bytes = 0.0
        self.peak_kept = 0.0
        self._finish: list[tuple[int, int, int]] = []

    # ------------------------------------------------------------------ from outside

    def add(self, job: Job) -> None:
        self.waiting.append(job)
        if self.order.name != "fcfs" or len(self.waiting) == 1:
            self.blocked = False

    def queue_s(self, now: float) -> float:
        """Seconds until all prompts that are here have been computed, as predicted."""
        return max(0.0, self.until - now) + self.promised

    def begin(self, now: float) -> float | None:
        """Start the next iteration, if there is anything to do and nothing under way; returns when it ends."""
        if self.busy is not None:
            return None
        if self.prefetch:
            self._prefetch(now)
        act: Callable[[float], None] | None = None
        seconds = 0.0
        if self.batching == "chunked" and self.decodes:
            seconds, act = self._mixed(now)
        else:
            job = self._next_prompt(now)
            if job is not None:
                seconds, act = self._prompt(job)
            elif self.running:
                seconds, act = self._step_s(), self._stepped
        if act is None:
            return None
        seconds += self.stall
        self.stall, self.busy, self.until = 0.0, act, now + seconds
        self.busy_s += seconds
        return self.until

    def end(self, now: float) -> None:
        """The iteration is over."""
        act, self.busy = self.busy, None
        assert act is not None
        act(now)

    # ------------------------------------------------------------------ prompts

    def _next_prompt(self, now: float) -> Job | None:
        if self.batching == "request" and self.stepping:
            return None
        while True:
            if self.ready:
                return self.ready.popleft()
            if not self._admit(now):
                return None

    def _admit(self, now: float) -> bool:
        """Take one waiting request in; False where none fits."""
        waiting = (
            [job for job in self.waiting if job.request.agent not in self.fetching] if self.fetching else self.waiting
        )
        if not waiting or self.blocked or (self.most is not None and self._live() >= self.most):
            return False
        job = waiting[self.order.pick(waiting, lambda one: self.pool.lookup(one.request))]  # type: ignore[attr-defined]
        admitted = self.pool.admit(job.request, self.world.due(job, now))
        if admitted is None:
            self.blocked = True
            return False
        self.order.picked()
        self.waiting.remove(job)
        job.admitted = admitted
        seconds = self._load_s(job, admitted)
        if not seconds:
            self._loaded(job)
        elif self.swap.overlap:
            self.link_free = max(now, self.link_free) + seconds
            job.load_s += self.link_free - now
            self.loading += 1
            self.world.at(self.link_free, lambda time: self._arrived(job))
        else:
            self.stall += seconds
            job.load_s += seconds
            self._loaded(job)
        return True

    def _live(self) -> int:
        return len(self.running) + len(self.ready) + len(self.chunks) + self.loading

    def _load_s(self, job: Job, admitted: Admission) -> float:
        """Seconds of copies that a request waits for before anything else."""
        held, request = self.costs.held, job.request
        if job.prefilled:
            return 0.0
        if job.held_up and self.swap.mode == "swap":
            there = held.at(request.input, job.generated)
            nbytes = max(0.0, there - held.per_prompt * admitted.hit) + admitted.loads
            self.in_bytes += nbytes
            return self._copy_s(nbytes, there / request.tokens)
        seconds = 0.0
        if not job.held_up:
            job.hit, (far, taken) = admitted.hit, job.remote
            if far > job.hit:
                job.hit, seconds = far, taken
        per_token = self.costs.token_bytes if self.costs.store == "exact" else max(held.per_prompt, 1e-9)
        for tier, nbytes in enumerate(admitted.lower):
            if nbytes and tier == 1 and self.disk is not None:
                seconds += self.disk.seconds(nbytes)
            elif nbytes:
                seconds += self._copy_s(nbytes, per_token)
        return seconds

    def _copy_s(self, nbytes: float, per_token: float) -> float:
        return self.swap.seconds(nbytes / per_token, nbytes, self.costs.layers)

    def _arrived(self, job: Job) -> None:
        self.loading -= 1
        self._loaded(job)

    def _loaded(self, job: Job) -> None:
        """Everything that could be loaded is there."""
        assert job.admitted is not None
        if job.prefilled or (job.held_up and self.swap.mode == "swap"):
            self.pool.prefilled(job.admitted)
            job.held_up = False
            self._join(job)
        elif self.batching == "chunked" and self.decodes:
            job.progress = job.hit
            self.chunks.append(job)
        else:
            self.ready.append(job)

    def _prompt(self, job: Job) -> tuple[float, Callable[[float], None]]:
        """The whole prompt in one iteration; of a request that was dropped, with what it had generated."""
        self.promised = max(0.0, self.promised - job.predicted)
        assert job.admitted is not None
        tokens = job.request.input + (job.generated if job.held_up else 0)
        seconds = self.costs.prefill_s(tokens, min(max(job.hit, job.admitted.hit), tokens - 1))
        return seconds, lambda now: self._prompt_done(job, now)

    def _prompt_done(self, job: Job, now: float) -> None:
        assert job.admitted is not None
        self.pool.prefilled(job.admitted)
        self.blocked = False
        if job.held_up:
            job.held_up = False
            self._join(job)
            return
        job.first, job.generated = now, 1
        if not self.decodes:
            self.world.prompt_done(job, self, now)
        elif job.request.output == 1:
            self._done(job, now)
        else:
            self._join(job)

    # ------------------------------------------------------------------ decode

    def _step_s(self) -> float:
        self.peak_kept = max(self.peak_kept, self.kept)
        self.stepping = True
        return self.costs.step_s(len(self.running), self.kept)

    def _join(self, job: Job) -> None:
        job.joined, job.ends = len(self.ends), self.ends
        self.running[job.number] = job
        self.kept += self.costs.kept.at(job.request.input, job.generated)
        self.most_rows = max(self.most_rows, len(self.running))
        heapq.heappush(self._finish, (job.joined + job.request.output - job.generated, job.number, job.joined))

    def _leave(self, job: Job) -> None:
        """No longer among the running."""
        del self.running[job.number]
        job.segments.append((job.joined, len(self.ends)))
        job.generated += len(self.ends) - job.joined
        job.joined = -1
        self.kept -= self.costs.kept.at(job.request.input, job.generated)
        if not self.running:
            self.kept = 0.0  # nothing is left of rounding

    def _stepped(self, now: float) -> None:
        self.ends.append(now)
        self.kept += len(self.running) * self.costs.kept.per_output
        steps = len(self.ends)
        while self._finish and self._finish[0][0] <= steps:
            _, number, joined = heapq.heappop(self._finish)
            job = self.running.get(number)
            if job is not None and job.joined == joined:
                self._leave(job)
                self._done(job, now)
        if not self.running:
            self.stepping = False
        if self.order.name == "priority" and steps % self.order.update_every == 0:
            self._preempt(now)

    def _done(self, job: Job, now: float) -> None:
        assert job.admitted is not None
        self.pool.release(job.admitted)
        self.blocked = False
        job.done = now
        self.world.finished(job, now)

    def _mixed(self, now: float) -> tuple[float, Callable[[float], None] | None]:
        """All decodes, and prompt tokens as far as the budget goes, prompts under way first."""
        left, seconds, rows = self.chunk - len(self.running), 0.0, len(self.running)
        parts: list[tuple[Job, int]] = []
        at = 0
        while left > 0:
            if at == len(self.chunks) and not self._admit(now):
                break
            if at == len(self.chunks):  # what was taken in is being loaded, or goes on with its steps
                continue
            job = self.chunks[at]
            at += 1
            tokens = min(left, job.request.input + (job.generated if job.held_up else 0) - job.progress)
            seconds += self._chunk_s(job, tokens)
            parts.append((job, tokens))
            left -= tokens
        if not parts and not self.running:
            return 0.0, None
        stepped = rows > 0 or len(self.running) > 0
        if stepped:
            seconds += self._step_s()

        def done(time: float) -> None:
            if stepped:
                self._stepped(time)
            for job, tokens in parts:
                job.progress += tokens
                if job.progress == job.request.input + (job.generated if job.held_up else 0):
                    self.chunks.remove(job)
                    self._prompt_done(job, time)

        return seconds, done

    def _chunk_s(self, job: Job, tokens: int) -> float:
        end, whole = job.progress + tokens, job.request.input + (job.generated if job.held_up else 0)
        seconds = self.costs.compute_s(job.progress, end, job.hit)
        if job.progress == job.hit:
            seconds += self.costs.prefill[3] * job.hit
        return seconds + (self.costs.compress_s(whole, job.hit) if end == whole else 0.0)

    # ------------------------------------------------------------------ giving way, and coming ahead

    def _preempt(self, now: float) -> None:
        """Draw ranks; the best that fit together go on, other running ones give way."""
        live = [*self.running.values(), *self.waiting]
        self.order.redraw(live)
        room, chosen = self.pool.memory, set[int]()
        for job in sorted(live, key=lambda one: (-one.rank, one.number)):
            room -= self.pool.need(job.request)
            if room < 0:
                break
            chosen.add(job.number)
        for job in [one for one in self.running.values() if one.number not in chosen]:
            self._leave(job)
            assert job.admitted is not None
            self.pool.release(job.admitted)
            job.held_up = True
            self.preemptions += 1
            self.waiting.append(job)
            if self.swap.mode == "swap":
                held = self.costs.held.at(job.request.input, job.generated)
                nbytes = self.swap.written(held, job.copied)
                job.copied = held
                self.out_bytes += nbytes
                seconds = self._copy_s(nbytes, held / job.request.tokens)
                if self.swap.overlap:
                    self.link_free = max(now, self.link_free) + seconds
                else:
                    self.stall += seconds
        self.blocked = False

    def _prefetch(self, now: float) -> None:
        """Bring up fixed prefixes of the agents that are expected next, while the link is free."""
        tree: Any = self.pool.tree
        if tree is None or len(tree.rooms) < 2 or self.link_free > now:
            return
        for _, agent, blocks in self.world.expected()[: self.prefetch]:
            path = tree.match(blocks)
            below = [node for node in path if node.tier]
            fresh = sum(not node.locks for node in path)
            if not below or agent in self.fetching or tree.locked + fresh > tree.rooms[0]:
                continue
            tree.lock(path)
            nbytes = self.pool.block_bytes * tree.promote(path)
            self.pool.up[1] += nbytes
            self.fetching.add(agent)
            self.link_free = max(now, self.link_free) + self._copy_s(nbytes, self.costs.held.per_prompt)
            self.world.at(self.link_free, lambda time, path=path, agent=agent: self._fetched(path, agent))  # type: ignore[misc]

    def _fetched(self, path: list[Any], agent: str) -> None:
        self.pool.tree.unlock(path)  # type: ignore[union-attr]
        self.fetching.discard(agent)
        self.blocked = False
