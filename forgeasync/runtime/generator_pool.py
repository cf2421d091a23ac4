"""The generators of a run, or the engines of a teacher: who may be given groups, and who replaces whom.

Who waits for whom: a group waits for a healthy generator. Calls to a generator that is lost end with
``ProcessLost``; whoever asked goes on elsewhere. The one that replaces it loads its engine beside the run and
becomes healthy by an update of its weights, which is the serving loop's work.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from monarch.actor import ProcMesh

from forgeasync.config import GeneratorSection, RunConfig
from forgeasync.generator import EngineStats
from forgeasync.observability import Fault, FaultLog, ProcsFile, Role
from forgeasync.rollouts import InFlightRead
from forgeasync.runtime.generator import GeneratorActor
from forgeasync.runtime.hosts import Host
from forgeasync.runtime.jobs import HostRole
from forgeasync.runtime.process_manager import ProcessManager
from forgeasync.runtime.replica_states import LIVE, ReplicaState, ReplicaTable
from forgeasync.runtime.slow_replicas import Pace, SlowReplicas
from forgeasync.runtime.supervised import (
    LOOK_S,
    Heartbeat,
    Proc,
    ProcessLost,
    RestartBudget,
    RestartsFail,
    Spawned,
    Supervised,
    SupervisedPool,
    is_engine_dead,
    unless_lost,
)
from forgeasync.waiting import Monitor, comes_within, deadline

logger = logging.getLogger(__name__)

SUSPECT_SHARE = 0.5
"""A generator whose answer takes so much of ``generator.heartbeat_s`` gets no new groups until it comes."""

STALL_S = 1.0
"""A look that comes later than this says that the controller itself stood still, not the generators."""

SpawnReplica = Callable[[int, int], Awaitable[Spawned[GeneratorActor]]]
"""Starts the process of a rank and of a number, and loads its engine."""

ConnectReplica = Callable[["LiveReplica"], Awaitable[None]]
"""Connects a generator, which comes later than others, to the trainer's weights."""

OnChange = Callable[[], Awaitable[None]]


class LiveReplica(Supervised[GeneratorActor]):
    """A generator that has not been lost, or had not been when it was chosen."""

    def __init__(
        self,
        pool: "SupervisedPool[LiveReplica]",
        spawned: Spawned[GeneratorActor],
        *,
        name: str,
        rank: int,
        number: int,
        heartbeat: Heartbeat[EngineStats],
    ) -> None:
        super().__init__(pool, spawned, name=name, rank=rank, number=number, heartbeat=heartbeat)
        self.groups: set[int] = set()
        """Groups that it is sampling."""
        self.left: asyncio.Future[InFlightRead] = asyncio.get_running_loop().create_future()
        """What it had of its groups, some time after it was lost."""
        self.stats = EngineStats(num_generated_tokens=0, busy_s=0.0)
        """What it had counted when it was last heard of."""


@contextmanager
def sampling_group(replica: LiveReplica, group_id: int | None) -> Iterator[None]:
    """Count a group among those that a generator is sampling; it stays there if the generator is lost."""
    if group_id is not None:
        replica.groups.add(group_id)
    try:
        yield
    finally:
        if group_id is not None and not replica.lost.is_set():
            replica.groups.discard(group_id)


class GeneratorPool(SupervisedPool[LiveReplica]):
    """All generators of a run, or all engines of a teacher, by rank; a rank's host never changes."""

    def __init__(
        self,
        spawn: SpawnReplica,
        section: GeneratorSection,
        hosts: Sequence[Host],
        *,
        faults: FaultLog,
        listing: ProcsFile,
        role: Role = Role.GENERATOR,
        title: str = "generator",
    ) -> None:
        """``hosts`` says for every rank where it is; the last ``section.num_spares`` begin as spares.

        ``title`` is what they are called in messages.
        """
        super().__init__(role, faults=faults, listing=listing, title=title)
        self._spawn = spawn
        self._section = section
        self._hosts = list(hosts)
        self.table = Monitor(ReplicaTable())
        """States of the generators; loops wait for them."""
        self.connect: ConnectReplica | None = None
        """How one that joins is connected to the weights; None: weights are not connected."""
        self._spares = set(range(len(hosts) - section.num_spares, len(hosts)))
        """Ranks whose next generator begins as a spare."""
        self._budget = RestartBudget(section.max_restarts - 1)
        self._slow = None if section.slow_factor is None else SlowReplicas(section.slow_factor)
        self._looked_s = time.monotonic()
        self._open_faults: dict[int, list[Fault]] = {}
        """Losses that nothing has made up for yet, by rank."""
        self._lost_stats = EngineStats(num_generated_tokens=0, busy_s=0.0)
        """What all generators that are gone had counted."""
        self._num_tokens_kept = self._num_tokens_lost = 0
        """Tokens that lost generators had in flight: others continue from those that are kept."""
        self._followers: list[OnChange] = []

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Each host of generators once, in the order of ranks."""
        return tuple({host.id: host for host in self._hosts}.values())

    def host_of(self, rank: int) -> Host:
        """Where a rank is."""
        return self._hosts[rank]

    def rank_on_host(self, rank: int) -> int:
        """Its place among the ranks of its host."""
        return sum(host.id == self._hosts[rank].id for host in self._hosts[:rank])

    def follow(self, on_change: OnChange) -> None:
        """Have ``on_change`` called whenever a generator has come or gone."""
        self._followers.append(on_change)

    async def assigned(self, num_rollouts: int) -> LiveReplica:
        """Give rollouts to the healthy generator with the fewest, as soon as there is one.

        ``table.ended`` has to follow.
        """
        return self._replicas[await self.table.until(lambda table: table.assign(num_rollouts))]

    def want(self, num: int, add_place: Callable[[], Host], *, drain_s: float) -> str:
        """Have so many generators be given groups from now on; returns in words what is done for it.

        More are started at free places, or at those that ``add_place`` makes. Those that are too many get no
        more groups, and end when theirs have; what goes on after ``drain_s`` is continued elsewhere.

        Raises:
            ValueError: there is no place for them, or those that are too many are just being started.
        """
        working = self.table.state.working
        if num < len(working):
            drained = [self._replicas[one.number] for one in working[num:] if one.number in self._replicas]
            if len(drained) < len(working) - num:
                raise ValueError("generators that would have to go are just being started; try again later")
            for replica in drained:
                drain = functools.partial(ReplicaTable.drain, number=replica.number, why="not wanted")
                self.table.change(drain)
                self._in_background(self._retire(replica, drain_s=drain_s))
            return f"ending {', '.join(replica.name for replica in drained)}"
        places: list[int] = []
        free = sorted(set(range(len(self._hosts))) - {one.rank for one in self.table.state.present})
        for _ in range(num - len(working)):
            if not free:
                self._hosts.append(add_place())
                free.append(len(self._hosts) - 1)
            places.append(free.pop(0))
        for rank in places:
            self._spares.discard(rank)
            self._in_background(self._start(rank))
        return f"starting generators {places}" if places else "there are so many already"

    async def _retire(self, replica: LiveReplica, *, drain_s: float) -> None:
        number = replica.number
        await comes_within(drain_s, self.table.until(lambda table: table.of(number).num_live == 0))
        if self._replicas.pop(number, None) is None:
            return
        self.table.change(lambda table: table.remove(number))
        self._forget(replica)
        self._listing.remove(self.title, replica.rank)
        replica.end_calls()
        await self._replace(replica, None, is_wanted=False)

    def look_for_healed(self) -> None:
        """Take note of generators that have become healthy in the place of lost ones."""
        for replica in self.replicas:
            if self.table.state.of(replica.number).was_healthy and replica.rank in self._open_faults:
                for fault in self._open_faults.pop(replica.rank):
                    self._faults.recovered(fault, f"was replaced by process {replica.pid}")
                self._budget.reset()

    def stats(self) -> list[EngineStats]:
        """What was last heard of every generator; the last entry is of all that were lost together."""
        return [*(one.stats for one in self.replicas), self._lost_stats]

    def heard(self, replica: LiveReplica, stats: EngineStats) -> None:
        """Take note of what a generator has counted; a heartbeat does not measure memory."""
        replica.stats = replace(stats, memory=stats.memory or replica.stats.memory)

    def metrics(self) -> Mapping[str, float]:
        """Return counts and current values under their names in metrics.jsonl."""
        table = self.table.state
        num_tokens = self._num_tokens_kept + self._num_tokens_lost
        return {
            "generator/num_healthy": table.count(ReplicaState.HEALTHY),
            "generator/num_suspect": table.count(ReplicaState.SUSPECT),
            "generator/num_starting": table.count(ReplicaState.STARTING) + table.count(ReplicaState.STALE),
            "generator/num_lost": table.num_lost,
            "generator/num_removed": table.num_removed,
            "faults/tokens_kept_share": self._num_tokens_kept / num_tokens if num_tokens else 1.0,
        }

    # Starts and losses.

    def _begin(self, rank: int) -> int:
        host, is_spare = self._hosts[rank].id, rank in self._spares
        return self.table.change(lambda table: table.start(rank, host, is_spare=is_spare))

    async def _set_up(self, rank: int, number: int) -> LiveReplica:
        spawned = await self._spawn(rank, number)
        heartbeat = Heartbeat[EngineStats](
            spawned.actor.beat.call_one,
            limit_s=self._section.heartbeat_s,
            key="generator.heartbeat_s",
            heard=lambda stats: self._take_in(replica, stats),
        )
        name = f"{self.title} {rank}"
        replica = LiveReplica(self, spawned, name=name, rank=rank, number=number, heartbeat=heartbeat)
        return await self._joined(replica, self._connect(replica))

    async def _connect(self, replica: LiveReplica) -> None:
        if self.connect is not None:
            await self.connect(replica)

    def _has_joined(self, replica: LiveReplica, fault: Fault | None) -> None:
        """It makes up for the loss once it is healthy."""
        self.table.change(lambda table: table.ready(replica.number))
        self.look_for_healed()
        self._tell_followers()

    def _failed(self, rank: int, number: int, error: Exception) -> Exception | None:
        self.table.change(lambda table: table.lose(number, str(error)))
        return self._exhausted(rank, error)

    def _exhausted(self, rank: int, error: Exception) -> RestartsFail | None:
        """Count an engine that did not come to sample; returns an error if the budget is used up."""
        if self._budget.take():
            return None
        return RestartsFail(
            f"{self.title} {rank}: {self._budget.num_in_a_row} engines in a row did not come to sample "
            f"(generator.max_restarts = {self._section.max_restarts}); the last one: {error}"
        )

    def _is_lost(self, replica: LiveReplica, what: str) -> str:
        if not self.table.state.of(replica.number).was_healthy:
            error = RuntimeError(f"{replica.name} {what}")
            self._failure = self._failure or self._exhausted(replica.rank, error)
        self._forget(replica)
        return ""

    def _is_wanted(self, replica: LiveReplica, fault: Fault) -> bool:
        known = self.table.state.of(replica.number)
        is_wanted, is_spare = known.state is not ReplicaState.DRAINING, known.is_spare
        self.table.change(lambda table: table.lose(replica.number, fault.what))
        promoted = None
        if is_wanted and not is_spare:
            promoted = self.table.change(lambda table: table.promote())
        if not is_wanted:
            self._faults.recovered(fault, "was to be removed")
        elif promoted is not None:
            spare = self._replicas[promoted]
            self._spares.discard(spare.rank)
            self._faults.recovered(fault, f"was replaced by the spare {spare.name}")
        else:
            self._open_faults.setdefault(replica.rank, []).append(fault)
        if is_spare or promoted is not None:
            self._spares.add(replica.rank)
        return is_wanted

    def _forget(self, replica: LiveReplica) -> None:
        """Keep what a generator that is gone has counted."""
        before, stats = self._lost_stats, replica.stats
        self._lost_stats = replace(
            before,
            num_generated_tokens=before.num_generated_tokens + stats.num_generated_tokens,
            busy_s=before.busy_s + stats.busy_s,
        )
        if self._slow is not None:
            self._slow.forget(replica.number)

    async def _clean_up(self, replica: LiveReplica) -> None:
        self._tell_followers()
        left = InFlightRead(groups={}, problem="its host does not answer")
        try:
            await self._end(replica)
            left = await self._read_left(replica)
        finally:
            # Groups wait for it.
            replica.left.set_result(left)

    async def _read_left(self, replica: LiveReplica) -> InFlightRead:
        """Read what a generator had in flight, now that its process has ended."""
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

    def _tell_followers(self) -> None:
        for on_change in self._followers:
            self._in_background(on_change())

    def _dies_at_the_end(self, replica: LiveReplica) -> bool:
        """Monarch would wait for the answer of one that is silent; it ends the others."""
        return replica.heartbeat.is_late

    # Health.

    async def _look(self) -> None:
        now_s = time.monotonic()
        is_late = now_s - self._looked_s > LOOK_S + STALL_S
        self._looked_s = now_s
        if self._slow is not None and is_late:
            self._slow.restart()
        elif self._slow is not None:
            self._slow.judge(now_s=now_s)
        await super()._look()

    def _look_at(self, replica: LiveReplica) -> str | None:
        if (what := super()._look_at(replica)) is not None:
            return what
        if is_engine_dead(replica.heartbeat.error):
            return "has an engine that has died"
        if replica.heartbeat.silent_s > SUSPECT_SHARE * self._section.heartbeat_s:
            self._suspect(replica, "it does not answer")
        return self._slowness(replica)

    def _take_in(self, replica: LiveReplica, stats: EngineStats) -> None:
        """Take in the answer to a heartbeat."""
        self.heard(replica, stats)
        if self._slow is not None and self.table.state.of(replica.number).state in LIVE:
            counts = {load: (one.num_steps, one.took_s) for load, one in stats.decode_steps.items()}
            self._slow.heard(replica.number, counts, now_s=time.monotonic())
        if self._slow is None or self._slow.pace(replica.number) is Pace.LIKE_PEERS or self._is_idle(replica):
            # One that is slow and has nothing to do is given groups: nothing else shows whether it still is.
            self.table.change(lambda table: table.clear(replica.number))

    def _is_idle(self, replica: LiveReplica) -> bool:
        return self.table.state.of(replica.number).num_live == 0

    def _slowness(self, replica: LiveReplica) -> str | None:
        if self._slow is None or (ratio := self._slow.ratio(replica.number)) is None:
            return None
        what = f"its steps take {ratio:.1f} times as long as those of its peers"
        match self._slow.pace(replica.number):
            case Pace.SLOW:
                return f"is slow: {what} (generator.slow_factor = {self._section.slow_factor:g})"
            case Pace.SUSPECT if not self._is_idle(replica):
                self._suspect(replica, f"it is slow: {what}")
        return None

    def _suspect(self, replica: LiveReplica, why: str) -> None:
        self.table.change(lambda table: table.suspect(replica.number, why))


async def spawn_engine(
    procs: ProcessManager,
    config: RunConfig,
    role: HostRole,
    name: str,
    place: int,
    host: Host,
    *,
    call: str,
    spawn: Callable[[ProcMesh], GeneratorActor],
    set_up: Callable[[GeneratorActor], Awaitable[object]],
) -> Spawned[GeneratorActor]:
    """Start one process at a place of a role, and load its engine; ``call`` names this in messages.

    Raises:
        ProcessLost: its process has ended meanwhile.
        DeadlineExceeded: it took longer than ``timeouts.setup_s``.
        Exception: whatever ``set_up`` raises. The process is killed then.
    """
    mesh = procs.hosts.spawn_one(role, name, place)
    actor = spawn(mesh)
    pid = 0
    try:
        async with deadline(config.timeouts.setup_s, call=call, key="timeouts.setup_s"):
            pid = await actor.pid.call_one()
            await unless_lost(
                set_up(actor),
                Proc(role=role.value, rank=place, pid=pid, host=host).until_ended(),
                lambda: ProcessLost(f"its process {pid} has ended while it was started"),
            )
            in_flight = await actor.in_flight.call_one()
    except BaseException:
        if pid:
            await host.kill(pid)
        procs.in_background(procs.hosts.stop_one(mesh))
        raise
    return Spawned(
        actor=actor, pid=pid, host=host, stop=lambda: procs.hosts.stop_one(mesh), in_flight=in_flight
    )
