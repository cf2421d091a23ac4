"""Simulated time: callbacks in the order of their times."""

import heapq
import itertools
from collections.abc import Callable


class Event:
    """A scheduled callback, which can be canceled."""

    __slots__ = ("act", "at_s")

    def __init__(self, at_s: float, act: Callable[[], None]) -> None:
        self.at_s = at_s
        self.act: Callable[[], None] | None = act

    def cancel(self) -> None:
        """Cancel the event; no effect if its callback already ran."""
        self.act = None


class Clock:
    """Runs callbacks at simulated times; callbacks of the same time run in the order of their scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Event]] = []
        """Heap of (time, number, event)."""

    def after(self, delay_s: float, act: Callable[[], None]) -> Event:
        """Call ``act`` once ``delay_s`` simulated seconds have passed."""
        assert delay_s >= 0.0
        event = Event(self.now_s + delay_s, act)
        heapq.heappush(self._events, (event.at_s, next(self._numbers), event))
        return event

    def step(self) -> bool:
        """Advance to the next event and run its callback; return whether there was one."""
        while self._events:
            at_s, _, event = heapq.heappop(self._events)
            if (act := event.act) is not None:
                self.now_s = at_s
                event.cancel()
                act()
                return True
        return False
