"""Supervised processes: generators, scorers, environment workers, engines of teachers and the buffer.

A ``SupervisedPool`` starts one process at each of its places. Twice a second it checks whether each process
exists. A second after each answer it sends the next heartbeat. A process that has died or does not answer is
lost: its calls end with ``ProcessLost``, the process and everything that it has started are killed, and
another one starts at its place. Failed starts are repeated until the restart budget is used up, which ends
the run.

Who waits for whom: a call waits for its answer or for the loss of its process; ``watch`` does not wait.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, this_host

from forgeasync.config import TimeoutSection
from forgeasync.observability import Fault, FaultLog, ProcessListFile, Role, describe_error
from forgeasync.processes import NotEnded, end_all, marked_processes
from forgeasync.runtime.hosts import LOCAL_HOST_ID, LocalHost, stop
from forgeasync.runtime.placement import spawn_role
from forgeasync.runtime.stalls import LIMIT_S
from forgeasync.waiting import DeadlineExceeded, deadline, forget

if TYPE_CHECKING:
    from forgeasync.runtime.job_hosts import Host

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two checks of a process."""

BEAT_S = 1.0
"""Seconds between an answer and the next heartbeat."""

DEATH_SEEN_S = 20.0
"""Seconds that the end of a process may take to be noticed after a call to it has failed."""

END_S = 10.0
"""Time limit for a killed process to end, in seconds."""

RETRY_S = 1.0
"""Seconds between two attempts to start a process."""

PEER_END_S = 1.0
"""Time limit for checking whether a process has ended: its peers fail within milliseconds of its end."""

ANSWER_S = LIMIT_S + 2.0
"""Time limit for reading the stacks of a process on its host, in seconds."""

T = TypeVar("T")
ActorT = TypeVar("ActorT")
LocalActorT = TypeVar("LocalActorT", bound=Actor)


class ActorDied(RuntimeError):
    """A process ended, or one of its actors failed outside of a call, and the run cannot continue."""


class ProcessLost(RuntimeError):
    """A process ended before it answered; its work is lost."""


class RestartsFail(RuntimeError):
    """The restart budget of a role is used up."""


def call_limit(timeouts: TimeoutSection, key: str, call: str) -> AbstractAsyncContextManager[None]:
    """Limit the body to the time that ``timeouts`` has under ``key``; see ``deadline``."""
    return deadline(getattr(timeouts, key), call=call, key=f"timeouts.{key}")


async def unless_lost(work: Awaitable[T], loss: Awaitable[object], error: Callable[[], Exception]) -> T:
    """Return the result of ``work``, unless ``loss`` completes first; the other one is cancelled.

    Raises:
        Exception: ``error()`` if ``loss`` completed first, or the exception of ``loss`` or ``work``.
    """
    working, losing = asyncio.ensure_future(work), asyncio.ensure_future(loss)
    try:
        await asyncio.wait([working, losing], return_when=asyncio.FIRST_COMPLETED)
        if losing.done():
            losing.result()
            raise error()
        return working.result()
    finally:
        for one in (working, losing):
            one.add_done_callback(forget)
            one.cancel()


# --- One process ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Proc:
    """One process of a role on its host."""

    role: str
    rank: int
    pid: int
    host: "Host"

    async def has_ended(self) -> bool:
        """Return whether the process has ended; False if its host does not answer (reported elsewhere)."""
        call = f"looking for {self.role} rank {self.rank}"
        try:
            async with deadline(PEER_END_S, call=call, key="PEER_END_S in supervised.py"):
                return not await self.host.is_running(self.pid)
        except (ActorError, SupervisionError, DeadlineExceeded):
            return False

    async def until_ended(self) -> None:
        """Wait until the process has ended."""
        while not await self.has_ended():
            await asyncio.sleep(LOOK_S)


async def first_ended(processes: Sequence[Proc], *, within_s: float) -> Proc | None:
    """Return a process that has ended or ends within ``within_s``, else None. Checks at least once."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + within_s
    while True:
        have_ended = await asyncio.gather(*(proc.has_ended() for proc in processes))
        for proc, has_ended in zip(processes, have_ended, strict=True):
            if has_ended:
                return proc
        if loop.time() >= end_s:
            return None
        await asyncio.sleep(0.1)


class Heartbeat(Generic[T]):
    """Sends heartbeats to an actor. Its supervisor calls ``look`` periodically."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[T]],
        *,
        limit_s: float,
        key: str,
        heard: Callable[[T], None] = lambda answer: None,
    ) -> None:
        """``ask`` sends a heartbeat, which the actor's event loop answers within ``limit_s`` (config key
        ``key``).

        ``heard`` is called with each answer.
        """
        self._ask = ask
        self._limit_s, self._key, self._heard = limit_s, key, heard
        self._question: asyncio.Future[T] | None = None
        self._sent_s = self._looked_s = time.monotonic()
        self._rest_s = 0.0
        self.silent_s = 0.0
        """Time that the open heartbeat has been without an answer."""
        self.error: BaseException | None = None
        """Error of the last heartbeat; None if it succeeded."""

    def look(self) -> str | None:
        """Process an answer, or send the next heartbeat; returns a message after a silence of ``limit_s``.

        Time during which the controller itself was stopped does not count as silence.
        """
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, 2 * LOOK_S), now_s
        if self._question is None:
            self._rest_s -= passed_s
            if self._rest_s <= 0.0:
                self._sent_s = now_s
                self._question = asyncio.ensure_future(self._ask())
                self._question.add_done_callback(forget)
        elif self._question.done():
            self.error = None if self._question.cancelled() else self._question.exception()
            if self.error is None and not self._question.cancelled():
                self._heard(self._question.result())
            self._question, self._rest_s, self.silent_s = None, BEAT_S, 0.0
        else:
            self.silent_s += passed_s
        if self.silent_s > self._limit_s:
            return f"has not answered for {self._key} = {self._limit_s:g} s"
        return None

    @property
    def is_late(self) -> bool:
        """Whether the open heartbeat was sent more than ``BEAT_S`` ago."""
        is_open = self._question is not None and not self._question.done()
        return is_open and time.monotonic() - self._sent_s > BEAT_S

    def stop(self) -> None:
        """Cancel the open heartbeat."""
        if self._question is not None:
            self._question.cancel()


@dataclass(slots=True, kw_only=True)
class Spawned(Generic[ActorT]):
    """A process that has been set up."""

    actor: ActorT
    pid: int
    stop: Callable[[], Awaitable[None]]
    """Releases the process's mesh in Monarch, also after its end."""
    host: "Host" = field(default_factory=lambda: LocalHost(LOCAL_HOST_ID, []))
    mark: str | None = None
    """Mark in the environment of all processes that it starts, which identifies them after its end."""
    in_flight: Path | None = None
    """Folder on its host where a generator logs its tokens in flight; None: it does not log them."""


class ProcessReady(Protocol):
    """Answer of an actor once it is set up."""

    @property
    def pid(self) -> int: ...

    @property
    def mark(self) -> str:
        """Mark in the environment of all processes that this process starts."""
        ...


async def spawn_local(
    role: str,
    name: str,
    actor_type: type[LocalActorT],
    *arguments: object,
    set_up: Callable[[LocalActorT], Awaitable[ProcessReady]],
    call: str,
    timeouts: TimeoutSection,
) -> Spawned[LocalActorT]:
    """Start a process on the controller's machine and set it up, in a mesh that can be stopped separately.

    ``call`` names this in messages.

    Raises:
        DeadlineExceeded: ``set_up`` took longer than ``timeouts.setup_s``.
        Exception: whatever ``set_up`` raises; the process is then stopped.
    """
    mesh = spawn_role(this_host(), role, num_procs=1)
    actor = mesh.spawn(name, actor_type, *arguments)
    try:
        async with call_limit(timeouts, "setup_s", call):
            ready = await set_up(actor)
    except BaseException:
        await stop(mesh)
        raise
    return Spawned(actor=actor, pid=ready.pid, mark=ready.mark, stop=lambda: stop(mesh))


class Supervised(Generic[ActorT]):
    """One process of a pool, from a caller's point of view."""

    def __init__(self, pool: "SupervisedPool[Any]", spawned: Spawned[ActorT], rank: int, number: int) -> None:
        """``rank`` is its place in the pool. ``number`` is unique in the pool, also among replacements."""
        self._pool = pool
        self.spawned, self.actor = spawned, spawned.actor
        self.pid, self.host = spawned.pid, spawned.host
        self.proc = Proc(role=pool.role.value, rank=rank, pid=spawned.pid, host=spawned.host)
        self.name = f"{pool.name_of(rank, number)} (process {spawned.pid})"
        self.rank, self.number = rank, number
        self.heartbeat = pool.heartbeat_of(self)
        self.lost = asyncio.Event()

    async def call(self, make: Callable[[], Awaitable[T]]) -> T:
        """Call this process and return its answer.

        Raises:
            ProcessLost: the process is lost, or becomes so before it answers.
            Exception: whatever the call raises in a live process.
        """
        if self.lost.is_set():
            # Monarch returns a message to a dead process as an error of this process.
            raise self.lost_error()
        answer = await unless_lost(self._answer(make), self.lost.wait(), self.lost_error)
        if self.lost.is_set():
            raise self.lost_error()
        return answer

    async def _answer(self, make: Callable[[], Awaitable[T]]) -> T:
        try:
            return await make()
        except Exception as error:
            if is_engine_dead(error):
                self.lose("has an engine that has died")
            elif isinstance(error, SupervisionError) or await self.proc.has_ended():
                # The call can fail before the end of the process is noticed.
                await asyncio.sleep(DEATH_SEEN_S)
                self.lose("did not survive a failed call")
            raise

    def lose(self, what: str) -> None:
        """Give the process up, unless it is lost. ``what`` is the problem, which completes a sentence."""
        self._pool.lose(self, what)

    def end_calls(self) -> None:
        """End all calls to the process, and its heartbeats."""
        self.lost.set()
        self.heartbeat.stop()

    def lost_error(self) -> ProcessLost:
        """Return the error for calls to a lost process."""
        return ProcessLost(f"{self.name} is gone")


def is_engine_dead(error: BaseException | None) -> bool:
    """Return whether a call failed because its engine has died while the process lives."""
    # Compared by name, because importing vLLM (0.32, vllm/v1/engine/exceptions.py) takes the controller 10 s.
    return isinstance(error, ActorError) and type(error.exception).__name__ == "EngineDeadError"


def kill_marked(mark: str) -> None:
    """Kill all processes that a process with this mark has started; they may have outlived it."""
    with suppress(NotEnded):
        end_all(partial(marked_processes, mark), limit_s=END_S)


# --- Diagnosis of a process that does not answer ---


async def stacks_of(host: "Host", pid: int) -> str:
    """Return the Python stacks of a process in one line, or why they cannot be read."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await host.read_stacks(pid)
    except (ActorError, SupervisionError, TimeoutError) as error:
        return f"its stack is not known: host {host.id} does not answer ({type(error).__name__})"


async def diagnose_hang(*processes: Proc) -> str:
    """Return the stacks of processes in one line."""
    stacks = await asyncio.gather(*(stacks_of(one.host, one.pid) for one in processes))
    if len(stacks) > 1:
        stacks = [f"process {one.pid}: {stack}" for one, stack in zip(processes, stacks, strict=True)]
    return "; ".join(stacks)


# --- Pools ---


@dataclass(slots=True)
class RestartBudget:
    """Limits restarts by the number of consecutive failures."""

    max_in_a_row: int
    """Maximum number of consecutive failures that are each followed by another start."""
    num_in_a_row: int = 0

    def take(self) -> bool:
        """Count a failure; return whether another start is allowed."""
        self.num_in_a_row += 1
        return self.num_in_a_row <= self.max_in_a_row

    def reset(self) -> None:
        """Reset the count, because a process works."""
        self.num_in_a_row = 0


class BackgroundTasks:
    """Tasks that run in the background; their errors are logged."""

    def __init__(self, owner: str) -> None:
        """``owner`` names the owner of the tasks in the log."""
        self._owner = owner
        self._tasks: set[asyncio.Future[None]] = set()

    def start(self, work: Awaitable[None]) -> None:
        """Run ``work`` until it ends, or ``cancel`` is called."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._has_ended)

    def _has_ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("in the background of %s: %s", self._owner, describe_error(error), exc_info=error)

    def cancel(self) -> None:
        """Cancel all tasks without waiting for them."""
        for task in tuple(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks, and those that they start meanwhile, and wait until they have ended."""
        while self._tasks:
            self.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


ReplicaT = TypeVar("ReplicaT", bound=Supervised[Any])


class RunReports(Protocol):
    """Where pools report to; the run's ``ProcessManager``."""

    faults: FaultLog
    """Log of losses and recoveries."""
    listing: ProcessListFile
    """File that lists the live processes."""


class SupervisedPool(Generic[ReplicaT]):
    """The processes of one role; subclasses define role-specific behavior, such as the effect of a loss."""

    role: Role
    heartbeat_key: str
    """Config key of the time within which a healthy process answers."""
    replica_type: Callable[["SupervisedPool[Any]", Spawned[Any], int, int], ReplicaT]
    after_loss = ""
    """End of the report of a loss, which describes what happens next."""

    def __init__(
        self,
        spawn: Callable[[int, int], Awaitable[Spawned[Any]]],
        reports: RunReports,
        *,
        heartbeat_s: float,
        title: str | None = None,
    ) -> None:
        """``spawn`` starts and sets up a process, given its place and a unique number.

        A healthy actor answers ``beat`` within ``heartbeat_s``. ``title`` names the processes in the listing;
        None: the role does.
        """
        self.title = self.role.value if title is None else title
        self._spawn = spawn
        self._heartbeat_s = heartbeat_s
        self._faults, self._listing = reports.faults, reports.listing
        self._numbers = count()
        self._replicas: dict[int, ReplicaT] = {}
        self._ending: dict[int, ReplicaT] = {}
        """Processes that were killed and may not have ended yet."""
        self._has_started = False
        self._failure: Exception | None = None
        """Error with which the pool has given up."""
        self._background = BackgroundTasks(self.title)

    # Methods that subclasses override.

    def name_of(self, rank: int, number: int) -> str:
        """Return the name of a process in messages."""
        return f"{self.title} {rank}"

    def _begin(self, rank: int) -> int:
        """Return the number for a process that will be started next."""
        return next(self._numbers)

    async def _join(self, replica: ReplicaT) -> None:
        """Prepare a process that is set up for its first call."""

    def heard(self, replica: ReplicaT, answer: Any) -> None:
        """Process the answer to a heartbeat."""

    def _look_at(self, replica: ReplicaT) -> str | None:
        """Check a live process; return the problem if it must be replaced, else None."""
        return replica.heartbeat.look()

    def _on_ready(self, replica: ReplicaT, fault: Fault | None) -> None:
        """Record that a process can be called; ``fault`` is the loss that it recovers from, if any."""
        if fault is not None:
            self._faults.recovered(fault, f"was replaced by process {replica.pid}")

    def _on_lost(self, replica: ReplicaT, fault: Fault) -> bool:
        """Record the loss of a process; return whether another one starts at its place."""
        return True

    async def _clean_up(self, replica: ReplicaT) -> None:
        """End a lost process."""
        await self._end(replica)

    def _must_kill_on_close(self, replica: ReplicaT) -> bool:
        """Return whether ``close`` must kill a process, because nothing else ends it."""
        return True

    def _on_start_failed(self, rank: int, number: int, error: Exception) -> Exception | None:
        """Record that a start has failed; return an error if the restart budget is used up."""
        raise NotImplementedError

    # Methods that all roles share.

    async def start(self, num_places: int) -> None:
        """Start one process at each place.

        Raises:
            Exception: the first error of a start.
        """
        starts = [asyncio.create_task(self._start(rank)) for rank in range(num_places)]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        self._has_started = True

    def heartbeat_of(self, replica: ReplicaT) -> Heartbeat[Any]:
        """Return a new heartbeat for a process."""
        return Heartbeat(
            replica.actor.beat.call_one,
            limit_s=self._heartbeat_s,
            key=self.heartbeat_key,
            heard=lambda answer: self.heard(replica, answer),
        )

    @property
    def replicas(self) -> tuple[ReplicaT, ...]:
        """The live processes, by rank."""
        return tuple(sorted(self._replicas.values(), key=lambda one: one.rank))

    def get(self, number: int) -> ReplicaT | None:
        """Return the live process with this number, or None."""
        return self._replicas.get(number)

    def at(self, rank: int) -> ReplicaT | None:
        """Return the live process at a place, or None."""
        return next((one for one in self._replicas.values() if one.rank == rank), None)

    async def watch(self) -> None:
        """Supervise the processes until cancelled.

        Raises:
            Exception: the error with which the pool has given up.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look()
            if self._failure is not None:
                raise self._failure

    async def _look(self) -> None:
        """Check every process, and give up those with a problem."""
        replicas = self.replicas
        have_ended = await asyncio.gather(*(one.proc.has_ended() for one in replicas))
        for replica, has_ended in zip(replicas, have_ended, strict=True):
            if has_ended:
                self.lose(replica, "has died")
            elif not replica.lost.is_set() and (what := self._look_at(replica)) is not None:
                self.lose(replica, what, await diagnose_hang(replica.proc))

    def lose(self, replica: ReplicaT, what: str, evidence: str | None = None) -> None:
        """Give up a process: all calls to it end, it is killed, and its replacement is started.

        ``what`` completes a sentence about it with the problem; ``evidence`` describes what it was doing.
        Does nothing if the process is already lost.
        """
        if self._replicas.pop(replica.number, None) is None:
            return
        self._ending[replica.number] = replica
        self._listing.remove(self.title, replica.rank)
        what += self.after_loss
        fault = self._faults.detected(self.role, replica.name, what, evidence=evidence)
        replica.end_calls()
        self._background.start(self._replace(replica, fault, is_wanted=self._on_lost(replica, fault)))

    async def _replace(self, replica: ReplicaT, fault: Fault | None, *, is_wanted: bool) -> None:
        await self._clean_up(replica)
        self._background.start(replica.spawned.stop())
        if is_wanted:
            await self._start(replica.rank, fault)

    async def _start(self, rank: int, fault: Fault | None = None) -> None:
        """Start a process at a place, with as many attempts as the budget allows."""
        while True:
            number = self._begin(rank)
            try:
                replica = await self._set_up(rank, number)
            except Exception as error:
                failure = self._on_start_failed(rank, number, error)
                if not self._has_started:
                    raise
                logger.warning("%s %d cannot be started", self.title, rank, exc_info=error)
                if failure is not None:
                    self._failure, failure.__cause__ = failure, error
                    return
                await asyncio.sleep(RETRY_S)
            else:
                self._replicas[number] = replica
                self._listing.put(self.title, rank, pid=replica.pid, host=replica.host.id)
                self._on_ready(replica, fault)
                return

    async def _set_up(self, rank: int, number: int) -> ReplicaT:
        """Start a process and let it join; kill it if that fails."""
        replica = self.replica_type(self, await self._spawn(rank, number), rank, number)
        try:
            await self._join(replica)
        except BaseException:
            await self._end(replica)
            self._background.start(replica.spawned.stop())
            raise
        return replica

    async def _end(self, replica: ReplicaT) -> None:
        """Kill a process and everything that it has started, and wait until its GPUs are free."""
        self._ending[replica.number] = replica
        await replica.host.kill(replica.pid)
        if replica.spawned.mark is not None:
            await asyncio.to_thread(kill_marked, replica.spawned.mark)
        end_s = time.monotonic() + END_S
        while not await replica.proc.has_ended():
            if time.monotonic() > end_s:
                logger.warning("%s still runs %g s after its kill", replica.name, END_S)
                break
            await asyncio.sleep(0.02)
        self._ending.pop(replica.number, None)

    async def close(self) -> None:
        """Stop all starts, and kill the processes that nothing else ends, within ``END_S``."""
        await self._background.close()
        for replica in self._replicas.values():
            replica.heartbeat.stop()
        doomed = {one.number: one for one in self._replicas.values() if self._must_kill_on_close(one)}
        for replica in doomed.values():
            # Calls in flight fail, which does not count as a loss.
            replica.lost.set()
        await asyncio.gather(*(self._end(one) for one in (self._ending | doomed).values()))
