"""The workers of a run's environment: spreads episodes over them, and replaces those that are lost.

Who waits for whom: an episode waits for a worker with room. Whoever asked for an episode whose worker is lost
decides whether it runs again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from monarch.actor import this_host

from forgeasync.config import EpisodesSection, RunConfig, is_served
from forgeasync.environments import EndpointModel, ServingAddress, WorkerTable, serving_metrics
from forgeasync.observability import Fault, FaultLog, ProcsFile, Role
from forgeasync.rollouts import EpisodeOutcome, lost_outcome
from forgeasync.runtime.environment import (
    EnvironmentActor,
    EnvironmentSetup,
    EpisodeRequest,
    GroupMove,
    WorkerReady,
    WorkerReport,
    agent_roles,
)
from forgeasync.runtime.generator import CancelledGroup, GeneratorActor
from forgeasync.runtime.hosts import stop
from forgeasync.runtime.placement import spawn_role
from forgeasync.runtime.process_manager import ENVIRONMENT_WORKER, ProcessManager
from forgeasync.runtime.supervised import (
    Heartbeat,
    ProcessLost,
    RestartBudget,
    RestartsFail,
    Spawned,
    Supervised,
    SupervisedPool,
)
from forgeasync.waiting import Monitor, deadline, forget

logger = logging.getLogger(__name__)

END_SERVING_S = 5.0
"""Time for a worker to tell the people whom it serves that the run has ended."""

MAX_STUCK = 8
"""A worker with more stuck threads than this is replaced once its episodes have ended."""

MAX_FAILED_STARTS = 5
"""So many workers in a row that cannot be started end the run."""


SpawnWorker = Callable[[int], Awaitable[Spawned[EnvironmentActor]]]
"""Starts and sets up the worker of a number."""

Worker = Supervised[EnvironmentActor]


class EnvironmentPool(SupervisedPool[Worker]):
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
        """``tell`` is called with a line for people about workers that cannot be started.

        ``serves`` says that the workers serve people, who are told when the run ends.
        """
        super().__init__(Role.ENVIRONMENT, faults=faults, listing=listing)
        self._spawn = spawn
        self._section = section
        self._num_agents = num_agents
        self._tell = tell
        self._serves = serves
        self._budget = RestartBudget(MAX_FAILED_STARTS - 1)
        self._table = Monitor(WorkerTable(max_live_per_worker=section.max_live_per_worker))
        self._generators: Callable[[], tuple[Sequence[GeneratorActor], Sequence[int]]] | None = None
        self._moves: dict[int, list[GroupMove]] = {}
        """Where groups went on that have not ended, for workers that start later."""
        self._num_killed_processes = 0
        self._lost_counts: Counter[str] = Counter()
        """What lost workers had counted when they were last heard of."""
        self._telling: set[asyncio.Future[None]] = set()

    async def connect(self, generators: Callable[[], tuple[Sequence[GeneratorActor], Sequence[int]]]) -> None:
        """Let all workers, and those that will replace them, ask these generators for turns.

        ``generators`` returns the generators that there are, and the numbers of those that are gone.
        """
        self._generators = generators
        await asyncio.gather(*(one.actor.connect.call_one(*generators()) for one in self.replicas))

    async def generators_changed(self) -> None:
        """Tell all workers which generators there are now, and wait for none of them."""
        if self._generators is not None:
            for worker in self.replicas:
                self._tell_worker(worker.actor.connect.call_one(*self._generators()))

    def move_group(self, move: GroupMove) -> None:
        """Tell all workers where the episodes of a group go on, and wait for none of them."""
        self._moves.setdefault(move.group_id, []).append(move)
        for worker in self.replicas:
            self._tell_worker(worker.actor.move_groups.call_one([move]))

    def forget_moves(self, group_id: int) -> None:
        """A group has ended; it may have moved never."""
        self._moves.pop(group_id, None)

    def _tell_worker(self, call: Awaitable[None]) -> None:
        # Its loss shows elsewhere.
        told = asyncio.ensure_future(call)
        self._telling.add(told)
        told.add_done_callback(self._telling.discard)
        told.add_done_callback(forget)

    async def run_episode(self, request: EpisodeRequest) -> EpisodeOutcome | CancelledGroup:
        """Run an episode on the worker with the fewest of them, as soon as one has room.

        An episode whose worker is lost has ended as ``infrastructure``.
        """
        number = await self._table.until(WorkerTable.assign)
        worker = self._replicas[number]
        try:
            return await worker.call(lambda: worker.actor.run_episode.call_one(request))
        except ProcessLost as lost:
            episode = request.episode
            return lost_outcome(
                str(lost), num_agents=self._num_agents, attempt=episode.attempt, episode=episode.index
            )
        finally:
            self._table.change(lambda table: table.ended(number))

    @property
    def num_live(self) -> int:
        """Episodes in flight."""
        return self._table.state.num_live

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began, and current values, under their names in metrics.jsonl."""
        reports = [one for one in map(_last_report, self.replicas) if one is not None]
        metrics: dict[str, float] = {
            "environment/num_restarted_workers": self._table.state.num_lost,
            "environment/num_live_episodes": self.num_live,
            "environment/num_killed_processes": self._num_killed_processes
            + sum(report.num_killed_processes for report in reports),
        }
        if self._serves:
            # One worker serves people; there is none while it is replaced.
            last = next((report.serving for report in reports), None)
            metrics |= serving_metrics(self._lost_counts, last)
        return metrics

    async def close(self) -> None:
        """End all workers; people that they serve are told before."""
        if self._serves:
            await self._end_serving()
        await super().close()

    async def _end_serving(self) -> None:
        ending = [asyncio.ensure_future(one.actor.end_serving.call_one()) for one in self.replicas]
        if not ending:
            return
        _, late = await asyncio.wait(ending, timeout=END_SERVING_S)
        for one in ending:
            one.add_done_callback(forget)
            one.cancel()
            if one in late or one.exception() is not None:
                # Its clients see that connections break instead.
                logger.warning("a worker could not tell people that the run has ended")

    def _begin(self, rank: int) -> int:
        return self._table.change(WorkerTable.start)

    async def _set_up(self, rank: int, number: int) -> Worker:
        spawned = await self._spawn(number)
        heartbeat = Heartbeat(
            spawned.actor.report.call_one, limit_s=self._section.heartbeat_s, key="episodes.heartbeat_s"
        )
        name = f"environment worker {number}"
        worker = Worker(self, spawned, name=name, rank=rank, number=number, heartbeat=heartbeat)
        return await self._joined(worker, self._connect(worker))

    async def _connect(self, worker: Worker) -> None:
        if self._generators is not None:
            await worker.actor.connect.call_one(*self._generators())

    def _has_joined(self, replica: Worker, fault: Fault | None) -> None:
        self._budget.reset()
        if self._generators is not None and self._has_started:
            # Generators may have come and gone since it was connected.
            self._tell_worker(replica.actor.connect.call_one(*self._generators()))
        if self._moves:
            moves = [move for of_group in self._moves.values() for move in of_group]
            self._tell_worker(replica.actor.move_groups.call_one(moves))
        self._table.change(lambda table: table.ready(replica.number))
        super()._has_joined(replica, fault)

    def _failed(self, rank: int, number: int, error: Exception) -> Exception | None:
        self._table.change(lambda table: table.lose(number))
        if not self._budget.take():
            return RestartsFail(f"environment worker {number} cannot be started: {error}")
        self._tell(f"environment worker {number} cannot be started ({error}); trying again")
        return None

    async def _look(self) -> None:
        await super()._look()
        for number in self._table.state.retired:
            self.lose(self._replicas[number], "had threads that nothing ended")

    def _look_at(self, replica: Worker) -> str | None:
        what = super()._look_at(replica)
        report = _last_report(replica)
        if report is not None and report.num_stuck > MAX_STUCK:
            self._table.change(lambda table: table.retire(replica.number))
        return what

    def _is_lost(self, replica: Worker, what: str) -> str:
        self._table.change(lambda table: table.lose(replica.number))
        report = _last_report(replica)
        if report is not None:
            self._num_killed_processes += report.num_killed_processes
            if report.serving is not None:
                self._lost_counts.update(report.serving.counts)
        return ": its episodes run again elsewhere, and another worker starts"


def _last_report(worker: Worker) -> WorkerReport | None:
    """What a worker has answered to its last heartbeat."""
    report: WorkerReport | None = worker.heartbeat.last
    return report


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

    async def spawn(number: int) -> Spawned[EnvironmentActor]:
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
        return Spawned(actor=actor, pid=ready.pid, mark=ready.mark, stop=lambda: stop(mesh))

    pool = procs.environment = EnvironmentPool(
        spawn,
        config.episodes,
        num_agents=len(agent_roles(config.agents)),
        serves=address is not None,
        tell=tell,
        faults=procs.faults,
        listing=procs.listing,
    )
    await pool.start(config.episodes.num_workers)
    return pool
