"""Simulated time, with cores that processes share.

There are two timelines. On that of the wall, things take as long as they say: GPUs, networks, waiting. On
that of the cores they take longer when processes want more cores than there are. All of them then slow down
alike, to the share num_cores / wanted (processor sharing). So the second timeline is one number for all of
them, and its speed changes when one begins or ends to compute.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable

_EPSILON = 1e-6
"""Cores that are wanted are a sum of floats."""


class Event:
    """Something that will happen, unless it is canceled."""

    __slots__ = ("act", "at")

    def __init__(self, at: float, act: Callable[[], None]) -> None:
        self.at = at
        self.act: Callable[[], None] | None = act

    def cancel(self) -> None:
        """Keep it from happening. An event that has happened stays as it is."""
        self.act = None


class Timeline:
    """One of the timelines; ``now`` is in its own seconds."""

    def __init__(self, numbers: "itertools.count[int]") -> None:
        self.now = 0.0
        self.speed = 1.0
        """Its seconds in one second of the wall."""
        self._numbers = numbers
        self._events: list[tuple[float, int, Event]] = []
        """Events of the same time are in the order in which they were asked for."""

    def after(self, delay_s: float, act: Callable[[], None]) -> Event:
        """Call ``act`` once ``delay_s`` seconds of this timeline have passed."""
        assert delay_s >= 0.0
        event = Event(self.now + delay_s, act)
        heapq.heappush(self._events, (event.at, next(self._numbers), event))
        return event

    def first(self) -> Event | None:
        """The next event that was not canceled."""
        while self._events and self._events[0][2].act is None:
            heapq.heappop(self._events)
        return self._events[0][2] if self._events else None


class Clock:
    """Both timelines, and the cores that are wanted."""

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
        """The timeline of a process that keeps ``cores`` busy while it computes."""
        return self._cores if cores else self.wall

    def begin(self, cores: float) -> None:
        """A process begins to keep ``cores`` busy."""
        self._wanted += cores
        self._set_speed()

    def end(self, cores: float) -> None:
        """A process stops keeping ``cores`` busy."""
        self._wanted -= cores
        self._set_speed()

    def compute(self, work_s: float, cores: float, then: Callable[[], None]) -> None:
        """Have a process compute for ``work_s``, as if alone on its host, and then call ``then``."""

        def done() -> None:
            self.end(cores)
            then()

        self.begin(cores)
        self.timeline(cores).after(work_s, done)

    def step(self) -> bool:
        """Go on to the next event; return whether there was one."""
        found, on, in_s = None, self.wall, math.inf
        for timeline in (self.wall, self._cores):
            event = timeline.first()
            if event is not None and (event.at - timeline.now) / timeline.speed < in_s:
                found, on, in_s = event, timeline, (event.at - timeline.now) / timeline.speed
        if found is None:
            return False
        for timeline in (self.wall, self._cores):
            timeline.now += in_s * timeline.speed
        # Without an error of rounding.
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
    """One thread of a simulated process. It does one thing after the other, in the order in which they came,
    and keeps one core busy with it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        """What is not done yet; the first of it is being done."""

    def do(self, work_s: float, then: Callable[[], None]) -> None:
        """Call ``then`` once this thread has computed for ``work_s`` after all that came before."""
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
        # Only now: what comes during the call waits for this one.
        self._waiting.popleft()
        if self._waiting:
            self._work()
