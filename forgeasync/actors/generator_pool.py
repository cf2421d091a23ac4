"""The generators of a run as a set that changes: notices those that are gone, and replaces them.

Who waits for whom: a group waits for a healthy generator; ``watch`` waits for nobody and looks at every
process and heartbeat several times a second. A generator that is gone ends all calls to it with
``ReplicaLost``; whoever asked goes on elsewhere. The one that replaces it loads its engine beside the run and
becomes healthy by an update of its weights, which is the serving loop's work.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from forgeasync.actors.generator import GeneratorActor
from forgeasync.actors.supervised import Proc, diagnose_hang
from forgeasync.config import GeneratorSection
from forgeasync.faults import LIVE, Fault, FaultLog, Pace, ReplicaState, ReplicaTable, Role, SlowReplicas
from forgeasync.generator import EngineStats
from forgeasync.launch import Host
from forgeasync.observability import ProcsFile
from forgeasync.rollouts import InFlightRead
from forgeasync.waiting import Monitor, comes_within, forget

T = TypeVar("T")

SEEN_S = 20.0
"""Time for a process to be seen to be gone after a call to it has failed: heartbeats may have to tell."""


class ReplicaLost(RuntimeError):
    """A generator is gone, with what it was sampling."""


@dataclass(slots=True, kw_only=True)
class SpawnedReplica:
    """A generator whose engine is loaded."""

    actor: GeneratorActor
    pid: int
    host: Host
    stop: Callable[[], Awaitable[None]]
    """Give back what Monarch holds of its proc, which was killed."""
    in_flight: Path | None = None
    """Folder on its host where it logs its tokens in flight; None: it does not."""


@dataclass(slots=True, kw_only=True)
class LiveReplica:
    """A generator that has not been lost, or had not been when it was chosen."""

    number: int
    """Its own: a generator that replaces it has another."""
    rank: int
    actor: GeneratorActor
    pid: int
    host: Host
    stop: Callable[[], Awaitable[None]]
    in_flight: Path | None = None
    groups: set[int] = field(default_factory=set)
    """Groups that it is sampling."""
    left: "asyncio.Future[InFlightRead]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """What it had of its groups, some time after it was lost."""
    role: Role = Role.GENERATOR
    title: str = "generator"
    """What it is called in messages."""
    give_up: "Callable[[LiveReplica, str], None]"
    """Have it killed and replaced; the words say what is wrong with it, as the rest of a sentence."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    beat_since_s: float
    """When the heartbeat under way was sent, or the next one is due."""
    beat: "asyncio.Task[EngineStats] | None" = None
    stats: EngineStats = field(default_factory=lambda: EngineStats(num_generated_tokens=0, busy_s=0.0))
    """What it had counted when it was last heard of."""

    @property
    def name(self) -> str:
        return f"{self.title} {self.rank} (process {self.pid})"

    def proc(self) -> Proc:
        return Proc(role=self.role.value, rank=self.rank, pid=self.pid, host=self.host)

    async def while_there(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call to this generator, and wait for its answer or its end.

        Raises:
            ReplicaLost: it is gone, or became so meanwhile, or its engine has died.
        """
        if self.gone.is_set():
            # A message to a process that is gone comes back as an error of this one.
            raise ReplicaLost(f"{self.name} is gone")
        answer = asyncio.ensure_future(call())
        gone = asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and not answer.cancelled() and may_be_a_death(answer.exception()):
                # The call of one that dies can fail before its process is seen to be gone.
                has_ended = gone.done() or await self.proc().has_ended()
                if is_engine_dead(answer.exception()):
                    self.give_up(self, "has an engine that has died")
                elif has_ended or not isinstance(answer.exception(), ActorError):
                    await asyncio.wait([gone], timeout=SEEN_S)
            if self.gone.is_set():
                raise ReplicaLost(f"{self.name} is gone")
            return answer.result()
        finally:
            gone.cancel()
            answer.add_done_callback(forget)
            answer.cancel()


def may_be_a_death(error: BaseException | None) -> bool:
    """Whether a call may have failed because the process that was called is dying."""
    return isinstance(error, ActorError | SupervisionError)


def is_engine_dead(error: BaseException | None) -> bool:
    """Whether an engine has died whose process lives."""
    # By its name: importing vLLM (0.32, vllm/v1/engine/exceptions.py) takes the controller 10 s.
    return isinstance(error, ActorError) and type(error.exception).__name__ == "EngineDeadError"


LOOK_S = 0.5
"""Seconds between two looks at the generators."""

BEAT_S = 1.0
"""Seconds between two heartbeats of a generator."""

SUSPECT_SHARE = 0.5
"""A generator whose answer takes so much of ``generator.heartbeat_s`` gets no new groups until it comes."""

STALL_S = 1.0
"""A look that comes later than this says that the controller itself stood still, not the generators."""


class ReplicaHealth:
    """Looks at the heartbeats of generators: ``begin_look`` at all of them, then ``look_at`` each."""

    def __init__(
        self,
        section: GeneratorSection,
        table: Monitor[ReplicaTable],
        heard: Callable[[LiveReplica, EngineStats], None],
    ) -> None:
        """``heard`` takes in what a generator has counted."""
        self._heartbeat_s = section.heartbeat_s
        self._slow_factor = section.slow_factor
        self._slow = None if section.slow_factor is None else SlowReplicas(section.slow_factor)
        self._table = table
        self._heard = heard
        self._looked_s = time.monotonic()

    def begin(self) -> None:
        """The looks begin now."""
        self._looked_s = time.monotonic()

    def begin_look(self, replicas: Iterable[LiveReplica]) -> None:
        """Do not hold against generators that this process stood still; compare their paces."""
        now_s = time.monotonic()
        late_s = now_s - self._looked_s - LOOK_S
        self._looked_s = now_s
        if late_s > STALL_S:
            for replica in replicas:
                replica.beat_since_s += late_s
            if self._slow is not None:
                self._slow.restart()
        elif self._slow is not None:
            self._slow.judge(now_s=now_s)

    def look_at(self, replica: LiveReplica) -> str | None:
        """Look at one generator; returns what is wrong with it, if it is to be given up."""
        now_s = time.monotonic()
        if replica.beat is None:
            if now_s >= replica.beat_since_s:
                replica.beat_since_s = now_s
                replica.beat = asyncio.ensure_future(replica.actor.beat.call_one())
                replica.beat.add_done_callback(forget)
        elif replica.beat.done():
            error = replica.beat.exception()
            if error is None:
                self._take_in(replica, replica.beat.result(), now_s)
            elif is_engine_dead(error):
                return "has an engine that has died"
            replica.beat, replica.beat_since_s = None, now_s + BEAT_S
        elif now_s - replica.beat_since_s > self._heartbeat_s:
            return f"has not answered for generator.heartbeat_s = {self._heartbeat_s:g} s"
        elif now_s - replica.beat_since_s > SUSPECT_SHARE * self._heartbeat_s:
            self._suspect(replica, "it does not answer")
        return self._slowness(replica)

    def _take_in(self, replica: LiveReplica, stats: EngineStats, now_s: float) -> None:
        self._heard(replica, stats)
        if self._slow is not None and self._table.state.of(replica.number).state in LIVE:
            counts = {load: (one.num_steps, one.took_s) for load, one in stats.decode_steps.items()}
            self._slow.heard(replica.number, counts, now_s=now_s)
        if self._slow is None or self._slow.pace(replica.number) is Pace.LIKE_PEERS or self._is_idle(replica):
            # One that is slow and has nothing to do is given groups: nothing else shows whether it still is.
            self._table.change(lambda table: table.clear(replica.number))

    def _is_idle(self, replica: LiveReplica) -> bool:
        return self._table.state.of(replica.number).num_live == 0

    def _slowness(self, replica: LiveReplica) -> str | None:
        if self._slow is None or (ratio := self._slow.ratio(replica.number)) is None:
            return None
        what = f"its steps take {ratio:.1f} times as long as those of its peers"
        match self._slow.pace(replica.number):
            case Pace.SLOW:
                return f"is slow: {what} (generator.slow_factor = {self._slow_factor:g})"
            case Pace.SUSPECT if not self._is_idle(replica):
                self._suspect(replica, f"it is slow: {what}")
        return None

    def _suspect(self, replica: LiveReplica, why: str) -> None:
        self._table.change(lambda table: table.suspect(replica.number, why))

    def forget(self, replica: LiveReplica) -> None:
        """A generator is gone."""
        if replica.beat is not None:
            replica.beat.cancel()
        if self._slow is not None:
            self._slow.forget(replica.number)


@dataclass(slots=True)
class GeneratorLosses:
    """Counts of generators that are gone, and losses that nothing has made up for yet."""

    faults: FaultLog
    num_tokens_kept: int = 0
    """Of what lost generators had in flight: those that others continue from."""
    num_tokens_lost: int = 0
    """The others that were logged."""
    _num_generated_tokens: int = 0
    _busy_s: float = 0.0
    _open: dict[int, list[Fault]] = field(default_factory=dict)
    """Faults by rank."""

    def count(self, replica: LiveReplica) -> None:
        """Keep what a generator that is gone had counted when it was last heard of."""
        self._num_generated_tokens += replica.stats.num_generated_tokens
        self._busy_s += replica.stats.busy_s

    def read(self, left: InFlightRead) -> None:
        """Count what a lost generator had in flight."""
        self.num_tokens_kept += left.num_kept
        self.num_tokens_lost += left.num_lost

    def wait_for(self, rank: int, fault: Fault) -> None:
        """A loss is made up for when the rank has a healthy generator."""
        self._open.setdefault(rank, []).append(fault)

    def heal(self, replica: LiveReplica) -> bool:
        """A rank has a healthy generator; whether that makes up for a loss."""
        faults = self._open.pop(replica.rank, [])
        for fault in faults:
            self.faults.recovered(fault, f"was replaced by process {replica.pid}")
        return bool(faults)

    @property
    def stats(self) -> EngineStats:
        """What all generators that are gone had counted."""
        return EngineStats(num_generated_tokens=self._num_generated_tokens, busy_s=self._busy_s)

    @property
    def tokens_kept_share(self) -> float:
        """Share of the tokens in flight that others continue from; 1 where none was lost."""
        num_tokens = self.num_tokens_kept + self.num_tokens_lost
        return self.num_tokens_kept / num_tokens if num_tokens else 1.0


logger = logging.getLogger(__name__)

END_S = 10.0
"""Time for a killed process to be gone."""

SpawnReplica = Callable[[int, int], Awaitable[SpawnedReplica]]
"""Starts the process of a rank and of a number, and loads its engine."""

ConnectReplica = Callable[[SpawnedReplica, int], Awaitable[None]]
"""Connects the generator of a rank, which comes later than others, to the trainer's weights."""

OnChange = Callable[[], Awaitable[None]]


class GeneratorsFail(RuntimeError):
    """Generators cannot be started any more."""


class GeneratorPool:
    """All generators of a run, by rank; a rank's host never changes."""

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
        self._spawn = spawn
        self._section = section
        self._hosts = list(hosts)
        self._faults = faults
        self._listing = listing
        self._role, self.title = role, title
        self.table = Monitor(ReplicaTable())
        """States of the generators; loops wait for them."""
        self.connect: ConnectReplica | None = None
        """How one that joins is connected to the weights; None: weights are not connected."""
        self._replicas: dict[int, LiveReplica] = {}
        self._has_started = False
        self._starting: set[asyncio.Task[None]] = set()
        self._stopping: set[asyncio.Task[None]] = set()
        self._num_failed_starts = 0
        self._failure: Exception | None = None
        self._health = ReplicaHealth(section, self.table, self.heard)
        self._losses = GeneratorLosses(faults)
        self._followers: list[OnChange] = []
        self._pids: dict[int, tuple[Host, int]] = {}
        """Processes that have been started and not yet seen to be gone, by number."""

    async def start(self) -> None:
        """Start a generator for each rank.

        Raises:
            Exception: what kept one of them from starting.
        """
        async with asyncio.TaskGroup() as starting:
            for rank in range(len(self._hosts)):
                is_spare = rank >= len(self._hosts) - self._section.num_spares
                starting.create_task(self._start_replica(rank, is_spare=is_spare))
        self._has_started = True

    @property
    def replicas(self) -> tuple[LiveReplica, ...]:
        """Those that have not been lost, by rank."""
        return tuple(sorted(self._replicas.values(), key=lambda one: one.rank))

    def get(self, number: int) -> LiveReplica | None:
        """One that has not been lost."""
        return self._replicas.get(number)

    def at(self, rank: int) -> LiveReplica | None:
        """The one that has a rank now."""
        return next((one for one in self._replicas.values() if one.rank == rank), None)

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

    async def watch(self) -> None:
        """Look after the generators until cancelled.

        Raises:
            GeneratorsFail: they cannot be started any more.
        """
        self._health.begin()
        while True:
            await asyncio.sleep(LOOK_S)
            if self._failure is not None:
                raise self._failure
            self._health.begin_look(replicas := self.replicas)
            have_ended = await asyncio.gather(*(one.proc().has_ended() for one in replicas))
            for replica, has_ended in zip(replicas, have_ended, strict=True):
                if has_ended:
                    self.lose(replica, "has died")
                elif replica.number in self._replicas and (what := self._health.look_at(replica)) is not None:
                    self.lose(replica, what, await diagnose_hang(self._role, (replica.host, replica.pid)))

    def lose(self, replica: LiveReplica, what: str, evidence: str | None = None) -> None:
        """Give a generator up: all calls to it end, it is killed, and another one is started.

        ``what`` is what is wrong with it, as the rest of a sentence; ``evidence`` what was seen of it. No
        news if it is lost already.
        """
        if self._replicas.pop(replica.number, None) is None:
            return
        known = self.table.state.of(replica.number)
        if not known.was_healthy:
            self._count_failed_start(replica.rank, RuntimeError(f"{replica.name} {what}"))
        is_wanted, is_spare = known.state is not ReplicaState.DRAINING, known.is_spare
        self.table.change(lambda table: table.lose(replica.number, what))
        self._losses.count(replica)
        self._health.forget(replica)
        self._listing.remove(self.title, replica.rank)
        fault = self._faults.detected(self._role, replica.name, what, evidence=evidence)
        replica.gone.set()
        promoted = None
        if is_wanted and not is_spare:
            promoted = self.table.change(lambda table: table.promote())
        if not is_wanted:
            self._faults.recovered(fault, "was to be removed")
        elif promoted is not None:
            spare = self._replicas[promoted]
            self._faults.recovered(fault, f"was replaced by the spare {spare.name}")
        else:
            self._losses.wait_for(replica.rank, fault)
        self._tell_followers()
        self._in_background(
            self._starting,
            self._replace(replica, is_wanted=is_wanted, is_spare=is_spare or promoted is not None),
        )

    async def _replace(self, replica: LiveReplica, *, is_wanted: bool, is_spare: bool) -> None:
        left = InFlightRead(groups={}, problem="its host does not answer")
        try:
            await self._end(replica.number)
            left = await self._read_left(replica)
        finally:
            # Groups wait for it.
            replica.left.set_result(left)
        self._in_background(self._stopping, replica.stop())
        if is_wanted:
            await self._start_replica(replica.rank, is_spare=is_spare)

    async def _read_left(self, replica: LiveReplica) -> InFlightRead:
        """Read what a generator had in flight, now that its process has ended."""
        if replica.in_flight is None:
            return InFlightRead(groups={}, problem="it has kept no log (generator.keep_in_flight)")
        left = await replica.host.read_in_flight(replica.in_flight, sorted(replica.groups))
        await replica.host.remove_in_flight(replica.in_flight)
        self._losses.read(left)
        if left.problem is not None and replica.groups:
            logger.warning("%s: what it had in flight is lost: %s", replica.name, left.problem)
        return left

    async def _end(self, number: int) -> None:
        """Kill a process and wait until it has given everything back, its GPUs among it."""
        host, pid = self._pids[number]
        await host.kill(pid)
        proc = Proc(role=self._role.value, rank=number, pid=pid, host=host)
        end_s = time.monotonic() + END_S
        while not await proc.has_ended() and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        self._pids.pop(number, None)

    async def _start_replica(self, rank: int, *, is_spare: bool) -> None:
        host = self._hosts[rank]
        number = self.table.change(lambda table: table.start(rank, host.id, is_spare=is_spare))
        try:
            spawned = await self._spawn(rank, number)
            self._pids[number] = (spawned.host, spawned.pid)
            try:
                if self.connect is not None:
                    await self.connect(spawned, rank)
            except BaseException:
                await self._end(number)
                self._in_background(self._stopping, spawned.stop())
                raise
        except Exception as error:
            what = str(error)
            self.table.change(lambda table: table.lose(number, what))
            if not self._has_started:
                raise
            self._count_failed_start(rank, error)
            if self._failure is None:
                logger.warning("%s %d cannot be started; trying again", self.title, rank, exc_info=error)
                self._in_background(self._starting, self._start_replica(rank, is_spare=is_spare))
            return
        self._replicas[number] = LiveReplica(
            number=number,
            rank=rank,
            actor=spawned.actor,
            pid=spawned.pid,
            host=spawned.host,
            stop=spawned.stop,
            in_flight=spawned.in_flight,
            role=self._role,
            title=self.title,
            give_up=self.lose,
            beat_since_s=time.monotonic(),
        )
        self._listing.put(self.title, rank, pid=spawned.pid, host=spawned.host.id)
        self.table.change(lambda table: table.ready(number))
        self.look_for_healed()
        self._tell_followers()

    def _count_failed_start(self, rank: int, error: Exception) -> None:
        self._num_failed_starts += 1
        if self._num_failed_starts >= self._section.max_restarts:
            self._failure = GeneratorsFail(
                f"{self.title} {rank}: {self._num_failed_starts} engines in a row did not come to sample "
                f"(generator.max_restarts = {self._section.max_restarts}); the last one: {error}"
            )
            self._failure.__cause__ = error

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
                self._in_background(self._starting, self._retire(replica, drain_s=drain_s))
            return f"ending {', '.join(replica.name for replica in drained)}"
        places: list[int] = []
        free = sorted(set(range(len(self._hosts))) - {one.rank for one in self.table.state.present})
        for _ in range(num - len(working)):
            if not free:
                self._hosts.append(add_place())
                free.append(len(self._hosts) - 1)
            places.append(free.pop(0))
        for rank in places:
            self._in_background(self._starting, self._start_replica(rank, is_spare=False))
        return f"starting generators {places}" if places else "there are so many already"

    async def _retire(self, replica: LiveReplica, *, drain_s: float) -> None:
        number = replica.number
        await comes_within(drain_s, self.table.until(lambda table: table.of(number).num_live == 0))
        if self._replicas.pop(number, None) is None:
            return
        self.table.change(lambda table: table.remove(number))
        self._losses.count(replica)
        self._health.forget(replica)
        self._listing.remove(self.title, replica.rank)
        replica.gone.set()
        self._tell_followers()
        await self._replace(replica, is_wanted=False, is_spare=False)

    def look_for_healed(self) -> None:
        """Take note of generators that have become healthy in the place of lost ones."""
        for replica in self.replicas:
            if self.table.state.of(replica.number).was_healthy and self._losses.heal(replica):
                self._num_failed_starts = 0

    def stats(self) -> list[EngineStats]:
        """What was last heard of every generator; the last entry is of all that were lost together."""
        return [*(one.stats for one in self.replicas), self._losses.stats]

    def heard(self, replica: LiveReplica, stats: EngineStats) -> None:
        """Take note of what a generator has counted; a heartbeat does not measure memory."""
        replica.stats = replace(stats, memory=stats.memory or replica.stats.memory)

    def metrics(self) -> Mapping[str, float]:
        """Return counts and current values under their names in metrics.jsonl."""
        table = self.table.state
        return {
            "generator/num_healthy": table.count(ReplicaState.HEALTHY),
            "generator/num_suspect": table.count(ReplicaState.SUSPECT),
            "generator/num_starting": table.count(ReplicaState.STARTING) + table.count(ReplicaState.STALE),
            "generator/num_lost": table.num_lost,
            "generator/num_removed": table.num_removed,
            "faults/tokens_kept_share": self._losses.tokens_kept_share,
        }

    async def close(self) -> None:
        """Begin nothing more, and kill those that cannot end by themselves."""
        for task in (*self._starting, *self._stopping):
            task.cancel()
        await asyncio.gather(*self._starting, *self._stopping, return_exceptions=True)
        now_s = time.monotonic()
        for replica in self.replicas:
            is_silent = replica.beat is not None and now_s - replica.beat_since_s > BEAT_S
            if replica.beat is not None:
                replica.beat.cancel()
            if is_silent:
                # Monarch would wait for its answer.
                await self._end(replica.number)

    def _tell_followers(self) -> None:
        for on_change in self._followers:
            self._in_background(self._stopping, on_change())

    def _in_background(self, tasks: "set[asyncio.Task[None]]", work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(self._note_failure)

    def _note_failure(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("in the background of the generators", exc_info=error)
