"""Starts, supervises and stops all processes of a run."""

import asyncio
import contextlib
import functools
import logging
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, MeshFailure, ProcMesh, this_host

from forgeasync.observability import Fault, FaultLog, ProcessListFile, Role, real_errors
from forgeasync.runtime.hosts import HostLost, LocalHosts, stop
from forgeasync.runtime.job_hosts import Host, Hosts
from forgeasync.runtime.placement import spawn_role
from forgeasync.runtime.supervised import (
    PEER_END_S,
    ActorDied,
    BackgroundTasks,
    Proc,
    SupervisedPool,
    first_ended,
)
from forgeasync.waiting import happens_within

if TYPE_CHECKING:
    from forgeasync.runtime.generator_pool import GeneratorPool

REPORT_S = 15.0
"""Time within which Monarch reports a death, in seconds: it checks every few seconds."""
BETTER_REPORT_S = 5.0
"""Time to wait, after a report without a signal, for one that names the signal, in seconds."""
WATCH_S = 2.0
"""Seconds between two checks of processes about which no error was reported."""
CLOSE_S = 120.0
"""Time limit for Monarch's part of ending a run, in seconds."""

_ACTOR = re.compile(r"([\w-]+)\{((?:'\w+': \d+/\d+(?:, )?)+)\}")
_PLACE = re.compile(r"(\d+)/(\d+)")
"""Pattern of an actor's place in one dimension of its mesh: its hosts, or the processes of each."""
_PROC = re.compile(r"The actor ([\w-]+?)(?:-\d+)?-(\d+)<")
"""Pattern of a process: the role, the mesh's number if it replaces another one, and the rank."""
_KILLED = re.compile(r"Killed\(sig=(\d+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The content of one of Monarch's reports."""

    text: str
    has_signal: bool


def read_report(report: str, log_dir: Path) -> Death:
    """Return rank, role, signal and log file of a death report, or a report of another form unchanged."""
    killed = _KILLED.search(report)
    if (actor := _ACTOR.search(report)) is not None:
        # Monarch's own actor, through which trainer ranks find each other.
        role = "trainer" if actor.group(1) == "_SPMDActor" else actor.group(1)
        rank, num = 0, 1
        for place in _PLACE.finditer(actor.group(2)):
            rank, num = rank * int(place.group(2)) + int(place.group(1)), num * int(place.group(2))
        of_how_many = f" of {num}"
    elif (proc := _PROC.match(report)) is not None:
        role, rank, of_how_many = proc.group(1), int(proc.group(2)), ""
    else:
        return Death(text=report, has_signal=False)
    who, log = f"{role} rank {rank}{of_how_many}", log_dir / f"{role}-{rank}.log"
    if killed is None:
        return Death(text=f"{who} is gone ({' '.join(report.split())}); see {log}", has_signal=False)
    number = int(killed.group(1))
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    hint = "; the kernel does so when memory runs out" if number == signal.SIGKILL else ""
    return Death(text=f"{who} was killed by signal {number} ({name}{hint}); see {log}", has_signal=True)


logger = logging.getLogger(__name__)

MONARCH_OWN_ACTORS = ("logger", "setup")
"""Names of the actors that Monarch adds to every process."""


ENVIRONMENT_WORKER = "episodes"
"""Prefix of the names of environment workers' actors."""

SCORER = "scorer"
"""Prefix of the names of scorers' actors."""
GENERATOR = "generator-"
"""Prefix of the names of generators' processes and actors."""
TEACHER = "teacher-"
"""Prefix of the names of teachers' processes and actors."""


@dataclass(slots=True)
class ProcessManager:
    """The processes that a run has started; ``close`` stops them in any state."""

    log_dir: Path
    hosts: Hosts = field(default_factory=LocalHosts)
    faults: FaultLog = field(default_factory=FaultLog)
    """Log of faults and recoveries."""
    listing: ProcessListFile = field(default_factory=ProcessListFile)
    """File that lists the process of each role."""
    owned: set[str] = field(default_factory=lambda: {ENVIRONMENT_WORKER, SCORER, GENERATOR, TEACHER})
    """Prefixes of the names of actors that a pool supervises and whose deaths it handles."""
    payload_folders: list[Path] = field(default_factory=list)
    """Payload folder of each generator, on its own host; by rank."""
    peers: list[Proc] = field(default_factory=list)
    """Processes whose death shows as an error of other processes."""
    _own_meshes: list[ProcMesh] = field(default_factory=list)
    closing: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Callbacks that run before the processes are stopped."""
    environment: SupervisedPool[Any] | None = None
    scorer: SupervisedPool[Any] | None = None
    generators: "GeneratorPool | None" = None
    teachers: list[SupervisedPool[Any]] = field(default_factory=list)
    buffer: SupervisedPool[Any] | None = None
    _failure: asyncio.Future[None] = field(init=False)
    _watching: asyncio.Task[None] | None = None
    _host_fault: Fault | None = None
    _closing: bool = False
    _background: BackgroundTasks = field(default_factory=functools.partial(BackgroundTasks, "the run"))

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()

        def on_fault(failure: MeshFailure) -> None:
            # Monarch's default ends the process here, but the loops must end it in their own order. A dead
            # process is reported once for each of its actors; the names of Monarch's own actors do not
            # contain the role.
            if not self._closing and not failure.mesh_name.startswith((*MONARCH_OWN_ACTORS, *self.owned)):
                loop.call_soon_threadsafe(self._on_report, str(failure.report()))

        monarch.actor.unhandled_fault_hook = on_fault

    def _on_report(self, report: str) -> None:
        logger.error("%s", report)
        death = read_report(report, self.log_dir)
        # Monarch's own actors are not named after the role; the report names their process.
        if death.text.startswith(tuple(self.owned)):
            return
        # Some reports only say that an actor does not answer, and a better one may follow.
        delay_s = 0.0 if death.has_signal else BETTER_REPORT_S
        asyncio.get_running_loop().call_later(delay_s, self._fail, ActorDied(death.text))

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def open(self, tell: Callable[[str], None]) -> None:
        """Start the hosts; required if they are other machines than this one. See ``LocalHosts.open``."""
        await self.hosts.open(tell)
        self._watching = asyncio.create_task(self._watch_hosts())

    async def _watch_hosts(self) -> None:
        try:
            await self.hosts.watch()
        except HostLost as lost:
            self._note_lost_host(lost)
            self._fail(lost)
        except Exception as error:
            # Otherwise lost hosts would go unnoticed.
            self._fail(error)

    async def _close_hosts(self) -> None:
        try:
            await self.hosts.close()
        except HostLost as lost:
            # Broken connections to it may have ended the run before its heartbeat was missed.
            self._note_lost_host(lost)
            raise

    def _note_lost_host(self, lost: HostLost) -> None:
        """Report one fault for a lost host, regardless of what is lost with it."""
        if self._host_fault is None:
            self._host_fault = self.faults.detected(Role.HOST, "the run's hosts", f"are not whole: {lost}")

    async def watch(self) -> None:
        """Wait until a process or a host is lost, and always raise the error.

        Raises:
            ActorDied: a process has died; has Monarch's report.
            HostLost: a host is lost.
        """
        watching = [
            asyncio.create_task(self._watch_peers()),
            *(asyncio.create_task(self._fail_with(one.watch())) for one in self._supervisors()),
        ]
        try:
            await asyncio.shield(self._failure)
        finally:
            for task in watching:
                task.cancel()

    def _supervisors(self) -> list[SupervisedPool[Any]]:
        """Pools of this run; the last one is closed first."""
        all_of_them = (*self.teachers, self.generators, self.environment, self.scorer, self.buffer)
        return [one for one in all_of_them if one is not None]

    @property
    def procs(self) -> list[Proc]:
        """Live processes of the pools."""
        return [replica.proc for pool in self._supervisors() for replica in pool.replicas]

    async def _fail_with(self, watching: Awaitable[None]) -> None:
        """End the run if a pool gives up."""
        try:
            await watching
        except Exception as error:
            self._fail(error)

    async def _watch_peers(self) -> None:
        """Check ranks that may wait in a collective for a dead one, which Monarch can report late (30 s)."""
        while (ended := await first_ended(self.peers, within_s=0.0)) is None:
            await asyncio.sleep(WATCH_S)
        self._fail(await self._death_of(ended))

    @asynccontextmanager
    async def naming_deaths(self) -> AsyncIterator[None]:
        """Replace errors of the body that the death of a process caused by an error that names the death.

        Raises:
            ActorDied: a process has died; raised from the body's own error.
        """
        try:
            yield
        except Exception as error:
            causes = real_errors(error)
            if isinstance(error, ActorDied | HostLost):
                raise
            for cause in causes:
                if isinstance(cause, ActorDied | HostLost):
                    raise cause from error
            for cause in causes:
                if isinstance(cause, SupervisionError):
                    raise ActorDied(read_report(str(cause), self.log_dir).text) from error
            # A collective fails, or hangs, if one of its ranks has died.
            if any(isinstance(cause, ActorError | TimeoutError) for cause in causes):
                if (ended := await first_ended(self.peers, within_s=PEER_END_S)) is not None:
                    raise await self._death_of(ended) from error
            raise

    async def _death_of(self, ended: Proc) -> Exception:
        """Return Monarch's report if it arrives within ``REPORT_S``, else an error without its details."""
        await asyncio.wait([self._failure], timeout=REPORT_S)
        if self._failure.done() and (reported := self._failure.exception()) is not None:
            assert isinstance(reported, Exception)
            return reported
        log = self.log_dir / f"{ended.role}-{ended.rank}.log"
        return ActorDied(f"{ended.role} rank {ended.rank} (process {ended.pid}) has ended; see {log}")

    def in_background(self, work: Awaitable[None]) -> None:
        """Run ``work`` without waiting for it, such as releasing the mesh of a killed process."""
        self._background.start(work)

    def spawn_here(self, name: str) -> ProcMesh:
        """Start one process on the controller's own machine, without a GPU."""
        mesh = spawn_role(this_host(), name, num_procs=1)
        self._own_meshes.append(mesh)
        return mesh

    async def close(self) -> None:
        """Stop every process, even if the caller is cancelled; processes may have ended before."""
        closing = asyncio.create_task(self._close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    async def _close(self) -> None:
        self._closing = True
        self._background.cancel()
        # Callbacks run in reverse order, and all of them run even if one fails.
        async with contextlib.AsyncExitStack() as ending:
            ending.push_async_callback(_within_limit, self._close_hosts)
            if self._watching is not None:
                # Keep polling until this point: a host that is not polled shuts itself down.
                ending.callback(self._watching.cancel)
            ending.push_async_callback(_within_limit, functools.partial(_stop_all, self._own_meshes))
            for one in self._supervisors():
                ending.push_async_callback(one.close)
            for close in self.closing:
                ending.push_async_callback(close)
        if self._failure.done() and not self._failure.cancelled():
            self._failure.exception()
        else:
            self._failure.cancel()


async def _within_limit(end: Callable[[], Awaitable[None]]) -> None:
    """End something through Monarch, which may never answer once its processes are gone.

    What is left ends with this process.
    """
    if not await happens_within(CLOSE_S, end()):
        logger.warning("Monarch has not ended all processes within %g s; the run ends without it", CLOSE_S)


async def _stop_all(meshes: Sequence[ProcMesh]) -> None:
    await asyncio.gather(*(stop(mesh) for mesh in meshes))


async def make_folders(hosts: Sequence[Host], sizes: Sequence[int]) -> list[Path]:
    """Create a folder on each host for the sum of its sizes; return the folder of each entry."""
    totals: dict[str, int] = {}
    by_id = {host.id: host for host in hosts}
    for host, size in zip(hosts, sizes, strict=True):
        totals[host.id] = totals.get(host.id, 0) + size
    made = await asyncio.gather(*(by_id[name].make_folder(total) for name, total in totals.items()))
    folders = dict(zip(totals, made, strict=True))
    return [folders[host.id] for host in hosts]
