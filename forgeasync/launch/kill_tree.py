"""Ends a process with everything that it has started."""

import contextlib
import os
import signal

import psutil


def kill_with_children(process: psutil.Process) -> None:
    """Kill a process with everything that it has started; no error if it has ended."""
    with contextlib.suppress(psutil.Error):
        started = process.children(recursive=True)
        # First the process itself: it can start no more then.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        for one in started:
            with contextlib.suppress(psutil.Error):
                one.kill()


def kill_tree(pid: int) -> None:
    """Kill the process of an id, as ``kill_with_children`` does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        kill_with_children(psutil.Process(pid))
