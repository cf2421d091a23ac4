"""Simulated time, with cores that procs share.

On the timeline of the wall, things take as long as they say: GPUs, networks, waiting. On that of the cores
they take longer where procs want more cores than there are: all of them then slow down alike, to the share
num_cores / wanted. So this timeline is one number that all of them share, and whose speed changes when one
begins or ends to compute. Engines have one of their own: they compute more for the same, the smaller their
share is, as others use their caches for the rest of the time. So have procs that compute in lockstep, as the
ranks of a trainer. Each of them waits for a core and for the others many times: where cores are short they
get less than others, the less the more procs want each core, and leave them the rest.
"""

import heapq
import itertools
import math
from collections.abc import Callable

_EPSILON = 1e-6
"""Cores that are wanted are a sum of floats."""


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
    """One of the timelines; ``now`` is in its own seconds."""

    def __init__(self, numbers: "itertools.count[int]") -> None:
        self.now = 0.0
        self.speed = 1.0
        """Its seconds in one of the wall."""
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


def crowded_work(core_share: float, crowding: float) -> float:
    """How much more a proc computes for the same, as a multiple, that has its cores for a share of the time,
    and others for the rest; ``crowding`` is ``Cores.generator_crowding`` or ``Cores.trainer_crowding``."""
    return 1.0 + crowding * (1.0 - core_share)


def crowded_speed(core_share: float, crowding: float) -> float:
    """How fast such a proc goes on."""
    return core_share / crowded_work(core_share, crowding)


def lagging(core_share: float, lag: float) -> float:
    """What procs in lockstep get of the cores, by what others get, whose share is ``core_share``.

    1 / core_share - 1 others want the core that one of these has; ``lag`` is ``Cores.trainer_lag``.
    """
    return 1.0 / (1.0 + lag * (1.0 / core_share - 1.0))


class Clock:
    """The timelines, and which of them an activity belongs to."""

    def __init__(
        self,
        num_cores: int,
        *,
        engine_crowding: float = 0.0,
        lockstep_lag: float = 0.0,
        lockstep_crowding: float = 0.0,
    ) -> None:
        """``engine_crowding`` is ``Cores.generator_crowding``; ``lockstep_lag`` and ``lockstep_crowding`` are
        ``Cores.trainer_lag`` and ``Cores.trainer_crowding``."""
        self._num_cores = num_cores
        self._engine_crowding = engine_crowding
        self._lockstep_crowding = lockstep_crowding
        self._lag = lockstep_lag
        self._wanted = 0.0
        self._wanted_in_lockstep = 0.0
        numbers = itertools.count()
        self.wall = Timeline(numbers)
        self._cores = Timeline(numbers)
        self._engines = Timeline(numbers)
        self._lockstep = Timeline(numbers)
        self._timelines = (self.wall, self._cores, self._engines, self._lockstep)
        self._has_changed = False
        """Whether other cores are wanted than when the speeds were set."""

    @property
    def now_s(self) -> float:
        return self.wall.now

    def of_engine(self, cores: float) -> Timeline:
        """The timeline of an engine that keeps so many cores busy while it computes."""
        return self._engines if cores else self.wall

    def begin(self, cores: float) -> None:
        """So many more cores are wanted."""
        self._want(others=cores)

    def end(self, cores: float) -> None:
        """So many fewer."""
        self._want(others=-cores)

    def compute(self, work_s: float, cores: float, then: Callable[[], None]) -> None:
        """Have a proc compute for so long, alone on its host, and then something happen."""

        def done() -> None:
            self.end(cores)
            then()

        self.begin(cores)
        (self._cores if cores else self.wall).after(work_s, done)

    def compute_in_lockstep(self, work_s: float, cores: float, then: Callable[[], None]) -> None:
        """Have procs compute that wait for each other all the time."""

        def done() -> None:
            self._want(in_lockstep=-cores)
            then()

        self._want(in_lockstep=cores)
        (self._lockstep if cores else self.wall).after(work_s, done)

    def shares(self) -> tuple[float, float]:
        """Which share of their cores procs have: those in lockstep, and all others."""
        others, lockstep, cores = self._wanted, self._wanted_in_lockstep, self._num_cores
        if others + lockstep <= cores + _EPSILON:
            return 1.0, 1.0
        if others <= _EPSILON:
            return cores / lockstep, 1.0
        if lockstep <= _EPSILON:
            return 1.0, cores / others
        # All cores are taken: (others + lockstep * lagging(share)) * share = cores, a quadratic equation with
        # one root between 0 and 1.
        square = others * (1.0 - self._lag) + lockstep
        linear = others * self._lag - cores * (1.0 - self._lag)
        constant = -cores * self._lag
        root = math.sqrt(linear * linear - 4.0 * square * constant)
        share = (root - linear) / (2.0 * square) if linear < 0.0 else -2.0 * constant / (root + linear)
        return share * lagging(share, self._lag), share

    def step(self) -> bool:
        """Go on to the next event; false if there is none."""
        if self._has_changed:
            self._set_speeds()
        found, in_s = None, math.inf
        for timeline in self._timelines:
            event = timeline.first()
            if event is not None and (event.at - timeline.now) / timeline.speed < in_s:
                found, on, in_s = event, timeline, (event.at - timeline.now) / timeline.speed
        if found is None:
            return False
        for timeline in self._timelines:
            timeline.now += in_s * timeline.speed
        # Without an error of rounding.
        on.now = found.at
        act = found.act
        assert act is not None
        # One without an act is taken away when the next one is looked for.
        found.cancel()
        act()
        return True

    def _want(self, *, others: float = 0.0, in_lockstep: float = 0.0) -> None:
        self._wanted += others
        self._wanted_in_lockstep += in_lockstep
        self._has_changed = True
        assert self._wanted > -_EPSILON and self._wanted_in_lockstep > -_EPSILON

    def _set_speeds(self) -> None:
        in_lockstep, each = self.shares()
        self._cores.speed = each
        self._engines.speed = crowded_speed(each, self._engine_crowding)
        self._lockstep.speed = crowded_speed(in_lockstep, self._lockstep_crowding)
        self._has_changed = False
