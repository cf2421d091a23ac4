"""Simulated time, with CPU cores that processes share.

There are two timelines. On the wall timeline (GPUs, networks, waiting), delays are never stretched. On the
core timeline, delays grow when processes demand more cores than exist: all of them slow down equally, to the
speed num_cores / demand (processor sharing). The core timeline is therefore a single counter, whose speed
changes when a process begins or ends to compute.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable

_EPSILON = 1e-6
"""Tolerance for rounding of the total demand, which is a sum of floats."""


class Event:
    """A scheduled callback, which can be canceled."""

    __slots__ = ("act", "at")

    def __init__(self, at: float, act: Callable[[], None]) -> None:
        self.at = at
        self.act: Callable[[], None] | None = act

    def cancel(self) -> None:
        """Cancel the event; no effect if its callback already ran."""
        self.act = None


class Timeline:
    """One timeline; ``now`` is in seconds of this timeline."""

    def __init__(self, numbers: "itertools.count[int]") -> None:
        self.now = 0.0
        self.speed = 1.0
        """Seconds of this timeline per wall second."""
        self._numbers = numbers
        self._events: list[tuple[float, int, Event]] = []
        """Heap of (time, number, event); events of the same time run in the order of their scheduling."""

    def after(self, delay_s: float, act: Callable[[], None]) -> Event:
        """Call ``act`` once ``delay_s`` seconds of this timeline have passed."""
        assert delay_s >= 0.0
        event = Event(self.now + delay_s, act)
        heapq.heappush(self._events, (event.at, next(self._numbers), event))
        return event

    def first(self) -> Event | None:
        """Return the next event that is not canceled; None if there is none."""
        while self._events and self._events[0][2].act is None:
            heapq.heappop(self._events)
        return self._events[0][2] if self._events else None


class Clock:
    """Both timelines, and the number of cores in demand."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._wanted = 0.0
        numbers = itertools.count()
        self.wall = Timeline(numbers)
        self._cores = Timeline(numbers)

    @property
    def now_s(self) -> float:
        return self.wall.now

    def timeline(self, cores: float) -> Timeline:
        """Return the timeline of a process that keeps ``cores`` busy; the wall timeline if ``cores`` is 0."""
        return self._cores if cores else self.wall

    def begin(self, cores: float) -> None:
        """Add ``cores`` to the demand: a process begins to compute."""
        self._wanted += cores
        self._set_speed()

    def end(self, cores: float) -> None:
        """Remove ``cores`` from the demand: a process stops computing."""
        self._wanted -= cores
        self._set_speed()

    def compute(self, work_s: float, cores: float, then: Callable[[], None]) -> None:
        """Simulate a computation of ``work_s`` seconds (measured on an idle host), then call ``then``."""

        def done() -> None:
            self.end(cores)
            then()

        self.begin(cores)
        self.timeline(cores).after(work_s, done)

    def step(self) -> bool:
        """Advance to the next event and run its callback; return whether there was one."""
        found, on, in_s = None, self.wall, math.inf
        for timeline in (self.wall, self._cores):
            event = timeline.first()
            if event is not None and (event.at - timeline.now) / timeline.speed < in_s:
                found, on, in_s = event, timeline, (event.at - timeline.now) / timeline.speed
        if found is None:
            return False
        for timeline in (self.wall, self._cores):
            timeline.now += in_s * timeline.speed
        # Avoids a rounding error.
        on.now = found.at
        act = found.act
        assert act is not None
        # ``first`` drops events without an act.
        found.cancel()
        act()
        return True

    def _set_speed(self) -> None:
        assert self._wanted > -_EPSILON
        is_enough = self._wanted <= self._num_cores + _EPSILON
        self._cores.speed = 1.0 if is_enough else self._num_cores / self._wanted


class Thread:
    """One thread of a simulated process, which runs its work items in order and keeps one core busy."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        """Unfinished work items (seconds, callback); the first one is in progress."""

    def do(self, work_s: float, then: Callable[[], None]) -> None:
        """Compute for ``work_s`` seconds after all earlier work items, then call ``then``."""
        if not work_s and not self._waiting:
            then()
            return
        self._waiting.append((work_s, then))
        if len(self._waiting) == 1:
            self._work()

    def _work(self) -> None:
        self._clock.compute(self._waiting[0][0], 1.0, self._done)

    def _done(self) -> None:
        self._waiting[0][1]()
        # After the callback, so that work added during it waits for this item.
        self._waiting.popleft()
        if self._waiting:
            self._work()
