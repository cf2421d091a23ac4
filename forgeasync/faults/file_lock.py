"""Locks of files (flock): the kernel lets go of one when the process that has it ends, in whatever way."""

import fcntl
import time

LOOK_S = 0.05
"""Seconds between two tries."""


class FileLocked(RuntimeError):
    """Another process has the lock."""


def lock(descriptor: int, *, wait_s: float) -> bool:
    """Lock an open file; returns whether its file system has locks at all (some over a network have none).

    Raises:
        FileLocked: another process has it, still after ``wait_s``.
    """
    end_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise FileLocked from None
            time.sleep(LOOK_S)
        except OSError:
            return False
        else:
            return True
