"""The speed of this machine just now: on virtual ones everything takes half as long again for some hours.

A small loop is timed again and again, by the processor time of its own thread: what it waits for a core does
not count, what the core does in a second does.
"""

import statistics
import threading
import time
from types import TracebackType

NUM_ROUNDS = 80_000
"""The loop has so many, and takes some 4 ms."""
PAUSE_S = 0.1


class SpeedProbe:
    """A context manager: times the loop on a thread of its own meanwhile."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._go, name="speed", daemon=True)

    def __enter__(self) -> "SpeedProbe":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def loop_s(self) -> float:
        """Mean processor seconds of the loop."""
        return statistics.mean(self._times_s)

    def _go(self) -> None:
        while True:
            self._times_s.append(_loop())
            if self._is_over.wait(PAUSE_S):
                return


def _loop() -> float:
    start_s = time.thread_time()
    total = 0
    for number in range(NUM_ROUNDS):
        total += number * number % 7
    return time.thread_time() - start_s
