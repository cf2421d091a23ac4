"""One trainer from its start to its loss: how it is noticed that a rank is gone, stopped, or stuck.

Three things show it: a rank's process is gone; it does not answer heartbeats, which its event loop answers
while its thread computes; a call has failed in a collective, or has exceeded its deadline.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from monarch.actor import ActorError

from forgeasync.actors.deaths import END_S, ActorDied, Proc, first_ended
from forgeasync.actors.hang_diagnosis import diagnose_hang
from forgeasync.actors.process_manager import ProcessManager
from forgeasync.actors.trainer_mesh import TrainerMesh
from forgeasync.faults import Fault, Role
from forgeasync.waiting import DeadlineExceeded, forget

T = TypeVar("T")

LOOK_S = 0.5
"""Seconds between two looks at the ranks."""
BEAT_S = 1.0
"""Seconds between two heartbeats."""
COLLECTIVE_ERRORS = ("gloo", "NCCL", "ProcessGroup", "c10d")
"""What errors of collectives name: the rank that reports one need not be the one that has caused it."""


class TrainerIncarnation:
    """A trainer mesh, and what has become of it."""

    def __init__(self, mesh: TrainerMesh, procs: ProcessManager, *, heartbeat_s: float) -> None:
        """Faults are reported to those of ``procs``; a silence of ``heartbeat_s`` is one."""
        self.mesh = mesh
        self.lost = asyncio.Event()
        self.error: Exception | None = None
        """What has ended it."""
        self.faults: list[Fault] = []
        self._procs = procs
        self._heartbeat_s = heartbeat_s

    async def until_lost(self) -> None:
        """Look at the processes, and ask every rank for heartbeats, until the trainer is lost."""
        beats = [_Beat(self.mesh, one.rank) for one in self.mesh.members]
        try:
            while not self.lost.is_set():
                await self._look_at_processes()
                for one, beat in zip(self.mesh.members, beats, strict=True):
                    if not self.lost.is_set() and beat.look() > self._heartbeat_s:
                        what = f"has not answered for trainer.recovery.heartbeat_s = {self._heartbeat_s:g} s"
                        evidence = await diagnose_hang(Role.TRAINER, (one.host, one.pid))
                        if not self.lost.is_set():
                            self._lose(_name(one), what, ActorDied(f"{_name(one)} {what}"), evidence)
                await self._rest()
        finally:
            for beat in beats:
                beat.cancel()

    async def while_living(self, work: Awaitable[T]) -> T:
        """Return what ``work`` returns while the trainer is set up.

        Raises:
            ActorDied: a rank's process has ended: nobody would answer ``work`` any more.
        """
        working, dying = asyncio.ensure_future(work), asyncio.ensure_future(self._until_dead())
        try:
            await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                dying.result()
                assert self.error is not None
                raise self.error
            return working.result()
        finally:
            dying.cancel()
            working.add_done_callback(forget)
            working.cancel()

    async def is_lost_with(self, error: BaseException) -> bool:
        """Whether a call has failed with ``error`` because the trainer is lost."""
        if await first_ended(self.mesh.members, within_s=END_S) is not None:
            await self._look_at_processes()
        if self.lost.is_set():
            return True
        if isinstance(error, DeadlineExceeded):
            ranks = [(one.host, one.pid) for one in self.mesh.members]
            evidence = await diagnose_hang(Role.TRAINER, *ranks)
            if not self.lost.is_set():
                self._lose("the trainer", f"is stuck: {error}", error, evidence)
        elif isinstance(error, ActorError) and _is_of_collective(error.exception):
            self._lose("the trainer", f"has failed in a collective ({error.exception})", error)
        return self.lost.is_set()

    async def _until_dead(self) -> None:
        while not self.lost.is_set():
            await self._look_at_processes()
            await self._rest()

    async def _rest(self) -> None:
        """Wait for the next look, or for a loss that somebody else has noticed."""
        try:
            await asyncio.wait_for(self.lost.wait(), LOOK_S)
        except TimeoutError:
            return

    async def _look_at_processes(self) -> None:
        """Every rank that has ended is a fault."""
        ended = await asyncio.gather(*(one.has_ended() for one in self.mesh.members))
        if self.lost.is_set():
            return
        for one, has_ended in zip(self.mesh.members, ended, strict=True):
            if has_ended:
                log = self._procs.log_dir / f"trainer-{one.rank}.log"
                self._lose(_name(one), "has died", ActorDied(f"{_name(one)} has ended; see {log}"))

    def _lose(self, who: str, what: str, error: Exception, evidence: str | None = None) -> None:
        self.faults.append(self._procs.faults.detected(Role.TRAINER, who, what, evidence=evidence))
        self.error = self.error or error
        self.lost.set()


class _Beat:
    """The heartbeat of one rank."""

    def __init__(self, mesh: TrainerMesh, rank: int) -> None:
        self._mesh = mesh
        self._rank = rank
        self._answer: asyncio.Future[None] | None = None
        self._looked_s = time.monotonic()
        self._silent_s = 0.0
        self._rest_s = 0.0

    def look(self) -> float:
        """Ask if it is time; returns for how many seconds the rank has left a question open.

        A look that comes late counts as one in time: a controller that was busy says nothing of the rank.
        """
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, 2 * LOOK_S), now_s
        if self._answer is None:
            self._rest_s -= passed_s
            if self._rest_s <= 0.0:
                self._answer = asyncio.ensure_future(self._mesh.beat(self._rank))
                self._answer.add_done_callback(forget)
        elif self._answer.done():
            # An error is the end of the process, which shows by itself.
            self._answer, self._silent_s, self._rest_s = None, 0.0, BEAT_S
        else:
            self._silent_s += passed_s
        return self._silent_s

    def cancel(self) -> None:
        """Wait for no answer any more."""
        if self._answer is not None:
            self._answer.cancel()


def _name(one: Proc) -> str:
    return f"trainer rank {one.rank} (process {one.pid})"


def _is_of_collective(error: BaseException) -> bool:
    """Whether a rank's error tells of a collective, which another rank may have broken."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in COLLECTIVE_ERRORS)
