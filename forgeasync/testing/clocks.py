"""Clocks of tests: no busy machine makes them late.

``VirtualTime`` is an event loop whose time is that of its timers. ``HandClock`` is a clock that a test moves.
``HandTime`` is an event loop that goes by such a clock. Use these two for code that also waits for threads,
processes or sockets.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWaiting(selectors.SelectSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # The loop asks to wait until its next timer.
        self.now_s += timeout or 0.0
        return super().select(0)


class HandClock:
    """Tells the time that a test has set."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds


class VirtualTime:
    """``run`` a coroutine; ``now_s`` is how far its time has come."""

    def __init__(self) -> None:
        self._selector = _NoWaiting()

    def now_s(self) -> float:
        return self._selector.now_s

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        loop = asyncio.SelectorEventLoop(self._selector)
        loop.time = self.now_s  # type: ignore[method-assign]  # put in place of the loop's own clock
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.close()


class _WaitsForEvents(selectors.SelectSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # Only a due timer ends a wait. Whoever moves the clock runs on the loop, which then looks again.
        return super().select(0 if timeout == 0 else None)


class HandTime(HandClock):
    """``run`` a coroutine whose timers fire when ``advance`` has moved the clock.

    Threads, processes and sockets work as usual. A sleep without an ``advance`` never ends.
    """

    async def pass_until(self, is_reached: Callable[[], bool], *, step_s: float = 0.1) -> None:
        """Let time pass, step by step, until something has happened."""
        while not is_reached():
            self.advance(step_s)
            await asyncio.to_thread(time.sleep, 0.001)

    async def stand_until(self, is_reached: Callable[[], bool]) -> None:
        """Wait for threads, processes or sockets; no deadline runs meanwhile."""
        while not is_reached():
            await asyncio.to_thread(time.sleep, 0.001)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        loop = asyncio.SelectorEventLoop(_WaitsForEvents())
        loop.time = self  # type: ignore[method-assign]  # put in place of the loop's own clock
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(coroutine)
