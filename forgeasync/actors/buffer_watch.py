"""Notices that the replay buffer is gone: what it holds is gone with its process, so the run ends.

The next start (``--supervise``, ``--resume latest``) has all of it again, from the newest checkpoint, the
ledger and the finished groups that are kept on the disk.
"""

import asyncio
from collections.abc import Awaitable, Callable

import psutil

from forgeasync.actors.deaths import ActorDied
from forgeasync.actors.hang_diagnosis import evidence_here
from forgeasync.actors.watched_process import Heartbeat, is_running
from forgeasync.faults import FaultLog, Role
from forgeasync.launch import kill_with_children

LOOK_S = 0.5
"""Seconds between two looks at the process."""


class BufferWatch:
    """Looks after the buffer's process, on the controller's machine."""

    def __init__(
        self, ask: Callable[[], Awaitable[None]], *, pid: int, heartbeat_s: float, faults: FaultLog
    ) -> None:
        """``ask`` is answered from the buffer's event loop, within ``heartbeat_s`` if it is well."""
        self._process = psutil.Process(pid)
        self._beat = Heartbeat(ask, limit_s=heartbeat_s)
        self._heartbeat_s = heartbeat_s
        self._faults = faults
        self._is_lost = False

    async def watch(self) -> None:
        """Wait until the buffer is gone or does not answer.

        Raises:
            ActorDied: always.
        """
        while not self._look():
            if self._beat.look():
                evidence = await evidence_here(Role.BUFFER, self._process.pid)
                limit = f"buffer.heartbeat_s = {self._heartbeat_s:g} s"
                self._lose(f"has not answered for {limit}", evidence)
                break
            await asyncio.sleep(LOOK_S)
        raise ActorDied(f"{self._who} is gone, and with it the groups that it held")

    async def close(self) -> None:
        """End watching; a death that has just ended the run is noted now."""
        self._look()
        self._beat.stop()

    @property
    def _who(self) -> str:
        return f"the buffer (process {self._process.pid})"

    def _look(self) -> bool:
        """Whether the buffer is lost; notes its death."""
        if not self._is_lost and not is_running(self._process):
            self._lose("has died", None)
        return self._is_lost

    def _lose(self, what: str, evidence: str | None) -> None:
        kill_with_children(self._process)
        if not self._is_lost:
            self._is_lost = True
            self._faults.detected(Role.BUFFER, self._who, what, evidence=evidence)
