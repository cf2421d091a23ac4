"""Ends a process with everything that it has started."""

import contextlib

import psutil


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process and to all that it has started; no error if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        started = process.children(recursive=True)
        # First the process itself: it can start no more then.
        for one in (process, *started):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
