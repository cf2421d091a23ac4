"""Supervises the workers of a run's environment and spreads episodes over them.

Who waits for whom: an episode waits for a worker with a free slot. If its worker is lost, the caller decides
whether the episode runs again.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from forgeasync.config import EpisodesSection, RunConfig, is_served
from forgeasync.environments import EndpointModel, ServingAddress, serving_metrics
from forgeasync.observability import Fault, Role
from forgeasync.rollouts import EpisodeOutcome, failed_outcome
from forgeasync.runtime.environment import (
    EnvironmentActor,
    EpisodeRequest,
    GroupMove,
    WorkerReady,
    WorkerReport,
    agent_roles,
)
from forgeasync.runtime.generator import GeneratorActor
from forgeasync.runtime.process_manager import ENVIRONMENT_WORKER, ProcessManager
from forgeasync.runtime.supervised import (
    ProcessLost,
    RestartBudget,
    RestartsFail,
    RunReports,
    Spawned,
    Supervised,
    SupervisedPool,
    spawn_local,
)
from forgeasync.waiting import Monitor, forget

logger = logging.getLogger(__name__)

END_SERVING_S = 5.0
"""Time limit for a worker to tell clients that the run has ended, in seconds."""

MAX_STUCK = 8
"""A worker with more stuck threads than this is replaced once its episodes have ended."""

MAX_FAILED_STARTS = 5
"""Number of consecutive failed starts that ends the run."""


class Worker(Supervised[EnvironmentActor]):
    """A worker of the pool."""

    num_live = 0
    """Number of episodes that it runs."""
    is_retiring = False
    """Whether it gets no further episodes, and is replaced once it runs none."""
    report: WorkerReport | None = None
    """Its answer to the last heartbeat."""


class EnvironmentPool(SupervisedPool[Worker]):
    """All workers of a run's environment."""

    role = Role.ENVIRONMENT
    heartbeat_key = "episodes.heartbeat_s"
    replica_type = Worker
    after_loss = ": its episodes run again elsewhere, and another worker starts"

    def __init__(
        self,
        spawn: Callable[[int, int], Awaitable[Spawned[EnvironmentActor]]],
        reports: RunReports,
        section: EpisodesSection,
        *,
        num_agents: int,
        tell: Callable[[str], None],
        serves: bool = False,
    ) -> None:
        """``tell`` is called with a message about each worker that cannot be started.

        ``serves``: the workers serve people, who are notified when the run ends.
        """
        super().__init__(spawn, reports, heartbeat_s=section.heartbeat_s)
        self._section = section
        self._num_agents = num_agents
        self._tell = tell
        self._serves = serves
        self._budget = RestartBudget(MAX_FAILED_STARTS - 1)
        self._workers = Monitor(self._replicas)
        """Live workers; episodes wait for one with a free slot."""
        self._generators: Callable[[], tuple[Sequence[GeneratorActor], Sequence[int]]] | None = None
        self._moves: dict[int, list[GroupMove]] = {}
        """Moves of groups in flight, for workers that start later."""
        self._num_lost = self._num_killed_processes = 0
        self._lost_counts: Counter[str] = Counter()
        """Last known counts of lost workers."""

    async def connect(self, generators: Callable[[], tuple[Sequence[GeneratorActor], Sequence[int]]]) -> None:
        """Let all workers, and their later replacements, request turns from these generators.

        ``generators`` returns the live generators, and the numbers of the lost ones.
        """
        self._generators = generators
        await asyncio.gather(*(one.actor.connect.call_one(*generators()) for one in self.replicas))

    async def generators_changed(self) -> None:
        """Send the current generators to all workers, without waiting for answers."""
        if self._generators is not None:
            for worker in self.replicas:
                self._tell_worker(worker.actor.connect.call_one(*self._generators()))

    def move_group(self, move: GroupMove) -> None:
        """Send the move of a group to all workers, without waiting for answers."""
        self._moves.setdefault(move.group_id, []).append(move)
        for worker in self.replicas:
            self._tell_worker(worker.actor.move_groups.call_one([move]))

    def forget_moves(self, group_id: int) -> None:
        """Forget the moves of a group that has ended, if there were any."""
        self._moves.pop(group_id, None)

    def _tell_worker(self, call: Awaitable[None]) -> None:
        async def tell() -> None:
            # The loss of a worker is noticed elsewhere.
            with contextlib.suppress(Exception):
                await call

        self._background.start(tell())

    async def run_episode(self, request: EpisodeRequest) -> EpisodeOutcome | None:
        """Run an episode on the worker with the fewest episodes, as soon as one has a free slot.

        If the worker is lost, the episode ends as ``infrastructure``. Returns None if the group was
        cancelled.
        """
        worker = await self._workers.until(lambda workers: self._assign())
        try:
            return await worker.call(lambda: worker.actor.run_episode.call_one(request))
        except ProcessLost as lost:
            episode = request.episode
            return failed_outcome(
                str(lost), num_agents=self._num_agents, attempt=episode.attempt, episode=episode.index
            )
        finally:
            worker.num_live -= 1
            self._workers.wake()

    def _assign(self) -> Worker | None:
        """Give an episode to the worker with the fewest, and return it; None if none has a free slot."""
        most = self._section.max_live_per_worker
        free = (one for one in self.replicas if not one.is_retiring and one.num_live < most)
        worker = min(free, key=lambda one: one.num_live, default=None)
        if worker is not None:
            worker.num_live += 1
        return worker

    @property
    def num_live(self) -> int:
        """Number of episodes in flight."""
        return sum(one.num_live for one in self.replicas)

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began, and current values, by their names in metrics.jsonl."""
        reports = [one.report for one in self.replicas if one.report is not None]
        metrics: dict[str, float] = {
            "environment/num_restarted_workers": self._num_lost,
            "environment/num_live_episodes": self.num_live,
            "environment/num_killed_processes": self._num_killed_processes
            + sum(report.num_killed_processes for report in reports),
        }
        if self._serves:
            # Only one worker serves people; it may be starting at this moment.
            last = next((report.serving for report in reports), None)
            metrics |= serving_metrics(self._lost_counts, last)
        return metrics

    async def close(self) -> None:
        """Tell the people whom workers serve that the run ends, and end all workers."""
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
                # Its clients get broken connections instead.
                logger.warning("a worker could not tell people that the run has ended")

    def name_of(self, rank: int, number: int) -> str:
        """Return the name of a worker, for messages."""
        return f"environment worker {number}"

    async def _join(self, replica: Worker) -> None:
        if self._generators is not None:
            await replica.actor.connect.call_one(*self._generators())

    def _on_ready(self, replica: Worker, fault: Fault | None) -> None:
        self._budget.reset()
        if self._generators is not None and self._has_started:
            # Generators may have joined or ended since the worker was connected.
            self._tell_worker(replica.actor.connect.call_one(*self._generators()))
        if self._moves:
            moves = [move for of_group in self._moves.values() for move in of_group]
            self._tell_worker(replica.actor.move_groups.call_one(moves))
        self._workers.wake()
        super()._on_ready(replica, fault)

    def _on_start_failed(self, rank: int, number: int, error: Exception) -> Exception | None:
        self._num_lost += 1
        if not self._budget.take():
            return RestartsFail(f"{self.name_of(rank, number)} cannot be started: {error}")
        self._tell(f"{self.name_of(rank, number)} cannot be started ({error}); trying again")
        return None

    async def _look(self) -> None:
        await super()._look()
        for worker in self.replicas:
            if worker.is_retiring and not worker.num_live:
                self.lose(worker, "had threads that nothing ended")

    def heard(self, replica: Worker, answer: WorkerReport) -> None:
        """Store the report of a worker; one with too many stuck threads gets no further episodes."""
        replica.report = answer
        replica.is_retiring |= answer.num_stuck > MAX_STUCK

    def _on_lost(self, replica: Worker, fault: Fault) -> bool:
        self._num_lost += 1
        if replica.report is not None:
            self._num_killed_processes += replica.report.num_killed_processes
            if replica.report.serving is not None:
                self._lost_counts.update(replica.report.serving.counts)
        return True


async def start_environment(
    processes: ProcessManager,
    config: RunConfig,
    model_path: Path,
    tell: Callable[[str], None],
    *,
    artifacts: Path | None = None,
    serving_file: Path | None = None,
    endpoint: EndpointModel | None = None,
) -> EnvironmentPool | None:
    """Start the workers of the environment; None if the run has none.

    ``tell`` is called with messages about workers. ``artifacts`` is the folder for files that episodes keep;
    None: they keep none. If the run serves people, ``serving_file`` gets the address. With ``endpoint``, its
    model takes all turns instead of the run's generators, and ``model_path`` is not read.
    """
    if config.environment is None:
        return None
    address: ServingAddress | None = None
    if is_served(config):
        assert serving_file is not None, "only runs serve people"
        address = ServingAddress(config.serving, serving_file, tell)

    async def spawn(rank: int, number: int) -> Spawned[EnvironmentActor]:
        async def set_up(actor: EnvironmentActor) -> WorkerReady:
            serving = None if address is None else address.setup()
            ready = await actor.setup.call_one(config, model_path, artifacts, endpoint, serving)
            if number == 0:
                tell(ready.renderer)
            if address is not None:
                address.opened(ready.url, ready.port)
            return ready

        return await spawn_local(
            "environment",
            f"{ENVIRONMENT_WORKER}-{number}",
            EnvironmentActor,
            processes.log_dir,
            number,
            set_up=set_up,
            call=f"setting up environment worker {number}",
            timeouts=config.timeouts,
        )

    pool = processes.environment = EnvironmentPool(
        spawn,
        processes,
        config.episodes,
        num_agents=len(agent_roles(config.agents)),
        serves=address is not None,
        tell=tell,
    )
    await pool.start(config.episodes.num_workers)
    return pool
