"""Processes that somebody looks after: whether they run, whether they answer, and how they end."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import psutil
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from forgeasync.environments import kill, marked_processes
from forgeasync.faults import LIMIT_S, Role, awaited_calls
from forgeasync.launch import LOCAL_HOST_ID, Host, LocalHost
from forgeasync.waiting import DeadlineExceeded, deadline, forget

PEER_END_S = 1.0
"""Seconds for a proc to end that its peers have lost: their error comes within milliseconds of its end."""
ENDED_LOOK_S = 0.1


class ActorDied(RuntimeError):
    """A proc of the run ended, or one of its actors failed outside of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proc:
    """One proc of a role, to be checked when its peers report errors."""

    role: str
    rank: int
    pid: int
    host: Host

    async def has_ended(self) -> bool:
        """Whether its host no longer has it; a host that does not answer is reported elsewhere."""
        call = f"looking for {self.role} rank {self.rank}"
        try:
            async with deadline(PEER_END_S, call=call, key="PEER_END_S in supervised.py"):
                return not await self.host.is_running(self.pid)
        except (ActorError, SupervisionError, DeadlineExceeded):
            return False


async def first_ended(procs: Sequence[Proc], *, within_s: float) -> Proc | None:
    """Return a proc that has ended, or ends ``within_s``; None if all continue. Checks at least once."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + within_s
    while True:
        have_ended = await asyncio.gather(*(proc.has_ended() for proc in procs))
        for proc, has_ended in zip(procs, have_ended, strict=True):
            if has_ended:
                return proc
        if loop.time() >= end_s:
            return None
        await asyncio.sleep(ENDED_LOOK_S)


ANSWER_S = LIMIT_S + 2.0
"""Time for a host to say what a process of its does."""

WORDS = {
    Role.TRAINER: ("trainer",),
    Role.GENERATOR: ("router", "replica", "generator"),
    Role.TEACHER: ("teach",),
    Role.SCORER: ("scor",),
    Role.ENVIRONMENT: ("environment", "episode"),
    Role.BUFFER: ("buffer",),
}
"""What the code has in its names that waits for a role."""


async def stacks_of(host: Host, pid: int) -> str:
    """Return the Python stacks of a process of a host, in one line; or why they are not known."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await host.read_stacks(pid)
    except (ActorError, SupervisionError, TimeoutError) as error:
        return f"its stack is not known: host {host.id} does not answer ({type(error).__name__})"


async def evidence_here(role: Role, pid: int) -> str:
    """Return what is seen of a process of the controller's own host; see ``diagnose_hang``."""
    return await diagnose_hang(role, (LocalHost(LOCAL_HOST_ID, []), pid))


async def diagnose_hang(role: Role, *processes: tuple[Host, int]) -> str:
    """Return what is seen of processes of a role, in one line: their stacks, and who waits for the role.

    A process is named by its host and its id there.
    """
    # First: the calls may end while the stacks are read.
    calls = awaited_calls(asyncio.all_tasks() - {asyncio.current_task()}, WORDS[role])
    stacks = await asyncio.gather(*(stacks_of(host, pid) for host, pid in processes))
    if len(stacks) > 1:
        stacks = [f"process {pid}: {one}" for (_, pid), one in zip(processes, stacks, strict=True)]
    return f"{'; '.join(stacks)}; the controller waits in {calls or 'no call to it'}"


T = TypeVar("T")

BEAT_S = 1.0
"""Seconds between an answer and the next question whether an actor answers."""

MIN_LOOKS = 3
"""So many looks at least find no answer before an actor counts as silent."""

END_S = 10.0
"""Time for a killed process to be gone."""

LOOK_AGAIN_S = 0.02
"""Seconds between two looks for what a process has left."""


def is_running(process: psutil.Process) -> bool:
    """Whether a process is there and is no zombie; one that was stopped counts as running."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def kill_marked(mark: str) -> None:
    """Kill what a process with this mark has started; it may have outlived the process.

    Looks again until it finds nothing twice in a row, for at most ``END_S``: a process that is just becoming
    another program has no mark for a moment, and one that was found can have started another.
    """
    num_empty_looks = 0
    end_s = time.perf_counter() + END_S
    while num_empty_looks < 2 and time.perf_counter() < end_s:
        num_empty_looks = 0 if kill(marked_processes(mark)) else num_empty_looks + 1
        time.sleep(LOOK_AGAIN_S)


async def until_gone(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Wait until processes that were killed are gone, for at most ``END_S``; returns those that are not."""
    end_s = time.perf_counter() + END_S
    while (running := list(filter(is_running, processes))) and time.perf_counter() < end_s:
        await asyncio.sleep(0.01)
    return running


class Heartbeat(Generic[T]):
    """Asks an actor again and again whether it answers; whoever looks after it calls ``look``."""

    def __init__(self, ask: Callable[[], Awaitable[T]], *, limit_s: float) -> None:
        """``ask`` is answered from the actor's event loop, within ``limit_s`` if it is well."""
        self._ask = ask
        self._limit_s = limit_s
        self._asked: asyncio.Future[T] | None = None
        self._since_s = time.perf_counter()
        """When the question under way was asked, or the next one is due."""
        self._num_looks = 0
        self.last: T | None = None
        """The last answer."""

    def look(self) -> bool:
        """Take in an answer, or ask; returns whether there was none for ``limit_s``."""
        now_s = time.perf_counter()
        if self._asked is None:
            if now_s >= self._since_s:
                self._since_s, self._num_looks = now_s, 0
                self._asked = asyncio.ensure_future(self._ask())
                self._asked.add_done_callback(forget)
            return False
        if self._asked.done():
            if not self._asked.cancelled() and self._asked.exception() is None:
                self.last = self._asked.result()
            self._asked, self._since_s = None, now_s + BEAT_S
            return False
        self._num_looks += 1
        # Looks count too: where this process itself stood still, answers wait to be taken in.
        return now_s - self._since_s > self._limit_s and self._num_looks >= MIN_LOOKS

    def stop(self) -> None:
        """Wait for no further answer."""
        if self._asked is not None:
            self._asked.cancel()
