"""An event loop whose time is that of its timers: nothing waits, and no busy machine makes it late."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWaiting(selectors.SelectSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # The loop asks to wait until its next timer.
        self.now_s += timeout or 0.0
        return super().select(0)


class VirtualTime:
    """``run`` a coroutine; ``now_s`` is how far its time has come."""

    def __init__(self) -> None:
        self._selector = _NoWaiting()

    def now_s(self) -> float:
        return self._selector.now_s

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        loop = asyncio.SelectorEventLoop(self._selector)
        loop.time = self.now_s  # type: ignore[method-assign]
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.close()
