"""The controller of a simulated run: one thread that everything has to pass."""

from collections import deque
from collections.abc import Callable

from forgeasync.simulation.clock import Clock


class Controller:
    """Handles responses one after the other, in the order in which they ended; it keeps one core busy with
    it."""

    def __init__(self, clock: Clock, response_s: float) -> None:
        """``response_s``: processor seconds for each of them."""
        self._clock = clock
        self._response_s = response_s
        self._waiting: deque[Callable[[], None]] = deque()
        """Those that ended and were not handled yet; the first of them is being handled."""

    def handle(self, then: Callable[[], None]) -> None:
        """Have something happen once the controller has done its part for a response."""
        if not self._response_s:
            then()
            return
        self._waiting.append(then)
        if len(self._waiting) == 1:
            self._work()

    def _work(self) -> None:
        self._clock.compute(self._response_s, 1.0, self._done)

    def _done(self) -> None:
        then = self._waiting[0]
        then()
        # Only now: what ends meanwhile waits for this one.
        self._waiting.popleft()
        if self._waiting:
            self._work()
