"""One scorer of the pool as its callers see it: one process at a time, looked after and replaced.

Who waits for whom: a call waits while there is no scorer; ``watch`` waits for nobody and looks at the process
and its heartbeat twice a second. A call whose process is gone ends with ``ScorerLost``; whoever asked decides
whether to ask again.
"""

import asyncio
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import psutil
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from forgeasync.actors.hang_diagnosis import evidence_here
from forgeasync.actors.scorer import ScoredResponses, ScorerActor, Unavailable
from forgeasync.actors.watched_process import (
    END_S,
    Heartbeat,
    is_running,
    kill_marked,
    until_gone,
)
from forgeasync.config import ScorerSection
from forgeasync.environments import Response
from forgeasync.faults import Fault, FaultLog, Role
from forgeasync.launch import LOCAL_HOST_ID, kill_with_children
from forgeasync.observability import ProcsFile, last_words
from forgeasync.rollouts import Task, VerifierCounts
from forgeasync.waiting import forget

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two looks at the scorer."""

RETRY_S = 1.0
"""Seconds between two attempts at starting a scorer."""


class ScorerLost(RuntimeError):
    """The scorer's process was gone before it answered: nothing is known of the responses."""


class ScorerFails(RuntimeError):
    """The scorer ends or cannot be started again and again."""


@dataclass(slots=True, kw_only=True)
class SpawnedScorer:
    """A scorer that has been set up."""

    actor: ScorerActor
    pid: int
    mark: str
    """What the scorer has started carries it, also when the scorer is gone."""
    isolation: str
    """What isolates verifiers, in words."""
    stop: Callable[[], Awaitable[None]]
    """Give back what Monarch holds of its proc, which may be gone."""


SpawnScorer = Callable[[int], Awaitable[SpawnedScorer]]
"""Starts and sets up a scorer; the number is new for each."""


@dataclass(slots=True, kw_only=True)
class _Life:
    """One process."""

    spawned: SpawnedScorer
    process: psutil.Process
    beat: Heartbeat[None]
    counts: VerifierCounts = field(default_factory=VerifierCounts)
    """What it has counted since it began, when it was last heard of."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class WatchedScorer:
    """One scorer of a run."""

    def __init__(
        self,
        spawn: SpawnScorer,
        section: ScorerSection,
        *,
        limit_s: float,
        faults: FaultLog,
        listing: ProcsFile,
        rank: int = 0,
        on_change: Callable[[bool], None] = lambda is_up: None,
    ) -> None:
        """``limit_s`` is the longest time that a call takes once the scorer begins with it; it keeps that.

        No more than ``scorer.max_in_flight`` responses are with it, ``num_workers`` of which at least are
        scored at once, so that no call takes longer than that many rounds: a scorer that takes longer is
        replaced. ``rank`` is its place among the run's scorers. ``on_change`` is told whether there is a
        process, whenever that changes after the start.
        """
        self._rounds = math.ceil(section.max_in_flight / section.num_workers) + 1
        self._backstop_s = limit_s * self._rounds
        self._rank = rank
        self._name = "the scorer" if section.num_replicas == 1 else f"scorer {rank}"
        self._on_change = on_change
        self._spawn = spawn
        self._section = section
        self._faults = faults
        self._listing = listing
        self._life: _Life | None = None
        self._next_number = 0
        self._has_changed = asyncio.Condition()
        self._starting: asyncio.Task[None] | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._lost: list[psutil.Process] = []
        """Processes that were killed, or have died, and may take a moment to be gone."""
        self._lost_counts = VerifierCounts()
        self._num_restarts_in_a_row = 0
        self._failure: ScorerFails | None = None

    async def start(self) -> str:
        """Start the scorer; returns what isolates its verifiers, in words.

        Raises:
            Exception: what kept it from starting.
        """
        self._life = await self._begin()
        return self._life.spawned.isolation

    async def score(
        self, task: Task, responses: Sequence[Response], first: int
    ) -> ScoredResponses | Unavailable:
        """Return the score of each response, from the scorer that there is as soon as there is one.

        ``first`` is the place of the first response in its group.

        Raises:
            ScorerLost: its process was gone before it answered.
            ScorerFails: there will be no scorer any more.
            Exception: whatever the scorer raises.
        """
        async with self._has_changed:
            await self._has_changed.wait_for(lambda: self._life is not None or self._failure is not None)
        if self._failure is not None:
            raise self._failure
        life = self._life
        assert life is not None
        scoring = asyncio.ensure_future(life.spawned.actor.score.call_one(task, responses, first))
        gone = asyncio.ensure_future(life.gone.wait())
        try:
            ended, _ = await asyncio.wait(
                [scoring, gone], timeout=self._backstop_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended:
                limit = f"{self._rounds} times its limit: scorer.max_in_flight, scorer.num_workers"
                what = f"has not scored a response within {self._backstop_s:g} s ({limit})"
                self._lose(life, what, await evidence_here(Role.SCORER, life.process.pid))
            if scoring.done() and (error := scoring.exception()) is not None:
                # A dying scorer's call can fail before its process is seen to be gone.
                if isinstance(error, SupervisionError):
                    self._lose(life, "is gone, as a call has shown")
                elif not is_running(life.process):
                    await gone
            if life.gone.is_set():
                raise ScorerLost(f"{self._name} (process {life.process.pid}) was gone before it answered")
            scored = scoring.result()
        finally:
            gone.cancel()
            scoring.add_done_callback(forget)
            scoring.cancel()
        if isinstance(scored, Unavailable):
            return scored
        self._num_restarts_in_a_row = 0
        # Replies can arrive out of order, and counts only rise.
        life.counts = life.counts.merged(scored.counts)
        return dataclasses.replace(scored, counts=self._lost_counts + life.counts)

    async def watch(self) -> None:
        """Look after the scorer until cancelled.

        Raises:
            ScorerFails: it ends or cannot be started again and again.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            if self._failure is not None:
                raise self._failure
            life = self._life
            if life is None:
                continue
            if not is_running(life.process):
                self._lose(life, "has died")
            elif life.beat.look():
                limit = f"scorer.heartbeat_s = {self._section.heartbeat_s:g} s"
                evidence = await evidence_here(Role.SCORER, life.process.pid)
                self._lose(life, f"has not answered for {limit}", evidence)

    async def close(self) -> None:
        """End the scorer with all that it has started, and wait until it is gone, for at most ``END_S``."""
        tasks = [*self._stopping, *([] if self._starting is None else [self._starting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._life is not None:
            # Calls that are still under way fail, which is no loss of a scorer.
            self._life.gone.set()
            self._life.beat.stop()
            kill_with_children(self._life.process)
            await asyncio.to_thread(kill_marked, self._life.spawned.mark)
            self._lost.append(self._life.process)
        for process in await until_gone(self._lost):
            logger.warning("%s (process %d) still runs %g s after its kill", self._name, process.pid, END_S)

    async def _begin(self) -> _Life:
        number, self._next_number = self._next_number, self._next_number + 1
        spawned = await self._spawn(number)
        self._listing.put(Role.SCORER, self._rank, pid=spawned.pid, host=LOCAL_HOST_ID)
        return _Life(
            spawned=spawned,
            process=psutil.Process(spawned.pid),
            beat=Heartbeat(spawned.actor.beat.call_one, limit_s=self._section.heartbeat_s),
        )

    def _lose(self, life: _Life, why: str, evidence: str | None = None) -> None:
        """End a process and have another one started; no news if it was lost already."""
        if life.gone.is_set():
            return
        life.gone.set()
        assert life is self._life
        self._life = None
        life.beat.stop()
        kill_with_children(life.process)
        self._lost = [process for process in (*self._lost, life.process) if is_running(process)]
        self._lost_counts += life.counts
        who = f"{self._name} (process {life.process.pid})"
        what = f"{why}: another one starts, and its responses are scored again"
        fault = self._faults.detected(Role.SCORER, who, what, evidence=evidence)
        self._listing.remove(Role.SCORER, self._rank)
        cleaning = asyncio.create_task(_clean_up(life.spawned))
        self._stopping.add(cleaning)
        cleaning.add_done_callback(self._stopping.discard)
        cleaning.add_done_callback(forget)
        self._starting = asyncio.create_task(self._replace(fault))
        self._starting.add_done_callback(forget)
        self._on_change(False)

    async def _replace(self, fault: Fault) -> None:
        """Start a scorer in place of a lost one, as often as the budget allows."""
        reason = f"{fault.who} {fault.what}"
        while self._num_restarts_in_a_row < self._section.max_restarts:
            self._num_restarts_in_a_row += 1
            try:
                self._life = await self._begin()
            except Exception as error:
                reason = f"it could not be started: {last_words(error)}"
                logger.warning("a scorer could not be started", exc_info=True)
                await asyncio.sleep(RETRY_S)
            else:
                self._faults.recovered(fault, f"was replaced by process {self._life.process.pid}")
                break
        else:
            self._failure = ScorerFails(
                f"{self._name} was restarted {self._section.max_restarts} times in a row without a response "
                f"that it has scored (scorer.max_restarts); at last: {reason}"
            )
        async with self._has_changed:
            self._has_changed.notify_all()
        if self._failure is None:
            self._on_change(True)


async def _clean_up(scorer: SpawnedScorer) -> None:
    """End what a scorer that is gone has left."""
    await asyncio.to_thread(kill_marked, scorer.mark)
    await scorer.stop()


class WatchedScorers:
    """All scorers of a run."""

    def __init__(self, scorers: Sequence[WatchedScorer]) -> None:
        self._scorers = tuple(scorers)

    async def start(self) -> str:
        """Start all of them; returns what isolates their verifiers, in words. Raises as ``start`` of one."""
        async with asyncio.TaskGroup() as starting:
            tasks = [starting.create_task(scorer.start()) for scorer in self._scorers]
        isolation = tasks[0].result()
        return isolation if len(tasks) == 1 else f"{len(tasks)} scorers, in each {isolation}"

    async def watch(self) -> None:
        """Look after all of them until cancelled. Raises as ``watch`` of one."""
        watching = [asyncio.ensure_future(scorer.watch()) for scorer in self._scorers]
        try:
            await asyncio.gather(*watching)
        finally:
            for task in watching:
                task.cancel()

    async def close(self) -> None:
        """End all of them."""
        await asyncio.gather(*(scorer.close() for scorer in self._scorers))
