"""All procs of a run: spawned, set up, watched, and stopped."""

import asyncio
import contextlib
import logging
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, MeshFailure, ProcMesh, this_host

from forgeasync.observability import Fault, FaultLog, ProcsFile, Role, real_errors
from forgeasync.runtime.hosts import Host, HostLost, Hosts, LocalHosts, stop
from forgeasync.runtime.placement import spawn_role
from forgeasync.runtime.supervised import PEER_END_S, ActorDied, Proc, first_ended

if TYPE_CHECKING:
    from forgeasync.runtime.generator_pool import GeneratorPool

REPORT_S = 15.0
"""Seconds within which Monarch reports a death: it checks every few seconds."""
BETTER_REPORT_S = 5.0
"""Seconds to wait after a report without a signal for one that names the signal."""
WATCH_S = 2.0
"""Seconds between two checks of procs about which no error was reported."""

_ACTOR = re.compile(r"([\w-]+)\{((?:'\w+': \d+/\d+(?:, )?)+)\}")
_PLACE = re.compile(r"(\d+)/(\d+)")
"""An actor's place in one dimension of its mesh: its procs, or its hosts and the procs of each."""
_PROC = re.compile(r"The actor ([\w-]+?)(?:-\d+)?-(\d+)<")
"""A proc: the role, the number of the mesh if that has replaced another one, and the rank."""
_KILLED = re.compile(r"Killed\(sig=(\d+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The content of one of Monarch's reports."""

    text: str
    has_signal: bool


def read_report(report: str, log_dir: Path) -> Death:
    """Name rank, role, signal and log file of a death; or return the report as it is."""
    killed = _KILLED.search(report)
    if (actor := _ACTOR.search(report)) is not None:
        # Monarch's own actor that tells trainer ranks of each other.
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
"""Names of the actors that Monarch puts into every proc."""


ENVIRONMENT_WORKER = "episodes"
"""Begins the names of actors of environment workers."""

SCORER = "scorer"
"""Begins the names of actors of scorers."""
GENERATOR = "generator-"
"""Begins the names of procs and actors of generators."""
TEACHER = "teacher-"
"""Begins the names of procs and actors of teachers."""


class Supervisor(Protocol):
    """Looks after the processes of a role."""

    async def watch(self) -> None:
        """Look after them until cancelled; an error ends the run."""
        ...

    async def close(self) -> None:
        """End them, or whatever of them the process manager cannot end."""
        ...


@dataclass(slots=True)
class ProcessManager:
    """The meshes that a run has spawned so far; ``close`` stops them in any state."""

    log_dir: Path
    hosts: Hosts = field(default_factory=LocalHosts)
    faults: FaultLog = field(default_factory=FaultLog)
    """What has failed, and what came back."""
    listing: ProcsFile = field(default_factory=ProcsFile)
    """Which process fills which role."""
    owned: set[str] = field(default_factory=lambda: {ENVIRONMENT_WORKER, SCORER, GENERATOR, TEACHER})
    """Beginnings of the names of actors whose deaths are no news here: whoever looks after them sees them
    first, and replaces them."""
    payload_folders: list[Path] = field(default_factory=list)
    """Payload folder of each generator, on its own host; by generator."""
    peers: list[Proc] = field(default_factory=list)
    """Procs whose death shows as an error of others."""
    _own_meshes: list[ProcMesh] = field(default_factory=list)
    closing: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """What ends whoever looks after procs, before these are stopped."""
    environment: Supervisor | None = None
    scorer: Supervisor | None = None
    generators: "GeneratorPool | None" = None
    teachers: list[Supervisor] = field(default_factory=list)
    buffer: Supervisor | None = None
    _failure: asyncio.Future[None] = field(init=False)
    _watching: asyncio.Task[None] | None = None
    _host_fault: Fault | None = None
    _closing: bool = False
    _background: "set[asyncio.Future[None]]" = field(default_factory=set)

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()

        def on_fault(failure: MeshFailure) -> None:
            # Monarch's default ends the process from here; the loops are to end it in their own order. A dead
            # proc is reported once for each of its actors: those that Monarch itself put there say nothing
            # about the role.
            if not self._closing and not failure.mesh_name.startswith((*MONARCH_OWN_ACTORS, *self.owned)):
                loop.call_soon_threadsafe(self._on_report, str(failure.report()))

        monarch.actor.unhandled_fault_hook = on_fault

    def _on_report(self, report: str) -> None:
        logger.error("%s", report)
        death = read_report(report, self.log_dir)
        # Monarch's own actors in a role's procs have other names: the report tells whose procs they are in.
        if death.text.startswith(tuple(self.owned)):
            return
        # Some say no more than that an actor does not answer: a better one may follow.
        delay_s = 0.0 if death.has_signal else BETTER_REPORT_S
        asyncio.get_running_loop().call_later(delay_s, self._fail, ActorDied(death.text))

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def open(self, tell: Callable[[str], None]) -> None:
        """Start the hosts; needed if they are other machines than this one. See ``Hosts.open``."""
        await self.hosts.open(tell)
        self._watching = asyncio.create_task(self._watch_hosts())

    async def _watch_hosts(self) -> None:
        try:
            await self.hosts.watch()
        except HostLost as lost:
            self._note_lost_host(lost)
            self._fail(lost)
        except Exception as error:
            # Hosts that nobody watches any more would be lost unnoticed.
            self._fail(error)

    async def _close_hosts(self) -> None:
        try:
            await self.hosts.close()
        except HostLost as lost:
            # Connections to it may have broken, and ended the run, before it was missed.
            self._note_lost_host(lost)
            raise

    def _note_lost_host(self, lost: HostLost) -> None:
        """A lost host ends the run, so it is one fault, whatever else is lost with it."""
        if self._host_fault is None:
            self._host_fault = self.faults.detected(Role.HOST, "the run's hosts", f"are not whole: {lost}")

    async def watch(self) -> None:
        """Wait until something dies.

        Raises:
            ActorDied: with Monarch's report, or
            HostLost: always one of them.
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

    def _supervisors(self) -> list[Supervisor]:
        """Those that there are; the last one is closed first."""
        all_of_them = (*self.teachers, self.generators, self.environment, self.scorer, self.buffer)
        return [one for one in all_of_them if one is not None]

    async def _fail_with(self, watching: Awaitable[None]) -> None:
        """End the run if what looks after a role gives it up."""
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
        """Replace errors of the body that a proc's death caused by an error that names the death.

        Raises:
            ActorDied: a proc has died; raised from the body's own error.
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
            # A collective fails, or hangs, if one of its ranks is gone.
            if any(isinstance(cause, ActorError | TimeoutError) for cause in causes):
                if (ended := await first_ended(self.peers, within_s=PEER_END_S)) is not None:
                    raise await self._death_of(ended) from error
            raise

    async def _death_of(self, ended: Proc) -> Exception:
        """Return what Monarch reports within a bounded time, else what is known without its report."""
        await asyncio.wait([self._failure], timeout=REPORT_S)
        if self._failure.done() and (reported := self._failure.exception()) is not None:
            assert isinstance(reported, Exception)
            return reported
        log = self.log_dir / f"{ended.role}-{ended.rank}.log"
        return ActorDied(f"{ended.role} rank {ended.rank} (process {ended.pid}) has ended; see {log}")

    def in_background(self, work: Awaitable[None]) -> None:
        """Do what nobody waits for, such as giving back what is left of a proc that was killed."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._end_background)

    def _end_background(self, task: "asyncio.Future[None]") -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("in the background", exc_info=error)

    def spawn_here(self, name: str) -> ProcMesh:
        """Start one proc on the controller's own machine, without a GPU."""
        mesh = spawn_role(this_host(), name, num_procs=1)
        self._own_meshes.append(mesh)
        return mesh

    async def close(self) -> None:
        """Stop every proc. Procs that are gone already are no error; cancellation does not interrupt this."""
        closing = asyncio.create_task(self._close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    async def _close(self) -> None:
        self._closing = True
        for task in tuple(self._background):
            task.cancel()
        # Callbacks run in reverse order, and all of them run even if one fails.
        async with contextlib.AsyncExitStack() as ending:
            ending.push_async_callback(self._close_hosts)
            if self._watching is not None:
                # Keep polling until now: a host that is not polled shuts itself down.
                ending.callback(self._watching.cancel)
            ending.push_async_callback(_stop_all, self._own_meshes)
            for one in self._supervisors():
                ending.push_async_callback(one.close)
            for close in self.closing:
                ending.push_async_callback(close)
        if self._failure.done() and not self._failure.cancelled():
            self._failure.exception()
        else:
            self._failure.cancel()


async def _stop_all(meshes: Sequence[ProcMesh]) -> None:
    await asyncio.gather(*(stop(mesh) for mesh in meshes))


async def make_folders(hosts: Sequence[Host], sizes: Sequence[int]) -> list[Path]:
    """Make a folder on each host, large enough for all its sizes; return the folder of each entry."""
    totals: dict[str, int] = {}
    by_id = {host.id: host for host in hosts}
    for host, size in zip(hosts, sizes, strict=True):
        totals[host.id] = totals.get(host.id, 0) + size
    made = await asyncio.gather(*(by_id[name].make_folder(total) for name, total in totals.items()))
    folders = dict(zip(totals, made, strict=True))
    return [folders[host.id] for host in hosts]
