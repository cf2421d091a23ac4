"""Keeps readers of runs up to date in a thread of its own."""

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from forgeasync.viewer.answers import Answers
from forgeasync.viewer.run_reader import RunReader

LOOK_S = 1.0
"""Seconds between two looks at files that have nothing new."""

YIELD_S = 0.001
"""Pause after a piece of a file, in which who waits for the readers gets them."""

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


class Watcher:
    """Reads while it is entered; ``ask`` may be called from any thread."""

    def __init__(self, runs: Sequence[RunReader]) -> None:
        self._runs = runs
        self._answers = Answers(runs)
        self.failure: str | None = None
        """Why nothing is read any more; None: it is."""
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="viewer-reading", daemon=True)

    def ask(self, question: Callable[[Answers], T]) -> T:
        """Return what ``question`` makes of the runs as far as they were read."""
        with self._lock:
            return question(self._answers)

    def _watch(self) -> None:
        while not self._is_over.is_set():
            try:
                with self._lock:
                    # Each run in turn: a long one does not keep the others waiting.
                    is_new = any([run.read_some() for run in self._runs])
            except Exception as error:
                # A fault of the viewer's own. What was read is still shown, and the page says that it is old.
                _LOGGER.exception("a run's files could not be read")
                self.failure = f"the viewer has stopped reading: {type(error).__name__}: {error}"
                return
            self._is_over.wait(YIELD_S if is_new else LOOK_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
