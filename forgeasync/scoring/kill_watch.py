"""Kills processes that have not answered in time: one thread for all of them.

A thread for each answer, as ``threading.Timer`` has it, costs more than verifying a short answer does.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class KillWatch:
    """Calls ``kill`` of everything that takes longer than its limit. Its thread starts with the first one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deadlines: dict[int, tuple[float, Callable[[], None]]] = {}
        """By number: when to kill (``time.monotonic``), and how."""
        self._numbers = itertools.count()
        self._wakes_at = 0.0
        """When the thread looks again by itself."""
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, limit_s: float, kill: Callable[[], None]) -> Iterator[None]:
        """Have ``kill`` called, in another thread, if the block takes longer; never after the block."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            number = next(self._numbers)
            self._deadlines[number] = deadline, kill
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="kill-watch", daemon=True)
                self._thread.start()
            elif deadline < self._wakes_at:
                # Only then: limits are long and blocks short, so the thread sleeps through nearly all.
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._deadlines.pop(number, None)

    def _watch(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                due = [number for number, (deadline, _) in self._deadlines.items() if deadline <= now]
                for number in due:
                    # With the lock held: a block that ends now waits for it, and nothing is killed after it.
                    _, kill = self._deadlines.pop(number)
                    try:
                        kill()
                    except Exception:
                        # The others still have to be watched.
                        logger.exception("what has taken too long cannot be killed")
                first = min((deadline for deadline, _ in self._deadlines.values()), default=None)
                self._wakes_at = float("inf") if first is None else first
                self._changed.wait(None if first is None else max(0.0, first - now))


KILL_WATCH = KillWatch()
"""Of this process."""
