"""One thread of a simulated process, which everything that it does has to pass."""

from collections import deque
from collections.abc import Callable

from forgeasync.simulation.clock import Clock


class Thread:
    """Does one thing after the other, in the order in which they came; it keeps one core busy with it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        """What came and was not done yet; the first of it is being done."""

    def do(self, work_s: float, then: Callable[[], None]) -> None:
        """Have something happen once this thread has computed for so long after all that came before."""
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
        # Only now: what comes meanwhile waits for this one.
        self._waiting.popleft()
        if self._waiting:
            self._work()
