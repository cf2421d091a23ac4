"""How a supervisor notices that the run's controller stands still: a pipe with a byte every second.

A thread writes it, which a busy event loop does not hold up, only what stops the whole process, such as
SIGSTOP. Before the first byte, while the program is loaded, nothing counts. If the supervisor ends, the run
goes on.
"""

import os
import select
import threading
import time

PIPE = "FORGEASYNC_SUPERVISOR_PIPE"
"""Variable with the file descriptor of the pipe's end to write to."""

BEAT_S = 1.0

LOOK_S = 0.5
"""Seconds between two looks at a run, if nothing comes."""

STALL_S = 5.0
"""A look that comes later than this says that the supervisor stood still, and maybe the run with it."""


def start_beating() -> None:
    """Tell this process's supervisor from now on that it lives; no news if it has none."""
    if (descriptor := os.environ.pop(PIPE, None)) is None:
        return
    # What this process starts has no part in it: the supervisor sees its end by the pipe's.
    os.set_inheritable(int(descriptor), False)
    os.set_blocking(int(descriptor), False)
    # The first at once: what stops this process before the thread runs is to be noticed too.
    _write(int(descriptor), b".")
    threading.Thread(target=_beat, args=(int(descriptor),), name="supervisor-beat", daemon=True).start()


def _beat(descriptor: int) -> None:
    while _write(descriptor, b"."):
        time.sleep(BEAT_S)


def _write(descriptor: int, sign: bytes) -> bool:
    """Give a sign of life; false if the supervisor is gone."""
    try:
        os.write(descriptor, sign)
    except BlockingIOError:
        # The supervisor stands still.
        pass
    except BrokenPipeError:
        return False
    return True


class Pulse:
    """The supervisor's end of the pipe."""

    def __init__(self, *, limit_s: float) -> None:
        """``limit_s`` is ``timeouts.controller_s``."""
        self._limit_s = limit_s
        self._reader, self.writer = os.pipe()
        """``writer`` is for the run, and to be closed here once that is started."""
        self._is_open = True
        self._last_s: float | None = None
        """When the last byte came; None: none has."""
        self._looked_s = time.monotonic()

    def close_writer(self) -> None:
        """The run has it."""
        os.close(self.writer)

    def look(self) -> bool:
        """Wait a moment for a byte; returns whether none has come for ``limit_s``.

        If the run ends, the wait is over at once.
        """
        if self._is_open:
            ready, _, _ = select.select([self._reader], [], [], LOOK_S)
            now_s = time.monotonic()
            if now_s - self._looked_s > STALL_S and self._last_s is not None:
                self._last_s = now_s
            self._looked_s = now_s
            if ready and os.read(self._reader, 4096):
                self._last_s = now_s
            elif ready:
                self._is_open = False
            return self._last_s is not None and now_s - self._last_s > self._limit_s
        time.sleep(LOOK_S / 10)
        return False

    def close(self) -> None:
        """The run has ended."""
        os.close(self._reader)
