"""A process on the controller's machine that is looked after: whether it runs, and its end with all it has
started."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import psutil

from forgeasync.environments import kill, marked_processes
from forgeasync.waiting import forget

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
