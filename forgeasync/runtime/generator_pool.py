"""Supervises the generators of a run or the engines of a teacher, and assigns groups to them.

Who waits for whom: a group waits for a healthy generator. Calls to a lost generator end with ``ProcessLost``,
and the callers choose another one. Its replacement loads its engine while the run continues, and becomes
healthy when the serving loop has updated its weights.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from monarch.actor import ProcMesh

from forgeasync.config import Colocated, GeneratorSection, RunConfig
from forgeasync.generator import EngineStats
from forgeasync.observability import Fault, Role
from forgeasync.rollouts import InFlightRead
from forgeasync.runtime.generator import GeneratorActor
from forgeasync.runtime.job_hosts import Host
from forgeasync.runtime.jobs import HostRole
from forgeasync.runtime.process_manager import ProcessManager
from forgeasync.runtime.replica_states import ReplicaState, ReplicaTable
from forgeasync.runtime.supervised import (
    Proc,
    ProcessLost,
    RestartBudget,
    RestartsFail,
    RunReports,
    Spawned,
    Supervised,
    SupervisedPool,
    call_limit,
    is_engine_dead,
    unless_lost,
)
from forgeasync.waiting import Monitor, happens_within

logger = logging.getLogger(__name__)

SpawnReplica = Callable[[int, int], Awaitable[Spawned[GeneratorActor]]]
"""Starts the process of a rank and a number, and loads its engine."""

ConnectReplica = Callable[["LiveReplica"], Awaitable[None]]
"""Connects a generator that joins during the run to the trainer's weights."""

OnChange = Callable[[], Awaitable[None]]


class LiveReplica(Supervised[GeneratorActor]):
    """A generator of the pool, which was not lost when it was assigned."""

    def __init__(
        self, pool: SupervisedPool[Any], spawned: Spawned[GeneratorActor], rank: int, number: int
    ) -> None:
        super().__init__(pool, spawned, rank, number)
        self.groups: set[int] = set()
        """Groups that it is sampling; if it is lost, those that it was sampling then."""
        self.recovered: asyncio.Future[InFlightRead] = asyncio.get_running_loop().create_future()
        """Tokens that it had in flight; set some time after its loss."""
        self.stats = EngineStats(num_generated_tokens=0, busy_s=0.0)
        """Last known counters of its engine."""


class GeneratorPool(SupervisedPool[LiveReplica]):
    """All generators of a run, or all engines of a teacher, by rank; a rank's host never changes."""

    replica_type = LiveReplica

    def __init__(
        self,
        spawn: SpawnReplica,
        reports: RunReports,
        section: GeneratorSection,
        hosts: Sequence[Host],
        *,
        role: Role = Role.GENERATOR,
        title: str = "generator",
        key: str = "generator",
    ) -> None:
        """``hosts`` has the host of every rank.

        ``title`` names the processes in messages, and ``key`` the config section that ``section`` is.
        """
        self.role, self.heartbeat_key = role, f"{key}.heartbeat_s"
        super().__init__(spawn, reports, heartbeat_s=section.heartbeat_s, title=title)
        self._section, self._key = section, key
        self._hosts = list(hosts)
        self.table = Monitor(ReplicaTable())
        """States of the generators, whose changes loops wait for."""
        self.connect: ConnectReplica | None = None
        """Connects a joining generator to the weights; None until weights are connected."""
        self._budget = RestartBudget(section.max_restarts - 1)
        self._open_faults: dict[int, list[Fault]] = {}
        """Losses without a healthy replacement yet, by rank."""
        self._lost_stats = EngineStats(num_generated_tokens=0, busy_s=0.0)
        """Sum of the counters of all ended generators."""
        self._num_tokens_kept = self._num_tokens_lost = 0
        """Tokens that lost generators had in flight; others continue from the kept ones."""
        self._listeners: list[OnChange] = []
        self.gpu_turn = asyncio.Lock() if section.colocated is Colocated.SLEEP else None
        """Held during an optimizer step, and while a generator starts, on GPUs that both roles share."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts of generators, without duplicates, in the order of ranks."""
        return tuple({host.id: host for host in self._hosts}.values())

    def host_of(self, rank: int) -> Host:
        """Return the host of a rank."""
        return self._hosts[rank]

    def rank_on_host(self, rank: int) -> int:
        """Return the index of a rank among the ranks of its host."""
        return sum(host.id == self._hosts[rank].id for host in self._hosts[:rank])

    def add_listener(self, on_change: OnChange) -> None:
        """Call ``on_change`` whenever a generator has joined or ended."""
        self._listeners.append(on_change)

    @asynccontextmanager
    async def assigned(self, num_rollouts: int, group_id: int | None = None) -> AsyncIterator[LiveReplica]:
        """Assign ``num_rollouts`` of a group to the healthy generator with the fewest, during the body.

        Waits while no generator is healthy.
        """
        replica = self._replicas[await self.table.until(lambda table: table.assign(num_rollouts))]
        if group_id is not None:
            replica.groups.add(group_id)
        try:
            yield replica
        finally:
            if group_id is not None and not replica.lost.is_set():
                replica.groups.discard(group_id)
            self.table.change(lambda table: table.ended(replica.number, num_rollouts))

    def scale_to(self, num: int, add_place: Callable[[], Host], *, drain_s: float) -> str:
        """Change the number of working generators; return a message that describes the change.

        New ones start at free places, or at places that ``add_place`` adds. Surplus generators get no new
        groups and end when their groups have ended; after ``drain_s`` other generators continue the remaining
        groups.

        Raises:
            ValueError: there is no place for them, or surplus generators are still starting.
        """
        working = self.table.state.working
        if num < len(working):
            drained = [self._replicas[one.number] for one in working[num:] if one.number in self._replicas]
            if len(drained) < len(working) - num:
                raise ValueError("generators that would have to go are just being started; try again later")
            for replica in drained:
                self.table.change(functools.partial(ReplicaTable.drain, number=replica.number))
                self._background.start(self._retire(replica, drain_s=drain_s))
            return f"ending {', '.join(replica.name for replica in drained)}"
        places: list[int] = []
        free = sorted(set(range(len(self._hosts))) - {one.rank for one in self.table.state.present})
        for _ in range(num - len(working)):
            if not free:
                self._hosts.append(add_place())
                free.append(len(self._hosts) - 1)
            places.append(free.pop(0))
        for rank in places:
            self._background.start(self._start(rank))
        return f"starting generators {places}" if places else "as many are running already"

    async def _retire(self, replica: LiveReplica, *, drain_s: float) -> None:
        number = replica.number
        await happens_within(drain_s, self.table.until(lambda table: table.of(number).num_live == 0))
        if self._replicas.pop(number, None) is None:
            return
        self.table.change(lambda table: table.remove(number))
        self._forget(replica)
        self._listing.remove(self.title, replica.rank)
        replica.end_calls()
        await self._replace(replica, None, is_wanted=False)

    def look_for_healed(self) -> None:
        """Report the recovery of losses whose replacements have become healthy."""
        for replica in self.replicas:
            if self.table.state.of(replica.number).was_healthy and replica.rank in self._open_faults:
                for fault in self._open_faults.pop(replica.rank):
                    self._faults.recovered(fault, f"was replaced by process {replica.pid}")
                self._budget.reset()

    def stats(self) -> list[EngineStats]:
        """Return the last known counters of every generator; the last entry is the sum over ended ones."""
        return [*(one.stats for one in self.replicas), self._lost_stats]

    def heard(self, replica: LiveReplica, answer: EngineStats) -> None:
        """Store the counters of a generator; those of a heartbeat have no memory."""
        replica.stats = replace(answer, memory=answer.memory or replica.stats.memory)

    def metrics(self) -> Mapping[str, float]:
        """Return counts and current values by their names in metrics.jsonl."""
        table = self.table.state
        num_tokens = self._num_tokens_kept + self._num_tokens_lost
        return {
            "generator/num_healthy": table.count(ReplicaState.HEALTHY),
            "generator/num_starting": table.count(ReplicaState.STARTING) + table.count(ReplicaState.STALE),
            "generator/num_lost": table.count(ReplicaState.DEAD),
            "generator/num_removed": table.count(ReplicaState.REMOVED),
            "faults/tokens_kept_share": self._num_tokens_kept / num_tokens if num_tokens else 1.0,
        }

    # Starts and losses.

    async def _set_up(self, rank: int, number: int) -> LiveReplica:
        async with self.gpu_turn or contextlib.nullcontext():
            return await super()._set_up(rank, number)

    def _begin(self, rank: int) -> int:
        return self.table.change(lambda table: table.start(rank, self._hosts[rank].id))

    async def _join(self, replica: LiveReplica) -> None:
        if self.connect is not None:
            await self.connect(replica)

    def _on_ready(self, replica: LiveReplica, fault: Fault | None) -> None:
        """Record that a generator can be called; its loss is recovered once it is healthy."""
        self.table.change(lambda table: table.ready(replica.number))
        self.look_for_healed()
        self._tell_listeners()

    def _on_start_failed(self, rank: int, number: int, error: Exception) -> Exception | None:
        self.table.change(lambda table: table.lose(number))
        return self._exhausted(rank, error)

    def _exhausted(self, rank: int, error: Exception) -> RestartsFail | None:
        """Count an engine that never became healthy; return an error if the budget is used up."""
        if self._budget.take():
            return None
        return RestartsFail(
            f"{self.title} {rank}: {self._budget.num_in_a_row} consecutive engines failed before they "
            f"sampled ({self._key}.max_restarts = {self._section.max_restarts}); the last one: {error}"
        )

    def _on_lost(self, replica: LiveReplica, fault: Fault) -> bool:
        known = self.table.state.of(replica.number)
        if not known.was_healthy:
            error = RuntimeError(f"{replica.name} {fault.what}")
            self._failure = self._failure or self._exhausted(replica.rank, error)
        self._forget(replica)
        is_wanted = known.state is not ReplicaState.DRAINING
        self.table.change(lambda table: table.lose(replica.number))
        if is_wanted:
            self._open_faults.setdefault(replica.rank, []).append(fault)
        else:
            self._faults.recovered(fault, "was to be removed")
        return is_wanted

    def _forget(self, replica: LiveReplica) -> None:
        """Keep the counters of a generator that has ended."""
        before, stats = self._lost_stats, replica.stats
        self._lost_stats = replace(
            before,
            num_generated_tokens=before.num_generated_tokens + stats.num_generated_tokens,
            busy_s=before.busy_s + stats.busy_s,
        )

    async def _clean_up(self, replica: LiveReplica) -> None:
        self._tell_listeners()
        left = InFlightRead(groups={}, problem="its host does not answer")
        try:
            await self._end(replica)
            left = await self._read_left(replica)
        finally:
            # Groups wait for this result.
            replica.recovered.set_result(left)

    async def _read_left(self, replica: LiveReplica) -> InFlightRead:
        """Read the tokens that a generator had in flight, after its process has ended."""
        folder = replica.spawned.in_flight
        if folder is None:
            return InFlightRead(groups={}, problem="it has kept no log (generator.keep_in_flight)")
        left = await replica.host.read_in_flight(folder, sorted(replica.groups))
        await replica.host.remove_in_flight(folder)
        self._num_tokens_kept += left.num_kept
        self._num_tokens_lost += left.num_lost
        if left.problem is not None and replica.groups:
            logger.warning("%s: what it had in flight is lost: %s", replica.name, left.problem)
        return left

    def _tell_listeners(self) -> None:
        for on_change in self._listeners:
            self._background.start(on_change())

    def _must_kill_on_close(self, replica: LiveReplica) -> bool:
        """Return whether the generator is silent; Monarch ends others, but would wait for this one."""
        return replica.heartbeat.is_late

    # Health.

    def _look_at(self, replica: LiveReplica) -> str | None:
        what = super()._look_at(replica)
        if what is None and is_engine_dead(replica.heartbeat.error):
            return "has an engine that has died"
        return what


async def spawn_engine(
    processes: ProcessManager,
    config: RunConfig,
    role: HostRole,
    name: str,
    place: int,
    host: Host,
    *,
    call: str,
    spawn: Callable[[ProcMesh], GeneratorActor],
    set_up: Callable[[GeneratorActor], Awaitable[Path | None]],
) -> Spawned[GeneratorActor]:
    """Start one process at a place of a role, and load its engine; ``call`` names this in messages.

    ``set_up`` returns the folder of the log of its tokens in flight, if it has one.

    Raises:
        ProcessLost: the process ended during the start.
        DeadlineExceeded: it took longer than ``timeouts.setup_s``.
        Exception: whatever ``set_up`` raises; the process is then killed.
    """
    mesh = processes.hosts.spawn_one(role, name, place)
    actor = spawn(mesh)
    pid = 0
    try:
        async with call_limit(config.timeouts, "setup_s", call):
            pid = await actor.pid.call_one()
            in_flight = await unless_lost(
                set_up(actor),
                Proc(role=role.value, rank=place, pid=pid, host=host).until_ended(),
                lambda: ProcessLost(f"its process {pid} has ended while it was started"),
            )
    except BaseException:
        if pid:
            await host.kill(pid)
        processes.in_background(processes.hosts.stop_one(mesh))
        raise
    return Spawned(
        actor=actor, pid=pid, host=host, stop=lambda: processes.hosts.stop_one(mesh), in_flight=in_flight
    )
