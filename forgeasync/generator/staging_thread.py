"""Runs a worker's staging beside the engine's steps."""

import threading
from collections.abc import Callable


class StagingThread:
    """A function in a thread of its own; the engine's thread polls whether it has ended."""

    def __init__(self, stage: Callable[[], None]) -> None:
        self._stage = stage
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weight-staging", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._stage()
        except Exception as error:
            self._error = error

    def is_done(self) -> bool:
        """Whether it has ended; raises what it raised."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True
