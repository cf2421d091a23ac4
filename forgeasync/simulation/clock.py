"""Simulated time, with cores that procs share.

There are two timelines. On the wall's, things take as long as they say: GPUs, networks, waiting. On that of
the cores they take longer where procs want more cores than there are: all of them then slow down alike, to
the share num_cores / wanted. So the timeline of the cores is one number that all of them share, and whose
speed changes when one begins or ends to compute.
"""

import heapq
import itertools
from collections.abc import Callable


class Event:
    """Something that will happen, unless it is cancelled."""

    __slots__ = ("act", "at")

    def __init__(self, at: float, act: Callable[[], None]) -> None:
        self.at = at
        self.act: Callable[[], None] | None = act

    def cancel(self) -> None:
        """It will not happen; no news if it has."""
        self.act = None


class Timeline:
    """One of the two timelines; ``now`` is in its own seconds."""

    def __init__(self, numbers: "itertools.count[int]") -> None:
        self.now = 0.0
        self._numbers = numbers
        self._events: list[tuple[float, int, Event]] = []
        """Those of one time in the order in which they were asked for."""

    def after(self, delay_s: float, act: Callable[[], None]) -> Event:
        """Have something happen after so many of its seconds."""
        assert delay_s >= 0.0
        event = Event(self.now + delay_s, act)
        heapq.heappush(self._events, (event.at, next(self._numbers), event))
        return event

    def first(self) -> Event | None:
        """The next event that was not cancelled."""
        while self._events and self._events[0][2].act is None:
            heapq.heappop(self._events)
        return self._events[0][2] if self._events else None


class Clock:
    """The two timelines, and which of them an activity belongs to."""

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
        """The timeline of an activity that keeps so many cores busy."""
        return self._cores if cores else self.wall

    def begin(self, cores: float) -> None:
        """So many more cores are wanted."""
        self._wanted += cores

    def end(self, cores: float) -> None:
        """So many fewer."""
        self._wanted -= cores
        assert self._wanted > -1e-6

    def compute(self, work_s: float, cores: float, then: Callable[[], None]) -> None:
        """Have a proc compute for so long, alone on its host, and then something happen."""

        def done() -> None:
            self.end(cores)
            then()

        self.begin(cores)
        self.timeline(cores).after(work_s, done)

    def step(self) -> bool:
        """Go on to the next event; false if there is none."""
        on_wall, on_cores = self.wall.first(), self._cores.first()
        speed = min(1.0, self._num_cores / self._wanted) if self._wanted > 0.0 else 1.0
        wall_s = None if on_wall is None else on_wall.at - self.wall.now
        cores_s = None if on_cores is None else (on_cores.at - self._cores.now) / speed
        if wall_s is None and cores_s is None:
            return False
        if cores_s is None or (wall_s is not None and wall_s <= cores_s):
            assert on_wall is not None and wall_s is not None
            self._cores.now += wall_s * speed
            self.wall.now = on_wall.at
            event = on_wall
        else:
            assert on_cores is not None
            self.wall.now += cores_s
            self._cores.now = on_cores.at
            event = on_cores
        act = event.act
        assert act is not None
        # One without an act is taken away when the next one is looked for.
        event.cancel()
        act()
        return True
