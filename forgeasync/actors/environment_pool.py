"""The environment workers as one: gives episodes to them, notices those that are gone, and replaces them.

Who waits for whom: an episode waits for a worker with room; ``watch`` waits for nobody and looks at every
worker's process and heartbeat several times a second. A worker that is gone ends the calls of its episodes
with an ending of ``infrastructure``; whoever asked decides whether they run again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from monarch.actor import this_host

from forgeasync.actors.environment import (
    EnvironmentActor,
    EnvironmentSetup,
    EpisodeRequest,
    GroupMove,
    WorkerReady,
    WorkerReport,
    agent_roles,
)
from forgeasync.actors.generator import CancelledGroup, GeneratorActor
from forgeasync.actors.process_manager import ENVIRONMENT_WORKER, ProcessManager
from forgeasync.actors.supervised import END_S, Heartbeat, evidence_here, is_running, kill_marked, until_gone
from forgeasync.config import EpisodesSection, RunConfig, is_served
from forgeasync.environments import EndpointModel, ServingAddress, WorkerTable, serving_metrics
from forgeasync.faults import Fault, FaultLog, Role
from forgeasync.launch import LOCAL_HOST_ID, kill_with_children, spawn_role, stop
from forgeasync.observability import ProcsFile
from forgeasync.rollouts import EpisodeOutcome, lost_outcome
from forgeasync.waiting import deadline, forget

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""Seconds between two looks at the workers."""

END_SERVING_S = 5.0
"""Time for a worker to tell the people whom it serves that the run has ended."""

MAX_STUCK = 8
"""A worker with more stuck threads than this is replaced once its episodes have ended."""

MAX_FAILED_STARTS = 5
"""So many workers in a row that cannot be started end the run."""


@dataclass(slots=True, kw_only=True)
class SpawnedWorker:
    """A worker that has been set up."""

    actor: EnvironmentActor
    pid: int
    mark: str
    """What the worker has started carries it, also when the worker is gone."""
    stop: Callable[[], Awaitable[None]]
    """Give back what Monarch holds of its proc, which may be gone."""


SpawnWorker = Callable[[int], Awaitable[SpawnedWorker]]
"""Starts and sets up the worker of a number."""


class WorkersFail(RuntimeError):
    """Environment workers cannot be started any more."""


@dataclass(slots=True, kw_only=True)
class _Worker:
    spawned: SpawnedWorker
    process: psutil.Process
    place: int
    """Its place in ``procs.json``, from 0; a worker that replaces another has the other's."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    beat: Heartbeat[WorkerReport]

    @property
    def report(self) -> WorkerReport | None:
        """What it has answered last."""
        return self.beat.last


class EnvironmentPool:
    """All workers of a run's environment."""

    def __init__(
        self,
        spawn: SpawnWorker,
        section: EpisodesSection,
        *,
        num_agents: int,
        tell: Callable[[str], None],
        faults: FaultLog,
        listing: ProcsFile,
        serves: bool = False,
    ) -> None:
        """``tell`` is called with a line for people about workers that cannot be started or ended.

        Workers that are lost and replaced are reported to ``faults``; ``listing`` has those that there are.
        ``serves`` says that the workers serve people, who are told when the run ends.
        """
        self._faults = faults
        self._listing = listing
        self._serves = serves
        self._lost_counts: Counter[str] = Counter()
        """What lost workers had counted when they were last heard of."""
        self._spawn = spawn
        self._section = section
        self._num_agents = num_agents
        self._tell = tell
        self._table = WorkerTable(max_live_per_worker=section.max_live_per_worker)
        self._workers: dict[int, _Worker] = {}
        self._has_room = asyncio.Condition()
        self._starting: set[asyncio.Task[None]] = set()
        self._stopping: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Future[None]] = set()
        self._has_started = False
        self._generators: Callable[[], tuple[Sequence[GeneratorActor], Sequence[int]]] | None = None
        self._moves: dict[int, list[GroupMove]] = {}
        """Where groups went on that have not ended, for workers that start later."""
        self._num_failed_starts = 0
        self._failure: Exception | None = None
        self._num_killed_processes = 0
        self._lost: list[psutil.Process] = []
        """Workers that were killed, or have died, and may take a moment to be gone."""

    async def start(self) -> None:
        """Start all workers.

        Raises:
            Exception: what kept one of them from starting.
        """
        await asyncio.gather(*(self._start_worker(place) for place in range(self._section.num_workers)))
        self._has_started = True

    async def connect(self, generators: Callable[[], tuple[Sequence[GeneratorActor], Sequence[int]]]) -> None:
        """Let all workers, and those that will replace them, ask these generators for turns.

        ``generators`` returns the generators that there are, and the numbers of those that are gone.
        """
        self._generators = generators
        await asyncio.gather(
            *(worker.spawned.actor.connect.call_one(*generators()) for worker in self._workers.values())
        )

    async def generators_changed(self) -> None:
        """Tell all workers which generators there are now, and wait for none of them."""
        if self._generators is not None:
            for worker in self._workers.values():
                self._tell_worker(worker.spawned.actor.connect.call_one(*self._generators()))

    def move_group(self, move: GroupMove) -> None:
        """Tell all workers where the episodes of a group go on, and wait for none of them."""
        self._moves.setdefault(move.group_id, []).append(move)
        for worker in self._workers.values():
            self._tell_worker(worker.spawned.actor.move_groups.call_one([move]))

    def forget_moves(self, group_id: int) -> None:
        """A group has ended; it may have moved never."""
        self._moves.pop(group_id, None)

    def _tell_worker(self, call: Awaitable[None]) -> None:
        told = asyncio.ensure_future(call)
        self._telling.add(told)
        told.add_done_callback(self._telling.discard)
        told.add_done_callback(forget)

    async def run_episode(self, request: EpisodeRequest) -> EpisodeOutcome | CancelledGroup:
        """Run an episode on the worker with the fewest of them, as soon as one has room."""
        async with self._has_room:
            while (number := self._table.assign()) is None:
                await self._has_room.wait()
        worker = self._workers[number]
        running = asyncio.ensure_future(worker.spawned.actor.run_episode.call_one(request))
        gone = asyncio.ensure_future(worker.gone.wait())
        try:
            await asyncio.wait([running, gone], return_when=asyncio.FIRST_COMPLETED)
            # A dying worker's call can fail before its process is seen to be gone.
            if running.done() and running.exception() is not None and not is_running(worker.process):
                await gone
            if gone.done():
                problem = f"environment worker {number} (process {worker.process.pid}) is gone"
                return lost_outcome(
                    problem,
                    num_agents=self._num_agents,
                    attempt=request.episode.attempt,
                    episode=request.episode.index,
                )
            return running.result()
        finally:
            gone.cancel()
            running.add_done_callback(forget)
            running.cancel()
            self._table.ended(number)
            await self._tell_room()

    async def watch(self) -> None:
        """Look after the workers until cancelled.

        Raises:
            WorkersFail: workers cannot be started any more.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            if self._failure is not None:
                raise self._failure
            for number in self._table.numbers:
                if (worker := self._workers.get(number)) is not None:
                    await self._look_at(number, worker)
            for number in self._table.retired:
                await self._lose(number, "had threads that nothing ended")

    @property
    def num_live(self) -> int:
        """Episodes under way."""
        return self._table.num_live

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began, and current values, under their names in metrics.jsonl."""
        reports = [worker.report for worker in self._workers.values() if worker.report is not None]
        metrics: dict[str, float] = {
            "environment/num_restarted_workers": self._table.num_lost,
            "environment/num_live_episodes": self._table.num_live,
            "environment/num_killed_processes": self._num_killed_processes
            + sum(report.num_killed_processes for report in reports),
        }
        if self._serves:
            # One worker serves people; there is none while it is replaced.
            last = next((report.serving for report in reports), None)
            metrics |= serving_metrics(self._lost_counts, last)
        return metrics

    async def close(self) -> None:
        """End all workers, and wait until their processes are gone, for at most ``END_S``.

        People that they serve are told before.
        """
        for task in (*self._starting, *self._stopping):
            task.cancel()
        await asyncio.gather(*self._starting, *self._stopping, return_exceptions=True)
        if self._serves:
            await self._end_serving()
        for worker in self._workers.values():
            worker.beat.stop()
            kill_with_children(worker.process)
        marks = [worker.spawned.mark for worker in self._workers.values()]
        await asyncio.gather(*(asyncio.to_thread(kill_marked, mark) for mark in marks))
        # A signal only begins the end of a process, and giving its memory back takes a while.
        ending = [*self._lost, *(worker.process for worker in self._workers.values())]
        for process in await until_gone(ending):
            self._tell(
                f"environment worker (process {process.pid}) was killed and still runs after {END_S:g} s"
            )

    async def _end_serving(self) -> None:
        ending = [
            asyncio.ensure_future(worker.spawned.actor.end_serving.call_one())
            for worker in self._workers.values()
        ]
        if not ending:
            return
        _, late = await asyncio.wait(ending, timeout=END_SERVING_S)
        for one in ending:
            one.add_done_callback(forget)
            one.cancel()
            if one in late or one.exception() is not None:
                # Its clients see that connections break instead.
                logger.warning("a worker could not tell people that the run has ended")

    async def _look_at(self, number: int, worker: _Worker) -> None:
        if not is_running(worker.process):
            await self._lose(number, "has died")
            return
        if worker.beat.look():
            limit = f"episodes.heartbeat_s = {self._section.heartbeat_s:g} s"
            evidence = await evidence_here(Role.ENVIRONMENT, worker.process.pid)
            await self._lose(number, f"has not answered for {limit}", evidence)
        elif worker.report is not None and worker.report.num_stuck > MAX_STUCK:
            self._table.retire(number)

    async def _lose(self, number: int, why: str, evidence: str | None = None) -> None:
        worker = self._workers.pop(number)
        kill_with_children(worker.process)
        self._lost = [process for process in (*self._lost, worker.process) if is_running(process)]
        worker.beat.stop()
        if worker.report is not None:
            self._num_killed_processes += worker.report.num_killed_processes
            if worker.report.serving is not None:
                self._lost_counts.update(worker.report.serving.counts)
        self._table.lose(number)
        worker.gone.set()
        which = f"environment worker {number} (process {worker.process.pid})"
        what = f"{why}: its episodes run again elsewhere, and another worker starts"
        fault = self._faults.detected(Role.ENVIRONMENT, which, what, evidence=evidence)
        self._listing.remove(Role.ENVIRONMENT, worker.place)
        self._in_background(self._stopping, _clean_up(worker.spawned))
        self._in_background(self._starting, self._start_worker(worker.place, fault))

    async def _start_worker(self, place: int, replaces: Fault | None = None) -> None:
        number = self._table.start()
        try:
            spawned = await self._spawn(number)
            process = psutil.Process(spawned.pid)
            try:
                if self._generators is not None:
                    await spawned.actor.connect.call_one(*self._generators())
            except BaseException:
                # Nobody else knows of it yet.
                kill_with_children(process)
                self._lost.append(process)
                await asyncio.to_thread(kill_marked, spawned.mark)
                raise
        except Exception as error:
            if not self._has_started:
                raise
            self._table.lose(number)
            self._num_failed_starts += 1
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                self._failure = WorkersFail(f"environment worker {number} cannot be started: {error}")
                self._failure.__cause__ = error
                return
            self._tell(f"environment worker {number} cannot be started ({error}); trying again")
            self._in_background(self._starting, self._start_worker(place, replaces))
            return
        self._num_failed_starts = 0
        beat = Heartbeat(spawned.actor.report.call_one, limit_s=self._section.heartbeat_s)
        self._workers[number] = _Worker(spawned=spawned, process=process, place=place, beat=beat)
        if self._generators is not None and self._has_started:
            # Generators may have come and gone since it was connected.
            self._tell_worker(spawned.actor.connect.call_one(*self._generators()))
        if self._moves:
            moves = [move for of_group in self._moves.values() for move in of_group]
            self._tell_worker(spawned.actor.move_groups.call_one(moves))
        self._table.ready(number)
        self._listing.put(Role.ENVIRONMENT, place, pid=spawned.pid, host=LOCAL_HOST_ID)
        if replaces is not None:
            self._faults.recovered(
                replaces, f"was replaced by environment worker {number} (process {spawned.pid})"
            )
        await self._tell_room()

    async def _tell_room(self) -> None:
        async with self._has_room:
            self._has_room.notify_all()

    def _in_background(self, tasks: "set[asyncio.Task[None]]", work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(forget)


async def _clean_up(worker: SpawnedWorker) -> None:
    """End what a worker that is gone has left."""
    await asyncio.to_thread(kill_marked, worker.mark)
    await worker.stop()


async def start_environment(
    procs: ProcessManager,
    config: RunConfig,
    model_path: Path,
    tell: Callable[[str], None],
    *,
    artifacts: Path | None = None,
    serving_file: Path | None = None,
    endpoint: EndpointModel | None = None,
) -> EnvironmentPool | None:
    """Start the workers of the environment; None if the run has none.

    ``tell`` is called with a line for people whenever a worker was lost. ``artifacts`` is the folder for
    files that episodes keep; None: they keep none. ``serving_file`` gets the address at which people are
    served, if they are. With ``endpoint`` its model takes all turns, instead
    of our generators; ``model_path`` is not read then.
    """
    if config.environment is None:
        return None
    setup = EnvironmentSetup(
        environment=config.environment,
        sandbox=config.sandbox,
        agents=config.agents,
        model_path=model_path,
        data=config.data,
        sampling=config.sampling,
        max_context_length=config.model.max_context_length,
        episodes=config.episodes,
        timeouts=config.timeouts,
        artifacts=artifacts,
        endpoint=endpoint,
    )

    address: ServingAddress | None = None
    if is_served(config):
        assert serving_file is not None, "only runs serve people"
        address = ServingAddress(config.serving, serving_file, tell)

    async def spawn(number: int) -> SpawnedWorker:
        mesh = spawn_role(this_host(), "environment", num_procs=1)
        actor = mesh.spawn(f"{ENVIRONMENT_WORKER}-{number}", EnvironmentActor, procs.log_dir, number)
        call = f"setting up environment worker {number}"
        try:
            async with deadline(config.timeouts.setup_s, call=call, key="timeouts.setup_s"):
                serving = None if address is None else address.setup()
                ready: WorkerReady = await actor.setup.call_one(setup, serving)
        except BaseException:
            await stop(mesh)
            raise
        if number == 0:
            tell(ready.renderer)
        if address is not None:
            address.opened(ready.url, ready.port)
        return SpawnedWorker(actor=actor, pid=ready.pid, mark=ready.mark, stop=lambda: stop(mesh))

    procs.environment = EnvironmentPool(
        spawn,
        config.episodes,
        num_agents=len(agent_roles(config.agents)),
        serves=address is not None,
        tell=tell,
        faults=procs.faults,
        listing=procs.listing,
    )
    await procs.environment.start()
    return procs.environment
