"""How long an engine has had something to do."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class BusyClock:
    """Counts the time during which at least one of several things is under way."""

    def __init__(self) -> None:
        self._num_running = 0
        self._since_s = 0.0
        self._before_s = 0.0

    @property
    def total_s(self) -> float:
        """Seconds so far."""
        return self._before_s + (time.perf_counter() - self._since_s if self._num_running else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """One thing is under way while it lasts."""
        if self._num_running == 0:
            self._since_s = time.perf_counter()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._before_s += time.perf_counter() - self._since_s
